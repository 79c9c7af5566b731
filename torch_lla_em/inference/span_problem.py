"""The problem over a span of m directions at one H and σ. It is dense: G is (m, m), and the prior
is N(0, 1/λ)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_lla_em.inference.expectations import Expectations
from torch_lla_em.inference.linear_problem import LinearProblem
from torch_lla_em.inference.span import Span
from torch_lla_em.problem import Loss


@dataclass(frozen=True)
class SpanProblem(LinearProblem):
    """A ``LinearProblem`` whose w are coordinates in a span, (m,). It stores the eigenvalues of G,
    and its loss is that of all ranks."""

    span: Span
    expected: Expectations
    loss: Loss

    theta: Tensor
    vectors: Tensor
    """The eigenvalues of G, (m,), and its eigenvectors, (m, m)."""

    near: tuple[Tensor, Tensor]
    """Coordinates, (m,), and their outputs, (N, ..., C). Other outputs are computed by their
    difference from these, since both may be large."""

    deviations: Tensor | None = None
    """Draws of the outputs minus J m, (S, N, ..., C), over which the loss is averaged; None without
    draws."""

    @property
    def rounding(self) -> float:
        """The relative rounding error of the outputs, from which losses are computed."""
        return torch.finfo(self.span.probes.dtype).eps

    def zeros(self, num_vectors: int) -> Tensor:
        """Return coordinates that are 0, (num_vectors, m)."""
        return self.theta.new_zeros(num_vectors, len(self.theta))

    def outputs(self, w: Tensor) -> Tensor:
        """Return J V w, (N, ..., C), for coordinates (m,)."""
        start, outputs = self.near
        exact = self.loss.likelihood.is_quadratic
        return outputs + self.span.push((w - start)[None], exact)[..., 0]

    def ggn_product(self, w: Tensor) -> Tensor:
        """Return G w for coordinates (K, m)."""
        return (w @ self.vectors * self.theta) @ self.vectors.T

    def loss_and_gradient(self, w: Tensor) -> tuple[float, Tensor]:
        """Return the loss, in expectation if there are draws, and its gradient, (m,), for
        coordinates (m,)."""
        loss, u = self.expected.loss_and_slope(self.loss, self.outputs(w), self.deviations)
        return loss, self.span.pull(u.reshape(-1, 1))[0].double()

    def with_curvature_at(self, w: Tensor) -> SpanProblem:
        """Return this problem, because H is changed by EM and not during the search for the
        mode."""
        return self


def log_dets(theta: Tensor, xi: Tensor, eta: Tensor, precision: float) -> Tensor:
    """Estimate log det(I + G / λ) for every sample, (K,), from the eigenvalues of G, as the mean of
    an estimate by ξ and one by η. Its derivative in log λ is -γ."""
    log1p = torch.log1p(theta / precision)
    ratio = torch.where(theta > 0, log1p / theta, 1 / precision)
    return 0.5 * ((xi.square() * log1p).sum(1) + (eta.square() * ratio).sum(1))
