"""Gaussian mixtures by maximum likelihood, by MAP, and by variational EM."""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from torch_lla_em.mixtures.conjugate import (
    ConjugatePrior,
    Gaussians,
    NormalWishart,
    apply,
    inverse,
    log_dets,
    outer,
)
from torch_lla_em.mixtures.em import Family, Tensors
from torch_lla_em.mixtures.mixture import Mixture, check_parameters
from torch_lla_em.runtime import check_choice


class GaussianFamily(Family):
    """Gaussian components with φ(x) = (1, x, x xᵀ), in coordinates u = (x − centre) / unit.

    In these coordinates the columns have mean 0 and variance 1, so that sums of squares keep
    their digits.
    """

    concentration, least_concentration = 2.0, 1.0
    """α of the prior unless the user chooses it, and the least that the M-step allows."""

    def __init__(
        self,
        shape: tuple[int, ...],
        centre: Tensor,
        variance: Tensor,
        prior: ConjugatePrior | None,
        floor: float = 0.0,
    ):
        """``shape`` is that of the covariances, (K, D, D) or (K, D)."""
        self.num_components, dim = shape[:2]
        self.shape, self.is_full, self.floor = shape, len(shape) == 3, floor
        self.blocks = (shape[0], 1, dim, dim) if self.is_full else (*shape, 1, 1)
        self.width = dim * (shape[0] if self.is_full else 2) + shape[0]
        self.centre, self.unit = centre, torch.where(variance > 0, variance.sqrt(), 1.0)
        self.weak_prior = (prior or ConjugatePrior()).of_components(
            self.blocks, self.concentration, self.centre, self.unit
        )
        self.prior = None if prior is None else self.weak_prior
        if (self.weak_prior.concentration < self.least_concentration).any():
            raise ValueError(
                f"weight_concentration must be at least {self.least_concentration:g}, not "
                f"{prior.weight_concentration}."
            )

    def columns(self, x: Tensor) -> Tensor:
        columns = x.T.to(self.unit, copy=True, memory_format=torch.contiguous_format)
        return columns.sub_(self.centre[:, None]).div_(self.unit[:, None])

    def log_joint(self, natural: Tensors, columns: Tensor) -> Tensor:
        linear, blocks = super().log_joint(natural, columns), natural[2]
        if not self.is_full:
            return linear + blocks.flatten(1) @ columns.square()
        products = (blocks.reshape(-1, len(columns)) @ columns).view(len(blocks), *columns.shape)
        return linear + products.mul_(columns).sum(1)

    def sums(self, r: Tensor, columns: Tensor) -> Tensors:
        if self.is_full:
            second = (r[:, None] * columns).flatten(0, 1) @ columns.T
        else:
            second = r @ columns.square().T
        return *super().sums(r, columns), second.view(self.blocks)

    def natural(self, parameters: Any) -> Tensors:
        weights, means, covariances = parameters
        log_det = -log_dets(covariances).sum(1)
        return self.natural_of(weights.log(), means, inverse(covariances), log_det)

    def natural_of(
        self, log_weights: Tensor, means: Tensor, precision: Tensor, log_det: Tensor
    ) -> Tensors:
        """Return θ for log weights, means, precisions Λ and log|Λ|, each (K, ...)."""
        volume = self.unit.log().sum() + 0.5 * len(self.unit) * math.log(2 * math.pi)
        linear = apply(precision, means)
        constant = log_weights + 0.5 * log_det - volume - 0.5 * (linear * means).sum(1)
        return constant, linear, -0.5 * precision

    def maximise(self, sums: Tensors, old: Any) -> Any:
        counts, means, scatter = moments = _moments(*sums)
        prior = self.weak_prior if old is None else self.prior
        if prior is not None:
            return prior.updated(*moments).mode()
        # the bound does not depend on components without examples: they stay where they are
        has_examples = counts > 0
        means = torch.where(has_examples[:, None], means, old.means)
        counts_of_blocks, has_examples = (t[:, None, None, None] for t in (counts, has_examples))
        covariances = torch.where(has_examples, scatter / counts_of_blocks, old.covariances)
        return Gaussians(counts / counts.sum(), means, with_floor(covariances, self.floor))

    def log_prior(self, parameters: Any) -> Tensor:
        if self.prior is None:
            return self.unit.new_zeros(())
        return self.prior.log_density(parameters)

    def enter(self, parameters: Any) -> Any:
        each = (self.num_components,)
        check_parameters(parameters, each, self.shape[:2], self.shape)
        return self._inwards(parameters, "covariances")

    def _inwards(self, parameters: Any, name: str) -> Any:
        """Return parameters (weights, means, ..., matrices) in the coordinates of the fit."""
        weights, means, *others, matrices = (t.to(self.unit) for t in parameters)
        blocks = matrices.reshape(self.blocks) / self._units()
        if torch.linalg.cholesky_ex(blocks).info.any():
            raise ValueError(f"The {name} must be positive definite.")
        return type(parameters)(weights, (means - self.centre) / self.unit, *others, blocks)

    def leave(self, parameters: Any) -> Any:
        weights, means, *others, blocks = parameters
        matrices = (blocks * self._units()).reshape(self.shape)
        return type(parameters)(weights, means * self.unit + self.centre, *others, matrices)

    def _units(self) -> Tensor:
        """Return the product of the units of every two columns, in blocks of one component."""
        unit = self.unit.reshape(self.blocks[1:-1])
        return unit[..., :, None] * unit[..., None, :]


class VariationalFamily(GaussianFamily):
    """Gaussian components with a normal–Wishart posterior each."""

    least_concentration = 0.0

    @property
    def concentration(self) -> float:
        return 1 / self.num_components

    def natural(self, parameters: NormalWishart) -> Tensors:
        log_det = parameters.expected_log_dets().sum(1) - len(self.unit) / parameters.strength
        log_weights = parameters.expected_log_weights()
        return self.natural_of(
            log_weights, parameters.means, parameters.expected_precision(), log_det
        )

    def maximise(self, sums: Tensors, old: NormalWishart | None) -> NormalWishart:
        return self.weak_prior.updated(*_moments(*sums))

    def log_prior(self, parameters: NormalWishart) -> Tensor:
        return -parameters.divergence(self.weak_prior)

    def enter(self, parameters: NormalWishart) -> NormalWishart:
        each = (self.num_components,)
        check_parameters(parameters, each, self.shape[:2], each, each, self.shape)
        if min(parameters.concentration.min(), parameters.strength.min()) <= 0:
            raise ValueError("The concentration and the strength must be above 0.")
        if (parameters.dof <= self.blocks[-1] - 1).any():
            raise ValueError(f"dof must be above {self.blocks[-1] - 1}.")
        inside: NormalWishart = self._inwards(parameters, "scale")
        return inside


def _moments(counts: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return counts (K,), means (K, D), 0 without examples, and scatter about the means, in blocks."""
    means = torch.where(counts[:, None] > 0, first / counts[:, None], 0.0)
    return counts, means, (second + second.mT) / 2 - outer(means, counts, second)


def with_floor(blocks: Tensor, least: float) -> Tensor:
    """Raise eigenvalues below ``least`` to it.

    Of all covariances whose eigenvalues are at least that, the result has the greatest
    likelihood, so the bound does not fall where a component collapses.
    """
    identity = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)
    if not torch.linalg.cholesky_ex(blocks - least * identity).info.any():
        return blocks
    values, vectors = torch.linalg.eigh(blocks)
    raised = (vectors * values.clamp(min=least)[..., None, :]) @ vectors.mT
    return torch.where(values[..., :1, None] < least, raised, blocks)


class GaussianMixture(Mixture):
    """A Gaussian mixture, by maximum likelihood, or by MAP with a prior.

    p(x) = Σ_k π_k N(x | μ_k, Σ_k). All computations are in float64.

    Args:
        num_components (int): Number of components K.
        covariance (str): Structure of Σ_k: "full" (default) or "diagonal". Choose "diagonal" if there
            are few examples per component, or hundreds of columns.
        prior (ConjugatePrior, optional): Default None: maximum likelihood. ``ConjugatePrior()`` gives
            MAP, where no component collapses onto a few examples.
        min_variance (float): Smallest variance in any direction, relative to the variance of the
            column, if there is no prior. Default 1e-6.
        **options: Further arguments, those of ``Mixture``.

    Raises:
        ValueError: If an option is out of range.

    Example:
        >>> mixture = GaussianMixture(3, prior=ConjugatePrior()).fit(torch.randn(500, 2))
        >>> log_prob = mixture.log_prob(torch.randn(5, 2))
    """

    _kind: type[GaussianFamily] = GaussianFamily

    def __init__(
        self,
        num_components: int,
        *,
        covariance: Literal["full", "diagonal"] = "full",
        prior: ConjugatePrior | None = None,
        min_variance: float = 1e-6,
        **options: Any,
    ):
        super().__init__(num_components, **options)
        check_choice("covariance", covariance, ("full", "diagonal"))
        if not 0 < min_variance < 1:
            raise ValueError(f"min_variance must be between 0 and 1, not {min_variance}.")
        self.covariance, self.prior, self.min_variance = covariance, prior, min_variance

    def _family(self, num_components: int, centre: Tensor, variance: Tensor) -> GaussianFamily:
        dims = (len(centre),) * (2 if self.covariance == "full" else 1)
        shape = num_components, *dims
        return self._kind(shape, centre, variance, self.prior, self.min_variance)


class VariationalGaussianMixture(GaussianMixture):
    """A posterior over Gaussian mixtures, q(z) q(π, μ, Λ), by variational EM.

    The lower bound is the ELBO with all its constants, a bound on the log marginal likelihood.
    ``log_prob`` is log Σ_k exp E_q log p(x, k), which is slightly below the predictive log density
    and equal to it in the limit of many examples. ``parameters`` is a ``NormalWishart``;
    ``parameters.expected()`` returns a plain mixture. Weights of superfluous components shrink.

    Args:
        num_components (int): Largest number of components K.
        covariance (str): As in ``GaussianMixture``. Default "full".
        prior (ConjugatePrior): Prior of weights and components. Default ConjugatePrior().
        **options: Further arguments, those of ``Mixture``.

    Raises:
        ValueError: If an option is out of range.

    Example:
        >>> mixture = VariationalGaussianMixture(8).fit(torch.randn(500, 2))
        >>> weights = mixture.parameters.expected().weights
    """

    _kind = VariationalFamily

    def __init__(
        self,
        num_components: int,
        *,
        covariance: Literal["full", "diagonal"] = "full",
        prior: ConjugatePrior | None = None,
        **options: Any,
    ):
        super().__init__(num_components, covariance=covariance, prior=prior, **options)
