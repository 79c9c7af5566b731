"""What every solver is given and returns, how it fails, and how it starts again."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.solvers.operator import Operator


class DivergenceError(ArithmeticError):
    """A solve grew instead of settling; nothing of it is kept."""


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

    passes: int
    """Products with A that it took."""

    converged: bool
    """Whether the error met the tolerance."""

    image: Tensor
    """A x by the true residual, shape (K, P)."""

    @property
    def error(self) -> float:
        """√(mean ‖r‖² / max(1, mean ⟨x, A x⟩)): bounds the relative error of J x on the data."""
        return relative_error(self.certificate, self.energy)


class Task(NamedTuple):
    """(A + I) X = B, and where X starts (0 if None)."""

    product: Operator
    b: Tensor
    start: Tensor | None = None

    image: Tensor | None = None
    """A times the start, where it is known."""

    original: Callable[[Tensor], Tensor] | None = None
    """Where x is preconditioned: the map back, since energies are those of what it stands for."""

    def residual(self, x: Tensor) -> Tensor:
        """Return B - (A + I) X, from a product."""
        return (self.b - self.product(x)).sub_(x)

    def energies(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return ⟨x, A x⟩ in the original coordinates, shape (K,), without another product."""
        dots = self.product.space.dots
        before = x if self.original is None else self.original(x)
        return (dots(x, self.b) - dots(x, residual) - dots(before, before)).clamp_min(0)

    def judge(self, x: Tensor, residual: Tensor, passes: int, tolerance: float) -> Solution:
        """Return the record of x, with its true residual."""
        dots = self.product.space.dots
        certificate, energy = dots(residual, residual).sqrt(), self.energies(x, residual)
        converged = relative_error(certificate, energy) <= tolerance
        image = (self.b - x).sub_(residual)
        return Solution(x, certificate, energy, passes, converged, image)


def relative_error(certificate: Tensor, energy: Tensor) -> float:
    """Return √(mean certificate² / max(1, mean energy)).

    Below an energy of 1 the certificate itself counts: then it already bounds the error at
    any input by ``tolerance`` posterior standard deviations.
    """
    return (certificate.square().mean() / energy.mean().clamp_min(1.0)).sqrt().item()


def check_positive(owner: str, **options: float) -> None:
    """Raise where a solver's option is not above 0."""
    for name, value in options.items():
        if not value > 0:
            raise ValueError(f"{owner}: {name} must be above 0, not {value}.")


def symmetric(product: Tensor, allowed: Tensor | float, least: Tensor | float) -> Tensor:
    """Return Dᵀ A D made symmetric; raise where it cannot be the product of a symmetric A ≥ 0.

    It may be off by ``allowed``, and its eigenvalues are to be above ``least``.
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
    "rounding hides the prior. Fix the model or the loader; where the data are sound, use a larger "
    "`prior_precision`, inputs scaled as in training, or a model and data in float64."
)
