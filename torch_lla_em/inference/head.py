"""A last linear layer, where J w = W h + b for stored features h. Products with J and Jᵀ then take
no pass over the data, and the fit needs no span.

Conjugate gradients are preconditioned by the (D, D) block of every class, and for a softmax also by
the exact inverse on vectors that are the same for all classes, which G maps to 0. One to five
products are then enough, for ten classes as for a thousand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference.expectations import Expectations
from torch_lla_em.inference.linear_problem import LinearProblem
from torch_lla_em.inference.prior import StochasticPrior
from torch_lla_em.problem import (
    ENTRIES,
    Hessian,
    Loss,
    Outputs,
    Problem,
    Sites,
    gathered,
    parts_of,
)

BLOCKS = 4000
"""The approximate number of a rank's examples from which the blocks of the preconditioner, the best
scale of q, and γ at another H are computed."""


class Head(NamedTuple):
    """Products with J and Jᵀ by the features of this rank's examples."""

    rows: Outputs
    """f, targets and weights of this rank's examples."""

    h: Tensor
    """The features, (N, ..., D), with a 1 if the layer has a bias."""

    sizes: tuple[int, ...]
    """The numbers of elements of the layer's weight and bias."""

    sites: Sites | None = None

    @classmethod
    def of(cls, problem: Problem, sites: Sites | None) -> Head | None:
        """Return the head of a problem, after a pass over the data; None if the parameters are not
        those of one last layer."""
        take = None if sites is None else partial(sites.take, problem)
        kept = problem.features(take)
        rows = None if kept is None else gathered(problem, kept, 1, sites.most if sites else 1)
        if rows is None or not problem.data.keeps_order:
            return None
        h = rows.Jw[0].clone()
        rows = rows._replace(Jw=rows.Jw[:0].clone())
        return cls(rows, h, tuple(problem.layout.sizes), sites)

    @property
    def classes(self) -> int:
        """The number of classes, C."""
        return self.rows.f.shape[-1]

    def tables(self, vectors: Tensor) -> Tensor:
        """Return parameters (k, P) as tables (k, C, D)."""
        parts = vectors.split(self.sizes, 1)
        return torch.cat([part.reshape(len(part), self.classes, -1) for part in parts], 2)

    def vectors(self, tables: Tensor) -> Tensor:
        """Return tables (k, C, D) as parameters (k, P)."""
        parts = tables.split([size // self.classes for size in self.sizes], 2)
        return torch.cat([part.flatten(1) for part in parts], 1)

    def parts(self, columns: int, step: int = 1) -> Iterator[slice]:
        """Yield slices of examples, or of every ``step``-th example, whose outputs for this number
        of columns are in memory at once.

        They have a quarter of ``ENTRIES`` numbers (with all of them, a product of 2,000 x 64 x 50
        takes a third more time), but at least as many examples as there are features, since reading
        the columns would take longer otherwise."""
        numbers = min(4 * self.rows.f[:1].numel() * columns, ENTRIES // self.h.shape[-1])
        for part in parts_of(-(-len(self.h) // step), numbers):
            yield slice(step * part.start, step * part.stop, step)

    def push(self, w: Tensor, rows: slice | Tensor = slice(None)) -> Tensor:
        """Return J w of these examples, (n, ..., C, k), for parameters (k, P)."""
        tables, h = self.tables(w).permute(2, 1, 0), self.h[rows]
        return (h @ tables.reshape(len(tables), -1)).view(*h.shape[:-1], self.classes, len(w))

    def pull(self, parts: Iterable[tuple[slice, Tensor]]) -> Tensor:
        """Return Jᵀ u, (k, P), summed over the examples of all ranks, for parts of u, (n, ..., C,
        k)."""
        products = (
            self.h[rows].flatten(0, -2).T @ u.flatten(-2).flatten(0, -2) for rows, u in parts
        )
        tables = reduce(torch.add, products).view(self.h.shape[-1], self.classes, -1)
        pulled: Tensor = self.rows.share.group.sum(self.vectors(tables.permute(2, 1, 0)))
        return pulled

    def blocks(self, H: Hessian, scale: Tensor, memory: float) -> tuple[Tensor, Tensor | None]:
        """Return the blocks of G for all classes, (C, D, D), estimated from some of the examples,
        for parameters divided by a scale, (P,).

        If the blocks exceed the memory, return their diagonals, (C, D), in an eigenbasis that all
        classes share, and this basis, (D, D)."""
        step = max(1, len(self.rows.f) // BLOCKS)
        h = self.h[::step].flatten(0, -2)
        curvature = H.diagonal(slice(None, None, step)).flatten(0, -2) * step
        group, table = self.rows.share.group, self.tables(scale[None])[0]
        C, D = table.shape
        if 3 * C * D * D * h.element_size() <= memory:
            blocks = h.new_empty(C, D, D)
            for c, (weights, of_class) in enumerate(zip(curvature.T, table, strict=True)):
                scaled = h * of_class
                torch.matmul((scaled * weights[:, None]).T, scaled, out=blocks[c])
            return group.sum(blocks), None
        # as if the scales of classes were proportional
        of_class = table.square().mean(1, keepdim=True)
        h = h * (table.square().mean(0) / of_class.mean()).sqrt()
        mean = group.sum((h * curvature.sum(1, keepdim=True)).T @ h)
        basis = group.from_first(torch.linalg.eigh(mean.double())[1].to(mean))
        return group.sum(curvature.T @ (h @ basis).square()) * of_class, basis


class Preconditioner:
    """M ≈ (A + I)⁻¹, which is the inverse of the blocks of all classes, plus I on whitened
    parameters that add the same to the outputs of all classes."""

    def __init__(
        self,
        head: Head,
        blocks: tuple[Tensor, Tensor | None],
        scale: Tensor | None,
        precision: Tensor,
    ):
        """``blocks`` are those of ``Head.blocks``; ``scale`` is that of the prior, (P,), if G maps
        to 0 all parameters that add the same to all outputs."""
        of_G, self._basis = blocks
        of_A, self._head = of_G / precision.to(of_G), head
        self._alike: Tensor | None = None
        """These parameters, normalised for every feature, (C, D), or computed as if the scales of
        classes were proportional, (C, 1)."""

        self._within = of_A[:0]
        """I plus the block of A + I for these parameters, (D, D)."""

        if self._basis is None:
            floor = 100 * torch.finfo(of_A.dtype).eps * of_A.diagonal(dim1=1, dim2=2).amax(1)
            of_A.diagonal(dim1=1, dim2=2).add_((floor + 1)[:, None])
            self._inner = torch.linalg.cholesky(of_A)
        else:
            self._inner = of_A.clamp_min(0) + 1
        if scale is not None:
            table = head.tables(scale[None])[0]
            if self._basis is not None:
                table = table.square().mean(1, keepdim=True).sqrt()
            alike = torch.where(table > 0, 1 / table, 0)
            self._alike = alike / alike.norm(dim=0).clamp_min(1e-30)
            if self._basis is None:
                self._within = torch.eye(of_A.shape[1], dtype=torch.float64, device=of_A.device)
                for of_class, block in zip(self._alike, of_A, strict=True):
                    self._within += (of_class[:, None] * block * of_class).double()

    def __call__(self, x: Tensor) -> Tensor:
        """Return M x, (k, P)."""
        r, alike = self._head.tables(x), self._alike
        if self._basis is None:
            tables = torch.cholesky_solve(r.permute(1, 2, 0), self._inner).permute(2, 0, 1)
        else:
            tables = (r @ self._basis / self._inner) @ self._basis.T
        if alike is not None:
            tables = tables + alike * (alike * r).sum(1, keepdim=True)
        return self._head.vectors(tables)

    def log_det(self) -> float:
        """Return -log det M."""
        alike, inner = self._alike, self._inner
        if self._basis is None:
            dets = 2 * inner.diagonal(dim1=1, dim2=2).double().log().sum()
        else:
            inner = inner.double()
            dets = inner.log().sum()
        if alike is not None and self._basis is None:
            dets = dets - torch.logdet(self._within)
        elif alike is not None:
            dets = dets - (alike.square() * inner).sum(0).log1p().sum()
        return float(dets)


@dataclass(frozen=True)
class HeadProblem(LinearProblem):
    """The ``LinearProblem`` of a last layer with stored features, at one H."""

    head: Head
    expected: Expectations
    loss: Loss
    H: Hessian

    probes: StochasticPrior
    inverse: Preconditioner
    """The random probes at this H, and the preconditioner."""

    deviations: Tensor | None = None
    """Draws of the outputs minus J m, (S, N, ..., C), over which the loss is averaged; None without
    draws."""

    @property
    def rounding(self) -> float:
        """The rounding error of the features' dtype."""
        return torch.finfo(self.head.h.dtype).eps

    def zeros(self, num_vectors: int) -> Tensor:
        """Return parameters that are 0, (num_vectors, P)."""
        return self.head.h.new_zeros(num_vectors, sum(self.head.sizes))

    def ggn_product(self, w: Tensor) -> Tensor:
        """Return G w, (K, P)."""
        return self.head.pull(
            (rows, self._of_part(self.head.push(w, rows), rows)) for rows in self.head.parts(len(w))
        )

    def _of_part(self, Jw: Tensor, rows: slice) -> Tensor:
        """Return H J w of these examples, (n, ..., C, k)."""
        return self.H.product(Jw.flatten(0, -2), rows).view_as(Jw)

    def loss_and_gradient(self, w: Tensor) -> tuple[float, Tensor]:
        """Return the loss at w, (P,), which is an expectation if there are draws, and its gradient,
        (P,)."""
        outputs = self.head.push(w[None])[..., 0]
        loss, slope = self.expected.loss_and_slope(self.loss, outputs, self.deviations)
        return loss, self.head.pull([(slice(None), slope[..., None])])[0]

    def with_curvature_at(self, w: Tensor) -> HeadProblem:
        """Return this problem with H of the expected loss at J w."""
        outputs = self.head.push(w[None])[..., 0]
        return replace(self, H=self.expected.H(self.loss, outputs, self.deviations))
