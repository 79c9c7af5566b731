"""EM on a last linear layer by its stored features. In every step λ, the mean, the samples and, if
it moves, H change together, by a few products.

Where features separate the classes, MacKay's update alone closes less than a tenth of the distance
in a step, since the bound hardly changes if the outputs grow while λ falls. So the whole posterior
q is scaled by a, and λ by 1/a². Its divergence from the prior stays, and at a = 1 the derivative
dE[loss] / d log a is γ - λ ‖m‖². The best a is at the root of that function, which is computed from
draws of the outputs without a product; it is 1 where MacKay's update is at rest. A secant lengthens
these steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference.expectations import Expectations
from torch_lla_em.inference.head import BLOCKS, Head, HeadProblem, Preconditioner
from torch_lla_em.inference.linear_problem import Whitened
from torch_lla_em.inference.mackay import accelerated, function_space_Mackay_update
from torch_lla_em.inference.over_span import START
from torch_lla_em.inference.prior import StochasticPrior
from torch_lla_em.inference.samples import PosteriorSamples
from torch_lla_em.inference.state import NONE_YET, OfHead, State, StoredHead
from torch_lla_em.problem import Hessian, Loss, Problem, functions, towards
from torch_lla_em.runtime import PRECISION_BOUNDS
from torch_lla_em.solvers import BlockCG, Minimum, Newton, log_dets

STEPS, DAMPING = 3, 0.75
"""The number of steps after which the preconditioner is computed again, and which ``em_steps``
counts as one; and the share of the way to E[H] that H moves in a step. With .6, fits take 50 % more
steps; with 1, the H of a problem of 1,000 x 50 x 7 alternates."""

LOOSE, NEAR, FEW = (0.15, 0.06), (0.1, 0.015), 2
"""The errors of samples and mean that are allowed while λ moves, and where it hardly moves; and the
number of samples that estimate the log evidence on the way, whose variance is small because of the
preconditioner."""

CAP, GATE, LONGER = 0.35, 0.15, 3
"""The largest change of log a in a step; the part of γ by which γ at E[H] may differ from that at H
for q to be scaled; and the factor by which a secant may lengthen such a step where H is at rest.
With .3 for the second, or a secant elsewhere, the λ of separable labels circles around its place of
rest."""

REST = 0.06
"""λ and H are at rest if log λ would move by less than this, and if γ at E[H] differs from that at
H by less than this part. With .3 for the second, λ stopped at .6 of its value while H still
moved."""

SETTLED = 8
"""The number of steps after which steps near the place of rest become shorter: with few draws for
each of 800 examples, H and λ circled around it until the last step."""


class Settings(NamedTuple):
    """The limits of the fit of a last layer, and how it stores H."""

    tolerance: float
    memory: float
    draws: int
    many: bool
    """The number of draws of an example's outputs, 0 if H is that at the network's outputs; and
    whether H is stored as draws."""


class OverHead:
    """The engine of EM on the features of a last layer, with H in expectation under the posterior,
    or at the network's outputs."""

    def __init__(self, problem: Problem, noise: StochasticPrior, head: Head, settings: Settings):
        self.problem, self.noise, self.span, self.settings = problem, noise, head, settings
        self.share, self.f = head.rows.share, problem.less_shift(head.rows.f)
        self._step = max(1, len(self.f) // BLOCKS)
        self.loss = problem.loss(head.rows.targets, head.rows.weights)
        draws, many = settings.draws, settings.many
        self.expected = Expectations(self.f, self.share, noise.seed, draws, many)
        self._epsilon = self.f.new_empty(len(noise.xi), *self.f.shape)
        for rows in head.parts(len(noise.xi)):
            self._epsilon[:, rows] = noise.epsilon(self.share.numbers[rows], self.f[rows])

    # EM's linear model

    def at(self, q: State) -> tuple[HeadProblem, StochasticPrior, BlockCG, Newton]:
        """Return the problem at the H of a state, its random probes, and the solvers, which are
        accurate if EM has ended."""
        H, inverse = q.in_head.H, self._inverse(q)
        eta = self.span.pull(
            (rows, H.root(self._epsilon[:, rows], rows).movedim(0, -1))
            for rows in self.span.parts(len(self._epsilon))
        )
        tolerance = self.settings.tolerance
        of_samples, of_mean = (
            (max(near, tolerance) for near in NEAR) if _is_near(q.fate.moved) else LOOSE
        )
        if q.fate.why:
            of_samples = of_mean = tolerance
        solver = BlockCG(of_samples, preconditioner=inverse, verified=bool(q.fate.why))
        of_newton = (lambda _: inverse) if self.expected.number else partial(self._inverse, q)
        newton = Newton(of_mean, preconditioner=of_newton)
        probes = self.noise._replace(eta=eta)
        problem = HeadProblem(self.span, self.expected, self.loss, H, probes, inverse)
        return problem, probes, solver, newton

    def _inverse(self, q: State, x: Tensor | None = None) -> Preconditioner:
        """Return the preconditioner at the H of a state, or at the outputs of whitened parameters
        x. If H stays at the outputs of an overconfident network, it is nearly 0 and does not help
        to find the mean."""
        prior, blocks = self.noise.prior, q.in_head.blocks
        if x is not None:
            outputs = self.span.push((prior.deviation(q.precision) * x)[None])[..., 0]
            H = self.expected.H(self.loss, outputs, None)
            blocks = self.span.blocks(H, prior.scale, self.settings.memory / 8)
        of_alike = prior.scale if self.problem.likelihood.is_softmax else None
        return Preconditioner(self.span, blocks, of_alike, q.precision)

    def expecting(
        self, problem: HeadProblem, samples: PosteriorSamples, precision: Tensor
    ) -> HeadProblem:
        """Return the problem with its loss in expectation over the posterior, or as it is without
        draws."""
        if not self.expected.number:
            return problem
        return replace(problem, deviations=self._deviations(samples.w))

    def _deviations(self, samples: Tensor) -> Tensor:
        """Return draws of the outputs minus J m, (S, N, ..., C)."""
        parts = self.span.parts(len(samples))
        drawn = [self.expected.deviations(self.span.push(samples, rows), rows) for rows in parts]
        return torch.cat(drawn, 1)

    def found(
        self, q: State, samples: PosteriorSamples, mode: Minimum, problem: HeadProblem
    ) -> State:
        """Return the state with the posterior and the bound on its log evidence, which few samples
        estimate while λ moves."""
        gamma, targets = samples.effective_dims, self.share.total * self.f.shape[1:].numel()
        gamma = gamma * (targets / gamma.mean()).clamp_max(1)  # γ of a sample may exceed it
        prior, inverse, some = self.noise.prior, problem.inverse, None if q.fate.why else FEW
        product = Whitened(problem, prior.deviation(q.precision))
        sides = problem.probes.right_hand_side(q.precision)[:some]
        dets = log_dets(product, sides, inverse, 0.003 if q.fate.why else 0.05)
        norm, total = prior.squared_norm(mode.w), dets.mean() + inverse.log_det()
        # E[loss] and the log det vary with the samples as γ does
        kl = q.precision * norm + total * gamma / gamma.mean()
        kl = kl - gamma.mean() if self.expected.number else kl
        q = q._replace(samples=samples.w, mean=mode.w, loss=mode.loss, gamma=gamma, norm=norm)
        q = q._replace(certificate=samples.certificate, errors=(samples.error, mode.error))
        outputs = self.span.push(mode.w[None])[..., 0]
        deviations = NONE_YET if problem.deviations is None else problem.deviations
        of_head = q.in_head._replace(outputs=outputs, deviations=deviations)
        return q._replace(bounds=-mode.loss - 0.5 * kl, head=of_head)

    def outputs(self, q: State) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield nothing: there is no σ."""
        yield from ()

    # other states

    def first(self, precision: float | None) -> State:
        """Return the state at this λ, or at one chosen by the prior's outputs. Its mean is the
        network's weights, and it has no samples."""
        prior, xi = self.noise.prior, self.noise.xi
        H = self.expected.H(self.loss, self.f, None)
        if self.expected.number:
            H = towards(self.expected.H(self.loss, torch.zeros_like(self.f), None), H, 0.5)
        if precision is None:
            variance = torch.cat(
                [
                    self.span.push(prior.scale * xi, rows).square().mean(-1)
                    for rows in self.span.parts(len(xi))
                ]
            )
            precision = START * self.share.mean(variance.flatten()).item()
        mean = self.problem.w_MAP * (prior.scale > 0)
        q = State(xi.new_tensor(precision, dtype=torch.float64), None, mean)
        return self.curved(q, H)

    def curved(self, q: State, H: Hessian) -> State:
        """Return the state at another H, with the blocks of G there for the preconditioner."""
        blocks = self.span.blocks(H, self.noise.prior.scale, self.settings.memory / 8)
        return q._replace(head=OfHead(H, blocks))

    def loss_at(self, sigma: Tensor | None) -> Loss:
        """Return the loss."""
        return self.loss

    def saved(self, q: State) -> tuple[State, StoredHead]:
        """Return a state without its part for a last layer, and the values that determine that
        part."""
        stored = StoredHead(self.share.gathered(q.in_head.H.values), q.in_head.blocks)
        return q._replace(head=None), stored

    def restored(self, q: State, stored: StoredHead) -> State:
        """Rebuild a state from the parts that ``saved`` has returned."""
        H = self.expected.H(self.loss, torch.zeros_like(self.f), None)
        H = H._replace(values=self.share.rows_here(stored.H))
        deviations, outputs = NONE_YET, self.span.push(q.mean[None])[..., 0]
        if self.expected.number:
            deviations = self._deviations(q.samples)
        return q._replace(head=OfHead(H, stored.blocks, outputs, deviations))

    # λ

    def ahead(self, q: State, H: Hessian) -> float:
        """Return by how much γ is larger at another H, estimated by the same samples and by some of
        the examples."""
        apart = q.samples.new_zeros((), dtype=torch.float64)
        for rows in self.span.parts(len(q.samples), self._step):
            pushed = self.span.push(q.samples, rows).flatten(0, -2)
            change = H.product(pushed, rows) - q.in_head.H.product(pushed, rows)
            apart += (change * pushed).sum(dtype=torch.float64)
        return float(self.share.group.sum(self._step * apart)) / len(q.samples)

    def best_scale(self, q: State, gamma: float) -> float:
        """Return log a of the best scale of q, at most ``CAP``, given its γ at E[H]."""
        group, outputs = self.share.group, q.in_head.outputs
        slope = self.expected.loss_and_slope(self.loss, outputs, q.in_head.deviations)[1]
        value = gamma + float(group.sum((slope * outputs).sum(dtype=torch.float64)))
        step = self._step
        loss, f = self.loss.part(slice(None, None, step)), outputs[::step]
        deviations, scale = q.in_head.deviations[:, ::step], max(gamma, 1e-12)

        def of_draws(way: float) -> float:
            """Return dE[loss] / d log a, estimated from draws for some of the examples."""
            a, total = math.exp(way), f.new_zeros((), dtype=torch.float64)
            for rows, drawn in functions(a * f, a * deviations):
                slopes = loss.part(rows).gradient(drawn) * drawn
                total += slopes.sum(dtype=torch.float64) / len(drawn)
            return float(group.sum(step * total))

        here, apart = 0.0, of_draws(0.0) - value  # the error of these estimates
        way = math.copysign(0.1, -value)
        for _ in range(6):
            new = of_draws(way) - apart
            is_bound = abs(way) >= CAP and new * value > 0
            if is_bound or abs(new) < 0.003 * scale or not math.isfinite(new) or new == value:
                break
            there = way - new * (way - here) / (new - value)
            here, value, way = way, new, max(-CAP, min(CAP, there))
        low, high = (0.5 * math.log(q.precision / bound) for bound in reversed(PRECISION_BOUNDS))
        return max(low, min(high, way))


def updated(over: OverHead, q: State, em_steps: int) -> State:
    """Return a posterior with the next λ and H, or with the reason why EM has ended. If
    ``em_steps`` is 0, only H moves."""
    number, learns, gamma = q.fate.number + 1, em_steps > 0, q.gamma.mean().item()
    if not over.expected.number:
        return _at_outputs(q, em_steps)
    H, way = over.expected.H(over.loss, q.in_head.outputs, q.in_head.deviations), 0.0
    last = None
    more = over.ahead(q, H)
    apart = abs(more) / max(1.0, gamma)
    share = 1.0
    if learns and apart < GATE:
        way = over.best_scale(q, gamma + more)
        here, longer = math.log(q.precision), LONGER if apart < REST else 1.0
        last = here, here - 2 * way
        way = -0.5 * accelerated(*last, q.fate.last, 2 * min(CAP, longer * abs(way)))
        share = min(1.0, SETTLED / number) if _is_near(2 * abs(way)) else 1.0
        a, of_head = math.exp(share * way), q.in_head
        of_head = of_head._replace(outputs=a * of_head.outputs, deviations=a * of_head.deviations)
        q = q._replace(mean=a * q.mean, samples=a * q.samples, precision=q.precision / a**2)
        H = over.expected.H(over.loss, of_head.outputs, of_head.deviations)
        q = q._replace(head=of_head)
    elif learns:
        new = function_space_Mackay_update(q.gamma.mean(), q.norm, q.precision)
        q = q._replace(precision=new.clamp(q.precision / math.e, q.precision * math.e))
    allowed = _allowed(q, rises=way < 0)
    rests = 2 * abs(way) < allowed and (allowed > 2 * CAP or _is_near(q.fate.moved))
    converged = apart < REST and rests
    H = towards(q.in_head.H, H, share * DAMPING)
    q = q._replace(head=q.in_head._replace(H=H)) if number % STEPS else over.curved(q, H)
    most = STEPS * em_steps if learns else STEPS * 20
    why = "converged" if converged else "all steps" if number >= most else ""
    moved = math.inf if learns and apart >= GATE else 2 * abs(way)
    fate = q.fate._replace(number=number, last=last, moved=moved, converged=converged, why=why)
    return q._replace(fate=fate)


def _at_outputs(q: State, em_steps: int) -> State:
    """Return a posterior with the next λ, by a secant through MacKay's updates, where H stays at
    the network's outputs."""
    number, way, last = q.fate.number + 1, 0.0, None
    if em_steps:
        new = function_space_Mackay_update(q.gamma.mean(), q.norm, q.precision)
        last = math.log(q.precision), math.log(new)
        way = accelerated(*last, q.fate.last)
    converged = abs(way) < _allowed(q, rises=way > 0) and (_is_near(q.fate.moved) or not em_steps)
    why = "converged" if converged else "all steps" if number >= STEPS * em_steps else ""
    fate = q.fate._replace(number=number, last=last, moved=abs(way), converged=converged, why=why)
    return q._replace(precision=q.precision * math.exp(way), fate=fate)


def _is_near(moved: Tensor | float) -> bool:
    """Whether log λ hardly moves in a step. The mean must then be more accurate, since MacKay's
    update multiplies its error."""
    return float(moved) < 0.3


def _allowed(q: State, rises: bool) -> float:
    """Return the largest distance of log λ from its fixed point that counts as convergence.

    Where the data determine nothing, λ grows without bound, and its value does not matter.
    """
    count = max(1e-12 if rises else 1.0, q.gamma.mean().item())
    return max(REST, float((len(q.samples) * count) ** -0.5))
