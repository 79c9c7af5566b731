"""Training examples that a fit stores, to detect inputs that are far from all of them.

An input is described by J w_k, the posterior's samples of its outputs. Its distance to a training
example is then the posterior standard deviation of the difference of their outputs: how little the
one says about the other. And where outputs vary more than at any of these examples, the means of a
prediction are extrapolated, and shrunk in proportion.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood

# differences between inputs and training examples that are held at a time
_NUMBERS = 2**22


class TrainingExamples(NamedTuple):
    """What is known of some training examples."""

    likelihood: Likelihood

    deviations: Tensor
    """J w_k, (n, K, ..., C)."""

    largest_variance: Tensor
    """The largest variance of their centred outputs, ()."""

    def distance(self, deviations: Tensor) -> Tensor:
        """Return the distance of inputs, given by J w_k (K, B, ..., C), to the nearest one, (B,)."""
        known = self._features()
        points = centred(self.likelihood, deviations).movedim(0, 1).flatten(1).to(known)
        parts = points.split(max(1, _NUMBERS // max(1, len(known))))
        nearest = [torch.cdist(part, known).min(1).values for part in parts]
        distances: Tensor = torch.cat(nearest).double() / len(deviations) ** 0.5
        return distances

    def distances(self) -> Tensor:
        """Return the distance of each of these examples to the nearest other one, (n,)."""
        known = self._features()
        between = torch.cdist(known, known).fill_diagonal_(torch.inf)
        distances: Tensor = between.min(1).values.double() / self.deviations.shape[1] ** 0.5
        return distances

    def kept_share(self, deviations: Tensor) -> Tensor:
        """Return the factor of the mean at inputs, (B,): 1 if the variance is within that of training data."""
        variance = output_variance(self.likelihood, deviations)
        largest = self.largest_variance.to(variance)
        return torch.where(variance > largest, largest / variance, torch.ones_like(variance))

    def _features(self) -> Tensor:
        return centred(self.likelihood, self.deviations).flatten(1)


def centred(likelihood: Likelihood, deviations: Tensor) -> Tensor:
    """Return outputs without their mean over classes, which moves no prediction."""
    if likelihood.gives_probabilities and not likelihood.elementwise:
        return deviations - deviations.mean(-1, keepdim=True)
    return deviations


def output_variance(likelihood: Likelihood, deviations: Tensor) -> Tensor:
    """Return the variance of the centred outputs, averaged over them, (B,), of (K, B, ..., C)."""
    variance = centred(likelihood, deviations).square().mean(0)
    return variance[:, None].flatten(1).mean(1)
