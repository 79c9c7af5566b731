"""The paper's solver: stochastic gradient descent with Nesterov momentum and linear decay to 0."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_lla_em.solvers.solution import Batched, DivergenceError, Solution, check_positive
from torch_lla_em.solvers.space import norm


@dataclass(frozen=True)
class SGD:
    """The paper's solver: minimises ½⟨x, A x⟩ + ½‖x - b‖² with one step for each batch of the
    loader.

    The random probes of the targets are part of b (the paper's L'), so minibatches add no noise.
    Use it for comparisons with the paper; the default needs fewer passes and no step size.

    Example:
        >>> la = LinearisedLaplace(model, "classification", compute=Compute(solver=SGD(epochs=50)))
    """

    tolerance: float = 1e-2
    """Largest error without a warning; a fit replaces it, see ``Compute``. Default 0.01."""

    epochs: int = 20
    """Passes over the loader, which do not end earlier. Default 20."""

    learning_rate: float | None = None
    """Initial step size, for the sum over all data. Default None: 0.1 / the largest eigenvalue."""

    momentum: float = 0.9
    """Nesterov momentum. Default 0.9."""

    def __post_init__(self) -> None:
        check_positive("SGD", tolerance=self.tolerance, epochs=self.epochs)
        if self.learning_rate is not None:
            check_positive("SGD", learning_rate=self.learning_rate)

    def solve(self, product: Batched, b: Tensor, start: Tensor | None = None) -> Solution:
        """Solve (A + I) X = B.

        Args:
            product (Batched): The product with A. Its ``minibatches()`` returns the number of
                batches and their products.
            b (Tensor): B, shape (K, P).
            start (Tensor, optional): Initial X, shape (K, P). Default None: b.

        Returns:
            X after the last epoch, with its true residual.
        """
        rate, passes = self._rate(product, b[:1])
        # (A + I)⁻¹ shrinks, so the solution is no longer than b
        bound = norm(b)
        if start is None or norm(start) > bound:  # a start from another λ can be longer
            start = b
        num_batches = product.minibatches()[0]
        x, velocity, count = start.clone(), torch.zeros_like(b), 0
        last = self.epochs * num_batches
        for _ in range(self.epochs):
            for batch_product in product.minibatches()[1]:
                # every batch is used once per epoch, so batches of different sizes have equal
                # weights
                ahead = x + self.momentum * velocity
                gradient = num_batches * batch_product(ahead) + ahead - b
                fade = 1 - count / last  # the last step has a positive size, too
                velocity.mul_(self.momentum).sub_(gradient, alpha=rate * fade)
                x.add_(velocity)
                count += 1
            if not norm(x) <= 10 * bound + 1:
                raise DivergenceError(
                    f"SGD diverged: ‖x‖ grew from {norm(start):.1e} to {norm(x):.1e}, but that of "
                    f"the solution is at most {bound:.1e}. Lower its learning_rate (now "
                    f"{rate:.1e}), or use the default solver, which needs none."
                )
        solution = Solution.of(b, x, b - x - product(x))
        return solution._replace(passes=passes + self.epochs + 1, tolerance=self.tolerance)

    def _rate(self, product: Batched, v: Tensor) -> tuple[float, int]:
        """Return the step size, and the number of passes for its estimate."""
        if self.learning_rate is not None:
            return self.learning_rate, 0
        for _ in range(4):
            v = product(v / norm(v))
        return 0.1 / (norm(v) + 1), 4
