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

        The second is the posterior standard deviation d of a difference of outputs, the first d /
        √(σ σ') by their own.
        """
        # distances are differences of squares, in which float32 would lose half of its digits
        known, K = centred(self.likelihood, self.deviations).flatten(1).double(), len(deviations)
        points = centred(self.likelihood, deviations).movedim(0, 1).flatten(1).to(known)
        if points.shape[1] != known.shape[1]:
            raise ValueError(
                f"These inputs have outputs of shape {tuple(deviations.shape[2:])}, but training "
                f"examples {tuple(self.deviations.shape[2:])}: their distances cannot be compared. "
                "Pass inputs of the same size."
            )
        squares = known.square().sum(1)
        sizes = squares.sqrt()

        def nearest(part: Tensor) -> Tensor:
            # squared distances less the square of the input: half the time of torch.cdist
            apart = torch.addmm(squares, part, known.T, alpha=-2)
            relative = (apart + part.square().sum(1, keepdim=True)) / sizes
            least = relative.argmin(1), apart.argmin(1)
            relative, distance = ((part - known[at]).norm(dim=1) for at in least)
            scale = (part.norm(dim=1) * sizes[least[0]]).sqrt()
            return torch.stack([relative / scale, distance / K**0.5], 1)

        return in_parts(nearest, NUMBERS // max(1, len(known)), points)

    def unit(self) -> Tensor:
        """Return the largest standard deviation of these examples, relative to which distances
        round."""
        outputs = self.deviations[:1, 0].numel()
        return (self.largest_variance.double() * outputs).sqrt()


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
