"""What a student learns: a posterior's predictions, and how far a student is from them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction import Prediction

# part of the mean that is added to an uncertainty before the logarithm is taken
_FLOOR = 1e-4
# part of the median distance below which an example counts as one of those it is compared with
_SAME = 1e-2


class StudentTargets(NamedTuple):
    """Predictions of a posterior at B inputs, classes last."""

    expectation: Tensor
    """E[y], (B, *sites, C)."""

    uncertainty: Tensor
    """The epistemic part and, unless E[y] is a probability, the aleatoric part: (B, *sites, n)."""

    scores: Tensor
    """Out-of-distribution scores, (B, S)."""

    def part(self, rows: Tensor | slice) -> StudentTargets:
        """Return some of the examples."""
        return StudentTargets(*(t[rows] for t in self))


def of_prediction(prediction: Prediction) -> StudentTargets:
    """Return what a student learns of a prediction."""

    def last(values: Tensor) -> Tensor:
        if values.dim() < expectation.dim():
            return values.unsqueeze(-1)
        return values.movedim(prediction.class_dim, -1)

    expectation = prediction.expectation
    parts = [last(prediction.epistemic)]
    if not prediction.likelihood.gives_probabilities:
        parts.append(last(prediction.aleatoric))
    expectation = last(expectation)
    return StudentTargets(
        expectation, torch.cat(parts, -1), prediction._ood_scores().to(expectation)
    )


def joined(parts: Iterable[StudentTargets]) -> StudentTargets:
    """Concatenate the examples of several batches."""
    return StudentTargets(*(torch.cat(each) for each in zip(*parts)))


def logarithm(values: Tensor) -> Tensor:
    """Return log(v + ε) of uncertainties in columns, where ε is a small part of their mean."""
    finite = values.where(values.isfinite(), 0)
    floor = _FLOOR * finite.flatten(0, -2).mean(0)
    return (values + floor.clamp_min(torch.finfo(values.dtype).tiny)).log()


def log_scores(scores: Tensor) -> Tensor:
    """Return the logarithms of scores; NaN for examples that are compared with themselves."""
    finite = scores.where(scores.isfinite(), torch.nan)
    known = finite > _SAME * finite.nanmedian(0).values
    return finite.log().where(known, torch.nan)


def divergence(likelihood: Likelihood, f: Tensor, variance: Tensor, due: StudentTargets) -> Tensor:
    """Return KL(posterior's prediction ‖ student's) of each example, (B,), a mean over its sites.

    For labels it is that of distributions over classes, for others that of Gaussians with the same
    mean and variance. ``variance`` is that of y, (B, *sites, C); labels have none.
    """
    p = due.expectation
    if likelihood.gives_probabilities:
        log_q = likelihood.log_mean(f)
        terms = torch.xlogy(p, p) - p * log_q
        if likelihood.elementwise:
            q = log_q.exp().clamp(max=1 - torch.finfo(f.dtype).eps)
            terms = terms + torch.xlogy(1 - p, 1 - p) - (1 - p) * (-q).log1p()
        else:
            terms = terms.sum(-1)
    else:
        epistemic, aleatoric = due.uncertainty.chunk(2, -1)
        known = epistemic + aleatoric
        ratio = (known + (p - likelihood.mean(f)).square()) / variance
        terms = 0.5 * (ratio - 1 - (known / variance).log())
    return terms.flatten(1).mean(1) if terms.dim() > 1 else terms


def variance_of(likelihood: Likelihood, log_uncertainty: Tensor) -> Tensor:
    """Return the variance of y that a student predicts, (B, *sites, C); labels need none."""
    if likelihood.gives_probabilities:
        return log_uncertainty
    epistemic, aleatoric = log_uncertainty.chunk(2, -1)
    return epistemic.exp() + aleatoric.exp()


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Return Spearman's correlation of two vectors, over entries where both are finite."""
    known = a.isfinite() & b.isfinite()
    a, b = (v[known].argsort().argsort().double() for v in (a, b))
    if len(a) < 2:
        return float("nan")
    return torch.corrcoef(torch.stack([a, b]))[0, 1].item()
