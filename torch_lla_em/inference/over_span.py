"""The problem restricted to a span of directions, where EM takes dense algebra and no pass over the data.

In coordinates of an orthonormal basis V of scaled parameters, G is an (m, m) matrix with eigenvalues θ, J V is stored, and
the prior is N(0, 1/λ). ``schedule.py`` has the derivation and decides about λ, σ and H.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from torch_lla_em.inference.curved import Curved
from torch_lla_em.inference.em import State
from torch_lla_em.inference.expectations import Expectations, takes_draws
from torch_lla_em.inference.linear_mode import LinearMode
from torch_lla_em.inference.mackay import count_and_rounding
from torch_lla_em.inference.posterior_samples import PosteriorSamples
from torch_lla_em.inference.prior import Prior
from torch_lla_em.inference.span import Span
from torch_lla_em.inference.stochastic_prior import StochasticPrior
from torch_lla_em.problem import Hessian, Problem, root_of
from torch_lla_em.solvers import DivergenceError, dots

ROUGHLY = 0.02
"""Error of the mean while H moves, by G. With .04 λ of single networks moves by 20 %, with .01 it takes 13 % longer."""


class OverSpan:
    """EM's linear model over a span that grows."""

    def __init__(
        self, problem: Problem, noise: StochasticPrior, span: Span, moves: bool, tolerance: float
    ):
        rows = span.rows
        self.span, self.share, self._problem = span, rows.share, problem
        self.f = problem.less_shift(rows.f)
        """The network's outputs for this rank's examples, (N, ..., C)."""

        loss = problem.loss(rows.targets, rows.weights)
        if problem.sigma is not None:
            loss = replace(loss, likelihood=loss.likelihood.without_constant())
        nbytes = self.f.numel() * self.f.element_size() * self.share.total / max(1, len(self.f))
        many = takes_draws(loss.likelihood, self.f.shape[-1], nbytes, span.memory)
        self.expected = Expectations(loss, self.f, self.share, noise.seed, moves, many)
        self.epsilon = noise.epsilon(self.share.numbers, self.f)
        """ε of this rank's examples, (K, N, ..., C)."""

        self._is_quadratic = problem.likelihood.is_quadratic
        """Whether the mean solves a linear system; then products are exact, as σ may be small."""

        self._dtype = torch.float64 if self._is_quadratic else self.f.dtype
        self._tolerance = max(0.2 * tolerance, 10 * torch.finfo(problem.dtype).eps)

    @property
    def is_exact(self) -> bool:
        """Whether γ, the log det and expectations follow from the covariance itself and not from samples."""
        return self.span.is_complete and self.expected.number > 0 and not self.expected.many

    # EM's linear model

    def at(self, q: State) -> tuple[Curved, StochasticPrior, Curved, Curved]:
        """Return the problem at H and σ of a state, its noise, its solver, and its search for the mode."""
        self._problem.sweep.say()
        curved: Curved = q.curved
        prior = Prior(self._problem.layout, torch.ones_like(self.span.xi[0]))
        noise = StochasticPrior(self.span.xi, curved.eta @ curved.vectors.T, prior)
        moves = self.expected.number > 0 and not q.converged and not self.is_exact
        return curved, noise, curved, curved._replace(roughly=ROUGHLY if moves else 0.0)

    def expecting(self, curved: Curved, samples: PosteriorSamples, precision: Tensor) -> Curved:
        """Return the problem with the loss in expectation over the posterior, or as it is."""
        if not self.expected.number:
            return curved
        if self.is_exact:
            pushed = self._roots(curved.vectors * (curved.theta + precision).rsqrt())
        else:
            pushed = self.span.push(samples.w)
        return curved._replace(deviations=self.expected.deviations(pushed))

    def found(
        self, q: State, samples: PosteriorSamples, mode: LinearMode, problem: Curved
    ) -> State:
        """Return the state with the posterior, and the bound on its log evidence."""
        precision, gamma, exact = float(q.precision), samples.effective_dims, self.is_exact
        targets = self.share.total * self.f.shape[1:].numel()
        gamma = gamma * (targets / gamma.mean()).clamp_max(1)  # which samples may exceed
        dets = problem.log_dets(precision)
        if exact:  # the same for every sample
            theta = problem.theta
            gamma = (theta / (theta + precision)).sum().expand_as(gamma)
            dets = (theta / precision).log1p().sum().expand_as(dets)
        loss, norm = mode.loss, mode.w.square().sum()
        if q.sigma is not None:
            count = self._problem.data.facts.num_targets / q.sigma.numel()
            constant = (q.sigma * math.sqrt(2 * math.pi)).log().sum().item()
            loss += count * constant
        kl = precision * norm + dets
        if problem.deviations is not None:
            kl = kl - gamma.mean()
        if problem.deviations is not None and not exact:
            # E[loss] varies with the samples too: the spread of the half from ξ accounts for both
            of_xi = (problem.xi.square() * (problem.theta / precision).log1p()).sum(1)
            kl = kl + (dets.mean() - dets) + (of_xi - of_xi.mean())
        gamma, bounds = self.share.agreed(gamma.clone()), self.share.agreed(-loss - 0.5 * kl)
        q = q._replace(samples=samples.w, gamma=gamma, bounds=bounds)
        outputs = problem.outputs(mode.w)
        curved = problem._replace(near=(mode.w, outputs))
        return q._replace(mean=mode.w, norm=norm, loss=loss, outputs=outputs, curved=curved)

    def noise_sums(self, q: State) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return Σ(y - J m)², the least of it that is no rounding, γ and the number of targets, the shape of σ."""
        sigma, expected = q.sigma, q.curved.expected
        if sigma.dim():
            y, pushed = expected.loss_of.targets.to(q.outputs), self.span.push(q.samples)
            each = y, y - q.outputs, pushed.double().square().mean(-1).sqrt()
            squares = torch.stack([part.double().square().flatten(0, -2).sum(0) for part in each])
            targets, residual, dims = self.share.sum(squares).to(sigma)
            dims = dims / sigma**2
        else:  # the loss is ½ Σ (y - J m)² / σ²
            found = [expected.loss_and_slope(h, None)[0] for h in (0 * q.outputs, q.outputs)]
            targets, residual = 2 * sigma**2 * sigma.new_tensor(found)
            dims = q.gamma.mean().to(sigma)
        count, least = count_and_rounding(self._problem, sigma, targets)
        return residual, least, dims, count

    # to another H, σ or span

    def first(self, precision: float) -> State:
        """Return the state at this λ and the first H, without a posterior."""
        like, H = self.span.xi, self.expected.first(self.f.to(self._dtype))
        q = State(like.new_tensor(precision), self._problem.sigma, H, torch.zeros_like(like[0]))
        q = self.curved(q)
        slope = self.expected.loss_and_slope(torch.zeros_like(self.f), None)[1]
        if not q.G.any() and self.share.sum(slope.count_nonzero()):
            raise DivergenceError(
                "The likelihood's H is 0 for every example: the outputs are so large that the "
                "loss is rounded to 0. Check that the inputs are scaled as in training."
            )
        return q

    def moved(self, q: State, precision: Tensor, sigma: Tensor | None, H: Hessian | None) -> State:
        """Return the state at another λ, σ and H (None: the same)."""
        q, old = q._replace(precision=self.share.agreed(precision)), q.sigma
        if H is not None:
            return self.curved(q._replace(H=H))
        if sigma is None or torch.equal(sigma, old):
            return q
        sigma = self.share.agreed(sigma)
        expected = self._at_noise(sigma)
        q = q._replace(sigma=sigma, H=expected.first(self.f.to(self._dtype)))
        if sigma.dim():
            return self.curved(q)
        ratio = (sigma / old).item()  # of one σ, G is scaled
        old = q.curved
        own = {
            "theta": old.theta / ratio**2,
            "eta": old.eta / ratio,
            "S_noise": old.S_noise / ratio,
        }
        curved = old._replace(expected=expected, **own)
        return q._replace(G=q.G / ratio**2, eta=q.eta / ratio, curved=curved)

    def widened(self, q: State) -> State:
        """Return the state over the extended span: G grows."""
        more = 0, self.span.size - len(q.mean)
        mean, samples = (torch.nn.functional.pad(part, more) for part in (q.mean, q.samples))
        return self.curved(q._replace(mean=mean, samples=samples), old=q.curved)

    def restarted(self, q: State) -> State:
        """Return the state over the span of its mean, its samples, ξ and η only."""
        turn = self.span.restart(torch.cat([q.mean[None], q.samples, q.eta]))
        q = q._replace(mean=q.mean @ turn, samples=q.samples @ turn, restarts=q.restarts + 1)
        return self.curved(q)

    def curved(self, q: State, old: Curved | None = None) -> State:
        """Return the state with G and η over the span; those of old directions are kept."""
        span, known = self.span, 0 if old is None else len(q.G)
        S_noise = q.H.root(self.epsilon) if old is None else old.S_noise
        m, eta = span.size, span.pull(S_noise.flatten(1).T.to(self._dtype), known).double()
        G = torch.zeros(m, m - known, dtype=torch.float64, device=eta.device)
        for rows, part in span.parts():
            part = part.to(self._dtype)
            HJ = q.H.product(part[:, known:], rows)
            # what is on and below the diagonal, if the columns are all
            for i in range(0, m - known, 64):
                lower = 0 if known else i
                G[lower:, i : i + 64] += part[:, lower:].T @ HJ[:, i : i + 64]
        G = self.share.sum(G)
        if known:
            G = torch.cat([torch.cat([q.G, G[:known].T]), G], dim=1)
            eta = torch.cat([q.eta, eta], dim=1)
        else:
            G = G.tril() + G.tril(-1).T
        outputs = span.push(q.mean[None], self._is_quadratic)[..., 0]
        return self._with(q._replace(G=G, eta=eta, outputs=outputs), S_noise)

    def _with(self, q: State, S_noise: Tensor) -> State:
        """Return the state with the eigenvectors of G."""
        theta, vectors = map(self.share.agreed, torch.linalg.eigh(0.5 * (q.G + q.G.T)))
        curved = Curved(
            self._problem,
            self._at_noise(q.sigma),
            self.span,
            theta.clamp_min(0),
            vectors,
            self.span.xi @ vectors,
            q.eta @ vectors,
            S_noise,
            (q.mean, q.outputs),
            self._tolerance,
        )
        return q._replace(curved=curved)

    def _at_noise(self, sigma: Tensor | None) -> Expectations:
        """Return the expectations at another σ."""
        loss = self.expected.loss_of
        if sigma is None:
            return self.expected
        return self.expected.at(replace(loss, likelihood=loss.likelihood.with_noise(sigma)))

    # checkpoints

    def saved(self, q: State) -> State:
        """Return what determines a state, with J m and, if it has moved, H for the examples of all ranks."""
        group, device = self.share.group, q.outputs.device
        order = group.gather(self.share.numbers.to(device)).argsort()
        H = group.gather(q.H.values)[order] if self.expected.number else None
        return q._replace(H=H, outputs=group.gather(q.outputs)[order], curved=None)

    def restored(self, q: State) -> State:
        """Return the state of which ``saved`` has returned a part."""
        H, here = self._at_noise(q.sigma).first(self.f.to(self._dtype)), self.share.numbers
        every = self.share.group.gather(here.to(q.outputs.device)).sort()[0]
        own = torch.searchsorted(every, here.to(every))
        if q.H is not None:
            H = H._replace(values=q.H[own])
        return self._with(q._replace(H=H, outputs=q.outputs[own]), H.root(self.epsilon))

    # from the whole problem

    def measured(self, q: State) -> State:
        """Return the state with the residuals of samples and mean, (K + 1, P), and with their errors.

        ‖residual‖ / √λ bounds the error in posterior standard deviations.
        """
        deviations, precision = q.curved.deviations, float(q.precision)
        if q.sigma is not None:  # of which a restored state knows nothing that was only scaled
            q = self._with(q, q.H.root(self.epsilon))
        curved = q.curved._replace(deviations=deviations)
        residuals = self._residuals(q, curved.expected.loss_and_slope(q.outputs, deviations)[1])
        inside = self.span.coordinates(residuals)
        squares = ((inside @ curved.vectors).square() / (curved.theta + precision)).sum(1)
        if not self.span.is_complete:  # what is inside is rounding
            outside = dots(residuals, residuals) - inside.square().sum(1)
            squares += outside.clamp_min(0) / precision
        squares = self.share.agreed(squares)
        of_samples, of_mean = squares[:-1], squares[-1]
        gamma, norm = q.gamma.mean().clamp_min(1), max(1.0, precision * q.norm.item())
        errors = (of_samples.mean() / gamma).sqrt().item(), (of_mean / norm).sqrt().item()
        own = {"certificate": of_samples.sqrt(), "residuals": residuals, "curved": curved}
        return q._replace(errors=errors, **own)

    def _residuals(self, q: State, slope: Tensor) -> Tensor:
        """Return √λ ξ + η - (G + λ) w of samples, (K, P), and -Jᵀ slope - λ m of the mean."""
        product = q.H.product(self.span.push(q.samples, self._is_quadratic).flatten(0, -2))
        u = self.f.new_empty(len(product), len(q.samples) + 1)
        torch.sub(q.curved.S_noise.flatten(1).T, product, out=u[:, :-1])
        u[:, -1] = -slope.flatten()
        residuals = self.span.pull_weights(u)
        columns = torch.cat([q.samples, q.mean[None]])
        self.span.add_scaled(residuals, -float(q.precision) * columns)
        residuals[:-1].add_(self.span.noise, alpha=math.sqrt(q.precision))
        return residuals

    def prior_variance(self) -> float:
        """Return the mean variance of the prior's outputs at λ = 1, relative to their size.

        The size of logits and log rates is 1. That of continuous targets depends on their units: it
        is the variance of the network's outputs, plus the inverse of H, which is σ².
        """
        pushed = self.span.push(self.span.xi)
        C, mean = self.f.shape[-1], self.share.mean
        square = mean(pushed.double().square().movedim(-1, 0).reshape(-1, C))
        if not self._problem.likelihood.real_valued:
            return square.mean().item()
        H = self.expected.first(self.f.to(self._dtype))
        product = H.product(pushed.flatten(0, -2)).view(pushed.shape)
        curvature = mean((pushed * product).double().movedim(-1, 0).reshape(-1, C))
        f = self.f.double().reshape(-1, C)
        size = mean((f - mean(f)).square()) + square / curvature
        return (square / size).nan_to_num(0.0).mean().item()

    def bound_error(self, q: State) -> float:
        """Return the standard error of the bound over samples, 0 for one sample."""
        spread: Tensor = q.bounds.std().nan_to_num(0.0)
        return spread.item() / math.sqrt(len(q.bounds))

    def _roots(self, root: Tensor) -> Tensor:
        """Return C columns for every example, (N, ..., C, C), whose mean square is its covariance J A⁻¹ Jᵀ, from a root of A⁻¹."""
        root, found = root.to(self.f), [self.f.new_zeros(0, *self.f.shape[1:], self.f.shape[-1])]
        for _, part in self.span.parts():
            pushed = (part @ root).view(-1, *self.f.shape[1:], root.shape[1])
            found.append(root_of(pushed @ pushed.mT))
        roots: Tensor = torch.cat(found) * self.f.shape[-1] ** 0.5
        return roots
