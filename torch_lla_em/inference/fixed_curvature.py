"""Laplace's method over a span: H at the network's outputs, or at J w for given weights w."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from torch_lla_em.inference.evidence import (
    Modes,
    gaussian_constant,
    log_evidences,
    sigma_of,
)
from torch_lla_em.inference.expectations import Expectations
from torch_lla_em.inference.mackay import (
    PRECISION_BOUNDS,
    Estimate,
    Expectation,
    Hyperparameters,
    MStep,
)
from torch_lla_em.inference.over_span import Curved, OverSpan, Q
from torch_lla_em.inference.span import Span
from torch_lla_em.inference.stochastic_prior import StochasticPrior
from torch_lla_em.problem import Problem
from torch_lla_em.solvers import DivergenceError

_STEPS, _SETTLING = 20, 200
"""Largest numbers of steps of λ and σ over a span, and over a complete one; usually less than ten."""

_AT_REST = 1e-3
"""Change of log λ and log σ at which the steps end."""

_NEWTON = 20
"""Largest number of Newton steps for the mode at one λ."""

_SLOW = 0.25
"""Share of the gradient left by a step above which H is evaluated again."""

_MIRRORED, _SHARE = 4, 0.2
"""Largest number of passes for the log det, and the share of its standard error at which they end."""

_CURVE_POINTS, _CURVE_DECADES = 241, 6
"""Precisions at which the mode of a quadratic loss is tabulated, either side of λ."""

_NEIGHBOURS = 10**-0.5, 10**-0.25, 1.0, 10**0.25, 10**0.5
"""Precisions, relative to λ, at which the mode of another loss is computed."""


class FixedCurvature(OverSpan):
    """The mode, the samples and the evidence over a span, at any λ and σ."""

    def __init__(
        self,
        problem: Problem,
        noise: StochasticPrior,
        span: Span,
        expected: Expectations,
        tolerance: float,
        at: Tensor | None = None,
    ):
        super().__init__(span, expected)
        self._problem, self._noise = problem, noise
        self._sigma = sigma_of(problem)
        rounding = 10 * torch.finfo(problem.dtype).eps
        self._tolerance = max(0.2 * tolerance, rounding)
        self._newton: Curved | None = None
        """G with H near the mode, as long as the span does not change."""

        self._f = span.rows.f if at is None else at
        zero = torch.zeros_like(self._f)
        self._loss_at_zero = expected.loss(zero, None)
        self._slope_at_zero = expected.slope(zero, None).flatten()

    def first(self, precision: float) -> Q:
        """Return the posterior at this λ; the search for the mode starts at 0."""
        zero, curved = torch.zeros_like(self.span.xi[0]), self.curved()
        if not curved.G.any() and self._slope_at_zero.any():
            raise DivergenceError(
                "The likelihood's H is 0 for every example: the outputs are so large that the "
                "loss is rounded to 0. Check that the inputs are scaled as in training."
            )
        return self.at(curved, Hyperparameters(zero.new_tensor(precision), self._sigma), zero)

    def curved(self, known: Curved | None = None) -> Curved:
        """Return G and the noise over the span; known of the first directions, by the others."""
        old, noise = 0 if known is None else len(known.G), self._noise
        G = self.grown(known, self._with_H)
        eta = self.span.coordinates(noise.eta, noise.prior.scale, old)
        eta = eta if known is None else torch.cat([known.eta, eta], dim=1)
        return Curved.of(G, self.span.xi, eta)

    def at(self, curved: Curved, hyper: Hyperparameters, mean: Tensor, refined: bool = False) -> Q:
        """Return the posterior at λ and σ; the search for the mode starts at ``mean``.

        ``refined`` corrects the mode of a quadratic loss for the rounding of G.
        """
        precision, noise = hyper.precision.item(), 1.0
        if hyper.sigma is not None:
            noise = (hyper.sigma / self._sigma).item()
        if self._problem.likelihood.is_quadratic:
            slope = (self._slope_at_zero @ self.span.J).double()
            mean = -curved.inverse(precision, noise)(slope / noise**2)
            if refined:
                scaled = precision * noise**2
                mean, loss = self.newton_step(scaled, mean, None, curved.inverse(scaled))
            else:
                loss = self.expected.loss(self.outputs(mean), None)
            loss /= noise**2
            if hyper.sigma is not None:
                loss += gaussian_constant(self._problem, hyper.sigma)
        else:
            mean, loss = self._mode(precision, mean)
        spectrum = curved.spectrum.at_noise(noise)
        samples = _samples(curved, precision, noise)
        evidences = log_evidences(
            loss, hyper.precision, mean.square().sum(), spectrum.log_dets(precision)
        )
        dims = spectrum.effective_dims(precision)
        return Q(precision, noise, curved, mean, samples, loss, evidences, dims)

    def widened(self, q: Q, steps: int = 1) -> Q:
        """Return the posterior over the extended span, at the same λ and σ."""
        mean = q.mean.new_zeros(self.span.size)
        mean[: len(q.mean)] = q.mean
        self._newton = None
        return self.at(self.curved(q.curved), self.hyper(q), mean)

    def restarted(self, q: Q) -> Q:
        """Return the posterior over the span of the random probes, the mode and the samples only."""
        turn = self.span.restart(torch.cat([q.mean[None], q.samples, q.curved.eta]))
        self._newton = None
        return self.at(self.curved(), self.hyper(q), q.mean @ turn)

    def ascend(self, q: Q, m_step: MStep, least: float, steps: int = _STEPS) -> Q:
        """Return the posterior at MacKay's fixed point over the span, with λ not below ``least``.

        With update="em", whose steps are small, it takes one step. An infinite ``least`` fixes λ.
        """
        if least == math.inf:
            return q
        step, quiet = None, replace(m_step, warns=False)
        for _ in range(1 if m_step.update == "em" else steps):
            here = self.hyper(q)
            step = quiet(self.expectation(q, 0.0, 0.0), step)
            new = step.hyper._replace(precision=step.hyper.precision.clamp_min(least))
            q = self.at(q.curved, new, q.mean)
            moved = (new.precision / here.precision).log().abs().item()
            if here.sigma is not None:
                moved = max(moved, (new.sigma / here.sigma).log().abs().item())
            if moved < _AT_REST:
                break
        q = self.at(q.curved, self.hyper(q), q.mean, refined=True)
        m_step(self.expectation(q, 0.0, 0.0))  # gives the warnings
        return q

    def settle(self, q: Q, m_step: MStep, learns: bool) -> tuple[Q, bool]:
        """Return the posterior at the fixed point over a complete span, and whether it was reached."""
        if not learns:
            return q, False
        return self.ascend(q, m_step, PRECISION_BOUNDS[0], _SETTLING), m_step.update != "em"

    def expectation(self, q: Q, mode_error: float, sample_error: float) -> Expectation:
        """Return what the M-step needs."""
        hyper, residual, targets, noise_dims = self.hyper(q), None, None, None
        if hyper.sigma is not None:
            # the loss without its constant: ½ Σ (y - J w)² / σ² at the first σ
            squares = 2 * self._sigma.item() ** 2
            fit = (q.loss - gaussian_constant(self._problem, hyper.sigma)) * q.noise**2
            sums = fit, self._loss_at_zero
            residual, targets = (hyper.sigma.new_tensor(squares * part) for part in sums)
            noise_dims = q.effective_dims.mean()
        return Expectation(
            hyper,
            q.effective_dims,
            q.mean.square().sum(),
            q.loss,
            residual,
            targets,
            noise_dims,
            q.bounds,
            mode_error,
            sample_error,
        )

    def residuals(self, q: Q, sign: float = 1.0) -> Tensor | None:
        """Return the residuals of samples and mode, (K + 1, P); None if the order has changed.

        With ``sign`` -1 they are those of the samples for -η.
        """
        span, shape, prior = self.span, self.expected.shape, self._noise.prior
        samples = _samples(q.curved, q.precision, q.noise, sign)
        curved = self._with_H(span.J @ samples.T.to(span.J)).T.reshape(-1, *shape)
        slope = self.expected.slope(self.outputs(q.mean), None)
        pulled = span.pulled(torch.cat([curved, slope[None]]))
        if pulled is None:
            return None
        pulled /= -(q.noise**2)
        span.add_scaled(pulled, -q.precision * torch.cat([samples, q.mean[None]]))
        pulled[:-1].add_(span.noise, alpha=math.sqrt(q.precision))
        pulled[:-1] += sign * prior.scale * self._noise.eta / q.noise
        return pulled

    def with_evidence(self, q: Q) -> Q:
        """Return the posterior over a span in which the log det is as exact as the samples.

        So far the span was extended for √λ ξ + η. The log det is a sum of functions of ξ and of η,
        for which the span is extended for √λ ξ - η too.
        """
        for _ in range(_MIRRORED):
            found = self.residuals(q, -1.0)
            if found is None or not self.span.has_room(len(q.samples)):
                break
            before, error = q.bound, Estimate.of(q.bounds).standard_error.item()
            if not self.span.widen(found[:-1]):
                break
            q = self.widened(q)
            if not abs(q.bound - before) > _SHARE * error:
                break
        return q

    def modes(self, q: Q) -> Modes:
        """Return the objective of the mode near λ, or for a wide range of λ if it is quadratic."""
        points = []
        if self._problem.likelihood.is_quadratic:
            values = q.curved.spectrum.eigenvalues / q.noise**2
            turned = q.curved.vectors.T @ q.mean
            for number in range(_CURVE_POINTS):
                there = q.precision * 10 ** (
                    _CURVE_DECADES * (2 * number / (_CURVE_POINTS - 1) - 1)
                )
                mean = turned * (values + q.precision) / (values + there)
                move = mean - turned
                # the gradient of the loss is -λ m at the mode
                loss = q.loss - q.precision * (turned @ move) + 0.5 * (values @ move.square())
                points.append((there, loss.item(), mean.square().sum().item()))
            return Modes.of(*torch.tensor(points, dtype=torch.float64, device="cpu").T)
        for there in (factor * q.precision for factor in _NEIGHBOURS):
            mean, at_mode = self._mode(there, q.mean)
            points.append((there, at_mode, mean.square().sum().item()))
        return Modes.of(*torch.tensor(points, dtype=torch.float64, device="cpu").T)

    def hyper(self, q: Q) -> Hyperparameters:
        """Return λ and σ."""
        sigma = None if self._sigma is None else q.noise * self._sigma
        return Hyperparameters(torch.full_like(q.mean[0], q.precision), sigma)

    def _mode(self, precision: float, start: Tensor) -> tuple[Tensor, float]:
        """Return the mode at λ, and Σ loss there."""
        mean, before, loss = start, math.inf, math.inf
        for _ in range(_NEWTON):
            h = self.outputs(mean)
            slope = (self.slope(h, None) + precision * mean).norm().item()
            if not slope < math.inf:
                raise DivergenceError(
                    "The gradient of the linear model is not finite: check the model's outputs "
                    "and the targets for extreme values."
                )
            if slope <= self._tolerance * precision * mean.norm().item() and loss < math.inf:
                break
            known = self._newton
            if known is None or len(known.G) < self.span.size or slope > _SLOW * before:
                self._newton = self._curved_at(h)
            before = slope
            mean, loss = self.newton_step(precision, mean, None, self._newton.inverse(precision))
        return mean, loss

    def _curved_at(self, h: Tensor) -> Curved:
        """Return G with H at the outputs h."""
        J, xi = self.span.J, self.span.xi
        H = self._problem.likelihood.hessian_product
        moved = H(h, J.T.reshape(-1, *h.shape))
        G = (self.expected.masked(moved).flatten(1) @ J).double()
        return Curved.of(G, xi, xi)

    def _with_H(self, J: Tensor) -> Tensor:
        """Return H J v for columns of J V, (N C, k)."""
        f = self._f
        moved = self._problem.likelihood.hessian_product(f, J.T.reshape(-1, *f.shape))
        return self.expected.masked(moved).flatten(1).T


def _samples(curved: Curved, precision: float, noise: float, sign: float = 1.0) -> Tensor:
    """Return (G + λ)⁻¹ (√λ ξ ± η), (K, m)."""
    spectrum = curved.spectrum.at_noise(noise)
    spectrum = spectrum._replace(eta=sign * spectrum.eta)
    return spectrum.solutions(precision) @ curved.vectors.T
