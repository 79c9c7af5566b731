"""The conjugate prior of a Gaussian mixture: Dirichlet weights, normal–Wishart components.

π ~ Dirichlet(α), Λ_k ~ Wishart(ν, Ψ⁻¹) block by block, μ_k | Λ_k ~ N(m, (κ Λ_k)⁻¹). For the
covariances this is the normal–inverse-Wishart prior. Given the component of each example, the
posterior has the same form: MAP-EM takes its mode, variational EM all of it.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.mixtures.blocks import Blocks, inverse, log_dets


class Gaussians(NamedTuple):
    """The parameters of a Gaussian mixture."""

    weights: Tensor
    """π, shape (K,)."""

    means: Tensor
    """μ, shape (K, D)."""

    covariances: Tensor
    """Σ: full (K, D, D), tied (D, D), diagonal (K, D) or spherical (K,); in blocks during a fit."""


class NormalWishart(NamedTuple):
    """q(π, μ, Λ) = Dirichlet(π | α) Π_k N(μ_k | m_k, (κ_k Λ_k)⁻¹) Wishart(Λ_k | ν_k, Ψ_k⁻¹)."""

    concentration: Tensor
    """α, shape (K,)."""

    means: Tensor
    """m, shape (K, D)."""

    strength: Tensor
    """κ, how many examples the mean is worth, shape (K,)."""

    dof: Tensor
    """ν, degrees of freedom, shape (K,), or (1,) if the covariance is tied."""

    scale: Tensor
    """Ψ, in the shape of the covariances: see ``Gaussians``; in blocks during a fit."""

    def expected(self) -> Gaussians:
        """Return the mixture of expected weights, means and precisions (as covariances)."""
        weights = self.concentration / self.concentration.sum()
        dof = self.dof.reshape(-1, *[1] * (self.scale.ndim - 1))
        return Gaussians(weights, self.means, self.scale / dof)

    def updated(self, moments: tuple[Tensor, Tensor, Tensor], blocks: Blocks) -> "NormalWishart":
        """Return the posterior given counts, means and scatter."""
        counts, means, scatter = moments
        strength = self.strength + counts
        weighted = self.strength[:, None] * self.means + counts[:, None] * means
        pull = blocks.outer(means - self.means, self.strength * counts / strength)
        return NormalWishart(
            self.concentration + counts,
            weighted / strength[:, None],
            strength,
            self.dof + blocks.degrees(counts),
            self.scale + scatter + pull,
        )

    def mode(self, blocks: Blocks) -> Gaussians:
        """Return the components at which the density of (π, μ, Σ) is greatest."""
        weights = self.concentration - 1
        dof = self._mode_dof(blocks)[:, None, None, None]
        return Gaussians(weights / weights.sum(), self.means, self.scale / dof)

    def log_density(self, components: Gaussians, blocks: Blocks) -> Tensor:
        """Return log p(π, μ, Σ) up to a constant, shape ()."""
        weights, means, covariances = components
        precision, deviation = inverse(covariances), means - self.means
        distance = (self.strength[:, None] * deviation * blocks.apply(precision, deviation)).sum()
        log_det = (self._mode_dof(blocks) * log_dets(precision).sum(1)).sum()
        log_weights = torch.special.xlogy(self.concentration - 1, weights).sum()
        return log_weights + 0.5 * (log_det - (self.scale * precision).sum() - distance)

    def _mode_dof(self, blocks: Blocks) -> Tensor:
        """Return ν + d + 1 + the number of means that share the block."""
        return self.dof + blocks.size + 1 + blocks.degrees(torch.ones_like(self.concentration))

    def expected_log_weights(self) -> Tensor:
        """Return E log π, shape (K,)."""
        return self.concentration.digamma() - self.concentration.sum().digamma()

    def expected_precision(self) -> Tensor:
        """Return E Λ = ν Ψ⁻¹, in blocks."""
        return self.dof[:, None, None, None] * inverse(self.scale)

    def expected_log_dets(self, blocks: Blocks) -> Tensor:
        """Return E log|Λ| of each block, shape (K or 1, number of blocks)."""
        d = blocks.size
        half = (self.dof[:, None] - torch.arange(d, device="cpu").to(self.dof)) / 2
        return half.digamma().sum(1, keepdim=True) + d * math.log(2) - log_dets(self.scale)

    def divergence(self, prior: "NormalWishart", blocks: Blocks) -> Tensor:
        """Return KL(self ‖ prior), shape ()."""
        precision, deviation = self.expected_precision(), self.means - prior.means
        change = self.concentration - prior.concentration
        weights = (change * self.expected_log_weights()).sum()
        ratio = prior.strength / self.strength
        distance = prior.strength * (deviation * blocks.apply(precision, deviation)).sum(1)
        means = (blocks.dim * (ratio - 1 - ratio.log()) + distance).sum()
        log_det = (self.dof - prior.dof) * self.expected_log_dets(blocks).sum(1)
        precisions = log_det.sum() - ((self.scale - prior.scale) * precision).sum()
        normalisers = prior._log_normaliser(blocks) - self._log_normaliser(blocks)
        return normalisers + weights + 0.5 * (means + precisions)

    def _log_normaliser(self, blocks: Blocks) -> Tensor:
        """Return that of the Dirichlet plus those of the Wishart distributions."""
        alpha, d = self.concentration, blocks.size
        dirichlet = alpha.lgamma().sum() - alpha.sum().lgamma()
        half = self.dof[:, None] / 2
        volume = half * (d * math.log(2) - log_dets(self.scale))
        return dirichlet + (torch.special.multigammaln(half, d) + volume).sum()


class ConjugatePrior(NamedTuple):
    """The prior of a Gaussian mixture's weights and components; None is chosen from the data.

    The defaults are weak and follow the location and scale of the data (Fraley and Raftery,
    2007): enough that no component collapses, little compared with a hundred examples.
    """

    weight_concentration: float | None = None
    """α of the Dirichlet. None: 2 for MAP (one more example each), 1/K for variational EM."""

    mean: Tensor | None = None
    """m, shape (D,). None: the column means."""

    strength: float = 0.01
    """κ, how many examples the prior mean is worth."""

    dof: float | None = None
    """ν, of a block of size d (D for full and tied, 1 for diagonal and spherical). None: d + 2."""

    scale: Tensor | None = None
    """Ψ, shape (D, D) or (D,), in the data's units. None: column variances · K^(−2/D)."""

    def check(self, least_concentration: float) -> None:
        """Raise an error for values that give no posterior mode, or no density at all."""
        alpha = self.weight_concentration
        if alpha is not None and not (alpha > 0 and alpha >= least_concentration):
            bound = f"at least {least_concentration:g}" if least_concentration else "above 0"
            raise ValueError(f"weight_concentration must be {bound}, not {alpha}.")
        if not self.strength > 0:
            raise ValueError(f"strength must be above 0, not {self.strength}.")

    def of_components(
        self, blocks: Blocks, concentration: float, centre: Tensor, unit: Tensor
    ) -> NormalWishart:
        """Return the prior of every component, in coordinates u = (x − centre) / unit."""
        num_components, dim = blocks.num_components, blocks.dim
        mean = centre if self.mean is None else self.mean.to(centre)
        if mean.shape != (dim,):
            raise ValueError(f"The prior's mean has shape {tuple(mean.shape)}, not ({dim},).")
        dof = blocks.size + 2 if self.dof is None else self.dof
        if dof <= blocks.size - 1:
            raise ValueError(f"dof must be above {blocks.size - 1} here, not {dof}.")
        if self.scale is None:
            scale = torch.ones_like(unit).diag() * num_components ** (-2 / dim)
        else:
            scale = (self.scale.diag() if self.scale.ndim == 1 else self.scale).to(centre)
            if scale.shape != (dim, dim) or torch.linalg.cholesky_ex(scale).info != 0:
                raise ValueError(
                    f"The prior's scale must be a positive definite matrix ({dim}, {dim}), "
                    f"or the diagonal of one, ({dim},)."
                )
            scale = scale / unit[:, None] / unit
        alpha = concentration if self.weight_concentration is None else self.weight_concentration
        ones = centre.new_ones(num_components)
        return NormalWishart(
            alpha * ones,
            ((mean - centre) / unit).expand(num_components, dim),
            self.strength * ones,
            float(dof) * centre.new_ones(blocks.shape[0]),
            blocks.of_matrix(scale),
        )
