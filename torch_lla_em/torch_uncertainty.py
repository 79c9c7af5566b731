"""A fitted posterior as the model of a TorchUncertainty routine, which evaluates it."""

from __future__ import annotations

from torch import Tensor, nn

from torch_lla_em.laplace import LinearisedLaplace


class RoutineModel(nn.Module):
    """A fitted posterior as the model of a TorchUncertainty routine.

    With "classification" it returns log probabilities, shape (B, C), for
    ``ClassificationRoutine(RoutineModel(la), num_classes=C, loss=None)``: their softmax is
    ``la(x)``. With ``class_dim=1`` they are for ``SegmentationRoutine``. With continuous targets it
    returns the mean and the standard deviation of y, for
    ``RegressionRoutine(RoutineModel(la), output_dim=C, loss=None, dist_family="normal")``.

    Args:
        la (LinearisedLaplace): The posterior, fitted. It moves with this module.
        ensemble (bool): Return the K posterior functions, shape (K B, C), as an ensemble of
            networks. Default False; set it for ``ClassificationRoutine(..., is_ensemble=True)`` with
            ``format_batch_fn=RepeatTarget(la.num_samples)`` and its mutual information.

    Raises:
        TypeError: For counts and for several labels, for which there is no routine.

    Example:
        >>> log_probs = RoutineModel(la)(x)
    """

    def __init__(self, la: LinearisedLaplace, ensemble: bool = False):
        """Wrap the posterior; the class documents the arguments."""
        super().__init__()
        likelihood = la.likelihood
        classes = likelihood.gives_probabilities and not likelihood.elementwise
        if not (classes or likelihood.real_valued) or (ensemble and not classes):
            raise TypeError(
                f"TorchUncertainty has no {'ensemble ' * ensemble}routine for "
                f"{type(likelihood).__name__}: use its metrics on la(x)."
            )
        self.la, self.ensemble = la, ensemble

    def forward(self, inputs: Tensor) -> Tensor | dict[str, Tensor]:
        """Return log probabilities, or the parameters of a normal distribution.

        Args:
            inputs (Tensor): Inputs, as the network takes them.
        """
        prediction = self.la.predict(inputs)
        if self.la.likelihood.real_valued:
            mean, variance = prediction.moments()
            return {"loc": mean, "scale": variance.sqrt()}
        return prediction.samples.flatten(0, 1) if self.ensemble else prediction.log_probs
