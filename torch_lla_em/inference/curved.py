"""The problem over a span at one H and σ: the loss in expectation over the outputs, and dense algebra.

The outputs of an example are h_n ~ N(m_n, Σ_k d_nk d_nkᵀ / K), where d_nk are the outputs J_n w_k of the posterior samples:
m_n + Σ_k d_nk ε_k / √K is a draw, so no covariance is ever factorised. Every example has ε of its own, so that a fit cannot
adapt to errors that all examples share, and every draw a mirror image.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import Share
from torch_lla_em.inference.span import Span
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.problem import (
    AtOutputs,
    Blocks,
    Diagonal,
    Draws,
    Hessian,
    Loss,
    functions,
)
from torch_lla_em.solvers import Batched, Minimum, Product, Solution, require_finite


class Expectations:
    """E[loss], E[∇loss] and E[H] of this rank's examples; without draws those at the mean."""

    def __init__(self, like: Tensor, share: Share, seed: int, number: int, many: bool = False):
        self.share, self.number, self.many = share, number, many
        """``number`` is that of the draws of every example; 0: H is fixed at the network's outputs."""

        self._shape, self._seed, self._noise = like.shape, seed, like.new_zeros(0)

    def H(self, loss: Loss, mean: Tensor, deviations: Tensor | None) -> Hessian:
        """Return H for means (N, ..., C), averaged over deviations (S, N, ..., C)."""
        if not self.number:
            return AtOutputs(mean, loss)
        parts = []
        for rows, f in functions(mean, deviations):
            if self.many:
                f = f.expand(2 * self.number, *f.shape[1:])
                parts.append(loss.part(rows).roots_of_probabilities(f))
            else:
                parts.append(loss.part(rows).expected_hessian(f))
        form = Draws if self.many else Diagonal if loss.likelihood.elementwise else Blocks
        found: Hessian = form(torch.cat(parts))
        return found

    def loss_and_slope(
        self, loss: Loss, mean: Tensor, deviations: Tensor | None
    ) -> tuple[float, Tensor]:
        """Return Σ E[-log p(y | h)] of all ranks, and its slope in the mean of this rank's examples."""
        total, found = mean.new_zeros((), dtype=torch.float64), [mean[:0]]
        for rows, f in functions(mean, deviations):
            part = loss.part(rows)
            total += part.value(f).double() / len(f)
            found.append(part.gradient(f).mean(0))
        return self.share.group.sum(total).item(), torch.cat(found)

    def deviations(self, pushed: Tensor) -> Tensor:
        """Return draws of the outputs less their mean, (S, N, ..., C), for J w_k (N, ..., C, K).

        If the draws of an example are many for every column, their second moments are those of the columns. Then
        E[loss] changes with the deviations as E[H] says, and the bound is highest where MacKay's update rests:
        otherwise λ of 30 examples moved by 15 % with its start. Of few draws it would make the tails too light: with
        20 for 16 columns λ of a CNN rose to 1.6 times that of many draws.
        """
        *sites, _, K = pushed.shape
        if self._noise.shape[:-1] != (*sites, K):
            # numbers of this rank's examples, (N, ..., K, S), the same on every device and for any number of ranks
            generator = torch.Generator("cpu").manual_seed(self._seed)
            shape = *self._shape[1:-1], K, self.number
            found = [pushed.new_zeros(0, *shape)]
            for numbers in torch.arange(self.share.total, device="cpu").split(1 << 12):
                size = len(numbers), *shape
                drawn = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")
                drawn = drawn[self.share.find(numbers)[0]]
                if self.number >= 8 * K:
                    drawn = self.number**0.5 * torch.linalg.qr(drawn.mT).Q.mT
                found.append(drawn.to(pushed).div_(K**0.5))
            self._noise = torch.cat(found)
        return (pushed @ self._noise).movedim(-1, 0).contiguous()


class Curved(NamedTuple):
    """The problem over a span at one H and σ by the eigenvalues of G: products, the loss, and its own solver."""

    rounding: float
    likelihood: Likelihood
    span: Span
    expected: Expectations
    loss: Loss
    theta: Tensor
    vectors: Tensor
    xi: Tensor
    eta: Tensor
    """The eigenvalues, (m,), and eigenvectors, (m, m), and ξ and η in these, (K, m)."""

    S_noise: Tensor
    """S ε with S Sᵀ = H, (K, N, ..., C)."""

    near: tuple[Tensor, Tensor]
    """Coordinates, (m,), and their outputs, (N, ..., C), from which others are computed: both may be large."""

    tolerance: float
    """‖∇‖ / ‖m‖ at the end of a search for the mode; 0 for a quadratic loss: a step, and one for its rounding."""

    roughly: float = 0.0
    """The error at which it ends earlier, by G."""

    deviations: Tensor | None = None
    """Draws of the outputs less J m, (S, N, ..., C); None without draws."""

    precision: Tensor | None = None
    """λ, of the solver."""

    dtype: torch.dtype = torch.float64

    def outputs(self, c: Tensor) -> Tensor:
        """Return J V c, (N, ..., C), for coordinates (m,)."""
        start, outputs = self.near
        return outputs + self.span.push((c - start)[None], self.likelihood.is_quadratic)[..., 0]

    num_steps: int | None = 1

    def zeros(self, num_vectors: int) -> Tensor:
        """Return coordinates, (num_vectors, m)."""
        return torch.zeros_like(self.theta).expand(num_vectors, -1).clone()

    def ggn_product(self, w: Tensor) -> Tensor:
        """Return G w for coordinates (K, m)."""
        return (w @ self.vectors * self.theta) @ self.vectors.T

    def minibatch_products(self) -> Iterator[Product]:
        """Yield the product with G, of all examples at once."""
        yield self.ggn_product

    def loss_and_gradient(self, w: Tensor) -> tuple[float, Tensor]:
        """Return the loss, in expectation if there are draws, and its gradient, (m,), for coordinates (m,)."""
        loss, u = self.expected.loss_and_slope(self.loss, self.outputs(w), self.deviations)
        return loss, self.span.pull(u.reshape(-1, 1))[0].double()

    def with_curvature_at(self, w: Tensor) -> Curved:
        """Return this problem: EM moves its H, and not a search for the mode."""
        return self

    def solve(self, product: Batched, b: Tensor, start: Tensor | None = None) -> Solution:
        """Return the solution of (A + I) x = b for the whitened product A with this G."""
        whitened = self.theta * self.precision.rsqrt().square()
        y = b @ self.vectors / (whitened + 1)
        energy = (whitened * y.square()).sum(1)
        return Solution(y @ self.vectors.T, torch.zeros_like(b[:, 0]), energy)

    def minimise(self, loss: Any, start: Tensor) -> Minimum:
        """Return the minimum of loss(x) + ½ ‖x‖² from a start (m,), by BFGS from the inverse by G, in the eigenvectors of G."""
        problem, deviation = loss.problem, loss.deviation
        agreed = self.span.rows.share.group.from_first
        # a search over a span that grows goes on later
        most = 2 if not self.tolerance else 1000 if self.span.is_complete else 100
        precision = float(deviation[0]) ** -2
        inverse = (1 / (self.theta + precision)).diag()

        def at(c: Tensor) -> tuple[float, float, Tensor]:
            """Return the loss, the objective and its slope, which are those of rank 0."""
            of_loss, gradient = problem.loss_and_gradient(self.vectors @ c)
            gradient = gradient @ self.vectors
            both = agreed(torch.cat([gradient, gradient.new_tensor([of_loss])]))
            of_loss, slope = both[-1].item(), both[:-1] + precision * c
            return of_loss, of_loss + 0.5 * precision * (c @ c).item(), slope

        c = (start * deviation) @ self.vectors
        of_loss, value, slope = at(c)
        length, idle, passes = 1.0, 0, 0
        while passes < most:
            require_finite(abs(value) + slope.norm().item())
            step, square = -agreed(inverse @ slope), precision * (c @ c).item()
            fall, small = -(slope @ step).item(), self.tolerance * (precision * square) ** 0.5
            if idle == 12 or fall <= self.roughly**2 * square or slope.norm().item() <= small:
                break
            step, passes = length * step, passes + 1
            of_new, new, slope_new = at(c + step)
            # values are rounded as the outputs are, and may hide that a step is good
            rounding = torch.finfo(self.span.noise.dtype).eps * abs(value)
            idle, lower = 0 if new < value - rounding else idle + 1, new < value
            if not lower and new <= value + 100 * rounding:
                lower = (slope_new @ inverse @ slope_new).item() < fall
            if lower or most == 2:
                change = slope_new - slope
                curvature = (step @ change).item()
                if curvature > 1e-12 * (step.norm() * change.norm()).item():
                    turned = inverse @ change
                    both = torch.outer(step, turned) / curvature
                    longer = (1 + (change @ turned).item() / curvature) / curvature
                    inverse = inverse - both - both.T + longer * torch.outer(step, step)
                c, of_loss, value, slope, length = c + step, of_new, new, slope_new, 1.0
            else:  # to where the gradient along the step vanishes, if it is linear
                down, rise = length * fall, max((slope_new @ step).item(), 2 * (new - value))
                share = down / max(down + rise, 1e-300)
                length *= min(0.5, max(0.05, share if share == share else 0.0))
        error = slope.norm().item() / max(precision * c.norm().item(), 1e-300)
        return Minimum((self.vectors @ c) / deviation, of_loss, error, passes + 1, True)


def log_dets(theta: Tensor, xi: Tensor, eta: Tensor, precision: float) -> Tensor:
    """Return log det(I + G / λ) of every sample, (K,), half from ξ, half from η, by eigenvalues of G; its slope in log λ is -γ."""
    log1p = torch.log1p(theta / precision)
    ratio = torch.where(theta > 0, log1p / theta, 1 / precision)
    return 0.5 * ((xi.square() * log1p).sum(1) + (eta.square() * ratio).sum(1))
