"""The problem over a span at one H and σ, by the eigenvalues of G: dense algebra, and the search for the mode."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference.expectations import Expectations
from torch_lla_em.inference.span import Span
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.problem import Loss, WhitenedGGN
from torch_lla_em.solvers import Minimum, Solution, require_finite


class Curved(NamedTuple):
    """The problem over a span at one H and σ by the eigenvalues of G: products, the loss, and its own solver."""

    linear_model: Any
    likelihood: Likelihood
    span: Span
    expected: Expectations
    loss: Loss
    theta: Tensor
    """The eigenvalues, (m,)."""

    vectors: Tensor
    """The eigenvectors, (m, m)."""

    xi: Tensor
    eta: Tensor
    """ξ and η in the eigenvectors, (K, m)."""

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

    dtype = torch.float64

    def ggn_product(self, c: Tensor) -> Tensor:
        """Return G c for coordinates c (k, m)."""
        return (c @ self.vectors * self.theta) @ self.vectors.T

    def outputs(self, c: Tensor) -> Tensor:
        """Return J V c, (N, ..., C), for coordinates (m,)."""
        start, outputs = self.near
        return outputs + self.span.push((c - start)[None], self.likelihood.is_quadratic)[..., 0]

    def solve(self, product: WhitenedGGN, b: Tensor, start: Tensor | None = None) -> Solution:
        """Return the solution of (A + I) x = b for the whitened product A with this G."""
        whitened = self.theta * product.deviation[:1].square()
        y = b @ self.vectors / (whitened + 1)
        energy = (whitened * y.square()).sum(1)
        return Solution(y @ self.vectors.T, torch.zeros_like(b[:, 0]), energy)

    def minimise(self, loss: Any, start: Tensor) -> Minimum:
        """Return the minimum of loss(x) + ½ ‖x‖² from a start (m,), by BFGS, whose first inverse is that by G."""
        deviation, problem, agreed = loss.deviation, loss.problem, self.span.rows.share.agreed
        precision, most = float(deviation[0]) ** -2, 100 if self.tolerance else 2
        pairs: list[tuple[Tensor, Tensor, Tensor]] = []

        def at(c: Tensor) -> tuple[float, float, Tensor]:
            """Return the loss, the objective and its slope, which are those of rank 0."""
            of_loss, u = self.expected.loss_and_slope(
                self.loss, self.outputs(c), problem.deviations
            )
            gradient = self.span.pull(u.reshape(-1, 1))[0].double()
            both = agreed(torch.cat([gradient, gradient.new_tensor([of_loss])]))
            of_loss, slope = both[-1].item(), both[:-1] + precision * c
            return of_loss, of_loss + 0.5 * precision * (c @ c).item(), slope

        def step_from(slope: Tensor) -> tuple[Tensor, float]:
            """Return the step, by the inverse that earlier steps have corrected, and its product with the slope."""
            shares, rest = [], slope
            for along, change, scale in reversed(pairs):
                shares.append(scale * (along @ rest))
                rest = rest - shares[-1] * change
            step = self.vectors @ ((self.vectors.T @ rest) / (self.theta + precision))
            for (along, change, scale), share in zip(pairs, reversed(shares)):
                step = step + (share - scale * (change @ step)) * along
            step = -agreed(step)
            return step, -(slope @ step).item()

        c = start * deviation
        of_loss, value, slope = at(c)
        length, idle, passes = 1.0, 0, 0
        while passes < most:
            require_finite(abs(value) + slope.norm().item())
            (step, fall), square = step_from(slope), precision * (c @ c).item()
            small = self.tolerance * (precision * square) ** 0.5
            if idle == 12 or fall <= self.roughly**2 * square or slope.norm().item() <= small:
                break
            step, passes = length * step, passes + 1
            of_new, new, slope_new = at(c + step)
            # values are rounded as the outputs are, and may hide that a step is good
            rounding = torch.finfo(self.span.noise.dtype).eps * abs(value)
            idle, lower = 0 if new < value - rounding else idle + 1, new < value
            if not lower and new <= value + 100 * rounding:
                lower = step_from(slope_new)[1] < fall
            if lower or most == 2:
                change = slope_new - slope
                curvature = step @ change
                if curvature > 1e-12 * step.norm() * change.norm():
                    pairs.append((step, change, 1 / curvature))
                c, of_loss, value, slope, length = c + step, of_new, new, slope_new, 1.0
            else:  # to where the gradient along the step vanishes, if it is linear
                down, rise = length * fall, max((slope_new @ step).item(), 2 * (new - value))
                share = down / max(down + rise, 1e-300)
                length *= min(0.5, max(0.05, share if share == share else 0.0))
        error = slope.norm().item() / max(precision * c.norm().item(), 1e-300)
        return Minimum(c / deviation, of_loss, error, passes + 1, True)


def log_dets(theta: Tensor, xi: Tensor, eta: Tensor, precision: float) -> Tensor:
    """Return log det(I + G / λ) of every sample, (K,), by the eigenvalues of G over a span, with ξ and η there.

    Half from ξ, half from η; the derivative in log λ is minus γ.
    """
    log1p = torch.log1p(theta / precision)
    ratio = torch.where(theta > 0, log1p / theta, 1 / precision)
    return 0.5 * ((xi.square() * log1p).sum(1) + (eta.square() * ratio).sum(1))
