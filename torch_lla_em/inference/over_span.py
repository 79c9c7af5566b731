"""The Gaussian posterior over a span of directions, by dense linear algebra without a pass.

q = N(m, (G + Λ)⁻¹), with H fixed or in expectation under q, and its bound on the log evidence;
``controller.py`` has the derivation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from torch_lla_em.inference.evidence import gaussian_constant
from torch_lla_em.inference.expectations import (
    DrawnH,
    ExpectedH,
    FixedH,
    draws_for,
    replace_by_roots,
    takes_draws,
)
from torch_lla_em.inference.q import Curvature, Q
from torch_lla_em.inference.records import Estimate, Hyper, NoiseSums, Statistics
from torch_lla_em.inference.span import Span
from torch_lla_em.inference.stochastic_prior import StochasticPrior
from torch_lla_em.problem import Problem
from torch_lla_em.solvers import DivergenceError, Searches

_EVALUATIONS = {True: 50, False: 200}
"""Largest number of evaluations of the loss for a mean, if H moves and if it is fixed."""

_ENOUGH, _KEPT = {False: 0.02, True: 0.002}, 10
"""Error of the mean with which λ and H can move on, relative to its norm, over spans that are complete or not, and
number of steps from which the next search for a mean learns. With two Newton steps the mean was so far from its
place that λ ended by chance."""

_COLUMNS = 64
"""Columns of G that are computed at once."""

_MIRRORED, _SHARE = 4, 0.2
"""Largest number of passes for the log det, and the share of its standard error at which they end."""


class OverSpan:
    """q over a span, at any λ, σ and H."""

    def __init__(
        self, problem: Problem, noise: StochasticPrior, span: Span, moves: bool, tolerance: float
    ):
        self.span, self.share, self._problem = span, span.share, problem
        self.f = problem.less_shift(span.rows.f)
        """The network's outputs for this rank's examples, (N, ..., C)."""

        self._sigma, loss = problem.sigma, problem.loss(span.rows.targets, span.rows.weights)
        if self._sigma is not None:
            loss = replace(loss, likelihood=loss.likelihood.without_constant())
        self.expected = FixedH(loss, self.f, self.share)
        if moves:
            sites = self.share.total * self.f.shape[1:-1].numel()
            memory = span.num_outputs * self.f.element_size(), span.memory
            many = takes_draws(loss.likelihood, self.f.shape[-1], *memory)
            kind, number = DrawnH if many else ExpectedH, draws_for(sites, many)
            self.expected = kind(loss, self.f, self.share, noise.seed, number)
        self._is_linear = loss.likelihood.is_quadratic
        """Whether the mean solves a linear system; then products are exact, as σ may be small."""

        self._dtype = torch.float64 if self._is_linear else self.f.dtype
        self._searches = Searches(_KEPT)
        self.epsilon = noise.epsilon(self.share.numbers, self.f)
        """ε of this rank's examples, (K, N, ..., C)."""

        rounding = 10 * torch.finfo(problem.dtype).eps
        self._tolerance = max(0.2 * tolerance, rounding)

    @property
    def moves(self) -> bool:
        """Whether H follows the posterior."""
        return self.expected.moves

    @property
    def is_exact(self) -> bool:
        """Whether E[H], γ and the log det follow from the covariance itself and not from samples."""
        return self.moves and self.span.is_complete and not isinstance(self.expected, DrawnH)

    def first(self, precision: float, at: Tensor | None = None) -> Q:
        """Return q at this λ, with H at given outputs (default: the network's).

        If H moves, it begins as the average of those at outputs 0 and at the network's outputs.
        """
        curved = self.curved(self.expected.first(self.f if at is None else at))
        mean = torch.zeros_like(self.span.xi[0])
        if not curved.G.any() and self.share.sum(
            self.expected.slope(torch.zeros_like(self.f), None).count_nonzero()
        ):
            raise DivergenceError(
                "The likelihood's H is 0 for every example: the outputs are so large that the "
                "loss is rounded to 0. Check that the inputs are scaled as in training."
            )
        return self.at(curved, precision, 1.0, mean)

    def at(
        self, curved: Curvature, precision: float, noise: float, mean: Tensor, exact: bool = False
    ) -> Q:
        """Return q at λ, σ and H. Its mean is found from ``mean``, to the tolerance if H is fixed or ``exact``."""
        self._problem.sweep.say()
        spectrum = curved.spectrum.at_noise(noise)
        samples = spectrum.solutions(precision) @ curved.vectors.T
        of_all = spectrum.exact if self.is_exact else spectrum.of_samples
        gamma, log_dets = of_all(precision)
        targets = self.share.total * self.f.shape[1:].numel()
        gamma = gamma * (targets / gamma.mean()).clamp_max(1)  # which samples may exceed
        draws = self._draws(curved, samples, precision)
        mean, h = self._mean(curved, precision * noise**2, mean, draws, exact)
        loss = self.expected.loss(h, draws) / noise**2
        if self._sigma is not None:
            loss += gaussian_constant(self._problem, noise * self._sigma)
        norm = precision * mean.square().sum()
        if self.moves:
            norm = norm - gamma
        if self.moves and not self.is_exact:
            # E[loss] varies with the samples too: the spread of the half from ξ accounts for both
            of_xi = (spectrum.xi.square() * (spectrum.eigenvalues / precision).log1p()).sum(1)
            log_dets = log_dets.mean() + of_xi - of_xi.mean()
        bounds = -loss - 0.5 * (norm + log_dets)
        return Q(precision, noise, curved, mean, samples, loss, bounds, gamma, h, draws)

    def curved(self, H: Tensor, known: Curvature | None = None) -> Curvature:
        """Return G and η over the span; if they are known for its first directions, they grow."""
        old = 0 if known is None else len(known.G)
        S_noise = self.expected.root(H, self.epsilon) if known is None else known.S_noise
        fall = -self.expected.slope(torch.zeros_like(self.f), None)
        u = torch.cat([S_noise, fall[None]]).flatten(1).T.to(self._dtype)
        G, pulled = self._gram(H, old), self.span.of_all.pull(u, old).double()
        if known is not None:
            G = torch.cat([torch.cat([known.G, G[:old].T]), G], dim=1)
            pulled = torch.cat([torch.cat([known.eta, known.fall[None]]), pulled], dim=1)
        return Curvature.of(G, self.span.xi, pulled, (H, S_noise), self.share)

    def widened(self, q: Q, exact: bool = False) -> Q:
        """Return q over the extended span, at the same λ, σ and H."""
        mean = torch.nn.functional.pad(q.mean, (0, self.span.size - len(q.mean)))
        return self.at(self.curved(q.curved.H, q.curved), q.precision, q.noise, mean, exact)

    def filled(self, q: Q, rows: list[Tensor]) -> Q:
        """Return q with its rows for examples, after ``Q.parted``."""
        outputs, H = rows
        curved = q.curved._replace(H=H, S_noise=self.expected.root(H, self.epsilon))
        return q._replace(
            curved=curved, outputs=outputs, deviations=self._draws(curved, q.samples, q.precision)
        )

    def restarted(self, q: Q) -> Q:
        """Return q over the span of its mean, its samples, ξ and a fixed H's η only."""
        kept = [q.mean[None], q.samples] + [q.curved.eta] * (not self.moves)
        turn = self.span.restart(torch.cat(kept))
        return self.at(self.curved(q.curved.H), q.precision, q.noise, q.mean @ turn)

    def prior_variance(self) -> Tensor:
        """Return the mean variance of the prior's outputs at λ = 1, relative to their size.

        The size of logits and log rates is 1. That of continuous targets depends on their units: it
        is the variance of the network's outputs, plus the inverse of H, which is σ².
        """
        pushed = self.span.of_all.push(self.span.xi)
        C, mean = self.expected.shape[-1], self.share.mean
        square = mean(pushed.double().square().movedim(-1, 0).reshape(-1, C))
        if not self._problem.likelihood.real_valued:
            return square.mean()
        Jw = pushed.reshape(-1, pushed.shape[-1])
        curved = self.expected.product(self.expected.first(self.f), Jw).view(pushed.shape)
        curvature = mean((pushed * curved).double().movedim(-1, 0).reshape(-1, C))
        f = self.f.double().reshape(-1, C)
        size = mean((f - mean(f)).square()) + square / curvature
        return (square / size).nan_to_num(0.0).mean()

    def outputs(self, mean: Tensor) -> Tensor:
        """Return J m, (N, ..., C)."""
        return self.span.of_all.push(mean[None], self._is_linear)[..., 0]

    def hyper(self, q: Q) -> Hyper:
        """Return λ and σ."""
        sigma = None if self._sigma is None else q.noise * self._sigma
        return torch.full_like(q.mean[0], q.precision), sigma

    def noise_of(self, sigma: Tensor | None) -> float:
        """Return σ relative to that of G."""
        return 1.0 if sigma is None else (sigma / self._sigma).item()

    def statistics(self, q: Q, mode_error: float = 0.0, sample_error: float = 0.0) -> Statistics:
        """Return what the controller needs."""
        precision, sigma = self.hyper(q)
        sums: NoiseSums = (None, None, None)
        loss = q.loss
        if self.moves:
            loss = self.expected.loss(q.outputs, None)
        if sigma is not None:
            # the loss without its constant: ½ Σ (y - J w)² / σ² at the first σ
            T = self._problem.temperature
            squares = 2 * self._sigma.item() ** 2 * T
            fit = (q.loss - gaussian_constant(self._problem, sigma)) * q.noise**2
            at_zero = self.expected.loss(torch.zeros_like(self.f), None)
            residual, targets = sigma.new_tensor([squares * fit, squares * at_zero])
            sums = residual, targets, T * q.effective_dims.mean()
        norm, errors = q.mean.square().sum(), (mode_error, sample_error)
        known = precision, sigma, q.effective_dims, norm, loss, q.bounds
        return Statistics(*known, *errors, *sums)

    def residuals(self, q: Q, sign: float = 1.0) -> Tensor | None:
        """Return the residuals of samples and mean, (K + 1, P); None if the order has changed.

        With ``sign`` -1 they are those of the samples for -η.
        """
        span, expected = self.span, self.expected
        spectrum = q.curved.spectrum.at_noise(q.noise)
        spectrum = spectrum._replace(eta=sign * spectrum.eta)
        samples = spectrum.solutions(q.precision) @ q.curved.vectors.T
        pushed = span.of_all.push(samples, self._is_linear).flatten(0, -2)
        curved = expected.product(q.curved.H, pushed)
        of_all = self.f.new_empty(len(curved), len(samples) + 1)
        noise = q.curved.S_noise.flatten(1).T
        torch.sub(noise * (sign * q.noise), curved, out=of_all[:, :-1])
        of_all[:, -1] = expected.slope(q.outputs, q.deviations).flatten().neg_()
        pulled = span.pulled(of_all)
        if pulled is None:
            return None
        pulled /= q.noise**2
        span.add_scaled(pulled, -q.precision * torch.cat([samples, q.mean[None]]))
        pulled[:-1].add_(span.noise, alpha=math.sqrt(q.precision))
        return pulled

    def with_evidence(self, q: Q) -> Q:
        """Return q over a span in which the log det of a fixed H is as exact as the samples.

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

    def _mean(
        self, metric: Curvature, precision: float, start: Tensor, draws: Tensor | None, exact: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the minimum m of E[loss] + ½ λ ‖m‖², by BFGS from a start if the loss is not quadratic, and J m."""
        if self._is_linear:
            mean = self.share.agreed(metric.solve(metric.fall, precision))
            return mean, self.outputs(mean)
        expected, from_start = self.expected, self.outputs(start)

        def outputs(mean: Tensor) -> Tensor:  # as a sum, since both may be large and nearly cancel
            return from_start + self.outputs(mean - start)

        def objective(mean: Tensor) -> tuple[float, Tensor]:
            h = outputs(mean)
            u = expected.slope(h, draws).view(-1, 1)
            slope = self.span.of_all.pull(u)[0].double() + precision * mean
            return expected.loss(h, draws) + 0.5 * precision * (mean @ mean).item(), slope

        def is_found(mean: Tensor, slope: Tensor, square: float) -> bool:
            norm: float = mean.norm().item()
            if self.moves and not exact:
                return square <= _ENOUGH[self.span.is_complete] ** 2 * precision * norm**2
            size: float = slope.norm().item()
            return size <= self._tolerance * precision * norm

        def solve(gradient: Tensor) -> Tensor:
            return self.share.agreed(metric.solve(gradient, precision))

        inverse = self._searches.inverse(solve, precision, len(start))
        mean = inverse.minimum(
            objective, start, is_found, _EVALUATIONS[self.moves], self._problem.dtype
        )
        self._searches.keep(inverse, precision)
        return mean, outputs(mean)

    def _draws(self, curved: Curvature, samples: Tensor, precision: float) -> Tensor | None:
        """Return draws of the outputs less their mean, if H moves."""
        if not self.moves:
            return None
        if not self.is_exact:
            return self.expected.deviations(self.span.of_all.push(samples))
        root = (curved.vectors * (curved.spectrum.eigenvalues + precision).rsqrt()).to(self.f)
        found = self.f.new_empty(*self.f.shape, self.f.shape[-1])
        for rows, part in self._parts():
            pushed = (part @ root).view(-1, *self.f.shape[1:], len(root))
            found[rows] = pushed @ pushed.mT
        replace_by_roots(found)
        return self.expected.deviations(found.mul_(self.f.shape[-1] ** 0.5))

    def _parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield blocks of examples with their J V, (n ... C, m)."""
        outputs = self.span.of_all
        step = max(1, outputs.at_once // (outputs.outputs * max(self.span.size, 1)))
        for start in range(0, len(self.f), step):
            yield slice(start, start + step), outputs.part(start, start + step)

    def _gram(self, H: Tensor, old: int) -> Tensor:
        """Return the columns of G = Jᵀ H J from ``old`` on, (m, m - old), a block of examples at a time."""
        m = self.span.size
        total = torch.zeros(m, m - old, dtype=torch.float64, device=H.device)
        for rows, part in self._parts():
            part = part.to(self._dtype)
            HJ = self.expected.product(H, part[:, old:], rows)
            if old:
                total += part.T @ HJ
                continue
            for i in range(0, m, _COLUMNS):  # what is on and below the diagonal
                total[i:, i : i + _COLUMNS] += part[:, i:].T @ HJ[:, i : i + _COLUMNS]
        total = self.share.sum(total)
        return total if old else total.tril() + total.tril(-1).T
