"""Regions of several continuous outputs together: the covariance of y, and ellipsoids."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.likelihoods import average
from torch_lla_em.prediction.mixture import FunctionMixture
from torch_lla_em.prediction.reference import errors_of
from torch_lla_em.prediction.scores import has_values


class Ellipsoid(NamedTuple):
    """The y with (y - centre)ᵀ covariance⁻¹ (y - centre) <= radius², for each of B inputs.

    Example:
        >>> region = several.predict(x).ellipsoid(0.9)  # doctest: +SKIP
        >>> inside = region.contains(y)  # doctest: +SKIP
    """

    centre: Tensor
    """The mean of y, (B, C)."""

    covariance: Tensor
    """The covariance of y, (B, C, C)."""

    radius: Tensor
    """The radius in units of the covariance, (B,)."""

    def contains(self, y: Tensor) -> Tensor:
        """Return which targets y, (B, C), are inside, as a mask of shape (B,)."""
        return length(y.to(self.centre) - self.centre, self.covariance) <= self.radius


def length(apart: Tensor, covariance: Tensor) -> Tensor:
    """Return (eᵀ covariance⁻¹ e)^½ of errors e (B, C), (B,)."""
    root = torch.linalg.cholesky(covariance)
    solved = torch.linalg.solve_triangular(root, apart[..., None], upper=False)
    norms: Tensor = torch.linalg.vector_norm(solved, dim=(1, 2))
    return norms


def covariance_of(mixture: FunctionMixture, variance: Tensor) -> Tensor:
    """Return the covariance of the continuous outputs y of each input, (B, C, C), in double precision.

    Its correlations are those of the predictive distribution, and its diagonal is ``variance``.
    """
    mean = mixture.likelihood.mean

    def of_functions(f: Tensor, weights: Tensor | None, _: slice) -> Tensor:
        values = mean(f).double()
        apart = values - average(values, weights)
        each = values.new_full((len(f),), 1 / len(f)) if weights is None else weights.to(values)
        return torch.einsum("s,sbc,sbd->bcd", each, apart, apart)

    epistemic = mixture.over_rows(of_functions)
    aleatoric = mixture.uncertainties()[0].double()
    covariance = epistemic + torch.diag_embed(aleatoric.expand(epistemic.shape[:2]))
    scale = (variance.double() / covariance.diagonal(dim1=1, dim2=2)).sqrt()
    scaled: Tensor = covariance * scale[:, :, None] * scale[:, None, :]
    return scaled


def joint_errors(mixture: FunctionMixture, y: Tensor) -> Tensor | None:
    """Return the errors of several continuous outputs together, (B, 2); None for other targets.

    The first is the largest of an example, in predictive standard deviations; the second the length of all,
    in units of the covariance.
    """
    each = errors_of(mixture, y)
    if not has_values(mixture.likelihood, mixture.f) or each.shape[1] < 2:
        return None
    apart = y.double() - mixture.expected().double()
    return torch.stack([each.amax(1), length(apart, covariance_of(mixture, mixture.variance()))], 1)
