"""A likelihood whose examples count as often as their weights say."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_lla_em.likelihoods.base import Likelihood


class Weighted(Likelihood):
    """p(y | f)^w in the fit, for targets packed with their weights, (B, ..., 2).

    The mask is the weight: whoever leaves masked sites out multiplies by it.
    """

    def __init__(self, likelihood: Likelihood):
        self.unweighted = likelihood
        self.elementwise, self.convex = likelihood.elementwise, likelihood.convex
        given = getattr(likelihood, "untempered", likelihood)
        if given.real_valued and not given.elementwise:
            raise TypeError(
                f"{type(given).__name__} takes no weights: its targets do not belong to single outputs."
            )
        if getattr(given, "from_data", False):
            raise ValueError(
                "A weighted regression does not learn σ: pass LinearisedLaplace(..., sigma_noise=...)."
            )

    def _targets(self, packed: Tensor, f: Tensor) -> Tensor:
        y = packed[..., 0]
        return y.to(f.dtype) if self.elementwise else y.long()

    def _weights(self, packed: Tensor) -> Tensor:
        """Return weights of sites, (B, *sites)."""
        w = packed[..., 1]
        return w[..., 0] if self.elementwise else w

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        targets, w = self._targets(y, f), self._weights(y).to(f.dtype)
        if w.dim() == 1:
            return self.unweighted.log_prob(f, targets) * w
        lead = f.shape[: f.dim() - w.dim() - 1]  # each site is an example of its own
        sites = targets.flatten(0, w.dim() - 1)
        each = self.unweighted.log_prob(f.flatten(len(lead), -2), sites).view(*lead, *w.shape)
        return (each * w).flatten(len(lead) + 1).sum(-1)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return self.unweighted.gradient(f, self._targets(y, f))

    def hessian_product(self, f: Tensor, u: Tensor) -> Tensor:
        return self.unweighted.hessian_product(f, u)

    def hessian_sqrt_product(self, f: Tensor, noise: Tensor) -> Tensor:
        return self.unweighted.hessian_sqrt_product(f, noise)

    def mean(self, f: Tensor) -> Tensor:
        return self.unweighted.mean(f)

    def mask(self, y: Tensor) -> Tensor:
        """Return the weight of each site, 0 where it has no label."""
        targets = y[..., 0] if self.elementwise else y[..., 0].long()
        kept, w = self.unweighted.mask(targets), self._weights(y)
        return w if kept is None else w * kept

    def align(self, y: Tensor, class_dim: int) -> Tensor:
        if self.elementwise and y.dim() < 3:
            raise ValueError(
                "Weights need an axis for the outputs: have the network return (B, 1), and pass "
                "targets of that shape."
            )
        aligned = (self.unweighted.align(part, class_dim) for part in y.unbind(-1))
        return torch.stack([part.double() for part in aligned], -1)

    def check(self, f: Tensor, y: Tensor) -> None:
        self.unweighted.check(f, self._targets(y, f))

    @property
    def is_quadratic(self) -> bool:
        return self.unweighted.is_quadratic
