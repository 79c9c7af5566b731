"""The paper's solver: stochastic gradient descent with Nesterov momentum and linear decay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from torch_lla_em.solvers.newton import Loss, Minimum
from torch_lla_em.solvers.operator import Minibatched, Operator, Product
from torch_lla_em.solvers.solution import DivergenceError, Solution, check_positive

Gradient = Callable[[Product, float, Tensor], Tensor]


class MinibatchedLoss(Minibatched, Loss, Protocol):
    """A loss whose gradient can be computed batch by batch."""


@dataclass(frozen=True)
class SGD:
    """The paper's solver: minimises ½⟨x, A x⟩ + ½‖x - b‖² with one step for each batch of the loader.

    The random probes of the targets are part of b (the paper's L'), so minibatches add no noise.
    Use it for comparisons with the paper; the default needs fewer passes and no step size.

    Example:
        >>> la = LinearisedLaplace(model, "classification", solver=SGD(epochs=50))
    """

    tolerance: float = 1e-2
    """Largest error that does not give a warning; no epoch ends early. Default 0.01."""

    epochs: int = 20
    """Passes over the loader. Default 20."""

    learning_rate: float | None = None
    """Initial step size, for the sum over all data. Default None: 0.1 / the largest eigenvalue."""

    momentum: float = 0.9
    """Nesterov momentum. Default 0.9."""

    averaging: float | None = None
    """Weight of the newest iterate in a running (Polyak) average. Default None: no average."""

    clip: float | None = None
    """Largest norm of a gradient, of all samples together. Default None: no limit."""

    decay: float = 1.0 / 330.0
    """Final step size divided by the initial one; it falls linearly. Default 1/330."""

    def __post_init__(self) -> None:
        check_positive("SGD", tolerance=self.tolerance, epochs=self.epochs)
        if self.learning_rate is not None:
            check_positive("SGD", learning_rate=self.learning_rate)

    def solve(self, product: Minibatched, b: Tensor, start: Tensor | None = None) -> Solution:
        """Solve (A + I) X = B.

        Args:
            product (Minibatched): The product with A, batch by batch.
            b (Tensor): B, shape (K, P).
            start (Tensor, optional): Where to start, shape (K, P). Default None: at b.

        Returns:
            X after the last epoch, with its true residual.
        """

        def gradient(batch_product: Product, weight: float, x: Tensor) -> Tensor:
            return weight * batch_product(x) + x - b

        rate, passes = self._rate(product, b[:1])  # type: ignore[arg-type]
        # (A + I)⁻¹ shrinks, so the solution is no longer than b
        bound = product.space.norm(b)
        if start is None or product.space.norm(start) > bound:
            # a start for another λ, or a mode that has not converged, can be worse than b
            start = b
        x = self._descend(product, gradient, start, (rate, bound))
        residual = b - x - product(x)  # type: ignore[operator]
        found = Solution.of(product.space, b, x, residual)
        return found._replace(passes=passes + self.epochs + 1, tolerance=self.tolerance)

    def minimise(self, loss: MinibatchedLoss, start: Tensor) -> Minimum:
        """Minimise loss(x) + ½‖x‖².

        Args:
            loss (MinibatchedLoss): The loss, batch by batch.
            start (Tensor): Where to start, shape (P,).

        Returns:
            The last iterate, with a bound on its error.
        """

        def gradient(batch_gradient: Product, weight: float, x: Tensor) -> Tensor:
            return weight * batch_gradient(x) + x

        _, slope = loss.value_and_gradient(start)
        rate, passes = self._rate(loss.hessian(start), torch.ones_like(start)[None])
        # the objective is 1-strongly convex, so its gradient bounds the distance to the minimum
        norm = loss.space.norm
        bound = norm(start) + norm(slope + start)
        x = self._descend(loss, gradient, start[None], (rate, bound))[0]
        value, slope = loss.value_and_gradient(x)
        size, length = norm(slope + x), norm(x)
        converged = size <= self.tolerance * length
        return Minimum(x, value, size, length, passes + self.epochs + 2, converged)

    def _descend(
        self,
        problem: Minibatched,
        gradient: Gradient,
        start: Tensor,
        limits: tuple[float, float],
    ) -> Tensor:
        """Return x after the last epoch, given the initial step size and a bound on ‖x‖."""
        (rate, bound), begun = limits, problem.space.norm(start)
        x, velocity, average, count = start.clone(), torch.zeros_like(start), start.clone(), 0
        num_batches = _num_batches(problem)
        last = max(1, self.epochs * num_batches - 1)
        for _ in range(self.epochs):
            for _, batch_product in problem.minibatches():
                # every batch is used once per epoch, so batches of different sizes have equal weights
                g = gradient(batch_product, num_batches, x + self.momentum * velocity)
                if self.clip is not None:
                    g = g * (self.clip / max(problem.space.norm(g), self.clip))
                fade = 1 - (1 - self.decay) * count / last
                velocity.mul_(self.momentum).sub_(g, alpha=rate * fade)
                x.add_(velocity)
                count += 1
                if self.averaging is not None:
                    average.lerp_(x, self.averaging)
            size = problem.space.norm(x)
            if not size <= 10 * bound + 1:
                raise DivergenceError(
                    f"SGD diverged: from ‖x‖ = {begun:.1e} it went to {size:.1e}, where the solution "
                    f"has at most {bound:.1e}. Lower its learning_rate (now {rate:.1e}), or use the "
                    "default solver, which needs none."
                )
        return x if self.averaging is None else average

    def _rate(self, product: Operator, v: Tensor) -> tuple[float, int]:
        """Return the step size, and the number of passes for its estimate."""
        if self.learning_rate is not None:
            return self.learning_rate, 0
        norm = product.space.norm
        for _ in range(4):
            v = product(v / norm(v))
        return 0.1 / (norm(v) + 1), 4


def _num_batches(problem: Minibatched) -> int:
    """Return the number of batches of an epoch, counted in one more pass if it is not known."""
    known = problem.num_steps()
    return sum(1 for _ in problem.minibatches()) if known is None else known
