"""The loss of all sites, where J V and H are kept at some of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference.expectations import FixedH
from torch_lla_em.inference.span import Span
from torch_lla_em.problem import Problem, Sites

_HALVED = 5
"""How often a step of the mean is halved until the loss of all sites decreases."""


class Anchor(NamedTuple):
    """The loss of all sites less that of the sites that are kept, to first order in the mean."""

    mean: Tensor
    """The mean at which it is exact, (m,)."""

    loss: float
    slope: Tensor
    """(m,)."""


class AllSites:
    """Corrects the loss of the sites that are kept.

    With the correction, the loss at the mean m has the value and the gradient of all sites at its
    anchor, so that the optimum that is found from there, and then from the next anchor, is that of
    all sites, although H and its expectations are those of some.
    """

    def __init__(self, problem: Problem, span: Span, expected: FixedH, sites: Sites):
        self._problem, self._span, self._expected, self._sites = problem, span, expected, sites
        self._anchor: Anchor | None = None
        self._known: list[tuple[Tensor, float, Tensor]] = []
        """The last two means, with the loss and gradient of all sites there."""

    @property
    def slope(self) -> Tensor | float:
        """What the other sites add to the gradient, (m,)."""
        return 0.0 if self._anchor is None else self._anchor.slope

    def is_at(self, mean: Tensor) -> bool:
        """Whether the anchor is at a mean."""
        return self._anchor is not None and torch.equal(self._anchor.mean, mean)

    def loss(self, mean: Tensor) -> float:
        """Return what the other sites add to the loss at a mean."""
        anchor = self._anchor
        return 0.0 if anchor is None else anchor.loss + (anchor.slope @ (mean - anchor.mean)).item()

    def anchored(self, mean: Tensor, precision: float = 0.0, draws: Tensor | None = None) -> Tensor:
        """Move the anchor to a mean and return it.

        If the objective of all sites at this λ is higher there than at the last anchor, it is moved only
        part of the way. ``draws`` are those of the outputs that are kept, less their mean.
        """
        mean = self._no_worse(mean, precision, draws)
        loss, gradient = self._of_all(mean)
        h, expected = self._outputs(mean), self._expected
        pulled = self._span.of_all.pull(expected.slope(h, None).view(-1, 1))[0]
        slope = (self._span.coordinates(gradient[None])[0] - pulled).double()
        self._anchor = Anchor(mean, loss - expected.loss(h, None), slope)
        return mean

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

    def _no_worse(self, mean: Tensor, precision: float, draws: Tensor | None) -> Tensor:
        """Return the mean, or one on the way to it, with an objective no higher than the anchor's."""
        anchor = self._anchor
        if anchor is None:
            return mean
        last = mean.new_zeros(len(mean))
        last[: len(anchor.mean)] = anchor.mean
        least = self._objective(last, precision, draws)
        for _ in range(_HALVED):
            if self._objective(mean, precision, draws) <= least:
                return mean
            mean = 0.5 * (mean + last)
        return last

    def _objective(self, mean: Tensor, precision: float, draws: Tensor | None) -> float:
        """Return E[loss] of all sites and the prior, where what draws add is that of the kept sites."""
        total, expected = (
            self._of_all(mean)[0] + 0.5 * precision * (mean @ mean).item(),
            self._expected,
        )
        if draws is not None:
            h = self._outputs(mean)
            total += expected.loss(h, draws) - expected.loss(h, None)
        return total

    def _outputs(self, mean: Tensor) -> Tensor:
        """Return J m at the sites that are kept."""
        return self._span.of_all.push(mean[None])[..., 0].contiguous()

    def _of_all(self, mean: Tensor) -> tuple[float, Tensor]:
        """Return the loss of all sites at a mean and its gradient in scaled weights, by one pass."""
        for known, loss, gradient in self._known:
            if torch.equal(mean[: len(known)], known) and not mean[len(known) :].any():
                return loss, gradient
        loss, gradient = self._problem.loss_and_gradient(self._span.weights(mean[None])[0])
        gradient *= self._span.prior.scale
        self._known = [*self._known[-1:], (mean, loss, gradient)]
        return loss, gradient
