"""What every solver is given and returns, and the errors that it raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.solvers.space import dots

Product = Callable[[Tensor], Tensor]


class Operator:
    """A product X -> A X of blocks of vectors (K, P)."""

    rounding = 0.0
    """Relative rounding error of a product."""

    def __init__(self, product: Product, rounding: float = 0.0):
        self._product, self.rounding = product, rounding

    def __call__(self, x: Tensor) -> Tensor:
        """Return A X, shape (K, P)."""
        return self._product(x)

    @property
    def allowed_asymmetry(self) -> float:
        """Largest difference of ⟨x, A y⟩ and ⟨y, A x⟩, relative to the largest of them."""
        return max(1e-3, 4 * self.rounding)


class DivergenceError(ArithmeticError):
    """The iterates of a solver grow instead of converging."""


def require_finite(size: float) -> None:
    """Raise an error if the size of a gradient is not finite."""
    if not size < float("inf"):
        raise DivergenceError(
            "The gradient of the linear model is not finite: check the model's outputs and the "
            "targets for extreme values."
        )


class FaultyProductError(ArithmeticError):
    """The product is not symmetric or not positive semi-definite: J and Jᵀ disagree."""


class Solution(NamedTuple):
    """x with (A + I) x = b up to its true residual r = b - (A + I) x, recomputed at the end."""

    x: Tensor
    """(K, P)."""

    certificate: Tensor
    """‖r_k‖, shape (K,): a bound on ‖x - x*‖ in the norm of A + I, since A ≥ 0."""

    energy: Tensor
    """⟨x_k, A x_k⟩, shape (K,)."""

    passes: int = 0
    """Number of products with A."""

    tolerance: float = 0.0
    """The tolerance of the solver."""

    @classmethod
    def of(cls, b: Tensor, x: Tensor, residual: Tensor) -> Solution:
        """Return the solution x with its true residual; ⟨x, A x⟩ needs no further product."""
        energy = (dots(x, b) - dots(x, residual) - dots(x, x)).clamp_min(0)
        return cls(x, dots(residual, residual).sqrt(), energy)

    @property
    def error(self) -> float:
        """√(mean ‖r‖² / max(1, mean ⟨x, A x⟩)): bounds the relative error of J x on the data."""
        return relative_error(self.certificate, self.energy)

    @property
    def converged(self) -> bool:
        """Whether the error met the tolerance."""
        return self.error <= self.tolerance


def relative_error(certificate: Tensor, energy: Tensor) -> float:
    """Return √(mean certificate² / max(1, mean energy)).

    For energies below 1 it is the certificate itself, which bounds the error at any input in
    posterior standard deviations.
    """
    return (certificate.square().mean() / energy.mean().clamp_min(1.0)).sqrt().item()


_NEARLY = 1.1


def is_accurate(error: float, tolerance: float) -> bool:
    """Whether an error counts as within the tolerance.

    It is the one criterion of warnings and of what is printed. The error is relative to γ, which has
    estimators that differ by some per cent.
    """
    return error <= _NEARLY * tolerance


def check_positive(owner: str, **options: float) -> None:
    """Raise an error if an option of a solver is not above 0."""
    for name, value in options.items():
        if not value > 0:
            raise ValueError(f"{owner}: {name} must be above 0, not {value}.")


def symmetric(product: Tensor, allowed: Tensor | float, least: Tensor | float) -> Tensor:
    """Return Dᵀ A D made symmetric; raise an error if A is not symmetric or not positive semi-definite.

    ``allowed`` is the largest asymmetry, and ``least`` the smallest eigenvalue.
    """
    if not torch.isfinite(product).all():
        raise DivergenceError("A product with G is not finite: check the model's outputs.")
    exact = 0.5 * (product + product.T)
    if (product - product.T).abs().max() > allowed:
        raise FaultyProductError(
            "The product with G is not symmetric: the model's J and Jᵀ disagree, or its outputs "
            f"change from call to call (dropout, random augmentation); or {_OR_ROUNDING}"
        )
    if torch.linalg.eigvalsh(exact)[0] <= least:
        raise FaultyProductError(
            "The product with G has negative curvature: the likelihood's H is not positive "
            f"semi-definite, or the model changes from call to call; or {_OR_ROUNDING}"
        )
    return exact


_OR_ROUNDING = (
    "the prior is lost to rounding. Correct the model or the loader; if they are correct, use a "
    "larger `prior_precision`, inputs scaled as in training, or a model and data in float64."
)
