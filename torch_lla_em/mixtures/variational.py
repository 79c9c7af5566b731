"""Variational EM: a Gaussian mixture with a posterior over its weights and components."""

from torch import Tensor

from torch_lla_em.mixtures.blocks import Blocks, check_structure
from torch_lla_em.mixtures.conjugate import ConjugatePrior, NormalWishart
from torch_lla_em.mixtures.em import Tensors
from torch_lla_em.mixtures.gaussian import GaussianFamily
from torch_lla_em.mixtures.mixture import Mixture, check_shapes


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
        return self.prior.updated(self.blocks.moments(sums), self.blocks)

    def log_prior(self, parameters: NormalWishart) -> Tensor:
        return -parameters.divergence(self.prior, self.blocks)

    def enter(self, parameters: NormalWishart) -> NormalWishart:
        blocks, each = self.blocks, (self.num_components,)
        shapes = each, (*each, blocks.dim), each, blocks.shape[:1], blocks.user_shape
        check_shapes(parameters, *shapes)
        alpha, m, kappa, nu, Psi = (t.to(self.unit) for t in parameters)
        blocks.check_positive(Psi, "scale")
        if min(alpha.min(), kappa.min()) <= 0:
            raise ValueError("The concentration and the strength must be above 0.")
        if (nu <= blocks.size - 1).any():
            raise ValueError(f"dof must be above {blocks.size - 1}.")
        m, Psi = self.inwards(m, Psi)
        return NormalWishart(alpha, m, kappa, nu, Psi)

    def leave(self, parameters: NormalWishart) -> NormalWishart:
        means, scale = self.outwards(parameters.means, parameters.scale)
        return parameters._replace(means=means, scale=scale)

    def moments(self, parameters: NormalWishart) -> tuple[Tensor, Tensor]:
        return super().moments(parameters.expected())


class VariationalGaussianMixture(Mixture):
    """A mean-field posterior over Gaussian mixtures, q(z) q(π, μ, Λ).

    The bound is the ELBO, with all its constants, a lower bound of the log marginal likelihood.
    ``log_prob`` is log Σ_k exp E_q log p(x, k): a little below the predictive log density, and
    equal to it in the limit of many examples. ``parameters.expected()`` gives a plain mixture.
    ``options`` are those of ``Mixture``.
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

    def _family(self, num_components: int, moments: tuple[Tensor, Tensor]) -> VariationalFamily:
        blocks = Blocks(self.covariance, num_components, len(moments[0]))
        return VariationalFamily(blocks, moments, self.prior)
