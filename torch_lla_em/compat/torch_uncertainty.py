"""A fitted posterior as a post-processing method of TorchUncertainty.

Needs torch-uncertainty: ``pip install torch-uncertainty``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch_uncertainty.post_processing import PostProcessing

from torch_lla_em.laplace import LinearisedLaplace


class LaplacePostProcessing(PostProcessing):
    """A fitted posterior of a classifier, for ``ClassificationRoutine(post_processing=...)``.

    The routine calls ``fit`` with the set for post-processing of its data module, on which the posterior is
    calibrated, and reports metrics of the network (``test/cls/...``) and of the posterior
    (``test/post/...``).

    Args:
        la (LinearisedLaplace): The posterior, fitted to the training data.

    Raises:
        TypeError: If the likelihood has no classes.

    Example:
        >>> method = LaplacePostProcessing(la)
        >>> log_probabilities = method(x)
    """

    def __init__(self, la: LinearisedLaplace):
        if not la.likelihood.gives_probabilities or la.likelihood.elementwise:
            raise TypeError(
                "Routines of TorchUncertainty post-process classes only. For a regression return "
                '{"loc": mean, "scale": variance.sqrt()} of la(x) from the model of the routine.'
            )
        super().__init__(la.model)
        self.la = la

    def set_model(self, model: nn.Module) -> None:
        """Check that the routine has the network of the posterior.

        Args:
            model (nn.Module): The network of the routine.

        Raises:
            ValueError: If it is another network.
        """
        if model is not self.la.model:
            raise ValueError(
                "The model of the routine is not the one of the posterior: pass la.model."
            )

    def fit(self, dataloader: Any) -> None:
        """Calibrate the posterior.

        Args:
            dataloader (DataLoader): Data that were not used in training.
        """
        self.la.calibrate(dataloader)
        self.trained = True

    def forward(self, inputs: Tensor) -> Tensor:
        """Return log probabilities, which are valid logits, shape (B, C).

        Args:
            inputs (Tensor): Inputs of the network.
        """
        return self.la.predict(inputs).log_probs
