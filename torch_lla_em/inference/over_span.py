"""The problem restricted to a span of directions, where EM takes dense algebra and no pass over the data.

In coordinates of an orthonormal basis V of scaled parameters, G is an (m, m) matrix with eigenvalues θ, J V is stored, and
the prior is N(0, 1/λ). ``schedule.py`` has the derivation and decides about λ, σ and H.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from torch_lla_em.inference.curved import Curved, Descent
from torch_lla_em.inference.em import Equations, State, e_step
from torch_lla_em.inference.expectations import Expectations, takes_draws
from torch_lla_em.inference.linear_mode import LinearMode
from torch_lla_em.inference.mackay import count_and_rounding
from torch_lla_em.inference.posterior_samples import PosteriorSamples, optimise_samples
from torch_lla_em.inference.prior import Prior
from torch_lla_em.inference.quadrature import Spectrum
from torch_lla_em.inference.span import Span
from torch_lla_em.inference.stochastic_prior import StochasticPrior
from torch_lla_em.problem import Hessian, Problem, root_of
from torch_lla_em.runtime import TensorList
from torch_lla_em.solvers import DivergenceError, Searches, dots


class OverSpan:
    """EM's linear model over a span that grows."""

    def __init__(
        self, problem: Problem, noise: StochasticPrior, span: Span, curvature: str, tolerance: float
    ):
        self.span, self.share, self._problem = span, span.rows.share, problem
        self.f, rows = problem.less_shift(span.rows.f), span.rows
        """The network's outputs for this rank's examples, (N, ..., C)."""

        loss = problem.loss(rows.targets, rows.weights)
        if problem.sigma is not None:
            loss = replace(loss, likelihood=loss.likelihood.without_constant())
        memory = (
            self.f.numel() * self.f.element_size() * self.share.total / max(1, len(self.f)),
            span.memory,
        )
        many = takes_draws(loss.likelihood, self.f.shape[-1], *memory)
        self.expected = Expectations(loss, self.f, self.share, noise.seed, curvature, many)
        self.epsilon = noise.epsilon(self.share.numbers, self.f)
        """ε of this rank's examples, (K, N, ..., C)."""

        self._is_quadratic = problem.likelihood.is_quadratic
        """Whether the mean solves a linear system; then products are exact, as σ may be small."""

        self._dtype = torch.float64 if self._is_quadratic else self.f.dtype
        self._tolerance = max(0.2 * tolerance, 10 * torch.finfo(problem.dtype).eps)
        self._searches = Searches(10, self.share.agreed)

    @property
    def prior(self) -> Prior:
        """The prior of coordinates."""
        return Prior(self._problem.layout, torch.ones_like(self.span.xi[0]))

    @property
    def is_exact(self) -> bool:
        """Whether γ, the log det and expectations follow from the covariance itself and not from samples."""
        return self.span.is_complete and self.expected.number > 0 and not self.expected.many

    # EM's linear model

    def at(self, q: State) -> Equations:
        """Return the equations at λ, σ and H of a state."""
        self._problem.sweep.say()
        curved: Curved = q.curved
        spectrum = curved.spectrum
        noise = StochasticPrior(self.span.xi, spectrum.eta @ spectrum.vectors.T, self.prior)
        roughly = 0.0 if q.converged or self.is_exact or not self.expected.number else 0.02
        search = Descent(spectrum, self._searches, self.share.agreed, self._tolerance, roughly)
        return Equations(curved, noise, q.precision, spectrum, search)

    def expecting(self, equations: Equations, samples: PosteriorSamples) -> Curved:
        """Return the problem with the loss in expectation over the posterior, or as it is."""
        curved: Curved = equations.problem
        if not self.expected.number:
            return curved
        if self.is_exact:
            theta, vectors, _, _ = curved.spectrum
            pushed = self._roots(vectors * (theta + equations.precision).rsqrt())
        else:
            pushed = self.span.outputs.push(samples.w)
        return curved._replace(deviations=self.expected.deviations(pushed))

    def found(
        self, q: State, samples: PosteriorSamples, mode: LinearMode, problem: Curved
    ) -> State:
        """Return the state with the posterior, and the bound on its log evidence."""
        precision, spectrum, gamma = float(q.precision), problem.spectrum, samples.effective_dims
        targets = self.share.total * self.f.shape[1:].numel()
        gamma = gamma * (targets / gamma.mean()).clamp_max(1)  # which samples may exceed
        log_dets, exact = spectrum.log_dets(precision), self.is_exact
        if exact:
            gamma, log_dets = spectrum.exact(precision)
        loss, norm = mode.loss, mode.w.square().sum()
        if q.sigma is not None:
            count = self._problem.data.facts.num_targets / q.sigma.numel()
            loss += count * (q.sigma * math.sqrt(2 * math.pi)).log().sum().item()
        kl = precision * norm + log_dets
        if problem.deviations is not None:
            kl = kl - gamma.mean()
        if problem.deviations is not None and not exact:
            # E[loss] varies with the samples too: the spread of the half from ξ accounts for both
            of_xi = (spectrum.xi.square() * (spectrum.eigenvalues / precision).log1p()).sum(1)
            kl = kl + (log_dets.mean() - log_dets) + (of_xi - of_xi.mean())
        outputs = problem.outputs(mode.w)
        return q._replace(
            samples=samples.w,
            gamma=self.share.agreed(gamma.clone()),
            mean=mode.w,
            norm=norm,
            loss=loss,
            bounds=self.share.agreed(-loss - 0.5 * kl),
            outputs=outputs,
            curved=problem._replace(near=(mode.w, outputs)),
        )

    def noise_sums(self, q: State) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return Σ(y - J m)², the least of it that is no rounding, γ and the number of targets, the shape of σ."""
        sigma, expected = q.sigma, q.curved.expected
        if sigma.dim():
            y, pushed = expected.loss_of.targets.to(q.outputs), self.span.outputs.push(q.samples)
            each = y, y - q.outputs, pushed.double().square().mean(-1).sqrt()
            squares = torch.stack([part.double().square().flatten(0, -2).sum(0) for part in each])
            targets, residual, dims = self.share.sum(squares).to(sigma)
            dims = dims / sigma**2
        else:  # the loss is ½ Σ (y - J m)² / σ²
            losses = [expected.loss(h, None) for h in (torch.zeros_like(q.outputs), q.outputs)]
            targets, residual = 2 * sigma**2 * sigma.new_tensor(losses)
            dims = q.gamma.mean().to(sigma)
        count, least = count_and_rounding(self._problem, sigma, targets)
        return residual, least, dims, count

    # to another H, σ or span

    def first(self, precision: float) -> State:
        """Return the state at this λ and the first H, without a posterior."""
        like = self.span.xi
        sigma, H = self._problem.sigma, self.expected.first(self.f.to(self._dtype))
        q = State(like.new_tensor(precision), sigma, H, torch.zeros_like(like[0]))
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
        curved = q.curved.rescaled(ratio)._replace(expected=expected)
        return q._replace(G=q.G / ratio**2, eta=q.eta / ratio, curved=curved)

    def widened(self, q: State) -> State:
        """Return the state over the extended span: G grows."""
        pad = torch.nn.functional.pad
        more = self.span.size - len(q.mean)
        q = q._replace(mean=pad(q.mean, (0, more)), samples=pad(q.samples, (0, more)))
        return self.curved(q, old=q.curved)

    def restarted(self, q: State) -> State:
        """Return the state over the span of its mean, its samples, ξ and η only."""
        turn = self.span.restart(torch.cat([q.mean[None], q.samples, q.eta]))
        q = q._replace(mean=q.mean @ turn, samples=q.samples @ turn, restarts=q.restarts + 1)
        return self.curved(q)

    def curved(self, q: State, old: Curved | None = None) -> State:
        """Return the state with G and η over the span; those of old directions are kept."""
        outputs, known = self.span.outputs, 0 if old is None else len(q.G)
        S_noise = q.H.root(self.epsilon) if old is None else old.S_noise
        m, eta = self.span.size, outputs.pull(S_noise.flatten(1).T.to(self._dtype), known).double()
        G = torch.zeros(m, m - known, dtype=torch.float64, device=eta.device)
        for rows, part in outputs.parts():
            part = part.to(self._dtype)
            HJ = q.H.product(part[:, known:], rows)
            for i in range(
                0, m - known, 64
            ):  # what is on and below the diagonal, if the columns are all
                lower = 0 if known else i
                G[lower:, i : i + 64] += part[:, lower:].T @ HJ[:, i : i + 64]
        G = self.share.sum(G)
        if known:
            G = torch.cat([torch.cat([q.G, G[:known].T]), G], dim=1)
            eta = torch.cat([q.eta, eta], dim=1)
        else:
            G = G.tril() + G.tril(-1).T
        q = q._replace(G=G, eta=eta, outputs=outputs.push(q.mean[None], self._is_quadratic)[..., 0])
        return self._with(q, S_noise)

    def _with(self, q: State, S_noise: Tensor) -> State:
        """Return the state with the eigenvectors of G."""
        values, vectors = map(self.share.agreed, torch.linalg.eigh(0.5 * (q.G + q.G.T)))
        spectrum = Spectrum(values.clamp_min(0), vectors, self.span.xi @ vectors, q.eta @ vectors)
        expected = self._at_noise(q.sigma)
        own = (
            self._problem.likelihood,
            self._problem.linear_model,
            expected,
            self.span,
            spectrum,
            S_noise,
        )
        return q._replace(curved=Curved(*own, near=(q.mean, q.outputs)))

    def _at_noise(self, sigma: Tensor | None) -> Expectations:
        """Return the expectations at another σ."""
        loss = self.expected.loss_of
        if sigma is None:
            return self.expected
        return self.expected.at(replace(loss, likelihood=loss.likelihood.with_noise(sigma)))

    # checkpoints

    def saved(self, q: State) -> State:
        """Return what determines a state, for a checkpoint."""
        rows = TensorList.of(q.H.values, q.outputs, numbers=self.share.numbers)
        return q._replace(H=rows, outputs=None, curved=None)

    def restored(self, known: State) -> State:
        """Return the state of which ``saved`` has returned a part."""
        values, outputs = known.H.parts
        H = self._at_noise(known.sigma).first(self.f.to(self._dtype))._replace(values=values)
        q = known._replace(H=H, outputs=outputs)
        return self._with(q, H.root(self.epsilon))

    # from the whole problem

    def measured(self, q: State) -> State:
        """Return the state with the residuals of samples and mean, (K + 1, P), and with their errors.

        ‖residual‖ / √λ bounds the error in posterior standard deviations.
        """
        if q.sigma is not None:  # of which a restored state knows nothing that was only scaled
            q = self._with(q, q.H.root(self.epsilon))
        curved, precision = q.curved, float(q.precision)
        slope = curved.expected.loss_and_slope(q.outputs, curved.deviations)[1]
        residuals = self._residuals(q, q.samples, 1.0, slope)
        inside, (theta, vectors, *_) = self.span.coordinates(residuals), curved.spectrum
        squares = ((inside @ vectors).square() / (theta + precision)).sum(1)  # which is rounding
        if not self.span.is_complete:
            squares += (dots(residuals, residuals) - inside.square().sum(1)).clamp_min(
                0
            ) / precision
        squares = self.share.agreed(squares)
        of_samples, of_mean = squares[:-1], squares[-1]
        gamma, norm = q.gamma.mean().clamp_min(1), max(1.0, precision * q.norm.item())
        errors = (of_samples.mean() / gamma).sqrt().item(), (of_mean / norm).sqrt().item()
        self._searches = Searches(10, self.share.agreed)  # a fit that goes on from here has none
        return q._replace(errors=errors, certificate=of_samples.sqrt(), residuals=residuals)

    def with_evidence(self, q: State) -> State:
        """Return the state over a span in which the log det of a fixed H is as exact as the samples.

        So far the span was extended for √λ ξ + η. The log det is a sum of functions of ξ and of η,
        for which the span is extended for √λ ξ - η too.
        """
        for _ in range(4):
            problem, noise, precision, solver, _ = self.at(q)
            mirrored = optimise_samples(problem, noise._replace(eta=-noise.eta), precision, solver)
            residuals, before = self._residuals(q, mirrored.w, -1.0), q.bounds.mean()
            if not (self.span.has_room(len(residuals)) and self.span.widen(residuals)):
                break
            q = e_step(self, self.widened(q))
            if abs(q.bounds.mean() - before) <= 0.2 * self.bound_error(q):
                break
        return q

    def _residuals(
        self, q: State, samples: Tensor, sign: float, slope: Tensor | None = None
    ) -> Tensor:
        """Return √λ ξ ± η - (G + λ) w of samples with this sign, (K, P), and that of the mean, if its slope is given."""
        product = q.H.product(self.span.outputs.push(samples, self._is_quadratic).flatten(0, -2))
        u = self.f.new_empty(len(product), len(samples) + (slope is not None))
        torch.sub(sign * q.curved.S_noise.flatten(1).T, product, out=u[:, : len(samples)])
        if slope is not None:
            u[:, -1] = -slope.flatten()
            samples = torch.cat([samples, q.mean[None]])
        residuals = self.span.pulled(u)
        self.span.add_scaled(residuals, -float(q.precision) * samples)
        residuals[: len(q.samples)].add_(self.span.noise, alpha=math.sqrt(q.precision))
        return residuals

    def prior_variance(self) -> float:
        """Return the mean variance of the prior's outputs at λ = 1, relative to their size.

        The size of logits and log rates is 1. That of continuous targets depends on their units: it
        is the variance of the network's outputs, plus the inverse of H, which is σ².
        """
        pushed = self.span.outputs.push(self.span.xi)
        C, mean = self.f.shape[-1], self.share.mean
        square = mean(pushed.double().square().movedim(-1, 0).reshape(-1, C))
        if not self._problem.likelihood.real_valued:
            return square.mean().item()
        product = (
            self.expected.first(self.f.to(self._dtype))
            .product(pushed.flatten(0, -2))
            .view(pushed.shape)
        )
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
        for _, part in self.span.outputs.parts():
            pushed = (part @ root).view(-1, *self.f.shape[1:], root.shape[1])
            found.append(root_of(pushed @ pushed.mT))
        roots: Tensor = torch.cat(found) * self.f.shape[-1] ** 0.5
        return roots
