"""The training examples that a fit stores, the distances of inputs to them, and the variance above
which means are shrunk."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction.conformal import in_parts
from torch_lla_em.runtime import NUMBERS

_MOST = 0.95
"""Largest leverage; the Monte Carlo error of a covariance of samples could make it larger than
1."""


class TrainingExamples(NamedTuple):
    """The posterior's outputs at some training examples."""

    likelihood: Likelihood

    deviations: Tensor
    """J w_k, (n, K, ..., C)."""

    largest_variance: Tensor
    """The largest variance of their centred outputs, (), each in the posterior without the
    example."""

    def distances(self, deviations: Tensor) -> Tensor:
        """Return the distances of inputs, by J w_k (K, B, ..., C), to the nearest example, (B, 2).

        Both are the posterior standard deviation of the difference between the outputs at input and
        example. The first is relative to the smaller of the two standard deviations of these
        outputs, the second to that of the example.
        """
        # distances are differences of squares, for which float32 would lose half of its digits
        known = centred(self.likelihood, self.deviations).flatten(1).double()
        points = centred(self.likelihood, deviations).movedim(0, 1).flatten(1).to(known)
        if points.shape[1] != known.shape[1]:
            raise ValueError(
                f"These inputs have outputs of shape {tuple(deviations.shape[2:])}, but training "
                f"examples {tuple(self.deviations.shape[2:])}: their distances cannot be compared. "
                "Pass inputs of the same size."
            )
        squares = known.square().sum(1)

        def nearest(part: Tensor) -> Tensor:
            # squared distances by a product: half the time of torch.cdist
            own = part.square().sum(1, keepdim=True)
            apart = torch.addmm(squares, part, known.T, alpha=-2) + own
            found = []
            for scale in (torch.minimum(own, squares), squares.expand_as(apart)):
                at = (apart / scale).argmin(1, keepdim=True)
                distance = (part - known[at[:, 0]]).norm(dim=1)
                found.append(distance / scale.gather(1, at)[:, 0].sqrt())
            return torch.stack(found, 1)

        return in_parts(nearest, NUMBERS // max(1, len(known)), points)


def centred(likelihood: Likelihood, deviations: Tensor) -> Tensor:
    """Return outputs minus their mean over classes, which has no influence on predictions."""
    if likelihood.gives_probabilities and not likelihood.elementwise:
        return deviations - deviations.mean(-1, keepdim=True)
    return deviations


def output_variance(likelihood: Likelihood, deviations: Tensor) -> Tensor:
    """Return the variance of the centred outputs, averaged over outputs, (B,), for (K, B, ...,
    C)."""
    variance = centred(likelihood, deviations).square().mean(0)  # one axis is faster on a CPU
    return variance.flatten(1).mean(1) if variance.dim() > 1 else variance


def largest_variance(likelihood: Likelihood, deviations: Tensor, leverages: Tensor) -> Tensor:
    """Return the largest of these variances among training examples, (), each in the posterior
    without the example.

    The factors (I - L)^-½ of its leverage L, (n, K, K), turn J w_k, (n, K, ..., C), into draws
    without the example.
    """
    shares, vectors = torch.linalg.eigh(leverages.double())
    factors = (1 - shares.clamp(0, _MOST)).rsqrt()[..., None] * vectors.mT
    moved = (factors @ deviations.flatten(2).double()).view_as(deviations)
    return output_variance(likelihood, moved.movedim(1, 0)).max()
