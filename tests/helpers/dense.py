"""The dense posterior of tiny networks, and MacKay's iteration on it: the reference for tests.

It shares no code with the library: J by reverse mode one output at a time, H by two
derivatives of the log-likelihood, and dense linear algebra.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import log, pi
from typing import Any

import torch
from torch import Tensor, nn

LogProb = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ExactLaplace:
    """N(w_lin, (G + Λ)⁻¹) with dense matrices; use float64."""

    J: Tensor  # the Jacobian of all examples, (N, C, P), with sites and classes in one axis
    f: Tensor  # the network's outputs, (N, C)
    y: Tensor  # targets, (N, ...)
    log_prob: LogProb  # the function f (C,), y -> log p(y | f) of one example
    H: Tensor  # the Hessian of -log p in the outputs, at f, (N, C, C)
    scale: Tensor  # the prior's shape, (P,): Λ = diag(λ / scale²)

    @classmethod
    def of(
        cls, model: nn.Module, x: Any, y: Tensor, log_prob: LogProb, names: list[str]
    ) -> ExactLaplace:
        """Return that of a model in eval mode, for its named parameters."""
        every = dict(model.named_parameters())
        chosen, f = [every[name] for name in names], model(x).flatten(1)
        rows = [torch.autograd.grad(output, chosen, retain_graph=True) for output in f.reshape(-1)]
        J = torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in rows])
        f = f.detach()
        H = _hessians(log_prob, f, y)
        return cls(J.unflatten(0, f.shape), f, y, log_prob, H, torch.ones_like(J[0]))

    @property
    def ggn(self) -> Tensor:
        """G = Σ_n J_nᵀ H_n J_n, (P, P)."""
        return self._outer(self.H)

    @property
    def expected_squared_features(self) -> Tensor:
        """diag(G) / N, (P,): the expectation of s² of the g-prior."""
        return self.ggn.diagonal() / len(self.J)

    def covariance(self, precision: Tensor) -> Tensor:
        """Return Σ = (G + Λ)⁻¹, for Λ = diag(precision / scale²), precision () or (P,)."""
        return torch.linalg.inv(self.ggn + torch.diag(precision / self.scale**2))

    def effective_dims(self, precision: Tensor) -> Tensor:
        """Return the diagonal of Σ G, (P,), whose sum is γ, in total or per block."""
        return (self.covariance(precision) * self.ggn).sum(1)

    def mode(self, precision: Tensor, start: Tensor | None = None) -> Tensor:
        """Return w_lin, (P,), by Newton steps with dense Hessians."""
        Lambda = precision / self.scale**2 * torch.ones_like(self.scale)
        w = torch.zeros_like(self.scale) if start is None else start
        objective = self._objective(w, Lambda)
        for _ in range(200):
            h = self.J @ w
            slopes = _gradients(self.log_prob, h, self.y)
            gradient = torch.einsum("ncp,nc->p", self.J, slopes) + Lambda * w
            H = _hessians(self.log_prob, h, self.y)
            hessian = self._outer(H) + torch.diag(Lambda)
            step = torch.linalg.solve(hessian, gradient)
            size, rounding = 1.0, 1e-14 * objective.abs()
            while self._objective(w - size * step, Lambda) > objective + rounding and size > 1e-8:
                size /= 2
            w = w - size * step
            objective = self._objective(w, Lambda)
            # each step squares the error
            if min(step.norm(), gradient.norm()) < 1e-12 * (1 + w.norm()):
                break
        return w

    def loss(self, w: Tensor) -> Tensor:
        """Return Σ_n -log p(y_n | J_n w)."""
        return -torch.vmap(self.log_prob)(self.J @ w, self.y).sum()

    def log_evidence(self, precision: Tensor) -> Tensor:
        """Return log p(y | λ) by Laplace's method at the mode, with the curvature G."""
        w = self.mode(precision)
        Lambda = precision / self.scale**2 * torch.ones_like(self.scale)
        root = Lambda.rsqrt()
        whitened = root[:, None] * self.ggn * root + torch.eye(len(root)).to(root)
        return -self.loss(w) - 0.5 * (Lambda * w**2).sum() - 0.5 * torch.logdet(whitened)

    def at_noise(self, log_prob: LogProb) -> ExactLaplace:
        """Return the posterior of the same data under another likelihood."""
        return replace(self, log_prob=log_prob, H=_hessians(log_prob, self.f, self.y))

    def centred(self, w: Tensor | None = None) -> ExactLaplace:
        """Return the posterior of continuous targets less their (weighted) mean, as a fit takes them."""
        w = torch.ones_like(self.y[:, 0]) if w is None else w
        return replace(self, y=self.y - w @ self.y / w.sum())

    def _outer(self, H: Tensor) -> Tensor:
        return self.J.flatten(0, 1).T @ (H @ self.J).flatten(0, 1)

    def _objective(self, w: Tensor, Lambda: Tensor) -> Tensor:
        return self.loss(w) + 0.5 * (Lambda * w**2).sum()


def gaussian_log_prob(sigma: Tensor) -> LogProb:
    """Return log N(y | f, σ²) of one example as a function."""

    def log_prob(f: Tensor, y: Tensor) -> Tensor:
        return (-0.5 * ((y - f) / sigma) ** 2 - sigma.log() - 0.5 * log(2 * pi)).sum()

    return log_prob


def _gradients(log_prob: LogProb, f: Tensor, y: Tensor) -> Tensor:
    return torch.vmap(torch.func.grad(lambda f, y: -log_prob(f, y)))(f, y)


def _hessians(log_prob: LogProb, f: Tensor, y: Tensor) -> Tensor:
    return torch.vmap(torch.func.hessian(lambda f, y: -log_prob(f, y)))(f, y)


def dense_step(exact, precision, sigma, layout, layerwise, start=None):
    """One step of MacKay's iteration on dense matrices; also return γ of every weight, and the mode."""
    if sigma is not None:
        exact = exact.at_noise(gaussian_log_prob(sigma))
    per_weight = layout.expand(precision) if layerwise else precision
    covariance = exact.covariance(per_weight)
    gamma, w = exact.effective_dims(per_weight), exact.mode(per_weight, start)
    total = layout.block_sums if layerwise else torch.sum
    new = total(gamma) / total((w / exact.scale) ** 2)
    if sigma is not None:
        error = (exact.y - exact.J @ w).square().sum(0)
        dims = torch.einsum("ncp,pq,ncq->c", exact.J, covariance, exact.J) / sigma**2
        if sigma.dim():
            sigma = (error / (len(exact.y) - dims)).sqrt()
        else:
            sigma = (error.sum() / (exact.y.numel() - dims.sum())).sqrt()
    return new, sigma, gamma, w


def dense_fixed_point(exact, precision, sigma, layout, layerwise):
    """MacKay's iteration on dense matrices to convergence, by secants where λ is all there is."""
    w, before = None, None
    for _ in range(300):
        new, new_sigma, gamma, w = dense_step(exact, precision, sigma, layout, layerwise, w)
        moved = new.log() - precision.log()
        if moved.abs().max() < 1e-7:
            break
        here, step = precision, moved
        if sigma is None and before is not None:
            slope = (moved - before[1]) / (precision.log() - before[0].log())
            if slope < 0:
                step = (-moved / slope).clamp(-2, 2)
        precision, sigma, before = (here.log() + step).exp(), new_sigma, (here, moved)
    return precision, sigma, gamma
