"""Predictions in one form, and what they score."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from math import log, pi

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.functional import mean_squared_error
from torchmetrics.functional.classification import (
    binary_auroc,
    multiclass_accuracy,
    multiclass_calibration_error,
)

from torch_lla_em import Prediction
from torch_lla_em.prediction import functions_of

_LABELS, _BATCHES = 10, 500
_NINETY = 1.6449
"""Standard deviations on either side of the mean that hold 90 % of a Gaussian."""

Groups = dict[str, Tensor]
"""Name of a joint score -> the rows that are scored together."""


def equal_functions(prediction: Prediction) -> Tensor:
    """Return functions of equal weight, (S, B, ..., C), whose averages are as exact as the prediction's own."""
    found, weights = functions_of(prediction)
    if weights is None:
        return found
    counts = (weights / weights[0]).round().clamp_max(1024).long()
    return found.repeat_interleave(counts, 0)


@dataclass(frozen=True)
class Classes:
    """Class probabilities at B inputs, and the logits of S functions, joint over inputs."""

    log_probs: Tensor
    """(B, C)."""

    draw: Callable[[], Tensor]
    """() -> (S, B, C), one row only where a method has no posterior."""

    @classmethod
    def of(cls, samples: Tensor) -> "Classes":
        """Return the average over S functions, by the logarithm of the mean probability."""
        log_probs = samples.log_softmax(-1).logsumexp(0) - log(len(samples))
        return cls(log_probs, lambda: samples)

    @cached_property
    def samples(self) -> Tensor:
        return self.draw()

    @property
    def unfamiliarity(self) -> Tensor:
        """Mutual information where there is a posterior, else entropy, shape (B,)."""
        if len(self.samples) == 1:
            return torch.special.entr(self.log_probs.exp()).sum(-1)
        p = self.samples.softmax(-1)
        entropy = torch.special.entr(p.mean(0)).sum(-1)
        return entropy - torch.special.entr(p).sum(-1).mean(0)

    def joint(self, y: Tensor, groups: Tensor) -> float:
        """Return the joint NLL per label of groups of rows, (G, labels)."""
        index = y.expand(len(self.samples), -1)[..., None]
        per_sample = self.samples.log_softmax(-1).gather(-1, index)[..., 0].double()
        together = per_sample[:, groups].sum(-1).logsumexp(0) - log(len(per_sample))
        return -together.mean().item() / groups.shape[-1]

    def scores(self, y: Tensor, groups: Groups | None = None) -> dict[str, float]:
        """Return what the labels say of the predictions."""
        # beyond 1, by rounding, torchmetrics would take them for logits
        p, classes = self.log_probs.exp().clamp_max(1), self.log_probs.shape[-1]
        if groups is None:
            groups = {"joint_dyadic": dyadic(len(y))}
        return {
            "accuracy": multiclass_accuracy(p, y, classes, average="micro").item(),
            "nll": F.nll_loss(self.log_probs, y).item(),
            "ece": multiclass_calibration_error(p, y, classes, n_bins=15).item(),
            "brier": (p - F.one_hot(y, classes)).square().sum(-1).mean().item(),
            **{name: self.joint(y, rows) for name, rows in groups.items()},
        }


@dataclass(frozen=True)
class Numbers:
    """A Gaussian over f at B inputs, and the noise of y."""

    mean: Tensor
    """(B,)."""

    covariance: Tensor
    """(B, B)."""

    sigma: float

    @classmethod
    def of(cls, samples: Tensor, sigma: float) -> "Numbers":
        """Return the moments of S functions (S, B)."""
        mean = samples.mean(0)
        deviations = samples - mean
        return cls(mean, deviations.T @ deviations / len(samples), sigma)

    @property
    def unfamiliarity(self) -> Tensor:
        return self.covariance.diagonal()

    def scores(self, y: Tensor, groups: Groups | None = None) -> dict[str, float]:
        """Return what the targets say of the predictions."""
        y, groups = y.flatten(), groups or {}
        variance = self.covariance.diagonal() + self.sigma**2
        terms = (y - self.mean) ** 2 / variance + variance.log() + log(2 * pi)
        return {
            "rmse": mean_squared_error(self.mean, y, squared=False).item(),
            "nll": 0.5 * terms.mean().item(),
            "crps": crps(self.mean, variance.sqrt(), y),
            "coverage": ((y - self.mean) ** 2 < _NINETY**2 * variance).double().mean().item(),
            **{name: self.joint(y, rows) for name, rows in groups.items()},
        }

    def joint(self, y: Tensor, index: Tensor) -> float:
        """Return the joint NLL per target of groups of different rows, (G, targets)."""
        eye = self.sigma**2 * torch.eye(index.shape[-1], dtype=torch.float64)
        blocks = self.covariance.double()[index[:, :, None], index[:, None]] + eye
        blocks = 0.5 * (blocks + blocks.mT)
        normal = torch.distributions.MultivariateNormal(self.mean.double()[index], blocks)
        return -normal.log_prob(y.double()[index]).mean().item() / index.shape[-1]


def crps(mean: Tensor, deviation: Tensor, y: Tensor) -> float:
    """Return the mean CRPS of Gaussians."""
    normal, z = torch.distributions.Normal(0.0, 1.0), (y - mean) / deviation
    each = z * (2 * normal.cdf(z) - 1) + 2 * normal.log_prob(z).exp() - pi**-0.5
    return (deviation * each).mean().item()


def auroc(familiar: Tensor, shifted: Tensor) -> float:
    """Return how well a score tells shifted inputs (higher) from familiar ones."""
    values = torch.cat([familiar, shifted]).double()
    ranks = values.unique(return_inverse=True)[1].double()
    target = torch.cat([torch.zeros(len(familiar)), torch.ones(len(shifted))]).long()
    # ranks: torchmetrics would squash scores outside of [0, 1]
    return binary_auroc(ranks / ranks.max().clamp_min(1), target).item()


def neighbours(x: Tensor, count: int = 200) -> Tensor:
    """Return groups of rows, each a random one and its nearest ones, (count, ten)."""
    generator = torch.Generator().manual_seed(2)
    anchors = torch.randperm(len(x), generator=generator)[:count]
    return torch.cdist(x.flatten(1)[anchors], x.flatten(1)).argsort(1)[:, :_LABELS]


@cache
def dyadic(rows: int) -> Tensor:
    """Return ten labels drawn with replacement from two anchors (Osband et al., 2022)."""
    generator = torch.Generator().manual_seed(0)
    pairs = torch.rand(_BATCHES, rows, generator=generator).argsort(1)[:, :2]
    chosen = torch.randint(2, (_BATCHES, _LABELS), generator=generator)
    return pairs.gather(1, chosen)
