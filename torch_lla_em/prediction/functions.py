"""Functions by which averages over a posterior are taken, made from its K samples, and averages
over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import log, prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction.arrays import NUMBERS
from torch_lla_em.runtime import without_autocast

Take = Callable[[Tensor, "Tensor | None", slice], Tensor]
"""Maps functions (S, b, ..., C), their weights (S,) or None, and the rows of these examples to
values."""

FUNCTIONS = 64
"""The least number of functions in an average over one example: with mirror images alone, averages
have 1 to 20 % more error than with any number of rotations; with one rotation, 1 to 9 % more."""

JOINT = 1024
"""The same for joint log-probabilities, where few functions dominate a product of many terms."""

WEIGHT, MODE, NETWORK, SCALE = range(4)
"""The columns of a table of components: a prediction's mixture, as fitted or as calibrated.

Each row is a component: its weight, how much of J w_lin and of f its mean contains, and the scale τ
of the posterior's variance. The first row has the samples' deviations, the others have none.
"""

# most outputs of an example, and most samples, for which rotations are drawn: these take K³
# operations
_OUTPUTS, _SAMPLES = 1024, 256


class Component(NamedTuple):
    """A component of a prediction's mixture: a posterior, or a function such as the network."""

    likelihood: Likelihood
    """The likelihood, with its observation noise."""

    centre: Tensor
    """The mean of f, (B, ..., C), classes last."""

    deviations: Tensor
    """The samples minus their mean, √τ J w_k, (K, B, ..., C), joint over inputs; K is 0 for a
    function."""

    weight: float | Tensor = 1.0
    """The weight in the mixture; those of all components have the sum 1."""

    owner: int = 0
    """The number of its posterior, whose first component has the samples."""


def weights_of(components: Sequence[Component]) -> Tensor:
    """Return the weights of components, (components,)."""
    weights, f = [part.weight for part in components], components[0].centre
    fitted = [weight for weight in weights if isinstance(weight, Tensor)]
    return torch.stack(fitted).to(f) if fitted else f.new_tensor(weights)


def functions_of(deviations: Tensor, at_least: int = FUNCTIONS) -> Tensor:
    """Return S ≥ 2 K zero-mean functions, shape (S, B, ...), from deviations (K, B, ...); outside
    of autocast.

    They are the samples, random rotations of them by K alone, and mirror images: each set has the
    samples' covariance.
    """
    count, _, *outputs = deviations.shape
    sets = max(2 if count <= _SAMPLES else 1, -(-at_least // (2 * count)))
    if count == 1 or sets == 1 or prod(outputs) > _OUTPUTS:
        return torch.cat([deviations, -deviations])
    Q = torch.from_numpy(_rotations(count, sets - 1)).to(deviations)
    return (Q @ deviations.flatten(1)).view(len(Q), *deviations.shape[1:])


@lru_cache(maxsize=8)
def _rotations(count: int, sets: int) -> np.ndarray:
    """Return the identity, random orthogonal matrices, and all of them with the other sign, (S,
    K)."""
    # no tensors, since one that is made in torch.inference_mode cannot be differentiated later
    generator = torch.Generator("cpu").manual_seed(0)
    normal = torch.randn(sets, count, count, generator=generator, dtype=torch.float64, device="cpu")
    Q = torch.cat(
        [torch.eye(count, device="cpu").to(normal), torch.linalg.qr(normal).Q.flatten(0, 1)]
    )
    rotations: np.ndarray = torch.cat([Q, -Q]).numpy()
    return rotations


def functions_at(
    components: Sequence[Component], rows: slice = slice(None), at_least: int = FUNCTIONS
) -> tuple[Tensor, Tensor | None]:
    """Return S functions of components, (S, B, ..., C), those of the first one first, and their
    weights; None: equal."""
    each = [
        part.centre[rows] + functions_of(part.deviations[:, rows], at_least)
        if len(part.deviations)
        else part.centre[None, rows]
        for part in components
    ]
    if len(each) == 1:
        return each[0], None
    pairs = zip(weights_of(components), each, strict=True)
    shares = [(weight / len(f)).expand(len(f)) for weight, f in pairs]
    return torch.cat(each), torch.cat(shares)


def over_rows(
    components: Sequence[Component], take: Take, dim: int = 0, at_least: int = FUNCTIONS
) -> Tensor:
    """Apply ``take`` to all functions of a few examples at a time."""
    f, counts = components[0].centre, [len(part.deviations) for part in components]
    count = sum(2 * n + max(at_least, 2 * n) for n in counts)  # at most
    step = max(1, NUMBERS // max(1, count * f.shape[1:].numel()))
    with without_autocast(f.device):
        if len(f) <= step:  # states no number of rows, so that exported programs take any
            return take(*functions_at(components, at_least=at_least), slice(None))
        parts = map(slice, range(0, len(f), step), range(step, len(f) + step, step))
        return torch.cat([take(*functions_at(components, p, at_least), p) for p in parts], dim)


def in_shares(samples: Tensor, others: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Return samples, (K, B, ..., C), of which other functions replace some in proportion to the
    weights of all."""
    every = torch.cat([samples, *(f[None] for f in others)])
    count = torch.arange(len(samples), device="cpu")
    # multiples of the golden ratio have the shares among the first few, too
    places = ((count.double() + 0.5) * (5**0.5 - 1) / 2).frac()
    ends = weights.detach().double().cpu().cumsum(0)
    at = torch.searchsorted(ends / ends[-1], places).clamp(max=len(ends) - 1)
    return every[torch.where(at > 0, len(count) + at - 1, count).to(every.device)]


def log_mean_exp(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the logarithm of the mean of exp(values) over the first axis."""
    if weights is None:
        return values.logsumexp(0) - log(len(values))
    return (values.movedim(0, -1) + weights.log().to(values)).logsumexp(-1)
