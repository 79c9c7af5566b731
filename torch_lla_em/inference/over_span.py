"""EM on the problem restricted to a span of m directions, where it is dense algebra: G is (m, m),
and the prior is N(0, 1/λ)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_lla_em.inference.expectations import Expectations
from torch_lla_em.inference.prior import Prior, StochasticPrior
from torch_lla_em.inference.samples import PosteriorSamples
from torch_lla_em.inference.span import Span
from torch_lla_em.inference.span_problem import SpanProblem, log_dets
from torch_lla_em.inference.state import OfSpan, State, Stored
from torch_lla_em.problem import Hessian, Loss, Problem, form_of_H, root_of, towards
from torch_lla_em.solvers import BFGS, DivergenceError, Eigen, Minimum, dots

START = 0.1
"""λ at the start, relative to the mean variance of the prior's outputs at λ = 1."""

ROUGHLY = 0.02
"""Error of the mean, in the norm of G + λ, while H moves. With .04 the λ of single networks changes
by 20 %; .01 takes 13 % longer."""


class OverSpan:
    """The engine of EM over a span that grows."""

    def __init__(
        self, problem: Problem, probes: StochasticPrior, span: Span, moves: bool, tolerance: float
    ):
        """If H ``moves``, it is an expectation under the posterior; otherwise it is evaluated at
        the network's outputs."""
        rows = span.rows
        self.span, self.share, self.problem = span, rows.share, problem
        self.f = f = problem.less_shift(rows.f)
        """The network's outputs for this rank's examples, (N, ..., C)."""

        self._loss = problem.loss(rows.targets, rows.weights)
        sites = self.share.total * f.shape[1:-1].numel()
        nbytes, C = sites * f.shape[-1] * f.element_size(), f.shape[-1]
        many, draws, _ = form_of_H(problem.likelihood, C, sites, nbytes, span.memory)
        self.expected = Expectations(f, self.share, probes.seed, draws if moves else 0, many)
        self.epsilon = probes.epsilon(self.share.numbers, f)
        """ε of this rank's examples, (K, N, ..., C)."""

        self._is_quadratic = problem.likelihood.is_quadratic
        """Whether the mean solves a linear system; products are then in float64, since σ may be
        small."""

        self._dtype = torch.float64 if self._is_quadratic else f.dtype
        self._tolerance = max(0.2 * tolerance, 10 * torch.finfo(problem.dtype).eps)

    @property
    def is_exact(self) -> bool:
        """Whether γ, the log determinant and expectations are computed from the covariance itself
        and not from samples."""
        return self.span.is_complete and self.expected.number > 0 and not self.expected.many

    # EM's linear model

    def at(self, q: State) -> tuple[SpanProblem, StochasticPrior, Eigen, BFGS]:
        """Return the problem at H and σ of a state, its random probes, its solver, and its search
        for the mode."""
        problem = q.in_span.problem
        prior = Prior(self.problem.layout, torch.ones_like(self.span.xi[0]))
        probes = StochasticPrior(self.span.xi, q.in_span.eta, prior)
        moves = self.expected.number > 0 and not q.fate.converged and not self.is_exact
        values, vectors = problem.theta * q.precision.rsqrt().square(), problem.vectors
        search = BFGS(
            values,
            vectors,
            tolerance=0.0 if self._is_quadratic else self._tolerance,
            roughly=ROUGHLY if moves else 0.0,
            is_exact=self._is_quadratic,
            group=self.share.group,
        )
        return problem, probes, Eigen(values, vectors), search

    def expecting(
        self, problem: SpanProblem, samples: PosteriorSamples, precision: Tensor
    ) -> SpanProblem:
        """Return the problem, whose loss is an expectation over the posterior if H moves."""
        if not self.expected.number:
            return problem
        if not self.is_exact:
            pushed = self.span.push(samples.w)
        else:  # C columns for every example, whose mean square is its covariance J A⁻¹ Jᵀ
            root = (problem.vectors * (problem.theta + precision).rsqrt()).to(self.f)
            _, *shape, C = self.f.shape
            roots = [self.f.new_zeros(0, *shape, C, C)]
            for _, part in self.span.parts():
                columns = (part @ root).view(-1, *shape, C, root.shape[1])
                roots.append(root_of(columns @ columns.mT))
            pushed = torch.cat(roots) * C**0.5
        return replace(problem, deviations=self.expected.deviations(pushed))

    def found(
        self, q: State, samples: PosteriorSamples, mode: Minimum, problem: SpanProblem
    ) -> State:
        """Return the state with the posterior, and the bound on its log evidence."""
        precision, gamma, theta = float(q.precision), samples.effective_dims, problem.theta
        targets = self.share.total * self.f.shape[1:].numel()
        gamma = gamma * (targets / gamma.mean()).clamp_max(1)  # γ of a sample may exceed it
        xi, eta = (noise @ problem.vectors for noise in (self.span.xi, q.in_span.eta))
        dets = log_dets(theta, xi, eta, precision)
        if self.is_exact:  # the same for every sample
            gamma = (theta / (theta + precision)).sum().expand_as(gamma)
            dets = (theta / precision).log1p().sum().expand_as(dets)
        loss, norm, agreed = mode.loss, mode.w.square().sum(), self.share.group.from_first
        kl = precision * norm + dets
        if self.expected.number:
            kl = kl - gamma.mean()
            if not self.is_exact:
                # E[loss] varies with the samples too: the spread of the half from ξ accounts for
                # both
                of_xi = (xi.square() * (theta / precision).log1p()).sum(1)
                kl = kl + (dets.mean() - dets) + (of_xi - of_xi.mean())
        q = q._replace(gamma=agreed(gamma.clone()), bounds=agreed(-loss - 0.5 * kl))
        outputs = problem.outputs(mode.w)
        problem = replace(problem, near=(mode.w, outputs))
        q = q._replace(span=q.in_span._replace(outputs=outputs, problem=problem))
        return q._replace(samples=samples.w, mean=mode.w, norm=norm, loss=loss)

    def outputs(self, q: State) -> Iterator[tuple[Tensor, Tensor, Any]]:
        """Yield y, E[y | J m] and, if there is a σ per output, J w_k, (K, N, C), for this rank's
        examples."""
        several = q.sigma is not None and q.sigma.dim() > 0
        pushed = self.span.push(q.samples).movedim(-1, 0) if several else ()
        yield (
            q.in_span.problem.loss.targets,
            self.problem.likelihood.mean(q.in_span.outputs),
            pushed,
        )

    # to another H, σ or span

    def first(self, precision: float | None = None) -> State:
        """Return the state at this λ (None: chosen from the variance of the prior's outputs) and
        the first H, without a posterior."""
        span, loss = self.span, self.loss_at(self.problem.sigma)
        H, like = self.first_H(loss), span.xi
        if precision is None:
            precision = START * self._variance_of_prior()
        q = State(like.new_tensor(precision), self.problem.sigma, torch.zeros_like(like[0]))
        q = self.curved(q, H)
        slope = self.expected.loss_and_slope(loss, torch.zeros_like(self.f), None)[1]
        if not q.in_span.G.any() and self.share.group.sum(slope.count_nonzero()):
            raise DivergenceError(
                "The likelihood's H is 0 for every example: the outputs are so large that the "
                "loss is rounded to 0. Check that the inputs are scaled as in training."
            )
        return q

    def first_H(self, loss: Loss) -> Hessian:
        """Return H at the network's outputs; if H moves, return the average of this and of H at
        0."""
        f = self.f.to(self._dtype)
        H = self.expected.H(loss, f, None)
        if not self.expected.number:
            return H
        return towards(self.expected.H(loss, torch.zeros_like(f), None), H, 0.5)

    def _variance_of_prior(self) -> float:
        """Return the mean variance of the prior's outputs at λ = 1, relative to that of continuous
        targets."""
        pushed, variance = self.span.push(self.span.xi).movedim(-1, 0).double(), None
        if self.problem.likelihood.real_valued and self.problem.moments is not None:
            pushed, variance = self.problem.likelihood.mean(pushed), self.problem.moments[1]
        square = self.share.mean(pushed.square().reshape(-1, pushed.shape[-1]))
        return float((square if variance is None else square / variance.to(square)).mean())

    def moved(self, q: State, precision: Tensor, sigma: Tensor | None, H: Hessian | None) -> State:
        """Return the state at another λ, σ and H (None: the same)."""
        q, old = q._replace(precision=self.share.group.from_first(precision)), q.sigma
        if H is not None:
            return self.curved(q, H)
        if sigma is None or old is None or torch.equal(sigma, old):
            return q
        sigma = self.share.group.from_first(sigma)
        loss = self.loss_at(sigma)
        q, H = q._replace(sigma=sigma), self.first_H(loss)
        if sigma.dim():
            return self.curved(q, H)
        ratio = (sigma / old).item()  # with a single σ, G is only scaled
        last = q.in_span
        problem = replace(last.problem, loss=loss, theta=last.problem.theta / ratio**2)
        scaled = last._replace(
            G=last.G / ratio**2, eta=last.eta / ratio, S_noise=last.S_noise / ratio
        )
        return q._replace(span=scaled._replace(H=H, problem=problem))

    def restarted(self, q: State) -> State:
        """Return the state over the smaller span of its mean, its samples, ξ and η."""
        turn = self.span.restart(torch.cat([q.mean[None], q.samples, q.in_span.eta]))
        fate = q.fate._replace(restarts=q.fate.restarts + 1)
        q = q._replace(mean=q.mean @ turn, samples=q.samples @ turn, fate=fate)
        return self.curved(q, q.in_span.H)

    def curved(self, q: State, H: Hessian) -> State:
        """Return the state with G and η of this H over the span."""
        S_noise = H.root(self.epsilon)
        eta = self.span.pull(S_noise.flatten(1).T.to(self._dtype)).double()
        return self._with(q, H, self.span.ggn(H, 0, self._dtype), eta, S_noise)

    def widened(self, q: State) -> State:
        """Return the state over a span that has grown, with G and η extended to the new
        directions."""
        start, m, last = len(q.mean), self.span.size, q.in_span
        mean, samples = (pad(part, (0, m - start)) for part in (q.mean, q.samples))
        of_new = last.S_noise.flatten(1).T.to(self._dtype)
        eta = torch.cat([last.eta, self.span.pull(of_new, start).double()], dim=1)
        G = self.span.ggn(last.H, start, self._dtype)
        G = torch.cat([torch.cat([last.G, G[:start].T]), G], dim=1)
        return self._with(q._replace(mean=mean, samples=samples), last.H, G, eta, last.S_noise)

    def _with(self, q: State, H: Hessian, G: Tensor, eta: Tensor, S_noise: Tensor) -> State:
        """Return the state with this H, G, η and S ε, the outputs of its mean, and the eigenvectors
        of G."""
        outputs = self.span.push(q.mean[None], self._is_quadratic)[..., 0]
        problem = self._dense(q, G, outputs)
        return q._replace(span=OfSpan(H, G, eta, outputs, problem, S_noise))

    def _dense(self, q: State, G: Tensor, outputs: Tensor) -> SpanProblem:
        """Return the problem over the span with this G, and J m."""
        theta, vectors = map(self.share.group.from_first, torch.linalg.eigh(0.5 * (G + G.T)))
        return SpanProblem(
            self.span,
            self.expected,
            self.loss_at(q.sigma),
            theta=theta.clamp_min(0),
            vectors=vectors,
            near=(q.mean, outputs),
        )

    def loss_at(self, sigma: Tensor | None) -> Loss:
        """Return the loss at another σ."""
        loss = self._loss
        return (
            loss if sigma is None else replace(loss, likelihood=loss.likelihood.with_noise(sigma))
        )

    # checkpoints

    def saved(self, q: State) -> tuple[State, Stored]:
        """Return a state and the part of its span that a checkpoint stores. J m, and H if it has
        moved, are gathered from all ranks."""
        last = q.in_span
        H = self.share.gathered(last.H.values) if self.expected.number else None
        outputs = self.share.gathered(last.outputs)
        return q._replace(span=None), Stored(H, last.G, last.eta, outputs, last.residuals)

    def restored(self, q: State, stored: Stored) -> State:
        """Rebuild a state from the parts that ``saved`` has returned."""
        H = self.first_H(self.loss_at(q.sigma))
        if stored.H is not None:
            H = H._replace(values=self.share.rows_here(stored.H))
        outputs = self.share.rows_here(stored.outputs)
        samples = PosteriorSamples(q.samples, q.certificate, q.gamma, q.errors[0])
        problem = self.expecting(self._dense(q, stored.G, outputs), samples, q.precision)
        S_noise = H.root(self.epsilon)
        of_span = OfSpan(H, stored.G, stored.eta, outputs, problem, S_noise, stored.residuals)
        return q._replace(span=of_span)

    # from the whole problem

    def measured(self, q: State) -> State:
        """Return the state with its residuals √λ ξ + η - (G + λ) w and -Jᵀ slope - λ m, (K + 1, P),
        and the errors that they bound."""
        problem, S_noise = q.in_span.problem, q.in_span.S_noise
        precision, span = float(q.precision), self.span
        deviations, H = problem.deviations, q.in_span.H
        if q.sigma is not None:  # a restored state was rescaled to σ without a pass
            S_noise = H.root(self.epsilon)
            problem = replace(self._dense(q, q.in_span.G, q.in_span.outputs), deviations=deviations)
        product = H.product(span.push(q.samples, self._is_quadratic).flatten(0, -2))
        u = self.f.new_empty(len(product), len(q.samples) + 1)
        torch.sub(S_noise.flatten(1).T, product, out=u[:, :-1])
        u[:, -1] = -self.expected.loss_and_slope(problem.loss, q.in_span.outputs, deviations)[
            1
        ].flatten()
        residuals = span.pull_weights(u)
        columns = torch.cat([q.samples, q.mean[None]])
        span.scaled(-precision * columns, residuals)
        residuals[:-1].add_(span.probes, alpha=math.sqrt(precision))
        inside = span.coordinates(residuals)
        squares = ((inside @ problem.vectors).square() / (problem.theta + precision)).sum(1)
        if not span.is_complete:  # the part within the span is only rounding
            outside = dots(residuals, residuals) - inside.square().sum(1)
            squares += outside.clamp_min(0) / precision
        squares = self.share.group.from_first(squares)
        of_samples, of_mean = squares[:-1], squares[-1]
        gamma, norm = q.gamma.mean().clamp_min(1), max(1.0, precision * q.norm.item())
        errors = (of_samples.mean() / gamma).sqrt().item(), (of_mean / norm).sqrt().item()
        of_span = q.in_span._replace(residuals=residuals, problem=problem, S_noise=S_noise)
        return q._replace(errors=errors, certificate=of_samples.sqrt(), span=of_span)
