"""A fitted posterior as a BoTorch model. Needs ``pip install torch_lla_em[botorch]``."""

from __future__ import annotations

from botorch.models.ensemble import EnsembleModel
from torch import Tensor

from torch_lla_em import LinearisedLaplace

__all__ = ["LaplaceModel"]


class LaplaceModel(EnsembleModel):
    """The K functions of a posterior as a BoTorch ensemble; sample k is one function of X.

    Samples are values of f without observation noise, in the units of the network's outputs, and
    differentiable in X. Fantasy models are not supported: fit again after new observations.

    Args:
        la (LinearisedLaplace): The posterior, fitted.
        num_outputs (int): Number of outputs of the network. Default 1.

    Example:
        >>> from botorch.acquisition.logei import qLogExpectedImprovement
        >>> acquisition = qLogExpectedImprovement(LaplaceModel(one_output), best_f=1.0)
    """

    la: LinearisedLaplace

    def __init__(self, la: LinearisedLaplace, num_outputs: int = 1):
        """Wrap the posterior; the class documents the arguments."""
        super().__init__()
        # not a submodule, so that ``eval`` and ``to`` of this model do not change the posterior
        object.__setattr__(self, "la", la)
        self._num_outputs = num_outputs

    def forward(self, X: Tensor) -> Tensor:
        """Return the K functions at inputs X (..., n, d), shape (..., K, n, outputs)."""
        w_MAP = self.la.w_MAP
        rows = X.reshape(-1, X.shape[-1]).to(X.dtype if w_MAP is None else w_MAP.dtype)
        samples = self.la.functional_samples(rows).to(X.dtype)
        outputs = samples.shape[2:] or (1,)
        if tuple(outputs) != (self.num_outputs,):
            raise ValueError(
                f"The network's outputs have shape {tuple(samples.shape[1:])}, not (n, "
                f"{self.num_outputs}): pass num_outputs, or wrap the network in a module that "
                "returns the quantities to optimise."
            )
        samples = samples.reshape(len(samples), *X.shape[:-1], self.num_outputs)
        return samples.movedim(0, -3)
