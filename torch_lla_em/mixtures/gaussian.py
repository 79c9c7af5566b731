"""Gaussian mixtures by maximum likelihood, and by MAP with the conjugate prior."""

import math

import torch
from torch import Tensor

from torch_lla_em.mixtures.blocks import Blocks, check_structure, inverse, log_dets, with_floor
from torch_lla_em.mixtures.conjugate import ConjugatePrior, Gaussians
from torch_lla_em.mixtures.em import Family, Tensors
from torch_lla_em.mixtures.mixture import Mixture, check_shapes, check_weights


class GaussianFamily(Family):
    """Gaussian components with φ(x) = (1, x, x xᵀ), in coordinates u = (x − centre) / unit.

    In these coordinates the columns have mean 0 and variance 1, so that sums of squares keep
    their digits.
    """

    concentration = 2.0
    """α of the prior unless the user chooses it."""

    def __init__(
        self,
        blocks: Blocks,
        moments: tuple[Tensor, Tensor],
        prior: ConjugatePrior | None,
        floor: float = 0.0,
    ):
        self.blocks, self.num_components, self.floor = blocks, blocks.num_components, floor
        self.width = blocks.dim * (blocks.shape[0] if blocks.dense else 2) + self.num_components
        self.centre, variance = moments
        variance = variance.mean().expand_as(variance) if blocks.copies > 1 else variance
        self.unit = torch.where(variance > 0, variance.sqrt(), 1.0)
        self.weak_prior = (prior or ConjugatePrior()).of_components(
            blocks, self.concentration, self.centre, self.unit
        )
        self.prior = None if prior is None else self.weak_prior

    def columns(self, x: Tensor) -> Tensor:
        columns = x.T.to(self.unit, copy=True, memory_format=torch.contiguous_format)
        return columns.sub_(self.centre[:, None]).div_(self.unit[:, None])

    def log_joint(self, natural: Tensors, columns: Tensor) -> Tensor:
        return super().log_joint(natural, columns) + self.blocks.quadratic(natural[2], columns)

    def sums(self, r: Tensor, columns: Tensor) -> Tensors:
        return *super().sums(r, columns), self.blocks.second_moments(r, columns)

    def natural(self, parameters: Gaussians) -> Tensors:
        weights, means, covariances = parameters
        log_det = -self.blocks.over_columns(log_dets(covariances))
        return self.natural_of(weights.log(), means, inverse(covariances), log_det)

    def natural_of(
        self, log_weights: Tensor, means: Tensor, precision: Tensor, log_det: Tensor
    ) -> Tensors:
        """Return θ for log weights, means, precisions Λ and log|Λ|, each (K, ...)."""
        volume = self.unit.log().sum() + 0.5 * self.blocks.dim * math.log(2 * math.pi)
        linear = self.blocks.apply(precision, means)
        constant = log_weights + 0.5 * log_det - volume - 0.5 * (linear * means).sum(1)
        return constant, linear, -0.5 * precision

    def maximise(self, sums: Tensors, old: Gaussians | None) -> Gaussians:
        counts, means, scatter = moments = self.blocks.moments(sums)
        prior = self.weak_prior if old is None else self.prior
        if prior is not None:
            return prior.updated(moments, self.blocks).mode(self.blocks)
        # the bound does not depend on components without examples: they stay where they are
        means = torch.where(counts[:, None] > 0, means, old.means)
        degrees = self.blocks.degrees(counts)[:, None, None, None]
        covariances = torch.where(degrees > 0, scatter / degrees, old.covariances)
        return Gaussians(counts / counts.sum(), means, with_floor(covariances, self.floor))

    def log_prior(self, parameters: Gaussians) -> Tensor:
        if self.prior is None:
            return self.unit.new_zeros(())
        return self.prior.log_density(parameters, self.blocks)

    def enter(self, parameters: Gaussians) -> Gaussians:
        num_components, dim = self.num_components, self.blocks.dim
        check_shapes(parameters, (num_components,), (num_components, dim), self.blocks.user_shape)
        check_weights(parameters.weights)
        weights, means, covariances = (t.to(self.unit) for t in parameters)
        self.blocks.check_positive(covariances, "covariances")
        return Gaussians(weights, *self.inwards(means, covariances))

    def leave(self, parameters: Gaussians) -> Gaussians:
        return Gaussians(parameters.weights, *self.outwards(*parameters[1:]))

    def moments(self, parameters: Gaussians) -> tuple[Tensor, Tensor]:
        weights, means, covariances = parameters
        mean = weights @ means
        variances = covariances.diagonal(dim1=-2, dim2=-1).flatten(1)
        return mean, weights @ (variances + (means - mean).square())

    def inwards(self, means: Tensor, covariances: Tensor) -> tuple[Tensor, Tensor]:
        """Return the user's means and covariances in the coordinates of the fit, in blocks."""
        blocks = self.blocks.rescale(covariances.reshape(self.blocks.shape), 1 / self.unit)
        return (means - self.centre) / self.unit, blocks

    def outwards(self, means: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and blocks in the user's coordinates and shapes."""
        covariances = self.blocks.rescale(blocks, self.unit).reshape(self.blocks.user_shape)
        return means * self.unit + self.centre, covariances


class GaussianMixture(Mixture):
    """p(x) = Σ_k π_k N(x | μ_k, Σ_k), by maximum likelihood, or by MAP with a prior.

    ``covariance`` is "full", "tied", "diagonal" or "spherical". Without a prior, no variance
    falls below ``min_variance`` times the variance of its column, in any direction. Data of any
    precision are computed with in float64. ``options`` are those of ``Mixture``.
    """

    def __init__(
        self,
        num_components: int,
        *,
        covariance: str = "full",
        prior: ConjugatePrior | None = None,
        min_variance: float = 1e-6,
        **options,
    ):
        super().__init__(num_components, **options)
        check_structure(covariance)
        if not 0 < min_variance < 1:
            raise ValueError(f"min_variance must be between 0 and 1, not {min_variance}.")
        if prior is not None:
            prior.check(least_concentration=1.0)
        self.covariance, self.prior, self.min_variance = covariance, prior, min_variance

    def _family(self, num_components: int, moments: tuple[Tensor, Tensor]) -> GaussianFamily:
        blocks = Blocks(self.covariance, num_components, len(moments[0]))
        return GaussianFamily(blocks, moments, self.prior, self.min_variance)

    def sample(self, num_examples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return examples drawn from the mixture, shape (n, D), and their components, (n,)."""
        weights, means, covariances = self._known_parameters()
        here, there = means.device, generator.device
        component = torch.multinomial(weights.to(there), num_examples, True, generator=generator)
        noise = torch.randn(
            num_examples, means.shape[1], dtype=means.dtype, device=there, generator=generator
        )
        component, noise = component.to(here), noise.to(here)
        blocks = Blocks(self.covariance, *means.shape)
        root = torch.linalg.cholesky(covariances.reshape(blocks.shape))
        root = root.expand(len(means), *root.shape[1:])[component]
        return means[component] + blocks.apply(root, noise), component
