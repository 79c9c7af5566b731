"""The arguments and results of all solvers, and the errors that they raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from numbers import Real
from typing import NamedTuple, Protocol

from torch import Tensor

from torch_lla_em.solvers.space import dots

Product = Callable[[Tensor], Tensor]


class Operator(Protocol):
    """A symmetric, positive semi-definite product x -> A x of (K, P)."""

    @property
    def rounding(self) -> float:
        """Its relative rounding error."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """Return A x."""


class Batched(Operator, Protocol):
    """A product that is the sum of products of batches."""

    def minibatches(self) -> tuple[int, Iterator[Product]]:
        """Return the number of batches, and the product of each."""


class ConvexLoss(Protocol):
    """A convex function of x, (P,)."""

    @property
    def rounding(self) -> float:
        """Its relative rounding error."""

    def value_and_gradient(self, x: Tensor, /) -> tuple[float, Tensor]:
        """Return its value and its gradient, (P,)."""

    def hessian(self, x: Tensor, /) -> Operator:
        """Return its Hessian at x."""


class Solver(Protocol):
    """Solves (A + I) X = B for the rows of B."""

    @property
    def tolerance(self) -> float:
        """The largest ``error`` of a solution that has converged."""

    def solve(self, product: Batched, b: Tensor, start: Tensor | None = None) -> Solution:
        """Return X, from a start."""


class Search(Protocol):
    """Minimises loss(x) + ½‖x‖²."""

    def minimise(self, loss: ConvexLoss, start: Tensor) -> Minimum:
        """Return the minimum, from a start."""


class Minimum(NamedTuple):
    """w near the minimum of loss(w) + ½‖w‖²."""

    w: Tensor
    """(P,)."""

    loss: float
    """loss(w), without the quadratic."""

    error: float
    """‖∇‖ / ‖w‖, which bounds the relative error of w, since the objective is 1-strongly convex."""

    passes: int
    """Number of products and gradients."""

    converged: bool
    """Whether the error met the tolerance."""


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

    For energies below 1 it is the certificate itself, which bounds the error at any input, in
    posterior standard deviations.
    """
    return (certificate.square().mean() / energy.mean().clamp_min(1.0)).sqrt().item()


_NEARLY = 1.1


def is_accurate(error: float, tolerance: float) -> bool:
    """Whether an error counts as within the tolerance.

    Warnings and printed results use this criterion. The error is relative to γ, whose estimators
    differ by a few per cent.
    """
    return error <= _NEARLY * tolerance


def check_positive(owner: str, **options: float) -> None:
    """Raise an error if an option of a solver is not above 0."""
    for name, value in options.items():
        if not isinstance(value, Real):
            raise TypeError(f"{owner}: {name} must be a number above 0, not {value!r}.")
        if not value > 0:
            raise ValueError(f"{owner}: {name} must be above 0, not {value}.")
