"""Every decision of a fit about λ, σ and H, and when it ends; the E-steps only compute.

The linear model h = J w has the prior N(0, Λ⁻¹), Λ = λ diag(scale)⁻², and the fit seeks the Gaussian
q = N(m, A⁻¹) and the λ that maximise

    L(m, A, λ) = E_q[log p(y | J w)] - KL(q ‖ N(0, Λ⁻¹)).

**Mean and covariance.** For Gaussian q, Bonnet's theorem d E_q[g] / d m = E_q[∇g] and Price's theorem
d E_q[g] / d Σ = ½ E_q[∇²g] turn the derivatives of E_q[loss] into expectations of derivatives. With
KL = ½ (‖m‖²_Λ + Tr Λ Σ - P + log det A - log det Λ), the two conditions of a maximum are

    Σ_n J_nᵀ E_q[∇loss_n] + Λ m = 0   and   A = G + Λ,  G = Σ_n J_nᵀ E_q[H_n] J_n.

So the mean is found by Newton's method with expected gradients, and H moves towards E_q[H_n]
(``ExpectedH``). If H stays fixed at given outputs and m is the mode, q is Laplace's approximation and
L, up to a constant, its log evidence (``FixedH``). For a Gaussian likelihood both are exact.

**The bound.** There Tr Λ A⁻¹ = P - γ with γ = Tr G A⁻¹, so KL = ½ (‖m‖²_Λ - γ + log det(I + Λ⁻¹ G)).
γ is the mean of ½ (⟨w, G w⟩ + ‖Λ^{-½} ξ - w‖²_Λ) over samples A w = Λ^½ ξ + η, η ~ N(0, G). The log det
is the mean of ξᵀ log(I + Λ^{-½} G Λ^{-½}) ξ, and of a like function of η. Over a span that is extended for the
sum Λ^½ ξ + η alone, the half from ξ is too large and that from η too small, by 10 to 15 % each, and their mean
is right to a few per cent. The same mean has -γ as its derivative in log λ. (The half from ξ alone, which
does not change with H, is at its largest at a λ that is up to 1.7 times too large.)

**λ.** G and m are stationary, so dL / d log λ = ½ (γ - λ ‖m‖²), where the norm is in scaled parameters.
MacKay's update λ ← γ / ‖m‖² has this fixed point, and so has λ ← λ (γ / (λ ‖m‖²))^stride. **σ** follows in the same way:
σ² ← Σ (y - J m)² / (N - γ).

**The first H** is the average of H(0) and H(f). H(f) alone is nearly 0 where a network has overfitted, and
G, γ and then λ with it; H(0), that of uniform predictions, is far too large for a trained network.

A span of directions changes λ, σ, H and m without a pass over the data, in ``ascend``; a solver needs
passes for each λ, so ``update`` accelerates its steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.inference.mackay import (
    LEAST_FREEDOM,
    em_noise,
    em_update,
    function_space_Mackay_update,
    mackay_noise,
)
from torch_lla_em.inference.options import FitOptions
from torch_lla_em.inference.over_span import OverSpan
from torch_lla_em.inference.prior import Prior
from torch_lla_em.inference.q import Q
from torch_lla_em.inference.records import Ascent, Extent, Hyper, State, Statistics, Way
from torch_lla_em.inference.rounds import OF_H, course, improve, stepped
from torch_lla_em.problem import Problem
from torch_lla_em.runtime import PRECISION_BOUNDS, or_float64, report

_FALL = 3.0
"""Largest factor by which λ may decrease before the span is extended; small spans overestimate it."""

_ERRORS = {True: (0.3, 0.1), False: (0.1, 0.03)}
"""Errors of samples and mean below which λ can have converged, for a moving and a fixed H."""

_GAIN, _SHARE = 0.3, 0.1
"""Gain of the bound that is worth another pass, in nats and as a share of its Monte Carlo error, whichever is larger."""

_LARGE = 1.0
"""Error of the samples above which a step with a fixed H does not count: its span is too small."""

_PATIENCE = 8
"""Steps at a fixed λ without a decrease of the error by 10 % after which only rounding is left."""

_STEPS = {False: 20, True: 400}
"""Largest number of steps of λ and σ at a fixed H, over a span and over a complete one."""

_AT_REST = 1e-3
"""Change of log λ and log σ at a fixed H, or of the bound in nats if H moves, at which the steps end."""

EACH, _BLOCKS, _LEFT = 3, {True: 40, False: 10}, 0.003
"""Steps of λ and a moving H after every extension; over a complete span the largest number of such blocks, if λ
moves and if it is fixed, and the rest of the way of log λ at which they end."""

_NOISE = 0.005
"""Nats that the bound over such a span may change in a block if samples stand for the covariance."""

_NEAR, _GROWTH = 0.1, 1.25
"""Change of log λ in the last steps below which the next ones wait until the span has grown by this factor, or
is accurate enough for λ to converge: each step computes G anew, for which time grows with the square of the span.
A last layer of 64 features, 50 classes and 2,000 examples takes 22.5 s instead of 50.3."""

_LOSS, _ROUGHLY = 2.0, 0.1
"""Nats by which these steps may lower the bound, if neither its Monte Carlo error is larger, nor this share of γ for each
unit of log λ, by which its log det may be wrong; otherwise a round that raises it is taken instead."""

_DAMPING, _STRIDE = 0.7, 2.0
"""Share of the change of H in such a round, and length of its step of log λ, relative to MacKay's."""

_LONGER = 1.3
"""How much longer a step of log λ is than one before it in the same direction. The first is MacKay's. If it is twice
as long, λ swings from one step to the next where a network has overfitted, since H follows it with a delay."""

_NEAR_ROUNDING = 10
"""Multiple of the rounding error of the residuals below which a warning is given."""


@dataclass(frozen=True)
class Controller:
    """Chooses λ, σ and H from the results of an E-step, and decides when they have converged."""

    problem: Problem
    prior: Prior
    options: FitOptions
    moves: bool = False
    """Whether H is an expectation under the posterior, and changes with it."""

    is_late: Callable[[], bool] = lambda: False
    """Whether the time of the fit is over, on all ranks alike: no further step over a complete span is taken."""

    # when λ and σ are fixed

    def is_fixed(self, state: State) -> bool:
        """Return whether λ and σ stay fixed: they have converged, or all steps are taken."""
        if state.ended or state.converged:
            return True
        steps = self.options.em_steps
        return state.number >= steps and bool(steps or not self.moves)

    def allowed(self, gamma: Tensor, num_samples: int, rises: bool = False) -> Tensor:
        """Return the change of log λ that counts as converged, () or (blocks,).

        It is max(0.01, 1 / √(K γ)), the Monte Carlo error of log λ. A γ below 1 counts as 1, unless λ
        ``rises``: where the data determine nothing, λ grows without bound, and its value does not
        matter. With update="em" it is 0.1 %, because small steps do not mean that the fixed point is
        close.
        """
        if self.options.update == "em":
            return torch.full_like(gamma, 1e-3)
        return (num_samples * gamma.clamp_min(1e-12 if rises else 1)).rsqrt().clamp_min(0.01)

    # a step of λ and σ for each E-step, by a solver

    def update(self, found: Statistics, state: State) -> State:
        """Return the state after the step of λ and σ that follows from an E-step at the present ones."""
        gamma, square = found.effective_dims.mean(0), found.squared_norm
        sigma = None if found.sigma is None else self._noise(found, found.sigma)
        if self.options.update == "em":
            plain = em_update(gamma, square, found.precision, self.prior.num_weights())
        else:
            plain = function_space_Mackay_update(gamma, square, found.precision)
        precision = plain if sigma is not None else self.accelerated(found.precision, plain, state)
        changes = self._changes((found.precision, found.sigma), (precision, sigma), found)
        number, before = state.number + 1, state.changes
        return state._replace(
            precision=precision,
            sigma=sigma,
            statistics=found,
            number=number,
            before=found.precision,
            plain=plain.log(),
            changes=changes,
            converged=number > 2
            and before is not None
            and bool((_left(before, changes) < 1).all()),
        )

    def accelerated(self, here: Tensor, plain: Tensor, state: State) -> Tensor:
        """Return λ after a secant step in log λ from the last two steps, or after the plain step."""
        if self.options.update == "em" or here.dim() or state.before is None:
            return plain
        start, end = here.log(), plain.log()
        slope = (end - state.plain) / (start - state.before.log())
        if not -1 < slope < 0.9:  # negative: it overshoots from both sides
            return plain
        return (start + (end - start) / (1 - slope)).exp()

    def _changes(self, old: Hyper, new: Hyper, found: Statistics) -> Tensor:
        """Return |Δ log| of every λ and of σ², (blocks,) or (blocks + 1,), relative to what counts as converged."""
        gamma, K = found.effective_dims.mean(0), len(found.effective_dims)
        allowed, rising = self.allowed(gamma, K), self.allowed(gamma, K, rises=True)
        moved = new[0].log() - old[0].log()
        changes = (moved.abs() / torch.where(moved > 0, rising, allowed)).view(-1)
        if old[1] is not None and new[1] is not None:
            of_noise = 2 * (new[1].log() - old[1].log()).abs().max()
            changes = torch.cat([changes, (of_noise / allowed.min()).view(1).to(changes)])
        return changes

    def _noise(self, found: Statistics, sigma: Tensor) -> Tensor:
        """Return the new σ."""
        residual, rounding, dims, count = self._sums(found, sigma)
        residual = torch.maximum(residual, rounding)
        if self.options.update == "em":
            return em_noise(residual, dims, count, sigma)
        learnt = mackay_noise(residual, dims, count)
        return torch.where(learnt > 0, learnt, sigma)  # all targets are 0

    def _sums(self, found: Statistics, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return Σ(y - J w_lin)², its rounding error, γ and the number of targets, the shape of σ."""
        sums: Any = found.residual, found.targets, found.noise_dims
        residual, targets, dims = (part.to(sigma) for part in sums)
        count = torch.full_like(sigma, self.problem.data.facts.num_targets / sigma.numel())
        eps, rounding = torch.finfo(self.problem.dtype).eps, targets
        if self.problem.moments is not None:
            means = self.problem.moments[0].square().to(sigma)
            rounding = targets + eps * count * (means if sigma.dim() else means.mean())
        return residual, eps * rounding, dims, count

    # steps of λ, σ and H over a span, which take no pass

    def ascend(self, over: OverSpan, q: Q, state: State, extent: Extent) -> Ascent:
        """Return q after steps of λ, σ, H and the mean over a span; none if λ stays fixed."""
        complete = extent.complete
        fixed = state.statistics is not None and self.is_fixed(state)
        if fixed and not (complete and self.moves):
            return Ascent(q, over.hyper(q), 0.0, climbed=False)
        least = PRECISION_BOUNDS[0] if complete else q.precision / _FALL
        if not self.options.em_steps:
            least = math.inf
        if self._waits(state, extent, q):
            return Ascent(q, over.hyper(q), 0.0, climbed=False)
        if not self.moves:
            after, at_rest = self._settle(over, q, least, _STEPS[complete])
            return Ascent(after, over.hyper(q), after.bound - q.bound, at_rest=at_rest)
        if complete:
            return self._at_end(over, q, state, least)
        early = state.statistics is not None and not self._is_accurate(state.statistics)
        after = self._steps(over, q, state.way, least, early)
        moved = abs(math.log(after.precision / q.precision))
        loss = max(_LOSS, q.bound_error, _ROUGHLY * moved * q.effective_dims.mean().item())
        if not after.bound > q.bound - loss:  # as on the way to a collapse of λ
            after = improve(over, q, least, _DAMPING, _STRIDE)
        return Ascent(after, over.hyper(q), after.bound - q.bound)

    def judge(self, state: State, ascent: Ascent, extent: Extent, found: Statistics) -> State:
        """Return the state after an extension of the span: whether λ has converged, and the fit ends."""
        fixed = state.statistics is not None and self.is_fixed(state)
        if ascent.climbed:
            changes = self._changes(ascent.old, (found.precision, found.sigma), found)
            # where λ is far too large the bound is flat, but λ still falls
            falls = bool((2 * found.precision < ascent.old[0]).any())
            little = max(_GAIN, _SHARE * ascent.q.bound_error)
            still = bool((changes < 1).all()) or (
                self.moves and not falls and abs(ascent.gain) < little
            )
            still = still and (self._is_accurate(found) or self._is_accurate(state.statistics))
            way = None
            if self.moves:
                way = course(ascent.q, ascent.old[0].item(), state.way)
                still = still and (way.worth < little or not self.options.em_steps)
            at_rest = extent.complete and ascent.at_rest
            small = not (self.moves or extent.complete) and found.sample_error > _LARGE
            state = state._replace(
                precision=found.precision,
                sigma=found.sigma,
                number=state.number + (not small or not self.options.em_steps),
                before=ascent.old[0],
                way=way,
                converged=still or at_rest or state.converged,
                best=math.inf,
                stalled=0,
                size=extent.size,
                peak=max(state.peak, ascent.q.bound),
            )
        else:
            state = state._replace(stalled=state.stalled + 1)
        if found.error < 0.9 * state.best:
            state = state._replace(best=found.error, stalled=0)
        ended = extent.complete and not ascent.cut
        if not self.moves:
            ended = not extent.grew and (fixed or state.converged)
        ended = ended or extent.full or state.stalled == _PATIENCE
        return state._replace(statistics=found, ended=ended)

    def _settle(self, over: OverSpan, q: Q, least: float, steps: int) -> tuple[Q, bool]:
        """Return q at the fixed point of λ and σ for a fixed H, and whether it was reached.

        With update="em", whose steps are small, it takes one step. Where σ follows rounding, few.
        """
        if least == math.inf:
            return q, False
        state = State(*over.hyper(q))
        for number in range(1 if self.options.update == "em" else steps):
            found = over.statistics(q)
            state = self.update(found, state)
            precision, noise = state.precision.clamp_min(least), over.noise_of(state.sigma)
            moved = (precision / found.precision).log().abs().item()
            moved = max(moved, abs(math.log(noise / q.noise)))
            q = over.at(q.curved, precision.item(), noise, q.mean)
            if moved < _AT_REST or (number > _STEPS[False] and self._is_rounded(found)):
                return q, True
        return q, False

    def _is_rounded(self, found: Statistics) -> bool:
        """Return whether the noise of some targets may be lost to rounding, which σ then follows."""
        sums = None if found.sigma is None else self._sums(found, found.sigma)
        return sums is not None and bool((sums[0] < _NEAR_ROUNDING * sums[1]).any())

    def _is_accurate(self, found: Statistics | None) -> bool:
        """Return whether samples and mean are accurate enough for λ to have converged."""
        of_samples, of_mean = _ERRORS[self.moves]
        return found is not None and found.sample_error < of_samples and found.mode_error < of_mean

    def _waits(self, state: State, extent: Extent, q: Q) -> bool:
        """Return whether steps of a moving H wait for a larger span: λ hardly moved, or the bound has fallen."""
        known = state.statistics is not None and state.before is not None
        if not (self.moves and known) or extent.complete or self._is_accurate(state.statistics):
            return False
        fell = q.bound < state.peak - max(_LOSS, q.bound_error)  # λ would follow it to 0
        return fell or (state.moved < _NEAR and extent.size < _GROWTH * state.size)

    def _at_end(self, over: OverSpan, q: Q, state: State, least: float) -> Ascent:
        """Return q after steps over a complete span, until λ and H are at rest or the time is over."""
        after, way, rests, near = q, state.way, False, False
        for _ in range(_BLOCKS[least < math.inf]):
            old, bound = after.precision, after.bound
            after = self._steps(over, after, way, least)
            way = course(after, old, way, complete=True)
            left = abs(math.log(way.ahead / after.precision)) if least < math.inf else 0.0
            allowed, gained = _LEFT, _AT_REST
            if not over.is_exact:
                K = len(after.effective_dims)
                allowed, gained = self.allowed(after.effective_dims.mean(), K).item(), _NOISE
            gained += _NEAR_ROUNDING * torch.finfo(self.problem.dtype).eps * abs(bound)
            found = left < allowed or way.worth < _LEFT * _AT_REST  # λ grows if γ is 0
            still = found and abs(after.bound - bound) < gained
            rests, near = near and still, still
            if rests or self.is_late():
                break
        gain, cut = after.bound - q.bound, not rests and self.is_late()
        return Ascent(after, over.hyper(q), gain, at_rest=rests, cut=cut)

    def _steps(self, over: OverSpan, q: Q, way: Way | None, least: float, early: bool = False) -> Q:
        """Return q after a few steps of λ and a moving H, of which the first takes λ ahead.

        Steps of log λ grow in one direction and shrink when it changes. If they may end ``early``, they do
        after one within the Monte Carlo error of λ.
        """
        if way is not None and least < math.inf:
            q = over.at(q.curved, max(way.ahead, least), 1.0, q.mean)
        stride, last, share = 1.0, 0.0, OF_H if way is None else way.share
        for _ in range(EACH):
            new = stepped(over, q, least, stride)
            H = q.curved.H.lerp(over.expected.curvature(q.outputs, q.deviations), share)
            step = math.log(new / q.precision)
            stride = _LONGER * stride if step * last >= 0 else max(stride / 2, 0.5)
            last = step
            q = over.at(over.curved(H), new, 1.0, q.mean)
            if early and abs(step) < self.allowed(q.effective_dims.mean(), len(q.effective_dims)):
                break
            if self.is_late():
                return q
        return over.at(q.curved, q.precision, 1.0, q.mean, exact=True)

    def warn(self, state: State) -> None:
        """Warn if λ has not converged or is at a bound, or if the data do not determine σ."""
        found, (low, high), precision = state.statistics, PRECISION_BOUNDS, state.precision
        if not self.options.em_steps or found is None or state.before is None:
            return
        if not state.converged:
            changed = state.change(": the last one changed it by a factor of %s")
            more = "Increase em_steps, or pass" if state.number >= self.options.em_steps else "Pass"
            words = f"The prior precision has not converged after {state.number} EM steps{changed}."
            report("log", f"{words} {more} a prior_precision closer to the result.")
        if not ((low < precision) & (precision < high)).all():
            report(
                "warn",
                f"The prior precision reached a bound of [{low:g}, {high:g}]: the evidence prefers a "
                "model without these parameters, or without a prior. Check that the network is "
                "trained, and on these targets.",
            )
        if found.sigma is None:
            return
        _, _, dims, count = self._sums(found, found.sigma)
        if self._is_rounded(found):
            least = torch.finfo(self.problem.dtype).eps ** 0.5
            report(
                "warn",
                "The linear model reproduces the targets so closely that their observation noise may "
                f"be lost to rounding: sigma_noise is held above {least:.0e} of their root mean "
                "square. Check that the targets are not constant or without noise"
                f"{or_float64(self.problem.dtype)}.",
            )
        if self.options.update == "mackay" and (count - dims < LEAST_FREEDOM * count).any():
            report(
                "warn",
                "The effective dimension reaches the number of targets, so the data cannot separate "
                "noise from signal. sigma_noise is limited as if the effective dimension were 95 % of "
                "the number of targets. Use more data, or fewer `parameters` in the posterior.",
            )


def _left(before: Tensor, changes: Tensor) -> Tensor:
    """Return a bound on the remaining distances of geometric convergences, from two changes of each."""
    ratio = changes / before.clamp_min(1e-300)
    return torch.where(ratio < 1, changes * (ratio / (1 - ratio)).clamp_min(1), changes)
