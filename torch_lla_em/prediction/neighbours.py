"""Training examples that a fit keeps, and the distances of inputs to them under the posterior.

An input is described by J w_k, the posterior's samples of its outputs. Its distance to a training
example is the posterior standard deviation of the difference of their outputs. Where outputs vary
more than they would at any of these examples without its label, the means of a prediction are
extrapolated, and shrunk in proportion.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction.scores import NUMBERS, in_parts

_CANDIDATES = 64
"""Neighbours of a training example among which the nearest without it is looked for: of 32 samples they find
distances to .6 % on four problems, as 32 do, and 8 to 11 %."""

_MOST = 0.95
"""Largest leverage; by the Monte Carlo error of a covariance of samples it can exceed 1."""


class TrainingExamples(NamedTuple):
    """What is known of some training examples."""

    likelihood: Likelihood

    deviations: Tensor
    """J w_k, (n, K, ..., C)."""

    largest_variance: Tensor
    """The largest variance of their centred outputs, each without itself in the posterior, ()."""

    between: Tensor | None = None
    """The distances of each to the nearest other one, without itself in the posterior, (n, 2)."""

    def distances(self, deviations: Tensor) -> Tensor:
        """Return the distances of inputs, by J w_k (K, B, ..., C), to the nearest example, (B, 2).

        The second is the posterior standard deviation d of a difference of outputs, the first d / √(σ σ') by their own.
        """
        known, K = self._features(), len(deviations)
        points = centred(self.likelihood, deviations).movedim(0, 1).flatten(1).to(known)
        if points.shape[1] != known.shape[1]:
            raise ValueError(
                f"These inputs have outputs of shape {tuple(deviations.shape[2:])}, but training examples "
                f"{tuple(self.deviations.shape[2:])}: their distances cannot be compared. Pass inputs of the "
                "same size, or call la.calibrate with such inputs."
            )
        sizes = known.norm(dim=1)

        def nearest(part: Tensor) -> Tensor:
            apart = torch.cdist(part, known)
            least = (apart / sizes.sqrt()).argmin(1), apart.argmin(1)
            relative, distance = ((part - known[at]).norm(dim=1) for at in least)
            scale = (part.norm(dim=1) * sizes[least[0]]).sqrt()
            return torch.stack([relative / scale, distance / K**0.5], 1)

        return in_parts(nearest, NUMBERS // max(1, len(known)), points)

    def distances_without(self, factors: Tensor) -> Tensor:
        """Return the distances of these examples to the nearest other one, (n, 2), each without it in the posterior.

        Among many others the nearest few with the example are candidates.
        """
        known, K = self._features(), self.deviations.shape[1]
        count = min(len(known) - 1, _CANDIDATES)
        if not count:
            return torch.full_like(known[:, :2], torch.inf)
        apart, sizes = torch.cdist(known, known).fill_diagonal_(torch.inf), known.norm(dim=1)
        scales = sizes.sqrt(), torch.ones_like(sizes)
        near = [(apart / scale).topk(count, largest=False).indices for scale in scales]

        def nearest(rows: Tensor) -> Tensor:
            def moved(n: Tensor) -> Tensor:
                each = known[n].view(len(rows), -1, K, known.shape[1] // K).movedim(1, 2)
                return (factors[rows] @ each.flatten(2)).view(*each.shape)

            own, *others = moved(rows), moved(near[0][rows]), moved(near[1][rows])
            relative, distance = (_length(own - other) for other in others)
            relative = relative / (_length(own) * _length(others[0])).sqrt()
            return torch.stack([relative.amin(1), distance.amin(1) / K**0.5], 1)

        return in_parts(nearest, 64, torch.arange(len(known), device=known.device))

    def unit(self) -> Tensor:
        """Return the largest standard deviation of these examples, relative to which distances round."""
        outputs = self.deviations[:1, 0].numel()
        return (self.largest_variance.double() * outputs).sqrt()

    def kept_share(self, deviations: Tensor) -> Tensor:
        """Return the factor of the mean at inputs, (B,): 1 if the variance is within that of training data."""
        variance = output_variance(self.likelihood, deviations)
        largest = self.largest_variance.to(variance)
        return torch.where(variance > largest, largest / variance, 1.0)

    def _features(self) -> Tensor:
        # distances are differences of squares, in which float32 would lose half of its digits
        return centred(self.likelihood, self.deviations).flatten(1).double()


def _length(values: Tensor) -> Tensor:
    """Return norms of J w of candidates (rows, K, candidates, C) over samples and outputs."""
    return values.square().sum((1, 3)).sqrt()


def centred(likelihood: Likelihood, deviations: Tensor) -> Tensor:
    """Return outputs without their mean over classes, which moves no prediction."""
    if likelihood.gives_probabilities and not likelihood.elementwise:
        return deviations - deviations.mean(-1, keepdim=True)
    return deviations


def output_variance(likelihood: Likelihood, deviations: Tensor) -> Tensor:
    """Return the variance of the centred outputs, averaged over them, (B,), of (K, B, ..., C)."""
    squares = centred(likelihood, deviations).square()
    return squares.mean((0, *range(2, squares.dim())))


def variances_without(likelihood: Likelihood, deviations: Tensor, factors: Tensor) -> Tensor:
    """Return this variance for training examples, each in the posterior without itself, (n,)."""
    moved = factors @ deviations.flatten(2).double()
    return output_variance(likelihood, moved.view_as(deviations).movedim(1, 0))


def without_itself(leverages: Tensor) -> Tensor:
    """Return the factors that turn J w_k into draws without the example, (I - L)^-½ of its leverage, (n, K, K)."""
    shares, vectors = torch.linalg.eigh(leverages.double())
    factors: Tensor = (1 - shares.clamp(0, _MOST)).rsqrt()[..., None] * vectors.mT
    return factors
