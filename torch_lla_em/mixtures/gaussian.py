"""Gaussian mixtures by maximum likelihood, and by MAP with the conjugate prior."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.mixtures.base import Mixture, check_shapes, check_weights
from torch_lla_em.mixtures.blocks import Blocks, check_structure
from torch_lla_em.mixtures.conjugate import ConjugatePrior, Gaussians
from torch_lla_em.mixtures.family import Family, FeatureMatrix, Features

WIDE = 64
"""Columns from which products of columns are better not written down (measured)."""


class Frame(NamedTuple):
    """The coordinates u = (x − centre) / scale, in which sums of squares keep their digits."""

    centre: Tensor
    """Shape (D,)."""

    scale: Tensor
    """Shape (D,)."""

    @classmethod
    def of(cls, mean: Tensor, variance: Tensor, structure: str) -> "Frame":
        """Return the frame of this mean and variance; a constant column keeps its unit."""
        if structure == "spherical":
            variance = variance.mean().expand(variance.shape)
        return cls(mean, torch.where(variance > 0, variance.sqrt(), 1.0))


class DenseFeatures(NamedTuple):
    """φ(x) = [1, x, products of columns] without writing the products down.

    Above some tens of columns memory is slower than arithmetic: K products of D × D
    matrices then take less time than D² / 2 features for each row.
    """

    x: Tensor
    """Shape (D, n)."""

    blocks: Blocks

    def dot(self, natural: Tensor) -> Tensor:
        """Return θ_k · φ(x), shape (K, n)."""
        dim = self.blocks.dim
        result = torch.addmm(natural[:, :1], natural[:, 1 : dim + 1], self.x)
        for row, products in zip(result, natural[:, dim + 1 :], strict=True):
            row += torch.linalg.vecdot(self.blocks.symmetric(products) @ self.x, self.x, dim=0)
        return result

    def sum(self, r: Tensor) -> Tensor:
        """Return Σ_n r_kn φ(x_n), shape (K, P)."""
        row, column = self.blocks.upper(r.device)
        second = torch.stack([((self.x * r_k) @ self.x.T)[row, column] for r_k in r])
        return torch.cat([r.sum(1, keepdim=True), r @ self.x.T, second], 1)


class GaussianFamily(Family):
    """Gaussian components in a frame of coordinates."""

    def __init__(self, frame: Frame, blocks: Blocks, prior: ConjugatePrior | None, floor=0.0):
        self.frame, self.blocks, self.floor = frame, blocks, floor
        self.num_components = blocks.num_components
        self.wide = blocks.dense and blocks.dim >= WIDE
        self.width = self.num_components + (4 * blocks.dim if self.wide else blocks.num_features)
        start = (prior or ConjugatePrior()).entered(*frame)
        self.start = start.resolve(blocks, self._default_concentration(), frame.centre)
        self.prior = None if prior is None else self.start

    def _default_concentration(self) -> float:
        return 2.0

    def columns(self, x: Tensor) -> Tensor:
        centre, scale = self.frame
        return (x.T - centre[:, None]).div_(scale[:, None])

    def features(self, columns: Tensor) -> Features:
        if self.wide:
            return DenseFeatures(columns, self.blocks)
        return FeatureMatrix(self.blocks.features(columns))

    def natural(self, parameters: Gaussians) -> Tensor:
        weights, means, covariances = parameters
        precision = self.blocks.inverse(covariances)
        log_det = -self.blocks.spread(self.blocks.log_dets(covariances))
        return self.linear(weights.log(), means, precision, log_det)

    def linear(
        self, log_weights: Tensor, means: Tensor, precision: Tensor, log_det: Tensor
    ) -> Tensor:
        """Return θ for the given log weights, means, precisions and log|Λ|, each (K, ...)."""
        volume = self.frame.scale.log().sum() + 0.5 * self.blocks.dim * math.log(2 * math.pi)
        return self.blocks.natural(log_weights + 0.5 * log_det - volume, means, precision)

    def maximise(self, sums: Tensor, old: Gaussians) -> Gaussians:
        counts, means, scatter = moments = self.blocks.moments(sums)
        if self.prior is not None:
            return self.prior.updated(moments, self.blocks).mode(self.blocks)
        # The bound does not ask anything of components without rows: they stay.
        means = torch.where(counts[:, None] > 0, means, old.means)
        degrees = self.blocks.degrees(counts)[..., None, None]
        covariances = torch.where(degrees > 0, scatter / degrees, old.covariances)
        covariances = self.blocks.floor(covariances, self.floor)
        return Gaussians(counts / counts.sum(), means, covariances)

    def first(self, sums: Tensor) -> Gaussians:
        posterior = self.start.updated(self.blocks.moments(sums), self.blocks)
        return posterior.mode(self.blocks)

    def log_prior(self, parameters: Gaussians) -> Tensor:
        if self.prior is None:
            return torch.zeros((), device="cpu")
        return self.prior.log_density(parameters, self.blocks)

    def inwards(self, means: Tensor, covariances: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and covariances of the user in the frame's coordinates, in blocks."""
        centre, scale = self.frame
        return (means - centre) / scale, self.blocks.rescale(
            self.blocks.pack(covariances), 1 / scale
        )

    def outwards(self, means: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and blocks in the coordinates and shapes of the user."""
        centre, scale = self.frame
        return means * scale + centre, self.blocks.unpack(self.blocks.rescale(blocks, scale))

    def enter(self, parameters: Gaussians) -> Gaussians:
        weights, means, covariances = (t.to(self.frame.centre) for t in parameters)
        return Gaussians(weights, *self.inwards(means, covariances))

    def leave(self, parameters: Gaussians) -> Gaussians:
        weights, means, covariances = parameters
        return Gaussians(weights, *self.outwards(means, covariances))


class GaussianMixture(Mixture):
    """p(x) = Σ_k π_k N(x | μ_k, Σ_k), by maximum likelihood, or by MAP with a prior.

    ``covariance`` is "full", "tied", "diagonal" or "spherical". Without a prior, no
    variance falls below ``min_variance`` times the variance of its column, in any
    direction. Data of any precision are computed with in double precision.
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

    def _family(self, num_components: int, mean: Tensor, variance: Tensor) -> GaussianFamily:
        blocks = Blocks(self.covariance, num_components, len(mean))
        frame = Frame.of(mean, variance, self.covariance)
        return GaussianFamily(frame, blocks, self.prior, self.min_variance)

    def _moments(self, parameters: Gaussians) -> tuple[Tensor, Tensor]:
        return Blocks(self.covariance, *parameters.means.shape).mixture_moments(*parameters)

    def _checked(self, parameters: Gaussians, num_components: int, dim: int) -> Gaussians:
        blocks = Blocks(self.covariance, num_components, dim)
        check_shapes(parameters, (num_components,), (num_components, dim), blocks.user_shape)
        check_weights(parameters.weights)
        blocks.check_positive(parameters.covariances, "covariances")
        return parameters

    def sample(self, num_rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return rows drawn from the mixture, shape (n, D), and their components, (n,)."""
        weights, means, covariances = self._known_parameters()
        blocks = Blocks(self.covariance, *means.shape)
        device = generator.device
        component = torch.multinomial(weights.to(device), num_rows, True, generator=generator)
        component = component.to(means.device)
        noise = torch.randn(
            num_rows, means.shape[1], dtype=means.dtype, device=device, generator=generator
        ).to(means.device)
        root = torch.linalg.cholesky(blocks.pack(covariances))
        root = root.expand(len(means), *root.shape[1:])[component]
        return means[component] + blocks.apply(root, noise), component
