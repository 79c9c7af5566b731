"""The conjugate prior of a Gaussian mixture: Dirichlet weights, normal–Wishart components.

π ~ Dirichlet(α), Λ_k ~ Wishart(ν, Ψ⁻¹) block by block, μ_k | Λ_k ~ N(m, (κ Λ_k)⁻¹). For the
covariances this is the normal–inverse-Wishart prior. Given the component of each example, the
posterior has the same form: MAP-EM takes its mode, variational EM all of it.

During a fit, covariances are blocks on a diagonal, so that one algebra serves both structures: one
block of D × D ("full", shape (K, 1, D, D)), or D blocks of 1 × 1 ("diagonal", (K, D, 1, 1)).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Dirichlet, kl_divergence


class Gaussians(NamedTuple):
    """The parameters of a Gaussian mixture."""

    weights: Tensor
    """π, shape (K,)."""

    means: Tensor
    """μ, shape (K, D)."""

    covariances: Tensor
    """Σ: full (K, D, D) or diagonal (K, D); in blocks during a fit."""

    def expectations(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return log π and log|Λ|, each (K,), and Λ = Σ⁻¹ in blocks."""
        return self.weights.log(), -log_dets(self.covariances).sum(1), inverse(self.covariances)


class NormalWishart(NamedTuple):
    """q(π, μ, Λ) = Dirichlet(π | α) Π_k N(μ_k | m_k, (κ_k Λ_k)⁻¹) Wishart(Λ_k | ν_k, Ψ_k⁻¹)."""

    concentration: Tensor
    """α, shape (K,)."""

    means: Tensor
    """m, shape (K, D)."""

    strength: Tensor
    """κ, the number of examples that the mean is worth, shape (K,)."""

    dof: Tensor
    """ν, degrees of freedom, shape (K,)."""

    scale: Tensor
    """Ψ, in the shape of the covariances: see ``Gaussians``; in blocks during a fit."""

    def expected(self) -> Gaussians:
        """Return the mixture of expected weights, means and precisions (as covariances)."""
        weights = self.concentration / self.concentration.sum()
        dof = self.dof.reshape(-1, *[1] * (self.scale.ndim - 1))
        return Gaussians(weights, self.means, self.scale / dof)

    def updated(self, counts: Tensor, means: Tensor, scatter: Tensor) -> "NormalWishart":
        """Return the posterior given the moments of each component's examples."""
        strength = self.strength + counts
        weighted = self.strength[:, None] * self.means + counts[:, None] * means
        pull = outer(means - self.means, self.strength * counts / strength, scatter)
        return NormalWishart(
            self.concentration + counts,
            weighted / strength[:, None],
            strength,
            self.dof + counts,
            self.scale + scatter + pull,
        )

    def mode(self) -> Gaussians:
        """Return the components at which the density of (π, μ, Σ) is greatest."""
        weights = self.concentration - 1
        dof = self._mode_dof()[:, None, None, None]
        return Gaussians(weights / weights.sum(), self.means, self.scale / dof)

    def log_density(self, components: Gaussians) -> Tensor:
        """Return log p(π, μ, Σ) up to a constant, shape ()."""
        weights, means, covariances = components
        precision, deviation = inverse(covariances), means - self.means
        distance = (self.strength[:, None] * deviation * apply(precision, deviation)).sum()
        log_det = (self._mode_dof() * log_dets(precision).sum(1)).sum()
        log_weights: Tensor = torch.special.xlogy(self.concentration - 1, weights).sum()
        return log_weights + 0.5 * (log_det - (self.scale * precision).sum() - distance)

    def _mode_dof(self) -> Tensor:
        return self.dof + self.scale.shape[-1] + 2

    def expectations(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return E log π and E log|Λ| − D / κ, each (K,), and E Λ = ν Ψ⁻¹ in blocks."""
        log_weights = self.concentration.digamma() - self.concentration.sum().digamma()
        log_dets = self._expected_log_dets() - self.means.shape[1] / self.strength
        return log_weights, log_dets, self._expected_precision()

    def _expected_precision(self) -> Tensor:
        return self.dof[:, None, None, None] * inverse(self.scale)

    def _expected_log_dets(self) -> Tensor:
        """Return E log|Λ|, shape (K,)."""
        d = self.scale.shape[-1]
        half = (self.dof[:, None] - torch.arange(d, device="cpu").to(self.dof)) / 2
        each = half.digamma().sum(1, keepdim=True) + d * math.log(2) - log_dets(self.scale)
        return each.sum(1)

    def divergence(self, prior: "NormalWishart") -> Tensor:
        """Return KL(self ‖ prior), shape ()."""
        precision, deviation = self._expected_precision(), self.means - prior.means
        weights = kl_divergence(Dirichlet(self.concentration), Dirichlet(prior.concentration))
        ratio = prior.strength / self.strength
        distance = prior.strength * (deviation * apply(precision, deviation)).sum(1)
        means = (self.means.shape[1] * (ratio - 1 - ratio.log()) + distance).sum()
        log_det = (self.dof - prior.dof) * self._expected_log_dets()
        precisions = log_det.sum() - ((self.scale - prior.scale) * precision).sum()
        normalisers = (prior._log_normalisers() - self._log_normalisers()).sum()
        divergence: Tensor = weights + normalisers + 0.5 * (means + precisions)
        return divergence

    def _log_normalisers(self) -> Tensor:
        """Return those of the Wishart distributions, shape (K, number of blocks)."""
        half, d = self.dof[:, None] / 2, self.scale.shape[-1]
        volume = half * (d * math.log(2) - log_dets(self.scale))
        log_normalisers: Tensor = torch.special.multigammaln(half, d) + volume
        return log_normalisers


def weak_prior(concentration: float, blocks: Tensor) -> NormalWishart:
    """Return the prior of components with covariances like these ``blocks``.

    Columns have mean 0 and variance 1. The mean is worth a hundredth of an example, and ν = d + 2 and
    Ψ = K^(−2/D) are those of Fraley and Raftery (2007): enough that no component collapses, little
    compared with a hundred examples.
    """
    num_components, dim = len(blocks), blocks[0].diagonal(dim1=-2, dim2=-1).numel()
    ones, size = blocks.new_ones(num_components), blocks.shape[-1]
    scale = num_components ** (-2 / dim) * torch.eye(size, dtype=blocks.dtype, device=blocks.device)
    return NormalWishart(
        concentration * ones,
        blocks.new_zeros(num_components, dim),
        0.01 * ones,
        (size + 2) * ones,
        scale.expand_as(blocks),
    )


def apply(blocks: Tensor, v: Tensor) -> Tensor:
    """Return the product of each matrix with its row of v, shape (K, D)."""
    return (blocks @ v.reshape(blocks.shape[:-1])[..., None]).reshape(v.shape)


def outer(v: Tensor, weights: Tensor, like: Tensor) -> Tensor:
    """Return w_k v_k v_kᵀ in blocks of the same shape as ``like``."""
    v = v.reshape(like.shape[:-1])
    return weights[:, None, None, None] * v[..., :, None] * v[..., None, :]


def log_dets(blocks: Tensor) -> Tensor:
    """Return log|A| of each block, shape (K, number of blocks)."""
    log_det: Tensor = 2 * torch.linalg.cholesky(blocks).diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return log_det


def inverse(blocks: Tensor) -> Tensor:
    """Return the inverse of positive definite blocks."""
    return torch.cholesky_inverse(torch.linalg.cholesky(blocks))
