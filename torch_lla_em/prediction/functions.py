"""The functions that averages are taken over, made of K samples and with their covariance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from math import log

import torch
from torch import Tensor

FUNCTIONS = 64
"""The least number of functions in an average over one example.

Mirror images alone leave 1 to 20 % more error than any number of rotations would, one rotation 1
to 9 %, and the samples' own error stays.
"""

JOINT = 1024
"""The same for joint log-probabilities, where few functions dominate a product of many terms."""

# outputs of one example beyond which there are only the samples and their mirror images
_LARGE_ROW = 2**10
# samples up to which a rotation, of K³ operations, is drawn
_ROTATED = 256


def functions_of(deviations: Tensor, at_least: int = FUNCTIONS) -> Tensor:
    """Return S ≥ 2 K zero-mean functions, shape (S, B, ...), of deviations (K, B, ...).

    Samples, and random rotations among them, each with its mirror image. All sets have the
    samples' covariance Σ_k d_k d_kᵀ / K, and all together the mean 0, so that what is left of
    the error of averages is mostly that of the covariance. What is drawn depends on K and on
    nothing else.
    """
    sets = _sets(deviations, at_least)
    if sets > 1:
        Q = _rotations(len(deviations), sets - 1)
        with own_precision(deviations):
            turned = torch.tensordot(Q.to(deviations), deviations, dims=1)
        deviations = torch.cat([deviations, turned])
    return torch.cat([deviations, -deviations])


@contextmanager
def own_precision(values: Tensor) -> Iterator[None]:
    """Compute in the precision of the values, whatever autocast holds outside."""
    device = values.device.type
    if not torch.amp.is_autocast_available(device):
        yield
        return
    with torch.autocast(device, enabled=False):
        yield


def number_of_functions(deviations: Tensor, at_least: int = FUNCTIONS) -> int:
    """Return S without drawing them."""
    return 2 * len(deviations) * _sets(deviations, at_least)


def _sets(deviations: Tensor, at_least: int) -> int:
    count, row = len(deviations), deviations[0, :1].numel()
    if count == 1 or row > _LARGE_ROW:
        return 1
    return max(2 if count <= _ROTATED else 1, -(-at_least // (2 * count)))


@lru_cache(maxsize=8)
def _rotations(count: int, sets: int) -> Tensor:
    """Return random orthogonal matrices, stacked to (sets × K, K)."""
    generator = torch.Generator("cpu").manual_seed(0)
    normal = torch.randn(sets, count, count, generator=generator, dtype=torch.float64, device="cpu")
    return torch.linalg.qr(normal).Q.flatten(0, 1)


def mixed(deviations: Tensor, generator: torch.Generator) -> Tensor:
    """Draw K fresh Gaussian functions with the samples' own covariance."""
    size = (len(deviations), len(deviations))
    weights = torch.randn(size, generator=generator, device=generator.device)
    weights = weights.to(deviations) / len(deviations) ** 0.5
    with own_precision(deviations):
        return torch.einsum("jk,k...->j...", weights, deviations)


def slots(weights: Tensor, count: int) -> Tensor:
    """Return which part of a mixture each of ``count`` functions is of, in shares of its weights.

    Any first few are in these shares too, as nearly as their number allows.
    """
    places = (
        (torch.arange(count, dtype=torch.float64, device="cpu") + 0.5) * 0.6180339887498949
    ).frac()
    ends = weights.detach().double().cpu().cumsum(0)
    return torch.searchsorted(ends / ends[-1], places).clamp(max=len(weights) - 1)


def log_mean(values: Tensor, weights: Tensor | None) -> Tensor:
    """Return the logarithm of the mean of exp over the leading axis."""
    if weights is None:
        return values.logsumexp(0) - log(len(values))
    return (values.movedim(0, -1) + weights.log().to(values)).logsumexp(-1)


def quantile(values: Tensor, share: float, weights: Tensor | None) -> Tensor:
    """Return a quantile over the leading axis, which torch.quantile limits in size."""
    values, order = values.sort(0)
    if weights is None:
        position = share * (len(values) - 1)
        below = min(int(position), len(values) - 2) if len(values) > 1 else 0
        return values[below].lerp(values[min(below + 1, len(values) - 1)], position - below)
    each = weights.to(values)[order]
    places = each.cumsum(0) - 0.5 * each
    above = (places < share).sum(0, keepdim=True).clamp(1, len(values) - 1)
    ends, at = zip(*((values.gather(0, i), places.gather(0, i)) for i in (above - 1, above)))
    step = ((share - at[0]) / (at[1] - at[0]).clamp_min(1e-30)).clamp(0, 1)
    return ends[0].lerp(ends[1], step)[0]


def pair_error(values: Tensor, count: int) -> Tensor:
    """Return the standard error that ``count`` samples leave in the mean over their functions.

    Averages over a sample and its mirror image are nearly quadratic in it, so that their spread
    over the samples is that of the covariance, which rotations do not lessen.
    """
    half = len(values) // 2
    pairs = 0.5 * (values[:count] + values[half : half + count])
    return pairs.std(0) / count**0.5 if count > 1 else torch.full_like(pairs[0], float("nan"))
