"""Linear measurements of the outputs with Gaussian noise, y = A f + noise, as in tomography."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from torch_lla_em.likelihoods.gaussian import Regression
from torch_lla_em.runtime import normal

# bound on the rounding of ⟨A u, v⟩ against ⟨u, Aᵀ v⟩ in single precision
_ADJOINT_ERROR = 1e-3


@dataclass(frozen=True, repr=False)
class LinearOperator:
    """A linear map A of one output of the network, given by functions instead of a matrix.

    Args:
        forward (callable): Maps n outputs (n, *shape) to A f, shape (n, M).
        adjoint (callable): Maps n measurements (n, M) to Aᵀ v, shape (n, *shape).
        shape (tuple of ints): Shape of one output of the network, with the classes last.

    Example:
        >>> A = torch.randn(30, 64)
        >>> forward, adjoint = lambda f: f.flatten(1) @ A.T, lambda v: (v @ A).view(-1, 1, 8, 8)
        >>> radon = LinearOperator(forward, adjoint, (1, 8, 8))
    """

    forward: Callable[[Tensor], Tensor]
    adjoint: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]

    def __repr__(self) -> str:
        return f"LinearOperator of outputs of shape {self.shape}"

    def apply(self, f: Tensor) -> Tensor:
        """Return A f.

        Args:
            f (Tensor): Outputs, shape (..., *shape).

        Returns:
            The measurements, shape (..., M).
        """
        leading = f.shape[: f.dim() - len(self.shape)]
        measured: Tensor = self.forward(f.reshape(-1, *self.shape)).unflatten(0, leading)
        return measured

    def apply_adjoint(self, v: Tensor) -> Tensor:
        """Return Aᵀ v.

        Args:
            v (Tensor): Measurements, shape (..., M).

        Returns:
            A tensor in the shape of outputs, (..., *shape).
        """
        outputs: Tensor = self.adjoint(v.reshape(-1, v.shape[-1])).unflatten(0, v.shape[:-1])
        return outputs


class LinearOperatorRegression(Regression):
    """y ~ N(A f, σ²): noisy linear measurements of the outputs, as in tomography; y is (B, M).

    ``Prediction.mean``, ``.variance`` and ``.samples`` are those of the output f (the image);
    ``.expectation``, ``.moments``, ``.aleatoric``, ``.epistemic`` and the log probabilities are
    those of y. The root S = Aᵀ/σ needs one random number per measurement, and there is one per
    output. Therefore there can be at most as many measurements as outputs.

    Args:
        operator (LinearOperator): The map A.
        sigma_noise (float, optional): As in ``Regression``, one number for all measurements.
            Default None.

    Raises:
        ValueError: If sigma_noise is not one positive number; in ``fit``, if A does not fit the
            outputs or the measurements, or the adjoint does not belong to the forward map.

    Example:
        >>> A = torch.randn(2, 3)
        >>> projection = LinearOperator(lambda f: f @ A.T, lambda v: v @ A, (3,))
        >>> likelihood = LinearOperatorRegression(projection, 0.05)
        >>> la = LinearisedLaplace(torch.nn.Linear(4, 3), likelihood)
        >>> la = la.fit(torch.randn(20, 4), torch.randn(20, 2), progress_bar=False)
        >>> variance = la.predict(torch.randn(5, 4)).variance  # of the outputs f
    """

    elementwise = False

    def __init__(self, operator: LinearOperator, sigma_noise: float | Tensor | None = None):
        super().__init__(sigma_noise)
        if self.sigma_noise.dim():
            raise ValueError("sigma_noise must be one number for all measurements.")
        self.operator = operator

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return self.operator.apply_adjoint(self.mean(f) - y) / self._sigma(f) ** 2

    def hessian_product(self, f: Tensor, u: Tensor) -> Tensor:
        return self.operator.apply_adjoint(self.operator.apply(u)) / self._sigma(u) ** 2

    def hessian_sqrt_product(self, f: Tensor, noise: Tensor) -> Tensor:
        measured = self.mean(f).shape[-1]
        kept = noise.flatten(noise.dim() - len(self.operator.shape))[..., :measured]
        return self.operator.apply_adjoint(kept) / self._sigma(noise)

    def mean(self, f: Tensor) -> Tensor:
        return self.operator.apply(f)

    def check(self, f: Tensor, y: Tensor) -> None:
        shape = tuple(self.operator.shape)
        if tuple(f.shape[1:]) != shape:
            raise ValueError(
                f"The operator takes outputs of shape {shape}, but the network's have shape "
                f"{tuple(f.shape[1:])} (classes last): give LinearOperator that shape."
            )
        expected = self._num_measurements(f)
        if y.is_complex() or y.shape != (len(f), expected):
            raise ValueError(
                f"The measurements have shape {tuple(y.shape)}, but the operator returns "
                f"{(len(f), expected)}: flatten what belongs to one output."
            )
        if expected > prod(shape):
            raise ValueError(
                f"There are {expected} measurements of {prod(shape)} outputs, but at most one per "
                'output is possible: let forward_fn return A f, with likelihood="regression".'
            )
        if not torch.isfinite(y).all():
            raise ValueError("The measurements hold NaN or infinite values: remove those examples.")

    def _num_measurements(self, f: Tensor) -> int:
        """Return M, after checking on one random output that the adjoint belongs to A."""
        row = torch.zeros(1, dtype=torch.long, device=f.device)
        u = normal(0, 0, 0, row, f[0].numel()).to(f.dtype).view(1, *f.shape[1:])
        Au = self.operator.apply(u)
        if Au.dim() != 2:
            raise ValueError(
                f"The operator's forward returns shape {tuple(Au.shape)} for one output: it must "
                "return (n, M) for n outputs."
            )
        v = normal(0, 0, 1, row, Au.shape[-1]).to(f.dtype)
        Atv = self.operator.apply_adjoint(v)
        gap = (Au * v).sum() - (u * Atv).sum() if Atv.shape == u.shape else u.new_tensor(torch.inf)
        if gap.abs() > _ADJOINT_ERROR * (Au.norm() * v.norm()):
            raise ValueError(
                "The operator's adjoint is not the adjoint of its forward map: ⟨A u, v⟩ and "
                "⟨u, Aᵀ v⟩ differ. A filtered back-projection, for example, is not an adjoint."
            )
        return Au.shape[-1]
