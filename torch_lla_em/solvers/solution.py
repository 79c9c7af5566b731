"""What every solver returns, and how it fails."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from torch_lla_em.solvers.space import dots


class Solution(NamedTuple):
    """x with (A + I) x = b up to its true residual r = b - (A + I) x, recomputed at the end."""

    x: Tensor
    """(K, P)."""

    certificate: Tensor
    """‖r_k‖, shape (K,): a bound on ‖x - x*‖ in the norm of A + I, since A ≥ 0."""

    energy: Tensor
    """⟨x_k, A x_k⟩, shape (K,)."""

    relative_residual: float
    """‖r‖ / ‖b‖ over the whole block."""

    passes: int
    """Products with A that it took."""

    converged: bool
    """Whether the error met the tolerance."""

    image: Tensor
    """A x, as the true residual tells it, shape (K, P)."""

    @property
    def error(self) -> float:
        """√(mean ‖r‖² / max(1, mean ⟨x, A x⟩)): bounds the relative error of J x on the data."""
        return relative_error(self.certificate, self.energy)

    @classmethod
    def of(cls, x: Tensor, b: Tensor, residual: Tensor, passes: int, tolerance: float) -> Solution:
        """Return the record of x, with its true residual."""
        certificate, energy = dots(residual, residual).sqrt(), energies(x, b, residual)
        relative = certificate.norm() / dots(b, b).sum().sqrt()
        converged = relative_error(certificate, energy) <= tolerance
        relative, image = relative.nan_to_num().item(), (b - x).sub_(residual)
        return cls(x, certificate, energy, relative, passes, converged, image)


class DivergenceError(ArithmeticError):
    """A solve grew instead of settling; nothing of it is kept."""


class FaultyProductError(ArithmeticError):
    """The product is not symmetric or not positive semi-definite: J and Jᵀ disagree."""


def allowed_asymmetry(product: object) -> float:
    """Return by how much ⟨x, A y⟩ and ⟨y, A x⟩ may differ, relative to the largest of them.

    Products of less than single precision say by ``rounding`` how exact they are.
    """
    return max(1e-3, 4 * getattr(product, "rounding", 0.0))


def energies(x: Tensor, b: Tensor, residual: Tensor) -> Tensor:
    """Return ⟨x, A x⟩ = ⟨x, b - r⟩ - ‖x‖², shape (K,), without another product."""
    return (dots(x, b) - dots(x, residual) - dots(x, x)).clamp_min(0)


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
