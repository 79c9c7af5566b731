"""Conjugate gradients with a Krylov space for every system of its own."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_lla_em.solvers import Operator, Solution, dots


@dataclass(frozen=True)
class PlainCG:
    """Solve (A + I) X = B; all rows share their products, and nothing else."""

    tolerance: float = 1e-2
    max_passes: int = 400

    def solve(self, product: Operator, b: Tensor, start: Tensor | None = None) -> Solution:
        """Return X once the residual, by recursion, meets the tolerance; its true one is told."""
        x, passes = torch.zeros_like(b) if start is None else start, 0
        for passes, x, residual in iterates(product, b, start):
            near = Solution.of(b, x, residual).error <= 0.9 * self.tolerance
            if near or passes >= self.max_passes:
                break
        found = Solution.of(b, x, b - x - product(x))
        return found._replace(passes=passes + 1, tolerance=self.tolerance)


def iterates(
    product: Operator, b: Tensor, start: Tensor | None = None
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the number of products so far, x and its residual."""
    if start is None:
        x, residual, passes = torch.zeros_like(b), b.clone(), 0
    else:
        x, residual, passes = start.clone(), b - start - product(start), 1
        yield passes, x, residual
    direction, rho = residual.clone(), dots(residual, residual)
    while True:
        image = direction + product(direction)
        passes += 1
        step = _ratio(rho, dots(direction, image))[:, None].to(x)
        x, residual = x + step * direction, residual - step * image
        rho, old = dots(residual, residual), rho
        direction = residual + _ratio(rho, old)[:, None].to(x) * direction
        yield passes, x, residual


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """Return above / below, and 0 for a system that is solved exactly."""
    return torch.where(below > 0, above / below, 0)
