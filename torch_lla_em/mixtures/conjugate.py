"""The conjugate prior of a Gaussian mixture: Dirichlet weights, normal–Wishart components.

π ~ Dirichlet(α), Λ_k ~ Wishart(ν, Ψ⁻¹) block by block, μ_k | Λ_k ~ N(m, (κ Λ_k)⁻¹).
Seen from the covariance this is the normal–inverse-Wishart prior. Given who belongs
where, the posterior has the same form: MAP-EM takes its mode, variational EM all of it.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.mixtures.blocks import Blocks


class Gaussians(NamedTuple):
    """A Gaussian mixture."""

    weights: Tensor
    """π, shape (K,)."""

    means: Tensor
    """μ, shape (K, D)."""

    covariances: Tensor
    """Σ: full (K, D, D), tied (D, D), diagonal (K, D) or spherical (K,); in blocks during a fit."""


class NormalWishart(NamedTuple):
    """A Dirichlet–normal–Wishart distribution over the components of a mixture."""

    concentration: Tensor
    """α, shape (K,)."""

    means: Tensor
    """m, shape (K, D)."""

    strength: Tensor
    """κ, how many rows the mean is worth, shape (K,)."""

    dof: Tensor
    """ν, degrees of freedom, shape (K or 1, 1)."""

    scale: Tensor
    """Ψ, in blocks."""

    def updated(self, moments: tuple[Tensor, Tensor, Tensor], blocks: Blocks) -> "NormalWishart":
        """Return the posterior given counts, means and scatter."""
        counts, means, scatter = moments
        strength = self.strength + counts
        pull = self.strength * counts / strength
        weighted = self.strength[:, None] * self.means + counts[:, None] * means
        return NormalWishart(
            self.concentration + counts,
            weighted / strength[:, None],
            strength,
            self.dof + blocks.degrees(counts),
            self.scale + scatter + blocks.outer(means - self.means, pull),
        )

    def mode(self, blocks: Blocks) -> Gaussians:
        """Return the components where the density of (π, μ, Σ) is greatest."""
        weights = self.concentration - 1
        dof = self.dof + self._mode_dof(blocks)
        return Gaussians(weights / weights.sum(), self.means, self.scale / dof[..., None, None])

    def log_density(self, components: Gaussians, blocks: Blocks) -> Tensor:
        """Return log p(π, μ, Σ) up to a constant, shape ()."""
        weights, means, covariances = components
        precision = blocks.inverse(covariances)
        deviation = means - self.means
        distance = (self.strength[:, None] * deviation * blocks.apply(precision, deviation)).sum()
        # ½ (ν + d + 1 + number of means) for each block, as in the mode.
        log_dets = ((self.dof + self._mode_dof(blocks)) * blocks.log_dets(precision)).sum()
        trace = (self.scale * precision).sum()
        log_weights = torch.special.xlogy(self.concentration - 1, weights).sum()
        return log_weights + 0.5 * (log_dets - trace - distance)

    def _mode_dof(self, blocks: Blocks) -> Tensor:
        return blocks.size + 1 + blocks.degrees(torch.ones_like(self.concentration))

    def expected_log_weights(self) -> Tensor:
        """Return E log π, shape (K,)."""
        return self.concentration.digamma() - self.concentration.sum().digamma()

    def expected_precision(self) -> Tensor:
        """Return E Λ = ν Ψ⁻¹, in blocks."""
        return self.dof[..., None, None] * torch.cholesky_inverse(torch.linalg.cholesky(self.scale))

    def expected_log_dets(self, blocks: Blocks) -> Tensor:
        """Return E log|Λ| of each block, shape (K or 1, number of blocks)."""
        d = blocks.size
        half = (self.dof[..., None] - torch.arange(d, device="cpu").to(self.dof)) / 2
        return half.digamma().sum(-1) + d * math.log(2) - blocks.log_dets(self.scale)

    def divergence(self, prior: "NormalWishart", blocks: Blocks) -> Tensor:
        """Return KL(self ‖ prior), shape ()."""
        weights = (
            prior._log_normaliser_of_weights()
            - self._log_normaliser_of_weights()
            + ((self.concentration - prior.concentration) * self.expected_log_weights()).sum()
        )
        precision = self.expected_precision()
        deviation = self.means - prior.means
        distance = prior.strength * (deviation * blocks.apply(precision, deviation)).sum(1)
        ratio = prior.strength / self.strength
        means = 0.5 * (blocks.dim * (ratio - 1 - ratio.log()) + distance).sum()
        precisions = (
            prior._log_normaliser_of_precision(blocks)
            - self._log_normaliser_of_precision(blocks)
            + 0.5 * ((self.dof - prior.dof) * self.expected_log_dets(blocks)).sum()
            - 0.5 * ((self.scale - prior.scale) * precision).sum()
        )
        return weights + means + precisions

    def _log_normaliser_of_weights(self) -> Tensor:
        return self.concentration.lgamma().sum() - self.concentration.sum().lgamma()

    def _log_normaliser_of_precision(self, blocks: Blocks) -> Tensor:
        """Return Σ over blocks of log ∫ |Λ|^((ν − d − 1)/2) exp(−½ tr(Ψ Λ)) dΛ."""
        d = blocks.size
        gamma = torch.special.multigammaln(self.dof / 2, d) + self.dof * d * math.log(2) / 2
        return (gamma - self.dof / 2 * blocks.log_dets(self.scale)).sum()


class ConjugatePrior(NamedTuple):
    """What a user believes of the components before the data; None is chosen from the data.

    The defaults are weak and follow the data's location and scale (Fraley and Raftery,
    2007): enough that no component collapses, little next to a hundred rows.
    """

    weight_concentration: float | None = None
    """α, the Dirichlet's. None: 2 for MAP (one row more for each), 1/K for variational EM."""

    mean: Tensor | None = None
    """m, shape (D,). None: the column means."""

    strength: float = 0.01
    """κ, how many rows the prior mean is worth."""

    dof: float | None = None
    """ν, of a block of size d (D for full and tied, 1 for diagonal and spherical). None: d + 2."""

    scale: Tensor | None = None
    """Ψ, shape (D, D) or (D,), in the data's units. None: column variances · K^(−2/D)."""

    def check(self, least_concentration: float) -> None:
        """Refuse what gives no posterior mode, or no density at all."""
        alpha = self.weight_concentration
        if alpha is not None and not (alpha > 0 and alpha >= least_concentration):
            bound = f"at least {least_concentration:g}" if least_concentration else "above 0"
            raise ValueError(f"weight_concentration must be {bound}, not {alpha}.")
        if not self.strength > 0:
            raise ValueError(f"strength must be above 0, not {self.strength}.")

    def entered(self, centre: Tensor, unit: Tensor) -> "ConjugatePrior":
        """Return the prior in coordinates u = (x − centre) / unit, its shapes checked."""
        mean, scale, dim = self.mean, self.scale, len(centre)
        if mean is not None:
            if mean.shape != (dim,):
                raise ValueError(f"The prior's mean has shape {tuple(mean.shape)}, not ({dim},).")
            mean = (mean.to(centre) - centre) / unit
        if scale is not None:
            scale = (scale.diag() if scale.ndim == 1 else scale).to(centre)
            if scale.shape != (dim, dim) or torch.linalg.cholesky_ex(scale).info != 0:
                raise ValueError(
                    f"The prior's scale must be a positive definite matrix ({dim}, {dim}), "
                    f"or the diagonal of one, ({dim},)."
                )
            scale = scale / unit[:, None] / unit
        return self._replace(mean=mean, scale=scale)

    def resolve(self, blocks: Blocks, concentration: float, like: Tensor) -> NormalWishart:
        """Return the prior of every component, in coordinates where None is 0 and 1."""
        num_components, dim = blocks.num_components, blocks.dim
        identity = torch.eye(dim, dtype=like.dtype, device=like.device)
        mean = (
            torch.zeros(dim, dtype=like.dtype, device=like.device)
            if self.mean is None
            else self.mean
        )
        dof = blocks.size + 2 if self.dof is None else self.dof
        if dof <= blocks.size - 1:
            raise ValueError(f"dof must be above {blocks.size - 1} here, not {dof}.")
        scale = identity * num_components ** (-2 / dim) if self.scale is None else self.scale
        alpha = concentration if self.weight_concentration is None else self.weight_concentration
        ones = torch.ones(num_components, dtype=like.dtype, device=like.device)
        return NormalWishart(
            alpha * ones,
            mean.expand(num_components, dim),
            self.strength * ones,
            torch.full((blocks.shape[0], 1), float(dof), dtype=like.dtype, device=like.device),
            blocks.from_matrix(scale).expand(blocks.shape),
        )
