"""The problem over a span at one H and σ, and the search for its mode."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference.expectations import Expectations
from torch_lla_em.inference.quadrature import Spectrum
from torch_lla_em.inference.span import Span
from torch_lla_em.jacobian import LinearModel
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.solvers import Minimum, Searches


class Curved(NamedTuple):
    """The problem over the span at one H and σ: what multiplies by G, and gives the loss and its gradient."""

    likelihood: Likelihood
    linear_model: LinearModel
    expected: Expectations
    span: Span
    spectrum: Spectrum
    S_noise: Tensor
    """S ε with S Sᵀ = H, (K, N, ..., C)."""

    near: tuple[Tensor, Tensor]
    """Coordinates, (m,), and their outputs, (N, ..., C), from which others are computed: both may be large."""

    deviations: Tensor | None = None
    """Draws of the outputs less J m, (S, N, ..., C); None without draws."""

    @property
    def dtype(self) -> torch.dtype:
        """Precision of coordinates."""
        return torch.float64

    def ggn_product(self, c: Tensor) -> Tensor:
        """Return G c for coordinates c (k, m)."""
        vectors = self.spectrum.vectors
        return (c @ vectors * self.spectrum.eigenvalues) @ vectors.T

    def outputs(self, c: Tensor) -> Tensor:
        """Return J V c, (N, ..., C), for coordinates (m,)."""
        start, outputs = self.near
        return (
            outputs
            + self.span.outputs.push((c - start)[None], self.likelihood.is_quadratic)[..., 0]
        )

    def loss_and_gradient(self, c: Tensor) -> tuple[float, Tensor]:
        """Return E[-log p(y | J V c)] of all examples, and its gradient, (m,)."""
        loss, u = self.expected.loss_and_slope(self.outputs(c), self.deviations)
        return loss, self.span.outputs.pull(u.reshape(-1, 1))[0].double()

    def rescaled(self, ratio: float) -> Curved:
        """Return it for σ times a number."""
        spectrum, eta = self.spectrum, self.spectrum.eta / ratio
        spectrum = spectrum._replace(eigenvalues=spectrum.eigenvalues / ratio**2, eta=eta)
        return self._replace(spectrum=spectrum, S_noise=self.S_noise / ratio)


@dataclass(frozen=True)
class Descent:
    """Minimises a loss(x) + ½ ‖x‖² over a span by BFGS, whose first inverse is that of the quadratic by G."""

    spectrum: Spectrum
    searches: Searches
    agreed: Any
    """Takes a tensor of rank 0 on every rank."""

    tolerance: float
    """‖∇‖ / ‖x‖ at the end."""

    roughly: float = 0.0
    """The error at which it ends earlier, by the inverse."""

    keeps: bool = True
    """Whether the next search begins with the steps of this one."""

    def exact(self) -> Descent:
        """Return this search for a quadratic loss, which takes one exact step."""
        return replace(self, keeps=False)

    def minimise(self, loss: Any, start: Tensor) -> Minimum:
        """Return the minimum of loss(x) + ½ ‖x‖² from a start (m,)."""
        deviation, vectors = loss.deviation, self.spectrum.vectors
        precision = float(deviation[0]) ** -2
        theta, start, known = (
            self.spectrum.eigenvalues + precision,
            start * deviation,
            dict[int, Any](),
        )

        def objective(c: Tensor) -> tuple[float, Tensor]:
            value, gradient = loss.problem.loss_and_gradient(c)
            both = self.agreed(torch.cat([gradient, gradient.new_tensor([value])]))
            value, gradient = both[-1].item(), both[:-1]
            slope = gradient + precision * c
            known[id(c)] = c, value, slope
            return value + 0.5 * precision * (c @ c).item(), slope

        def is_found(c: Tensor, slope: Tensor, square: float) -> bool:
            size = precision * (c @ c).item()
            if self.roughly and square <= self.roughly**2 * size:
                return True
            return bool(slope.norm().item() <= self.tolerance * (precision * size) ** 0.5)

        def solve(gradient: Tensor) -> Tensor:
            found: Tensor = vectors @ ((vectors.T @ gradient) / theta)
            return found

        if not self.keeps:  # a quadratic loss
            c = start - self.agreed(solve(objective(start)[1]))
            value, slope = objective(c)
            c = c - self.agreed(solve(slope))
            objective(c)
            c, value, slope = known[id(c)]
            return Minimum(c / deviation, value, slope.norm().item(), len(known), True)
        inverse = self.searches.inverse(solve, precision, len(start))
        # values are rounded as the outputs are
        c = inverse.minimum(objective, start, is_found, 100, loss.problem.span.noise.dtype)
        self.searches.keep(inverse, precision)
        c, value, slope = known[id(c)]
        error = slope.norm().item() / max(precision * c.norm().item(), 1e-300)
        return Minimum(c / deviation, value, error, len(known), True)
