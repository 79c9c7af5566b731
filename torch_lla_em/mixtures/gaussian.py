"""Gaussian mixtures by maximum likelihood, by MAP, and by variational EM."""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from torch_lla_em.mixtures.conjugate import Gaussians, NormalWishart, apply, outer, weak_prior
from torch_lla_em.mixtures.em import Family, Tensors
from torch_lla_em.mixtures.mixture import Mixture
from torch_lla_em.runtime import check_choice


class GaussianFamily(Family):
    """Gaussian components with φ(x) = (1, x, x xᵀ), in coordinates u = (x − centre) / unit.

    In these coordinates the columns have mean 0 and variance 1, so that sums of squares keep
    their digits.
    """

    def __init__(
        self,
        mixture: Any,
        num_components: int,
        centre: Tensor,
        variance: Tensor,
        regularised: bool = False,
    ):
        dim, self.is_full = len(centre), mixture.covariance == "full"
        self.shape = (num_components, dim, dim) if self.is_full else (num_components, dim)
        self.blocks = (num_components, 1, dim, dim) if self.is_full else (*self.shape, 1, 1)
        self.width = dim * (num_components if self.is_full else 2) + num_components
        variance = torch.where(variance > 0, variance, 1.0)
        self.mixture, self.regularised = mixture, regularised
        self.centre, self.unit = centre, variance.sqrt()
        self.prior = weak_prior(self.concentration(), centre.new_zeros(self.blocks))

    def concentration(self) -> float:
        """Return α of the prior: at 2, the mode has one example more in each component."""
        return 2.0

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
        log_weights, log_dets, precision = parameters.expectations()
        volume = self.unit.log().sum() + 0.5 * len(self.unit) * math.log(2 * math.pi)
        linear = apply(precision, parameters.means)
        squares = (linear * parameters.means).sum(1)
        constant = log_weights + 0.5 * (log_dets - squares) - volume
        return constant, linear, -0.5 * precision

    def maximise(self, sums: Tensors) -> Any:
        counts, means, scatter = _moments(*sums)
        if self.regularised or self.mixture.prior:
            return self.prior.updated(counts, means, scatter).mode()
        covariances = scatter / _positive(counts)[:, None, None, None]
        return Gaussians(
            counts / counts.sum(), means, with_floor(covariances, self.mixture.min_variance)
        )

    def log_prior(self, parameters: Any) -> Tensor:
        if self.regularised or self.mixture.prior:
            return self.prior.log_density(parameters)
        return self.unit.new_zeros(())

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

    empties = True

    def concentration(self) -> float:
        return 1 / self.shape[0]

    def maximise(self, sums: Tensors) -> Any:
        return self.prior.updated(*_moments(*sums))

    def log_prior(self, parameters: NormalWishart) -> Tensor:
        return -parameters.divergence(self.prior)


def _moments(counts: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return counts (K,), means (K, D), and scatter about the means, in blocks."""
    means = first / _positive(counts)[:, None]
    return counts, means, (second + second.mT) / 2 - outer(means, counts, second)


def _positive(counts: Tensor) -> Tensor:
    """Return counts to divide by, where sums over no examples become 0."""
    return counts.clamp_min(torch.finfo(counts.dtype).tiny)


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
        prior (bool): Whether to use a weak conjugate prior (MAP), with which no component collapses
            onto a few examples. Default False: maximum likelihood.
        min_variance (float): Smallest variance in any direction, relative to the variance of the
            column, if there is no prior. Default 1e-6.
        **options: Further arguments, those of ``Mixture``.

    Raises:
        ValueError: If an option is out of range.

    Example:
        >>> mixture = GaussianMixture(3, prior=True).fit(torch.randn(500, 2))
        >>> log_prob = mixture.log_prob(torch.randn(5, 2))
    """

    _kind = GaussianFamily

    def __init__(
        self,
        num_components: int,
        *,
        covariance: Literal["full", "diagonal"] = "full",
        prior: bool = False,
        min_variance: float = 1e-6,
        **options: Any,
    ):
        super().__init__(num_components, **options)
        check_choice("covariance", covariance, ("full", "diagonal"))
        if not 0 < min_variance < 1:
            raise ValueError(f"min_variance must be between 0 and 1, not {min_variance}.")
        self.covariance, self.prior, self.min_variance = covariance, prior, min_variance


class VariationalGaussianMixture(Mixture):
    """A posterior over Gaussian mixtures, q(z) q(π, μ, Λ), by variational EM.

    The lower bound is the ELBO with all its constants, a bound on the log marginal likelihood.
    ``log_prob`` is log Σ_k exp E_q log p(x, k), which is slightly below the predictive log density
    and equal to it in the limit of many examples. ``parameters`` is a ``NormalWishart``;
    ``parameters.expected()`` returns a plain mixture. The prior is weak, and weights of superfluous
    components shrink.

    Args:
        num_components (int): Largest number of components K.
        covariance (str): As in ``GaussianMixture``. Default "full".
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
        **options: Any,
    ):
        super().__init__(num_components, **options)
        check_choice("covariance", covariance, ("full", "diagonal"))
        self.covariance = covariance
