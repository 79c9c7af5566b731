"""EM on a last linear layer: λ, H, the mean and the samples move together, and every step is a few products.

A step solves for samples and mean at the present λ and H, roughly. Then the whole posterior q is scaled: where features separate the
classes, MacKay's update alone closes a tenth of its distance in a step, since the bound hardly changes if the outputs grow while λ falls.
If q is scaled by a and λ by 1/a², the divergence from the prior stays, and dE[loss] / d log a = γ - λ ‖m‖² at a = 1: the best a is at
the root of that function, which takes draws of the outputs and no product. It is 1 where MacKay's update rests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference.expectations import Expectations
from torch_lla_em.inference.head import Head, Preconditioner
from torch_lla_em.inference.mackay import function_space_Mackay_update
from torch_lla_em.inference.prior import StochasticPrior
from torch_lla_em.inference.state import OfHead, State
from torch_lla_em.problem import Hessian, Loss, Problem, functions, towards
from torch_lla_em.runtime import PRECISION_BOUNDS
from torch_lla_em.solvers import DivergenceError, require_finite

START = 0.1
"""λ at the start, relative to the mean variance of the prior's outputs at λ = 1."""

STEPS, DAMPING = 3, 0.45
"""Steps between two yields; and the share of the change of H in a step: with 1, H of 1,000 x 50 x 7 alternates."""

CAP, GATE = 0.35, 0.1
"""Largest change of log a in a step; and change of log γ below which H belongs to q, so that q is scaled. Without the gate λ of
5,000 x 512 x 10 ran away to 0."""

LOOSE = 0.15, 0.06
"""Errors of samples and mean at which a step ends."""

STEEP = 0.8
"""Largest ratio of two steps of log a that an extrapolation takes for real. Without one, λ of 70 classes took 60 steps."""

REST = 0.05
"""Distance that is left for log λ, and change of log γ, at which λ rests."""

MOST = 200
"""Largest number of products of a search."""

EXAMPLES = 4_000
"""Examples from which the best scale of q is found."""


class Descent(NamedTuple):
    """What conjugate gradients have found."""

    change: Tensor
    pushed: Tensor
    residual: Tensor
    """The change of the tables, (k, C, D), its outputs, (N, ..., C, k), and what remains of the right-hand side."""

    start: Tensor
    steps: list[Tensor]
    """⟨b, M⁻¹ b⟩, (k,), for the preconditioner M; of every step its lengths and the ratios of ⟨r, M⁻¹ r⟩, (2, k)."""

    of_M: float
    """log det(M / λ)."""

    def log_dets(self) -> Tensor:
        """Return log det(I + G / λ) by every right-hand side b ~ N(0, G + λ) of a search from 0, (k,).

        With A = M^-½ (G + λ) M^-½ it is log det(M / λ) + tr log A, and tr log A the expectation of M^-½ b under the function
        log(t) / t of A, which Lanczos' tridiagonal matrix gives: its entries follow from the steps.
        """
        if not self.steps:
            return torch.full_like(self.start, self.of_M, dtype=torch.float64)
        lengths, ratios = torch.stack(self.steps).double().movedim(0, -1)
        diagonal = 1 / lengths
        diagonal[:, 1:] += ratios[:, :-1] / lengths[:, :-1]
        beside = ratios[:, :-1].clamp_min(0).sqrt() / lengths[:, :-1]
        T = diagonal.diag_embed() + beside.diag_embed(1) + beside.diag_embed(-1)
        values, vectors = torch.linalg.eigh(T)
        shares = vectors[:, 0].square()
        values = values.clamp_min(1e-12)
        of_A: Tensor = self.start.double() * (shares * values.log() / values).sum(1)
        return self.of_M + of_A


class Options(NamedTuple):
    """What a fit of a last layer may use."""

    em_steps: int
    tolerance: float
    is_late: Callable[[], bool]
    memory: float
    draws: tuple[int, bool]
    """Number of draws of the outputs of an example, and whether H is stored as draws."""


class HeadFit:
    """A fit of a last layer whose H is an expectation under the posterior."""

    def __init__(self, problem: Problem, noise: StochasticPrior, span: Head, options: Options):
        rows = span.rows
        self.problem, self.noise, self.span, self._options = problem, noise, span, options
        self.memory = options.memory
        self.share, self.f = rows.share, problem.less_shift(rows.f)
        self._loss = problem.loss(rows.targets, rows.weights)
        self.expected = Expectations(self.f, self.share, noise.seed, *options.draws)
        self._epsilon = noise.epsilon(self.share.numbers, self.f)
        self._precondition: Preconditioner | None = None

    # the state

    def first(self, precision: float | None) -> State:
        """Return the state at this λ, or one chosen by the prior's outputs, with the network's weights as mean and no samples."""
        span, f, loss = self.span, self.f, self._loss
        at_zero, at_f = (self.expected.H(loss, at, None) for at in (torch.zeros_like(f), f))
        if precision is None:
            variance = span.push(span.xi).square().reshape(-1, len(span.xi))
            precision = START * self.share.mean(variance).mean().item()
        mean = span.tables(self.noise.prior.whitened(self.problem.w_MAP)[None])[0]
        like = mean.new_zeros(len(span.xi), dtype=torch.float64)
        q = State(like.new_tensor(precision), None, mean)
        determined = 0.1 * min(self.problem.size, self.share.total * f.shape[1:].numel())
        q = q._replace(samples=0 * span.xi, gamma=like + determined)
        return self.refreshed(q, towards(at_zero, at_f, 0.5))

    def refreshed(self, q: State, H: Hessian) -> State:
        """Return the state with H, and all that follows from mean and samples."""
        outputs, pushed = self.span.push(q.mean[None])[..., 0], self.span.push(q.samples)
        return self._expecting(q, H, outputs, pushed)

    def _expecting(self, q: State, H: Hessian, outputs: Tensor, pushed: Tensor) -> State:
        """Return the state with H, and the expected loss under these outputs of its mean and samples."""
        deviations = self.expected.deviations(pushed)
        loss, slope = self.expected.loss_and_slope(self._loss, outputs, deviations)
        require_finite(abs(loss))
        norm, carried = (
            q.mean.double().square().sum(),
            OfHead(H, outputs, pushed, deviations, slope),
        )
        return q._replace(loss=loss, head=carried, norm=norm)

    def loss_at(self, sigma: Tensor | None) -> Loss:
        """Return the loss."""
        return self._loss

    def saved(self, q: State) -> tuple[State, Tensor]:
        """Return what determines a state, and H for the examples of all ranks."""
        group, device = self.share.group, q.mean.device
        order = group.gather(self.share.numbers.to(device)).argsort()
        return q._replace(head=None), group.gather(q.head.H.values)[order]

    def restored(self, q: State, values: Tensor) -> State:
        """Return the state of which ``saved`` has returned a part."""
        here = self.share.numbers
        every = self.share.group.gather(here.to(q.mean.device)).sort()[0]
        H = self.expected.H(self._loss, torch.zeros_like(self.f), None)
        own = torch.searchsorted(every, here.to(every))
        return self.refreshed(q, H._replace(values=values[own]))

    # λ and H

    def run(self, known: State | None, precision: float | None) -> Iterator[State]:
        """Yield the state after every few steps, until it says why the fit ended; ``known`` is one of an earlier run."""
        q = (
            self._finite(precision)
            if known is None
            else known._replace(fate=known.fate._replace(why=""))
        )
        options, most = self._options, self._options.em_steps or 20
        while not q.fate.why:
            if q.fate.converged or q.fate.number >= most:
                q = self._accurate(q)
                reached = max(q.errors) <= options.tolerance
                why = "accurate" if reached else "rounding leaves no smaller residual"
            else:
                q, why = self._block(q), ""
                if options.is_late():
                    q, why = self.measured(q), "budget"
            q = q._replace(fate=q.fate._replace(why=why))
            yield q

    def _finite(self, precision: float | None) -> State:
        """Return the first state, at larger λ if expectations are not finite at this one."""
        while True:
            try:
                return self._solved(self.first(precision))
            except DivergenceError:
                known = self.first(precision).precision if precision is None else precision
                precision = 10 * float(known)
                if precision > PRECISION_BOUNDS[1] or not self._options.em_steps:
                    raise

    def _block(self, q: State) -> State:
        """Return the state after a few steps, fewer if λ has come to rest."""
        learns, self._precondition = self._options.em_steps > 0, None
        for number in range(STEPS):
            gamma, is_first = q.gamma.mean().item(), q.fate.number == 0 and number < 2
            q, way = self._solved(q), 0.0
            moved = abs(math.log(max(q.gamma.mean().item(), 1e-30) / gamma))
            allowed = max(REST, (len(q.samples) * max(1.0, gamma)) ** -0.5)
            settled = not is_first and moved < (GATE if learns else allowed)
            if learns and is_first:  # H does not belong to q
                new = function_space_Mackay_update(q.gamma.mean(), q.norm, q.precision)
                new = new.clamp(q.precision / math.e, q.precision * math.e)
                way = 0.5 * math.log(q.precision / new)
                q = q._replace(precision=self.share.group.from_first(new))
            elif learns and settled:
                way = self._best_scale(q)
                last, count = q.fate.last or (0.0, 0.0)
                ratio = min(STEEP, max(0.0, way / last)) if last and count else 0.0
                q = self._scaled(q, max(-CAP, min(CAP, way / (1 - ratio))))
            if settled:
                last, count = q.fate.last or (0.0, 0.0)
                ratio = min(0.9, max(0.0, way / last)) if last else 0.0
                rests = (count > 0 or not learns) and 2 * abs(way) / (1 - ratio) < allowed
                q = q._replace(fate=q.fate._replace(last=(way, count + 1), converged=rests))
            H = self.expected.H(self._loss, q.head.outputs, q.head.deviations)
            q = q._replace(head=q.head._replace(H=towards(q.head.H, H, DAMPING)))
            if q.fate.converged:
                break
        fate = q.fate._replace(number=q.fate.number + 1)
        q = q._replace(fate=fate, bounds=torch.full_like(q.gamma, math.nan))
        return self.refreshed(q, q.head.H)

    def _best_scale(self, q: State) -> float:
        """Return log a of the best scale of q, at most ``CAP``."""
        step = max(1, len(self.f) // EXAMPLES)
        loss, f = self._loss.part(slice(None, None, step)), q.head.outputs[::step]
        deviations, gamma = q.head.deviations[:, ::step], max(q.gamma.mean().item(), 1e-12)

        def slope(way: float) -> float:
            """Return dE[loss] / d log a."""
            a, total = math.exp(way), f.new_zeros((), dtype=torch.float64)
            for rows, outputs in functions(a * f, a * deviations):
                each = loss.part(rows).gradient(outputs) * outputs
                total += each.sum(dtype=torch.float64) / len(outputs)
            return float(step * self.share.group.sum(total))

        here, value = 0.0, gamma - float(q.precision) * q.norm.item()
        apart = slope(0.0) - value  # the Monte Carlo error of the draws
        way = math.copysign(0.1, -value)
        for _ in range(6):
            new = slope(way) - apart
            is_bound = abs(way) >= CAP and new * value > 0
            if is_bound or abs(new) < 0.02 * gamma or not math.isfinite(new) or new == value:
                break
            there = way - new * (way - here) / (new - value)
            here, value, way = way, new, max(-CAP, min(CAP, there))
        low, high = (0.5 * math.log(q.precision / bound) for bound in reversed(PRECISION_BOUNDS))
        return max(low, min(high, way))

    def _scaled(self, q: State, way: float) -> State:
        """Return the state with q times exp(way), and the λ that belongs to it."""
        a = math.exp(way)
        q = q._replace(mean=a * q.mean, samples=a * q.samples, precision=q.precision / a**2)
        return self._expecting(q, q.head.H, a * q.head.outputs, a * q.head.pushed)

    # samples and mean

    def _solved(self, q: State, errors: tuple[float, float] = LOOSE) -> State:
        """Return the state with samples and mean at its λ and H, up to these errors."""
        carried, precision, K = q.head, float(q.precision), len(q.samples)
        noise, first = self._residuals(q)
        gamma, size = max(1.0, q.gamma.mean().item()), max(1.0, precision * q.norm.item())

        def enough(squares: Tensor) -> bool:
            of_samples, of_mean = (squares[:K].mean() / gamma).sqrt(), (squares[K] / size).sqrt()
            return bool(of_samples <= errors[0] and of_mean <= errors[1])

        found = self._descend(q, first, enough)
        pushed = carried.pushed + found.pushed[..., :K]
        q = q._replace(samples=q.samples + found.change[:K], head=carried._replace(pushed=pushed))
        q = self._with_gamma(q, noise, found.residual[:K])
        return self._with_mean(q, found.change[K], found.pushed[..., K], first[K])

    def _residuals(self, q: State) -> tuple[Tensor, Tensor]:
        """Return S ε, (N, ..., C, K), and the residuals √λ ξ + η - (G + λ) z and -Jᵀ slope - λ m, (K + 1, C, D)."""
        carried, precision = q.head, float(q.precision)
        noise = carried.H.root(self._epsilon).movedim(0, -1)
        curved = carried.H.product(carried.pushed.flatten(0, -2)).view_as(noise)
        residuals = self.span.pull(torch.cat([noise - curved, -carried.slope[..., None]], -1))
        residuals[:-1].add_(self.span.xi, alpha=precision**0.5).sub_(q.samples, alpha=precision)
        residuals[-1].sub_(q.mean, alpha=precision)
        return noise, residuals

    def _descend(self, q: State, b: Tensor, enough: Callable[[Tensor], bool]) -> Descent:
        """Return x with (G + λ) x ≈ b, (k, C, D), as soon as it is ``enough`` for ‖residual‖² / λ of all columns, (k,)."""
        precision, span, agreed = float(q.precision), self.span, self.share.group.from_first
        if self._precondition is None:
            is_softmax = self.problem.likelihood.is_softmax
            self._precondition = span.preconditioner(q.head.H, is_softmax, self.memory / 8)
        inverse, dets = self._precondition.at(precision)
        x, r, z = torch.zeros_like(b), b.clone(), inverse(b)
        pushed = b.new_zeros(*self.f.shape, len(b))
        steps: list[Tensor] = []
        p, rho = z, (r * z).sum((1, 2))
        start = rho
        while len(steps) < MOST and not enough(agreed(r.square().sum((1, 2)) / precision)):
            Jp = span.push(p)
            image = span.pull(q.head.H.product(Jp.flatten(0, -2)).view_as(Jp)).add_(
                p, alpha=precision
            )
            length = rho / (p * image).sum((1, 2)).clamp_min(torch.finfo(p.dtype).tiny)
            x.addcmul_(length[:, None, None], p)
            r.addcmul_(length[:, None, None], image, value=-1)
            pushed.addcmul_(length, Jp)
            z = inverse(r)
            new = (r * z).sum((1, 2))
            ratio = new / rho.clamp_min(torch.finfo(p.dtype).tiny)
            steps.append(torch.stack([length, ratio]))
            p, rho = torch.addcmul(z, ratio[:, None, None], p), new
            require_finite(float(rho.sum()))
        return Descent(x, pushed, r, start, steps, dets)

    def _with_gamma(self, q: State, noise: Tensor, residual: Tensor) -> State:
        """Return the state with γ of every sample, from S ε and the residual of its system."""
        precision, group = float(q.precision), self.share.group
        z, xi = q.samples.double().flatten(1), self.span.xi.double().flatten(1)
        of_eta = (noise * q.head.pushed).flatten(0, -2).sum(0, dtype=torch.float64)
        apart = residual.flatten(1) * z + precision * z.square() - precision**0.5 * xi * z
        energy = (group.sum(of_eta) - apart.sum(1)).clamp_min(0)
        gamma = 0.5 * (energy + (xi - precision**0.5 * z).square().sum(1))
        targets = self.share.total * self.f.shape[1:].numel()
        gamma = gamma * (targets / gamma.mean()).clamp_max(1)  # which samples may exceed
        squares = residual.double().square().flatten(1).sum(1) / precision
        gamma, squares = group.from_first(torch.stack([gamma, squares]))
        return q._replace(gamma=gamma, certificate=squares.sqrt())

    def _with_mean(self, q: State, step: Tensor, pushed: Tensor, residual: Tensor) -> State:
        """Return the state with its mean moved along a step: not beyond the minimum of its objective, by the slope along it."""
        precision, group, old = float(q.precision), self.share.group, q
        fall, length = float((residual * step).sum()), 1.0
        while True:
            mean, outputs = old.mean + length * step, old.head.outputs + length * pushed
            q = self._expecting(q._replace(mean=mean), q.head.H, outputs, q.head.pushed)
            slope = group.sum((q.head.slope * pushed).sum()) + precision * (mean * step).sum()
            rise = float(group.from_first(slope))
            if rise <= 0.5 * abs(fall) or length < 1e-3:
                return q
            length *= max(0.05, abs(fall) / (abs(fall) + rise))

    def _accurate(self, q: State) -> State:
        """Return the posterior at λ and H within the tolerance, with the bound on its log evidence."""
        span, precision, most = self.span, float(q.precision), 0.9 * self._options.tolerance
        self._precondition = None
        gamma, group = max(1.0, q.gamma.mean().item()), self.share.group
        noise = q.head.H.root(self._epsilon).movedim(0, -1)
        b = span.pull(noise).add_(span.xi, alpha=precision**0.5)
        found = self._descend(q, b, partial(_below, most**2 * gamma))
        q = q._replace(samples=found.change)
        q = self._expecting(q, q.head.H, q.head.outputs, span.push(found.change))
        q = self._with_gamma(q, noise, found.residual)
        for _ in range(20):
            residual = -span.pull(q.head.slope[..., None]).add_(q.mean, alpha=precision)
            size = max(1.0, precision * q.norm.item())
            squares = group.from_first(residual.double().square().sum() / precision)
            if squares <= most**2 * size:
                break
            # its own Hessian, which H follows
            H = self.expected.H(self._loss, q.head.outputs, q.head.deviations)
            newton = q._replace(head=q.head._replace(H=H))
            limit = 0.01 * max(squares.item(), most**2 * size)
            step = self._descend(newton, residual, partial(_below, limit))
            q = self._with_mean(q, step.change[0], step.pushed[..., 0], residual[0])
        q, dets = self.measured(q), found.log_dets()
        for _ in range(3):  # residuals of the recursion are rounded
            if max(q.errors) <= self._options.tolerance:
                break
            q = self.measured(self._solved(q, (most, most)))
        # E[loss] and the log det vary with the samples as γ does
        kl = precision * q.norm + dets.mean() * q.gamma / q.gamma.mean() - q.gamma.mean()
        return q._replace(bounds=group.from_first(-q.loss - 0.5 * kl))

    def measured(self, q: State) -> State:
        """Return the state with the errors of samples and mean by their true residuals."""
        q = self.refreshed(q, q.head.H)
        precision, (_, residuals) = float(q.precision), self._residuals(q)
        squares = residuals.double().square().flatten(1).sum(1) / precision
        squares = self.share.group.from_first(squares)
        gamma, size = q.gamma.mean().clamp_min(1), max(1.0, precision * q.norm.item())
        errors = (squares[:-1].mean() / gamma).sqrt().item(), (squares[-1] / size).sqrt().item()
        return q._replace(errors=errors, certificate=squares[:-1].sqrt())


def _below(most: float, squares: Tensor) -> bool:
    """Return whether the mean is below a bound."""
    return bool(squares.mean() <= most)
