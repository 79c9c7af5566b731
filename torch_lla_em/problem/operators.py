"""The interface to solvers: products with A = D G D in whitened coordinates x = w / D."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from torch_lla_em.problem.problem import BatchProduct, Problem
from torch_lla_em.solvers import Operator


class WhitenedGGN(Operator):
    """A x = D G D x, where D is a prior standard deviation of every weight, (P,) or ().

    With D the prior's own, w = D x turns G + Λ into A + I.
    """

    def __init__(self, problem: Problem, deviation: Tensor):
        super().__init__(problem.ggn_product, problem.space, problem.linear_model.rounding)
        self.problem, self.deviation = problem, deviation
        self.num_steps = problem.data.num_steps

    def __call__(self, x: Tensor) -> Tensor:
        """Return A x, shape (K, P)."""
        return self._product(x * self.deviation).mul_(self.deviation)

    def rows(self) -> Tensor:
        """Return R D, shape (N C, P), with A = (R D)ᵀ R D."""
        return self.problem.rows().mul_(self.deviation)

    def minibatches(self) -> Iterator[tuple[int, BatchProduct]]:
        """Yield the number of examples of each batch, and its part of the product."""
        for rows, product in self.problem.minibatch_products():
            yield rows, _whitened(product, self.deviation)


class WhitenedLoss:
    """The loss of the linear model in whitened coordinates, for the solvers of its mode."""

    def __init__(self, problem: Problem, deviation: Tensor):
        self.problem, self.deviation = problem, deviation
        self.space, self.rounding = problem.space, problem.linear_model.rounding
        self.num_steps = problem.data.num_steps

    def value_and_gradient(self, x: Tensor) -> tuple[float, Tensor]:
        """Return Σ_n loss(J_n D x, y_n) and its gradient in x, shape (P,)."""
        loss, gradient = self.problem.loss_and_gradient(x * self.deviation)
        return loss, gradient * self.deviation

    def hessian(self, x: Tensor) -> WhitenedGGN:
        """Return the Hessian at x as a product."""
        problem = self.problem.with_curvature_at(x * self.deviation)
        return WhitenedGGN(problem, self.deviation)

    def minibatches(self) -> Iterator[tuple[int, BatchProduct]]:
        """Yield the number of examples of each batch, and its gradient."""
        for rows, gradient in self.problem.minibatch_gradients():
            yield rows, _whitened(gradient, self.deviation)


def _whitened(product: BatchProduct, deviation: Tensor) -> BatchProduct:
    return lambda x: product(x * deviation).mul_(deviation)
