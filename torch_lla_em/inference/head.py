"""A last linear layer: J w = W h + b for stored features h, so EM runs on all weights by products, without a span.

Vectors are scaled parameters z = w / scale as tables (k, C, D), whose prior is N(0, 1/λ). Conjugate gradients solve for all samples
and a Newton step of the mean at once. They are preconditioned by the (D, D) block of every class, and for a softmax also by the
exact inverse on vectors that are the same for all classes, which G annihilates.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference.prior import StochasticPrior
from torch_lla_em.problem import Blocks, Diagonal, Draws, Outputs, Problem, Sites, gathered

BLOCKS = 4000
"""Examples from which the blocks of the preconditioner are taken."""


class Head:
    """Products of all columns with J and Jᵀ by the features of this rank's examples."""

    def __init__(self, rows: Outputs, h: Tensor, noise: StochasticPrior, sites: Sites | None):
        self.rows, self.h, self.sites = rows, h, sites
        """f, targets and weights of this rank's examples, and features, (n, D), with a 1 if the layer has a bias."""

        self._sizes, self.classes = noise.prior.layout.sizes, rows.f.shape[-1]
        self.scale, self.xi = self.tables(noise.prior.scale[None])[0], self.tables(noise.xi)
        """(C, D), and ξ, (K, C, D)."""

    @classmethod
    def of(cls, problem: Problem, noise: StochasticPrior, sites: Sites | None) -> Head | None:
        """Return that of a problem, by a pass; None if the parameters are not those of one last layer."""
        take = None if sites is None else partial(sites.take, problem)
        kept = problem.features(take)
        rows = None if kept is None else gathered(problem, kept, 1, sites.most if sites else 1)
        if rows is None or not problem.data.keeps_order:
            return None
        h = rows.Jw[0].flatten(0, -2).clone()
        return cls(rows._replace(Jw=rows.Jw[:0].clone()), h, noise, sites)

    def with_samples(self, noise: StochasticPrior) -> Head:
        """Return the same products, with ξ of these samples."""
        return Head(self.rows, self.h, noise, self.sites)

    def tables(self, vectors: Tensor) -> Tensor:
        """Return parameters (k, P) as tables (k, C, D)."""
        parts = vectors.split(self._sizes, 1)
        return torch.cat([part.reshape(len(part), self.classes, -1) for part in parts], 2)

    def vectors(self, tables: Tensor) -> Tensor:
        """Return tables (k, C, D) as parameters (k, P)."""
        parts = tables.split([size // self.classes for size in self._sizes], 2)
        return torch.cat([part.flatten(1) for part in parts], 1)

    def push(self, z: Tensor) -> Tensor:
        """Return J w, (N, ..., C, k), for scaled parameters (k, C, D)."""
        w = (self.scale * z).permute(2, 1, 0)
        return (self.h @ w.reshape(len(w), -1)).view(*self.rows.f.shape, len(z))

    def pull(self, u: Tensor) -> Tensor:
        """Return Jᵀ u in scaled parameters, (k, C, D), for u (N, ..., C, k) of every rank."""
        pulled = u.reshape(len(self.h), self.classes * u.shape[-1]).T @ self.h
        tables = pulled.view(self.classes, u.shape[-1], -1).transpose(0, 1)
        total: Tensor = self.rows.share.group.sum(tables.contiguous())
        return total.mul_(self.scale)

    def preconditioner(
        self, H: Diagonal | Blocks | Draws, is_softmax: bool, memory: float
    ) -> Preconditioner:
        """Return the blocks of G of all classes from some of the examples, or in a shared eigenbasis if they exceed the memory."""
        step = max(1, len(self.rows.f) // BLOCKS)
        h = self.h.view(*self.rows.f.shape[:-1], -1)[::step].flatten(0, -2)
        curvature = H.diagonal(slice(None, None, step)).flatten(0, -2) * step
        group, (C, D) = self.rows.share.group, self.scale.shape
        inverse = torch.where(self.scale > 0, 1 / self.scale, 0)
        if 3 * C * D * D * h.element_size() <= memory:
            blocks = h.new_empty(C, D, D)
            for c, (weights, scale) in enumerate(zip(curvature.T, self.scale, strict=True)):
                own = h * scale
                torch.matmul((own * weights[:, None]).T, own, out=blocks[c])
            alike = inverse / inverse.norm(dim=0).clamp_min(1e-30)
            return Preconditioner(group.sum(blocks), None, alike if is_softmax else None)
        # as if the scales of classes were proportional
        of_class = self.scale.square().mean(1, keepdim=True)
        h = h * (self.scale.square().mean(0) / of_class.mean()).sqrt()
        mean = group.sum((h * curvature.sum(1, keepdim=True)).T @ h)
        basis = group.from_first(torch.linalg.eigh(mean.double())[1].to(mean))
        own = group.sum(curvature.T @ (h @ basis).square()) * of_class
        alike = of_class.rsqrt() / of_class.rsqrt().norm()
        return Preconditioner(own, basis, alike if is_softmax else None)


class Preconditioner(NamedTuple):
    """The inverse of diagonal blocks of G + λ, plus that of λ on tables that add the same to the outputs of all classes."""

    blocks: Tensor
    """Those of G, (C, D, D), or what is on their diagonals in a shared basis, (C, D)."""

    basis: Tensor | None
    """Eigenvectors that all classes share, (D, D)."""

    alike: Tensor | None
    """Tables that change the outputs of all classes alike, normalised for every feature, (C, D) or (C, 1); None: there are none."""

    def at(self, precision: float) -> tuple[Callable[[Tensor], Tensor], float]:
        """Return the function that multiplies tables (k, C, D) by the inverse at λ, and log det(M / λ) of what it inverts."""
        basis, alike = self.basis, self.alike
        if basis is None:
            diagonal = self.blocks.diagonal(dim1=1, dim2=2)
            floor = 100 * torch.finfo(self.blocks.dtype).eps * diagonal.amax(1, keepdim=True)
            root = torch.linalg.cholesky(
                self.blocks + torch.diag_embed(floor + precision + 0 * diagonal)
            )
            dets = 2 * (root.diagonal(dim1=1, dim2=2).double() / precision**0.5).log().sum()
        else:
            sums = self.blocks.clamp_min(0) + precision
            dets = (sums.double() / precision).log().sum()
        if alike is not None:
            if basis is None:
                weighed = root * alike[:, :, None]  # N root, of which the products are summed
                within = torch.einsum("cij,ckj->ik", weighed.double(), weighed.double())
                within.diagonal().add_(precision)
                dets = dets - torch.logdet(within / precision)
            else:
                within = (alike.square() * sums).sum(0).double()
                dets = dets - (within / precision).log1p().sum()

        def inverse(r: Tensor) -> Tensor:
            if basis is None:
                x = torch.cholesky_solve(r.permute(1, 2, 0), root).permute(2, 0, 1)
            else:
                x = (r @ basis / sums) @ basis.T
            if alike is not None:
                x = x + alike * (alike * r).sum(1, keepdim=True) / precision
            return x

        return inverse, dets.item()
