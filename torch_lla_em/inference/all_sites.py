"""The loss of all sites, where J V and H are kept at some of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_lla_em.inference.expectations import FixedH
from torch_lla_em.inference.span import Span
from torch_lla_em.problem import Problem, Sites
from torch_lla_em.solvers import BFGS, Searches

_PASSES = 200
"""Largest number of passes with one column for a mean."""


class AllSites:
    """Finds the mean of all sites, although H and its expectations are those of some.

    Each pass with one column gives the loss of all sites at a mean and its gradient. What draws add to
    both is that of the sites that are kept. The curvature of the kept sites is only where BFGS starts:
    a feature that is active at few sites may be missing there.
    """

    def __init__(self, problem: Problem, span: Span, expected: FixedH, sites: Sites):
        self._problem, self._span, self._expected, self._sites = problem, span, expected, sites
        self._known: list[tuple[Tensor, float, Tensor]] = []
        """The last two means, with the loss and gradient of all sites there."""

        self._inverse: BFGS | None = None
        """The inverse Hessian of the last minimum."""

        self._searches = Searches()

    def loss(self, mean: Tensor, outputs: Tensor) -> float:
        """Return what the other sites add to the loss at a mean, for J m at those that are kept."""
        return self._of_all(mean)[0] - self._expected.loss(outputs, None)

    def better(self, first: Tensor, second: Tensor, precision: float) -> Tensor:
        """Return the mean at which the loss of all sites plus the prior is lower."""
        values = [self._objective(mean, precision, None)[0] for mean in (first, second)]
        return second if values[1] < values[0] else first

    def minimum(
        self,
        mean: Tensor,
        precision: float,
        draws: Tensor | None,
        solve: Callable[[Tensor, float], Tensor],
        ends: Callable[[float], bool],
    ) -> Tensor:
        """Return the minimum of E[loss] of all sites plus the prior, (m,), from a mean.

        ``draws`` are those of the outputs that are kept, less their mean, and ``solve`` multiplies by (G + λ)⁻¹
        of the kept sites. The search is over once ``ends`` returns True for the squared error of the minimum in
        this metric, relative to the squared norm of the mean under the prior, or when passes no longer pay.
        """
        inverse = self._searches.inverse(lambda g: solve(g, precision), precision, len(mean))
        self._inverse = inverse

        def is_found(point: Tensor, slope: Tensor, square: float) -> bool:
            return ends(square / max(1.0, precision * (point @ point).item()))

        def objective(point: Tensor) -> tuple[float, Tensor]:
            return self._objective(point, precision, draws)

        mean = inverse.minimum(objective, mean, is_found, _PASSES, self._problem.dtype)
        self._searches.keep(inverse, precision)
        return mean

    def square(self, residual: Tensor) -> Tensor:
        """Return the squared error of the last minimum, (), from its residual (m,)."""
        if self._inverse is None:
            raise AttributeError("There is no minimum yet.")
        return residual @ self._inverse.times(residual)

    def pulled(self, mean: Tensor, outputs: Tensor, u: Tensor) -> Tensor | None:
        """Return Jᵀ u, (k, P), whose last row has the gradient of all sites at the mean.

        u (N ... C, k) are those of the sites that are kept, and ``outputs`` are J m there.
        """
        u[:, -1] += self._expected.slope(outputs, None).flatten()
        pulled = self._span.pulled(u)
        if pulled is not None:
            pulled[-1] -= self._of_all(mean)[1]
        return pulled

    def relative_error(self, pushed: Tensor, curved: Tensor) -> float:
        """Return the relative standard error of Tr Σ G from J w_k and H J w_k, (N, s, C, K)."""
        of_site = (pushed * curved).sum((-1, -2)).double()
        kept = of_site.shape[1]
        variance = of_site.var(1).sum() * kept * (1 - kept / self._sites.total)
        variance, total = self._span.share.sum(torch.stack([variance, of_site.sum()]))
        return float(variance.sqrt() / total.clamp_min(1e-300))

    def _objective(
        self, mean: Tensor, precision: float, draws: Tensor | None
    ) -> tuple[float, Tensor]:
        """Return E[loss] of all sites and the prior, and its gradient, (m,)."""
        loss, gradient = self._of_all(mean)
        value = loss + 0.5 * precision * (mean @ mean).item()
        slope = self._span.coordinates(gradient[None])[0].double() + precision * mean
        if draws is not None:
            of_all, expected = self._span.of_all, self._expected
            h = of_all.push(mean[None])[..., 0].contiguous()
            value += expected.loss(h, draws) - expected.loss(h, None)
            u = expected.slope(h, draws) - expected.slope(h, None)
            slope += of_all.pull(u.view(-1, 1))[0].double()
        return value, slope

    def _of_all(self, mean: Tensor) -> tuple[float, Tensor]:
        """Return the loss of all sites at a mean and its gradient in scaled weights, by one pass."""
        for known, loss, gradient in self._known:
            if torch.equal(mean[: len(known)], known) and not mean[len(known) :].any():
                return loss, gradient
        loss, gradient = self._problem.loss_and_gradient(self._span.weights(mean[None])[0])
        gradient *= self._span.prior.scale
        self._known = [*self._known[-1:], (mean, loss, gradient)]
        return loss, gradient
