"""Training examples that a fit keeps, the distances of inputs to them, and the variance above which
means are shrunk."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction.conformal import in_parts
from torch_lla_em.runtime import NUMBERS

_MOST = 0.95
"""Largest leverage; by the Monte Carlo error of a covariance of samples it can exceed 1."""


class TrainingExamples(NamedTuple):
    """What is known of some training examples."""

    likelihood: Likelihood

    deviations: Tensor
    """J w_k, (n, K, ..., C)."""

    largest_variance: Tensor
    """The largest variance of their centred outputs, each without itself in the posterior, ()."""

    def distances(self, deviations: Tensor) -> Tensor:
        """Return the distances of inputs, by J w_k (K, B, ..., C), to the nearest example, (B, 2).

        Both are the posterior standard deviation of a difference of outputs: the first relative to
        the smaller one of their own standard deviations, the second relative to the example's.
        """
        # distances are differences of squares, in which float32 would lose half of its digits
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
    """Return outputs without their mean over classes, which moves no prediction."""
    if likelihood.gives_probabilities and not likelihood.elementwise:
        return deviations - deviations.mean(-1, keepdim=True)
    return deviations


def output_variance(likelihood: Likelihood, deviations: Tensor) -> Tensor:
    """Return the variance of the centred outputs, averaged over them, (B,), of (K, B, ..., C)."""
    variance = centred(likelihood, deviations).square().mean(0)  # of one axis a CPU is faster
    return variance.flatten(1).mean(1) if variance.dim() > 1 else variance


def largest_variance(likelihood: Likelihood, deviations: Tensor, leverages: Tensor) -> Tensor:
    """Return the largest of these variances among training examples, each in the posterior without
    itself, ().

    The factors (I - L)^-½ of its leverage L, (n, K, K), turn J w_k, (n, K, ..., C), into draws
    without the example.
    """
    shares, vectors = torch.linalg.eigh(leverages.double())
    factors = (1 - shares.clamp(0, _MOST)).rsqrt()[..., None] * vectors.mT
    moved = (factors @ deviations.flatten(2).double()).view_as(deviations)
    return output_variance(likelihood, moved.movedim(1, 0)).max()
