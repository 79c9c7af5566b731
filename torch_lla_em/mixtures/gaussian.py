"""Gaussian components: θ, the sums of φ, and M-steps by maximum likelihood, MAP and variational EM."""

import math
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.mixtures.conjugate import Gaussians, NormalWishart, apply, outer, weak_prior
from torch_lla_em.mixtures.em import Tensors


class GaussianFamily:
    """Gaussian components with φ(x) = (1, x, x xᵀ), in coordinates u = (x − centre) / unit.

    In these coordinates the columns have mean 0 and variance 1, so that sums of squares keep
    their digits. With ``regularised`` there is a prior even if the mixture has none, so that no
    component collapses onto a few examples.
    """

    empties = False

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
        """Return examples (n, D) as columns (D, n) in the coordinates of the fit, in float64."""
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
        linear = apply(precision, parameters.means)
        squares = (linear * parameters.means).sum(1)
        constant = log_weights + 0.5 * (log_dets - squares) - volume
        return constant, linear, -0.5 * precision

    def maximise(self, sums: Tensors) -> Any:
        """Return the parameters that maximise the bound."""
        counts, means, scatter = _moments(*sums)
        if self.regularised or self.mixture.prior:
            return self.prior.updated(counts, means, scatter).mode()
        covariances = scatter / _positive(counts)[:, None, None, None]
        return Gaussians(
            counts / counts.sum(), means, with_floor(covariances, self.mixture.min_variance)
        )

    def log_prior(self, parameters: Any) -> Tensor:
        """Return what the objective adds to log p(X | θ), shape ()."""
        if self.regularised or self.mixture.prior:
            return self.prior.log_density(parameters)
        return self.unit.new_zeros(())

    def leave(self, parameters: Any) -> Any:
        """Return parameters in the user's coordinates."""
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
