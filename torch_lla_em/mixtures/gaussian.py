"""Gaussian components, log p(x, k) = θ_k · φ(x) with φ(x) = (1, x, x xᵀ), and their M-steps.

``Point`` maximises the likelihood, or the product of likelihood and a conjugate prior of the
covariances. ``NormalWishart`` is a prior of variational EM, π ~ Dirichlet(α), Λ_k ~ Wishart(ν, Ψ⁻¹)
block by block, μ_k | Λ_k ~ N(m, (κ Λ_k)⁻¹), and its posterior.

During a fit, covariances are blocks on a diagonal, so that one algebra serves both structures: one
block of D × D ("full", shape (K, 1, D, D)), or D blocks of 1 × 1 ("diagonal", (K, D, 1, 1)).
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Dirichlet, kl_divergence

Tensors = tuple[Tensor, ...]

FLOOR = 1e-8
"""Smallest variance of a component in any direction, relative to that of the data's columns. With
1e-6, one of 24 fits ends .15 per example lower, because a cluster is narrower."""


class Gaussians(NamedTuple):
    """A Gaussian mixture: π (K,), μ (K, D), and Σ, full (K, D, D) or diagonal (K, D); in blocks
    during a fit."""

    weights: Tensor
    means: Tensor
    covariances: Tensor

    def expectations(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return log π and log|Λ|, each (K,), and Λ = Σ⁻¹ in blocks."""
        return self.weights.log(), -_log_dets(self.covariances).sum(1), _inverse(self.covariances)

    def log_prior(self, prior: "Point") -> Tensor:
        """Return log p(Σ) up to a constant, shape ()."""
        precision = _inverse(self.covariances)
        height: Tensor = _log_dets(precision).sum() - (prior.covariance * precision).sum()
        return 0.5 * prior.worth * height


class Point(NamedTuple):
    """The M-step of maximum likelihood, or with a conjugate prior of Σ. Σ is at least ``FLOOR``.

    The fields are the number of examples that the prior is worth in each component (0 without a
    prior), and the prior's Σ in blocks.
    """

    worth: float
    covariance: Tensor

    def updated(self, counts: Tensor, means: Tensor, scatter: Tensor) -> Gaussians:
        """Return the components that maximise the bound, from the moments of their examples."""
        some = (
            counts + torch.finfo(counts.dtype).eps
        )  # a component without examples has this covariance
        prior = max(self.worth, torch.finfo(counts.dtype).eps)
        total = (counts + prior)[:, None, None, None]
        covariances = (scatter + prior * self.covariance) / total
        if covariances.shape[-1] == 1:
            return Gaussians(some / some.sum(), means, covariances.clamp_min(FLOOR))
        # the likelihood's maximum among matrices above the floor has the same eigenvectors
        values, vectors = torch.linalg.eigh(covariances)
        low = (values[..., 0] < FLOOR)[..., None, None]
        raised = (vectors * values.clamp_min(FLOOR)[..., None, :]) @ vectors.mT
        return Gaussians(some / some.sum(), means, torch.where(low, raised, covariances))


class NormalWishart(NamedTuple):
    """q(π, μ, Λ) = Dirichlet(π | α) Π_k N(μ_k | m_k, (κ_k Λ_k)⁻¹) Wishart(Λ_k | ν_k, Ψ_k⁻¹).

    The fields are α (K,), m (K, D), κ, the number of examples that a mean is worth, (K,), ν (K,),
    and Ψ in the shape of the covariances of ``Gaussians``.
    """

    concentration: Tensor
    means: Tensor
    strength: Tensor
    dof: Tensor
    scale: Tensor

    def expected(self) -> Gaussians:
        """Return the mixture of expected weights, means and precisions (as covariances)."""
        weights = self.concentration / self.concentration.sum()
        dof = self.dof.reshape(-1, *[1] * (self.scale.ndim - 1))
        return Gaussians(weights, self.means, self.scale / dof)

    def updated(self, counts: Tensor, means: Tensor, scatter: Tensor) -> "NormalWishart":
        """Return the posterior given the moments of each component's examples."""
        strength = self.strength + counts
        weighted = self.strength[:, None] * self.means + counts[:, None] * means
        pull = _outer(means - self.means, self.strength * counts / strength, scatter)
        return NormalWishart(
            self.concentration + counts,
            weighted / strength[:, None],
            strength,
            self.dof + counts,
            self.scale + scatter + pull,
        )

    def expectations(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return E log π and E log|Λ| − D / κ, each (K,), and E Λ = ν Ψ⁻¹ in blocks."""
        log_weights = self.concentration.digamma() - self.concentration.sum().digamma()
        d = self.scale.shape[-1]
        half = (self.dof[:, None] - torch.arange(d, device="cpu").to(self.dof)) / 2
        each = half.digamma().sum(1, keepdim=True) + d * math.log(2) - _log_dets(self.scale)
        precision = self.dof[:, None, None, None] * _inverse(self.scale)
        return log_weights, each.sum(1) - self.means.shape[1] / self.strength, precision

    def log_prior(self, prior: "NormalWishart") -> Tensor:
        """Return −KL(self ‖ prior), shape (), which replaces the log prior in the bound."""
        _, log_dets, precision = self.expectations()
        dim, deviation = self.means.shape[1], self.means - prior.means
        weights = kl_divergence(Dirichlet(self.concentration), Dirichlet(prior.concentration))
        ratio = prior.strength / self.strength
        distance = prior.strength * (deviation * _apply(precision, deviation)).sum(1)
        means = (dim * (ratio - 1 - ratio.log()) + distance).sum()
        log_det = (self.dof - prior.dof) * (log_dets + dim / self.strength)
        precisions = log_det.sum() - ((self.scale - prior.scale) * precision).sum()
        normalisers = (prior._log_normalisers() - self._log_normalisers()).sum()
        divergence: Tensor = weights + normalisers + 0.5 * (means + precisions)
        return -divergence

    def _log_normalisers(self) -> Tensor:
        """Return the log normalisers of the Wishart distributions, shape (K, number of blocks)."""
        half, d = self.dof[:, None] / 2, self.scale.shape[-1]
        volume = half * (d * math.log(2) - _log_dets(self.scale))
        log_normalisers: Tensor = torch.special.multigammaln(half, d) + volume
        return log_normalisers


class Family:
    """Gaussian components in coordinates u = (x − centre) / unit, in float64.

    In these coordinates the columns have mean 0 and variance 1, so that sums of squares keep their
    digits. θ is a tuple of a constant for each component (K,), the coefficients of x (K, D), and
    those of x xᵀ in blocks; sums of φ have the same shapes.

    ``worth`` is the number of examples that the prior of a ``Point`` is worth; None: the fit is
    variational. In that prior a mean is worth .01 examples, and ν = d + 2 for blocks of d × d.
    The covariance of either prior is K^(−2/D), as proposed by Fraley and Raftery (2007).
    """

    def __init__(self, x: Tensor, num_components: int, is_full: bool, worth: float | None):
        k, dim, self.is_full = num_components, x.shape[1], is_full
        self.shape = (k, dim, dim) if is_full else (k, dim)
        self.blocks = (k, 1, dim, dim) if is_full else (k, dim, 1, 1)
        variance, self.centre = torch.var_mean(x.double(), 0, correction=0)
        self.unit = torch.where(variance > 0, variance, 1.0).sqrt()
        ones, size = variance.new_ones(k), self.blocks[-1]
        scale = torch.eye(size, dtype=ones.dtype, device=ones.device) * k ** (-2 / dim)
        self.prior: NormalWishart | Point = Point(worth or 0.0, scale.expand(self.blocks))
        if worth is None:
            means, dof = ones.new_zeros(k, dim), (size + 2) * ones
            self.prior = NormalWishart(ones / k, means, 0.01 * ones, dof, scale.expand(self.blocks))

    def columns(self, x: Tensor) -> Tensor:
        """Return examples (n, D) as columns (D, n) in the coordinates of the fit."""
        columns = x.T.to(self.unit, copy=True, memory_format=torch.contiguous_format)
        return columns.sub_(self.centre[:, None]).div_(self.unit[:, None])

    def log_joint(self, natural: Tensors, columns: Tensor) -> Tensor:
        """Return θ_k · φ(x_n), which is log p(x_n, k) in the user's coordinates, shape (K, n)."""
        linear = torch.addmm(natural[0][:, None], natural[1], columns)
        blocks = natural[2]
        if not self.is_full:
            return linear + blocks.flatten(1) @ columns.square()
        products = (blocks.reshape(-1, len(columns)) @ columns).view(len(blocks), *columns.shape)
        return linear + products.mul_(columns).sum(1)

    def sums(self, r: Tensor, columns: Tensor) -> Tensors:
        """Return Σ_n r_kn φ(x_n) for responsibilities r, shape (K, n)."""
        if self.is_full:
            second = (r[:, None] * columns).flatten(0, 1) @ columns.T
        else:
            second = r @ columns.square().T
        return r.sum(1), r @ columns.T, second.view(self.blocks)

    def natural(self, parameters: Any) -> Tensors:
        """Return θ."""
        log_weights, log_dets, precision = parameters.expectations()
        volume = self.unit.log().sum() + 0.5 * len(self.unit) * math.log(2 * math.pi)
        linear = _apply(precision, parameters.means)
        squares = (linear * parameters.means).sum(1)
        return log_weights + 0.5 * (log_dets - squares) - volume, linear, -0.5 * precision

    def maximise(self, sums: Tensors) -> Any:
        """Return the parameters that maximise the bound."""
        counts, first, second = sums
        some = counts.clamp_min(torch.finfo(counts.dtype).tiny)  # sums over no examples become 0
        means = first / some[:, None]
        scatter = (second + second.mT) / 2 - _outer(means, counts, second)
        return self.prior.updated(counts, means, scatter)

    def leave(self, parameters: Any) -> Any:
        """Return parameters in the user's coordinates."""
        weights, means, *others, blocks = parameters
        unit = self.unit.reshape(self.blocks[1:-1])
        matrices = (blocks * unit[..., :, None] * unit[..., None, :]).reshape(self.shape)
        return type(parameters)(weights, means * self.unit + self.centre, *others, matrices)


def _apply(blocks: Tensor, v: Tensor) -> Tensor:
    """Return the product of each matrix with its row of v, shape (K, D)."""
    return (blocks @ v.reshape(blocks.shape[:-1])[..., None]).reshape(v.shape)


def _outer(v: Tensor, weights: Tensor, like: Tensor) -> Tensor:
    """Return w_k v_k v_kᵀ in blocks of the same shape as ``like``."""
    v = v.reshape(like.shape[:-1])
    return weights[:, None, None, None] * v[..., :, None] * v[..., None, :]


def _log_dets(blocks: Tensor) -> Tensor:
    """Return log|A| of each block, shape (K, number of blocks)."""
    log_det: Tensor = 2 * torch.linalg.cholesky(blocks).diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return log_det


def _inverse(blocks: Tensor) -> Tensor:
    """Return the inverse of positive definite blocks."""
    return torch.cholesky_inverse(torch.linalg.cholesky(blocks))
