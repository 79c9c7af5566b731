"""The paper's solver: stochastic gradient descent with Nesterov momentum and linear decay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from torch_lla_em.solvers.newton import Loss, Minimum
from torch_lla_em.solvers.operator import Minibatched, Operator, Product
from torch_lla_em.solvers.solution import DivergenceError, Solution, Task, check_positive

Gradient = Callable[[Product, float, Tensor], Tensor]


class MinibatchedLoss(Minibatched, Loss, Protocol):
    """A loss whose gradient can be taken batch by batch."""


@dataclass(frozen=True)
class SGD:
    """Descend on ½⟨x, A x⟩ + ½‖x - b‖², one step a batch of the loader.

    The noise of the targets is in b (the paper's L'), so that minibatches add none of it.
    """

    tolerance: float = 1e-2
    """What the certificate of the result is compared with; it stops no epoch early."""

    epochs: int = 20
    """Passes over the loader."""

    learning_rate: float | None = None
    """First step size, for the sum over all data; None: 0.1 / the largest eigenvalue."""

    momentum: float = 0.9
    """Nesterov's."""

    averaging: float | None = None
    """Weight of the newest iterate in a running (Polyak) average; None: the last iterate."""

    clip: float | None = None
    """Largest norm of a gradient, that of all samples together; None: no bound."""

    decay: float = 1.0 / 330.0
    """Last step size over the first; linear in between."""

    def __post_init__(self) -> None:
        check_positive("SGD", tolerance=self.tolerance, epochs=self.epochs)
        if self.learning_rate is not None:
            check_positive("SGD", learning_rate=self.learning_rate)

    def solve(self, product: Minibatched, b: Tensor, start: Tensor | None = None) -> Solution:
        """Return X after the epochs, from ``start`` or from b (the prior draw w0)."""

        def gradient(batch_product: Product, weight: float, x: Tensor) -> Tensor:
            return weight * batch_product(x) + x - b

        rate, passes = self._rate(product, b[:1])  # type: ignore[arg-type]
        # (A + I)⁻¹ shrinks, so the solution is no longer than b
        bound = product.space.norm(b)
        if start is None or product.space.norm(start) > bound:
            # a start of another λ, or of a mode that had not converged, is worse than b
            start = b
        x = self._descend(product, gradient, start, (rate, bound))
        residual = b - x - product(x)  # type: ignore[operator]
        return Task(product, b).judge(x, residual, passes + self.epochs + 1, self.tolerance)  # type: ignore[arg-type]

    def minimise(self, loss: MinibatchedLoss, start: Tensor) -> Minimum:
        """Return x (P,) near the minimum of loss(x) + ½‖x‖²."""

        def gradient(batch_gradient: Product, weight: float, x: Tensor) -> Tensor:
            return weight * batch_gradient(x) + x

        _, slope = loss.value_and_gradient(start)
        rate, passes = self._rate(loss.hessian(start), torch.ones_like(start)[None])
        # the whole is 1-strongly convex, so the minimum is no further than its gradient is long
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
        """Return x after the epochs, of the first step size and a bound on ‖x‖."""
        (rate, bound), begun = limits, problem.space.norm(start)
        x, velocity, average, count = start.clone(), torch.zeros_like(start), start.clone(), 0
        num_batches = _num_batches(problem)
        last = max(1, self.epochs * num_batches - 1)
        for _ in range(self.epochs):
            for _, batch_product in problem.minibatches():
                # every batch comes once an epoch, so uneven ones weigh alike: not by N / B
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
        """Return the step size, and the passes spent on its estimate."""
        if self.learning_rate is not None:
            return self.learning_rate, 0
        norm = product.space.norm
        for _ in range(4):
            v = product(v / norm(v))
        return 0.1 / (norm(v) + 1), 4


def _num_batches(problem: Minibatched) -> int:
    """Return the batches of an epoch: as the problem knows them, or counted in one more sweep."""
    known = problem.num_steps()
    return sum(1 for _ in problem.minibatches()) if known is None else known
