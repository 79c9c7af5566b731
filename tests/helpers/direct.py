"""Dense references of products and of solvers, for problems with few parameters."""

from dataclasses import dataclass

import torch

from torch_lla_em.solvers import Solution


def rows_of(problem):
    """Return R, shape (N C, P), with G = RᵀR."""
    parts = []

    def add(rows, batch, _):
        at = problem.less_shift(rows.f)
        problem.inspect(rows, batch)
        identity = torch.eye(at.numel(), dtype=at.dtype, device=at.device)
        u = problem.loss(batch.targets, batch.weights).root(at, identity.view(-1, *at.shape))
        R = torch.zeros(len(u), problem.size, dtype=problem.dtype, device=u.device)
        for column, into in zip(u.split(1), R.split(1), strict=True):
            rows.pull(column).added_to(into)
        problem.sweep.expect_finite(R)
        parts.append(R.to(problem.device))
        return {}

    problem.sweep(torch.arange(1 << 16, device="cpu"), {}, add)
    return problem.data.group.gather(torch.cat(parts))


@dataclass(frozen=True)
class Direct:
    """Solves (A + I) X = B by the dense matrix A, from its products with a basis."""

    tolerance: float = 1e-2

    def solve(self, product, b, start=None):
        """Return X with its true residual."""
        basis = torch.eye(b.shape[1], dtype=b.dtype, device=b.device)
        A = torch.cat([product(some) for some in basis.split(64)]).double()
        x = torch.linalg.solve(0.5 * (A + A.T) + basis, b.double().T).T.to(b)
        found = Solution.of(b, x, b - x - product(x))
        return found._replace(passes=3, tolerance=self.tolerance)
