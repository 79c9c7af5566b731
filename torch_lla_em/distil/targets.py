"""What a student learns: a posterior's predictions, and how far a student is from them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction import Prediction

# part of the mean that is added to an uncertainty before the logarithm is taken
_FLOOR = 1e-4
# part of the median distance below which an example counts as one of those it is compared with
_SAME = 1e-2


class Known(NamedTuple):
    """Inputs of one shape with the predictions of a posterior, classes last."""

    x: Any
    """B inputs."""

    given: Tensor
    """Which were given, (B,); the others were made from those."""

    expectation: Tensor
    """E[y], (B, *sites, C)."""

    uncertainty: Tensor
    """The epistemic part and, unless E[y] is a probability, the aleatoric part: (B, *sites, n)."""

    scores: Tensor
    """Out-of-distribution scores, (B, S)."""

    @classmethod
    def of(cls, x: Any, prediction: Prediction, is_given: bool = False) -> Known:
        """Return inputs with what a student learns of their prediction."""
        expectation = prediction.expectation

        def last(values: Tensor) -> Tensor:
            if values.dim() < expectation.dim():
                return values.unsqueeze(-1)
            return values.movedim(prediction.class_dim, -1)

        parts = [last(prediction.epistemic)]
        if not prediction.likelihood.gives_probabilities:
            parts.append(last(prediction.aleatoric))
        scores = prediction.scored.values.to(expectation)
        given = torch.full_like(scores[:, 0], is_given, dtype=torch.bool)
        return cls(x, given, last(expectation), torch.cat(parts, -1), scores)

    def logarithms(self) -> tuple[Tensor, Tensor]:
        """Return what the head learns: the logarithms of uncertainties and of scores."""
        finite = self.uncertainty.where(self.uncertainty.isfinite(), 0)
        floor = (_FLOOR * finite.flatten(0, -2).mean(0)).clamp_min(torch.finfo(finite.dtype).tiny)
        return (self.uncertainty + floor).log(), log_scores(self.scores)


def log_scores(scores: Tensor) -> Tensor:
    """Return the logarithms of scores; NaN for examples that are compared with themselves."""
    finite = scores.where(scores.isfinite(), torch.nan)
    known = finite > _SAME * finite.nanmedian(0).values
    return finite.log().where(known, torch.nan)


def divergence(likelihood: Likelihood, f: Tensor, log_uncertainty: Tensor, due: Known) -> Tensor:
    """Return KL(posterior's prediction ‖ student's) of each example, (B,), a mean over its sites.

    For labels it is that of distributions over classes, for others that of Gaussians with the same mean and
    variance, which is the sum of both parts of the uncertainty.
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
        known = due.uncertainty.unflatten(-1, (2, -1)).sum(-2)
        variance = log_uncertainty.exp().unflatten(-1, (2, -1)).sum(-2)
        ratio = (known + (p - likelihood.mean(f)).square()) / variance
        terms = 0.5 * (ratio - 1 - (known / variance).log())
    return terms.flatten(1).mean(1) if terms.dim() > 1 else terms
