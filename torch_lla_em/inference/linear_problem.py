"""The interface of a linear model with its data, and its whitened form for solvers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Protocol

from torch import Tensor

from torch_lla_em.solvers import Product


class LinearProblem(Protocol):
    """A linear model h(x) = J(x) w with the loss Σ_n -log p(y_n | J_n w) and G = Σ_n J_nᵀ H_n J_n,
    at one H and σ.

    ``Problem`` makes a pass over the data for each product, and a ``SpanProblem`` is dense algebra
    over a span of directions. The prior is not a part of it. Any other object with these methods
    can be passed to ``optimise_samples`` and ``optimise_MAP``.
    """

    @property
    def rounding(self) -> float:
        """Relative rounding error of products."""

    def zeros(self, num_vectors: int) -> Tensor:
        """Return zeros in the space of w, (num_vectors, P)."""

    def ggn_product(self, w: Tensor) -> Tensor:
        """Return G w for vectors w, both (K, P)."""

    def minibatch_products(self) -> tuple[int, Iterator[Product]]:
        """Return the number of parts of the data, and their products, whose sum is G w. By default
        all data are one part."""
        return 1, iter([self.ggn_product])

    def loss_and_gradient(self, w: Tensor) -> tuple[float, Tensor]:
        """Return the loss at w, (P,), and its gradient, (P,)."""

    def with_curvature_at(self, w: Tensor) -> LinearProblem:
        """Return the same problem with H evaluated at J w, for w (P,), or the problem itself if H
        stays the same during the search for the mode."""


class Whitened:
    """The product A x = D G D x and the loss as a function of x, where D is a standard deviation
    for every weight, (P,) or ().

    If D is the prior standard deviation, w = D x turns G + Λ into A + I.
    """

    def __init__(self, problem: LinearProblem, deviation: Tensor):
        self.problem, self.deviation = problem, deviation
        self.rounding = problem.rounding

    def __call__(self, x: Tensor) -> Tensor:
        """Return A x, shape (K, P)."""
        return self._of_part(self.problem.ggn_product, x)

    def minibatches(self) -> tuple[int, Iterator[Product]]:
        """Return the number of batches of a pass, and the part of each in the product."""
        number, products = self.problem.minibatch_products()
        return number, (partial(self._of_part, product) for product in products)

    def _of_part(self, product: Product, x: Tensor) -> Tensor:
        return product(x * self.deviation).mul_(self.deviation)

    def value_and_gradient(self, x: Tensor) -> tuple[float, Tensor]:
        """Return Σ_n loss(J_n D x, y_n) and its gradient in x, shape (P,)."""
        loss, gradient = self.problem.loss_and_gradient(x * self.deviation)
        return loss, gradient * self.deviation

    def hessian(self, x: Tensor) -> Whitened:
        """Return the Hessian of the loss at x, (P,), as a product."""
        return Whitened(self.problem.with_curvature_at(x * self.deviation), self.deviation)
