"""Variational EM: a Gaussian mixture whose weights and components are uncertain too."""

from typing import NamedTuple

from torch import Tensor

from torch_lla_em.mixtures.base import Mixture, check_shapes
from torch_lla_em.mixtures.blocks import Blocks, check_structure
from torch_lla_em.mixtures.conjugate import ConjugatePrior, Gaussians, NormalWishart
from torch_lla_em.mixtures.gaussian import Frame, GaussianFamily


class Posterior(NamedTuple):
    """q(π, μ, Λ) = Dirichlet(π | α) Π_k N(μ_k | m_k, (κ_k Λ_k)⁻¹) Wishart(Λ_k | ν_k, Ψ_k⁻¹)."""

    concentration: Tensor
    """α, shape (K,)."""

    means: Tensor
    """m, shape (K, D)."""

    strength: Tensor
    """κ, shape (K,)."""

    dof: Tensor
    """ν, shape (K,), or (1,) where the covariance is tied."""

    scale: Tensor
    """Ψ, in the shape of the covariances: see ``Gaussians``."""

    def expected(self) -> Gaussians:
        """Return the mixture of expected weights, means and precisions (as covariances)."""
        dof = self.dof.reshape(-1, *[1] * (self.scale.ndim - 1))
        weights = self.concentration / self.concentration.sum()
        return Gaussians(weights, self.means, self.scale / dof)


class VariationalFamily(GaussianFamily):
    """Gaussian components with a normal–Wishart posterior each."""

    def _default_concentration(self) -> float:
        return 1 / self.num_components

    def natural(self, parameters: NormalWishart) -> Tensor:
        log_det = self.blocks.spread(parameters.expected_log_dets(self.blocks))
        log_det = log_det - self.blocks.dim / parameters.strength
        log_weights = parameters.expected_log_weights()
        return self.linear(log_weights, parameters.means, parameters.expected_precision(), log_det)

    def maximise(self, sums: Tensor, old: NormalWishart) -> NormalWishart:
        return self.first(sums)

    def first(self, sums: Tensor) -> NormalWishart:
        return self.start.updated(self.blocks.moments(sums), self.blocks)

    def log_prior(self, parameters: NormalWishart) -> Tensor:
        return -parameters.divergence(self.start, self.blocks)

    def enter(self, parameters: Posterior) -> NormalWishart:
        alpha, m, kappa, nu, Psi = (t.to(self.frame.centre) for t in parameters)
        means, scale = self.inwards(m, Psi)
        return NormalWishart(alpha, means, kappa, nu[:, None], scale)

    def leave(self, parameters: NormalWishart) -> Posterior:
        alpha, m, kappa, nu, Psi = parameters
        means, scale = self.outwards(m, Psi)
        return Posterior(alpha, means, kappa, nu[:, 0], scale)


class VariationalGaussianMixture(Mixture):
    """A mean-field posterior over Gaussian mixtures, q(z) q(π, μ, Λ).

    The bound is the ELBO, with all its constants, below the log marginal likelihood of
    the data. ``log_prob`` is log Σ_k exp E_q log p(x, k): a little below the predictive
    log density, and equal to it as rows grow in number. ``parameters.expected()`` gives
    a plain mixture.
    """

    def __init__(
        self,
        num_components: int,
        *,
        covariance: str = "full",
        prior: ConjugatePrior | None = None,
        **options,
    ):
        super().__init__(num_components, **options)
        check_structure(covariance)
        self.covariance, self.prior = covariance, prior or ConjugatePrior()
        self.prior.check(least_concentration=0.0)

    def _family(self, num_components: int, mean: Tensor, variance: Tensor) -> VariationalFamily:
        blocks = Blocks(self.covariance, num_components, len(mean))
        return VariationalFamily(Frame.of(mean, variance, self.covariance), blocks, self.prior)

    def _moments(self, parameters: Posterior) -> tuple[Tensor, Tensor]:
        blocks = Blocks(self.covariance, *parameters.means.shape)
        return blocks.mixture_moments(*parameters.expected())

    def _checked(self, parameters: Posterior, num_components: int, dim: int) -> Posterior:
        blocks = Blocks(self.covariance, num_components, dim)
        each, tied = (num_components,), blocks.shape[:1]
        check_shapes(parameters, each, (*each, dim), each, tied, blocks.user_shape)
        blocks.check_positive(parameters.scale, "scale")
        if min(float(t.min()) for t in parameters[:1] + parameters[2:3]) <= 0:
            raise ValueError("The concentration and the strength must be above 0.")
        if (parameters.dof <= blocks.size - 1).any():
            raise ValueError(f"dof must be above {blocks.size - 1}.")
        return parameters
