"""How predicted deviations of an image fit the error of its reconstruction."""

from math import log, pi
from typing import NamedTuple

import torch
from torch import Tensor

PATCH = 4


class Reconstruction(NamedTuple):
    """An image, and deviations of S images drawn around it."""

    mean: Tensor
    deviations: Tensor
    """(S, 1, size, size)."""


def scores(drawn: Reconstruction, truth: Tensor) -> dict[str, float]:
    """Return how the predicted deviations fit the true error, in nats per pixel."""
    error = (truth - drawn.mean)[0, 0]
    variance = drawn.deviations.square().mean(0)[0] + 1e-8
    sd = variance.sqrt()
    span = (truth.max() - truth.min()) ** 2
    factor = (error.square() / variance).mean()
    return {
        "psnr": (10 * (span / error.square().mean()).log10()).item(),
        "nll": _nll(error, variance),
        "nll_scaled": _nll(error, factor * variance),
        "patch_nll": _patch_nll(error, drawn.deviations[:, 0]),
        "pearson": _correlation(error.abs(), sd),
        "spearman": _correlation(_ranks(error.abs()), _ranks(sd)),
        "coverage": (error.abs() < 1.96 * sd).double().mean().item(),
        "mean_sd": sd.mean().item(),
        "rmse": error.square().mean().sqrt().item(),
    }


def _nll(error: Tensor, variance: Tensor) -> float:
    return 0.5 * (error.square() / variance + variance.log() + log(2 * pi)).mean().item()


def _patch_nll(error: Tensor, deviations: Tensor) -> float:
    """Return the joint NLL of patches of pixels, with the samples' own covariance."""
    side = error.shape[-1] // PATCH * PATCH
    stack = torch.cat([error[None], deviations])[:, :side, :side].double()
    tiles = stack.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).flatten(3).flatten(1, 2)
    error, deviations = tiles[0], tiles[1:]
    covariance = torch.einsum("spi,spj->pij", deviations, deviations) / len(deviations)
    # fewer samples than a patch of that rank would ask for: a hundredth of the variance is white
    ridge = 1e-2 * covariance.diagonal(dim1=1, dim2=2).mean(1) + 1e-8
    covariance += ridge[:, None, None] * torch.eye(PATCH**2)
    normal = torch.distributions.MultivariateNormal(torch.zeros(PATCH**2).double(), covariance)
    return -normal.log_prob(error).mean().item() / PATCH**2


def _correlation(a: Tensor, b: Tensor) -> float:
    return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item()


def _ranks(values: Tensor) -> Tensor:
    return values.flatten().argsort().argsort().float()


def constant(mean: Tensor, variance: float, num_samples: int) -> Reconstruction:
    """Return deviations of one variance everywhere, independent over pixels."""
    noise = torch.randn(num_samples, *mean.shape[1:], generator=torch.Generator().manual_seed(0))
    noise /= noise.square().mean(0).sqrt()
    return Reconstruction(mean, variance**0.5 * noise)
