"""Gaussian mixtures by maximum likelihood, by MAP, and by variational EM."""

import math
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.mixtures.blocks import (
    STRUCTURES,
    Blocks,
    Structure,
    inverse,
    log_dets,
    with_floor,
)
from torch_lla_em.mixtures.conjugate import ConjugatePrior, Gaussians, NormalWishart
from torch_lla_em.mixtures.em import Family, Tensors
from torch_lla_em.mixtures.mixture import Mixture, check_shapes, check_weights
from torch_lla_em.runtime import check_choice


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
        centre: Tensor,
        variance: Tensor,
        prior: ConjugatePrior | None,
        floor: float = 0.0,
    ):
        self.blocks, self.num_components, self.floor = blocks, blocks.num_components, floor
        self.width = blocks.dim * (blocks.shape[0] if blocks.dense else 2) + self.num_components
        variance = variance.mean().expand_as(variance) if blocks.copies > 1 else variance
        self.centre, self.unit = centre, torch.where(variance > 0, variance.sqrt(), 1.0)
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

    def natural(self, parameters: Any) -> Tensors:
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

    def maximise(self, sums: Tensors, old: Any) -> Any:
        counts, means, scatter = moments = self.blocks.moments(sums)
        prior = self.weak_prior if old is None else self.prior
        if prior is not None:
            return prior.updated(moments, self.blocks).mode(self.blocks)
        # the bound does not depend on components without examples: they stay where they are
        means = torch.where(counts[:, None] > 0, means, old.means)
        degrees = self.blocks.degrees(counts)[:, None, None, None]
        covariances = torch.where(degrees > 0, scatter / degrees, old.covariances)
        return Gaussians(counts / counts.sum(), means, with_floor(covariances, self.floor))

    def log_prior(self, parameters: Any) -> Tensor:
        if self.prior is None:
            return self.unit.new_zeros(())
        return self.prior.log_density(parameters, self.blocks)

    def enter(self, parameters: Any) -> Any:
        each = (self.num_components,)
        check_shapes(parameters, each, (*each, self.blocks.dim), self.blocks.user_shape)
        check_weights(parameters.weights)
        return self._inwards(parameters, "covariances")

    def _inwards(self, parameters: Any, name: str) -> Any:
        """Return parameters (weights, means, ..., matrices) in the coordinates of the fit."""
        weights, means, *others, matrices = (t.to(self.unit) for t in parameters)
        blocks = self.blocks.rescale(matrices.reshape(self.blocks.shape), 1 / self.unit)
        if torch.linalg.cholesky_ex(blocks).info.any():
            raise ValueError(f"The {name} must be positive definite.")
        return type(parameters)(weights, (means - self.centre) / self.unit, *others, blocks)

    def leave(self, parameters: Any) -> Any:
        weights, means, *others, blocks = parameters
        matrices = self.blocks.rescale(blocks, self.unit).reshape(self.blocks.user_shape)
        return type(parameters)(weights, means * self.unit + self.centre, *others, matrices)


class VariationalFamily(GaussianFamily):
    """Gaussian components with a normal–Wishart posterior each."""

    @property
    def concentration(self) -> float:
        return 1 / self.num_components

    def natural(self, parameters: NormalWishart) -> Tensors:
        log_det = self.blocks.over_columns(parameters.expected_log_dets(self.blocks))
        log_det = log_det - self.blocks.dim / parameters.strength
        log_weights = parameters.expected_log_weights()
        precision = parameters.expected_precision()
        return self.natural_of(log_weights, parameters.means, precision, log_det)

    def maximise(self, sums: Tensors, old: NormalWishart | None) -> NormalWishart:
        return self.weak_prior.updated(self.blocks.moments(sums), self.blocks)

    def log_prior(self, parameters: NormalWishart) -> Tensor:
        return -parameters.divergence(self.weak_prior, self.blocks)

    def enter(self, parameters: NormalWishart) -> NormalWishart:
        blocks, each = self.blocks, (self.num_components,)
        shapes = each, (*each, blocks.dim), each, blocks.shape[:1], blocks.user_shape
        check_shapes(parameters, *shapes)
        if min(parameters.concentration.min(), parameters.strength.min()) <= 0:
            raise ValueError("The concentration and the strength must be above 0.")
        if (parameters.dof <= blocks.size - 1).any():
            raise ValueError(f"dof must be above {blocks.size - 1}.")
        return self._inwards(parameters, "scale")


class GaussianMixture(Mixture):
    """p(x) = Σ_k π_k N(x | μ_k, Σ_k), by maximum likelihood, or by MAP with a prior.

    Data of any precision are computed with in float64.

    Args:
        num_components (int): K.
        covariance ("full", "tied", "diagonal" or "spherical", default "full"): the structure of
            Σ_k; "tied" components share one full matrix. Choose a smaller one if there are few
            examples per component, or hundreds of columns.
        prior (ConjugatePrior, default None): None for maximum likelihood; ``ConjugatePrior()``
            for MAP, which does not collapse onto few examples.
        min_variance (float, default 1e-6): without a prior, the least variance in any direction,
            relative to the variance of the column.
        **options: those of ``Mixture``.

    Raises:
        ValueError: if an option is out of range.

    Example::

        mixture = GaussianMixture(3, prior=ConjugatePrior()).fit(torch.randn(500, 2))
        mixture.log_prob(torch.randn(5, 2))
    """

    def __init__(
        self,
        num_components: int,
        *,
        covariance: Structure = "full",
        prior: ConjugatePrior | None = None,
        min_variance: float = 1e-6,
        **options: Any,
    ):
        super().__init__(num_components, **options)
        check_choice("covariance", covariance, STRUCTURES)
        if not 0 < min_variance < 1:
            raise ValueError(f"min_variance must be between 0 and 1, not {min_variance}.")
        if prior is not None:
            prior.check(least_concentration=1.0)
        self.covariance, self.prior, self.min_variance = covariance, prior, min_variance

    def _family(self, num_components: int, centre: Tensor, variance: Tensor) -> GaussianFamily:
        blocks = Blocks(self.covariance, num_components, len(centre))
        return GaussianFamily(blocks, centre, variance, self.prior, self.min_variance)

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


class VariationalGaussianMixture(Mixture):
    """A mean-field posterior over Gaussian mixtures, q(z) q(π, μ, Λ), by variational EM.

    The lower bound is the ELBO with all its constants, a bound of the log marginal likelihood.
    ``log_prob`` is log Σ_k exp E_q log p(x, k): a little below the predictive log density, and
    equal to it in the limit of many examples. ``parameters`` is a ``NormalWishart``;
    ``parameters.expected()`` returns a plain mixture. Weights of superfluous components shrink.

    Args:
        num_components (int): K, the most components.
        covariance ("full", "tied", "diagonal" or "spherical", default "full"): as in
            ``GaussianMixture``.
        prior (ConjugatePrior, default ConjugatePrior()): the prior of weights and components.
        **options: those of ``Mixture``.

    Raises:
        ValueError: if an option is out of range.

    Example::

        mixture = VariationalGaussianMixture(8).fit(torch.randn(500, 2))
        mixture.parameters.expected().weights
    """

    def __init__(
        self,
        num_components: int,
        *,
        covariance: Structure = "full",
        prior: ConjugatePrior | None = None,
        **options: Any,
    ):
        super().__init__(num_components, **options)
        check_choice("covariance", covariance, STRUCTURES)
        self.covariance, self.prior = covariance, prior or ConjugatePrior()
        self.prior.check(least_concentration=0.0)

    def _family(self, num_components: int, centre: Tensor, variance: Tensor) -> VariationalFamily:
        blocks = Blocks(self.covariance, num_components, len(centre))
        return VariationalFamily(blocks, centre, variance, self.prior)
