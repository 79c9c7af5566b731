"""What a student learns, and how far its predictions are from those of the posterior."""

from __future__ import annotations

from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction import Prediction

# largest mean KL, in nats, of a student that is good enough; more is accepted far from the data
_KL, _KL_MADE = 0.03, 0.1
# smallest rank correlation that is good enough
_CORRELATION = 0.8
# part of the mean that is added to an uncertainty before the logarithm is taken
_FLOOR = 1e-4
# part of the median distance below which an example counts as one of those it is compared with
_SAME = 1e-2


class Known(NamedTuple):
    """Inputs with the predictions of a posterior, classes last."""

    x: Any
    """B inputs."""

    expectation: Tensor
    """E[y], (B, *sites, C)."""

    uncertainty: Tensor
    """The epistemic part and, unless E[y] is a probability, the aleatoric part: (B, *sites, n)."""

    scores: Tensor
    """Out-of-distribution scores, (B, S)."""

    @classmethod
    def of(cls, x: Any, prediction: Prediction) -> Known:
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
        return cls(x, last(expectation), torch.cat(parts, -1), scores)

    def logarithms(self) -> tuple[Tensor, Tensor]:
        """Return what the head learns: the logarithms of uncertainties and of scores."""
        finite = self.uncertainty.where(self.uncertainty.isfinite(), 0)
        floor = (_FLOOR * finite.flatten(0, -2).mean(0)).clamp_min(torch.finfo(finite.dtype).tiny)
        return (self.uncertainty + floor).log(), self.log_scores()

    def log_scores(self) -> Tensor:
        """Return the logarithms of scores; NaN for examples that are compared with themselves."""
        finite = self.scores.where(self.scores.isfinite(), torch.nan)
        known = finite > _SAME * finite.nanmedian(0).values
        return finite.log().where(known, torch.nan)

    def divergence(self, likelihood: Likelihood, f: Tensor, log_uncertainty: Tensor) -> Tensor:
        """Return KL(posterior's prediction ‖ student's) of each example, (B,), a mean over its sites.

        For labels it is that of distributions over classes, for others that of Gaussians with the same mean
        and variance, which is the sum of both parts of the uncertainty.
        """
        p = self.expectation
        if likelihood.gives_probabilities:
            log_q = likelihood.log_mean(f)
            terms = torch.xlogy(p, p) - p * log_q
            if likelihood.elementwise:
                q = log_q.exp().clamp(max=1 - torch.finfo(f.dtype).eps)
                terms = terms + torch.xlogy(1 - p, 1 - p) - (1 - p) * (-q).log1p()
            else:
                terms = terms.sum(-1)
        else:
            parts = self.uncertainty, log_uncertainty.exp()
            known, variance = (part.unflatten(-1, (2, -1)).sum(-2) for part in parts)
            ratio = (known + (p - likelihood.mean(f)).square()) / variance
            terms = 0.5 * (ratio - 1 - (known / variance).log())
        return terms.flatten(1).mean(1) if terms.dim() > 1 else terms


class StudentError(NamedTuple):
    """How far a student is from its posterior; ``print(student)`` shows it.

    Inputs are those that were left out of the training, or made from these. OOD scores of the former are nearly
    equal, and their ranks noise; uncertainties of the latter matter less.
    """

    number: int = 0
    """Number of inputs that were left out."""

    kl: float = nan
    """Mean KL(posterior's prediction ‖ student's) there, in nats."""

    kl_error: float = nan
    """Its standard error."""

    epistemic: float = nan
    """Rank correlation of the epistemic uncertainties there."""

    kl_made: float = nan
    """Mean KL at inputs that were made."""

    ood_made: float = nan
    """Rank correlation of the out-of-distribution scores there; the smallest, if there are several."""

    @property
    def warnings(self) -> list[str]:
        """What is not good enough, and what helps."""
        found = [
            f"its mean KL from the posterior at {name} inputs is {kl:.2g} nats"
            for name, kl, most in (("held-out", self.kl, _KL), ("made", self.kl_made, _KL_MADE))
            if kl > most
        ]
        if self.epistemic < _CORRELATION:
            found.append(
                f"the rank correlation of its epistemic uncertainty is {self.epistemic:.2f}"
            )
        if self.ood_made < _CORRELATION:
            found.append(f"the rank correlation of its OOD scores is {self.ood_made:.2f}")
        if not found:
            return []
        return [
            f"The student is not close to the posterior: {'; '.join(found)}. Pass more unlabelled "
            "inputs, increase num_inputs or steps, or pass a wider network as student=."
        ]

    def rows(self) -> list[tuple[str, ...]]:
        """Return the rows of a table."""
        if not self.number:
            return []
        own = f"KL {self.kl:.2g} ± {self.kl_error:.1g}, rank correlation of epistemic {self.epistemic:.3f}"
        rows = [("held-out inputs", f"{own} ({self.number:,} inputs)")]
        made = f"KL {self.kl_made:.2g}, rank correlation of OOD scores {self.ood_made:.3f}"
        return [*rows, ("made inputs", made), *(("warning", words) for words in self.warnings)]

    @classmethod
    def of(cls, record: dict[str, Any]) -> StudentError:
        """Return the error of a JSON record, also of one of version 0.4, which has a record for each kind of inputs."""
        if "held_out" in record:
            own, made = (record[name] or [0, *4 * [nan]] for name in ("held_out", "made"))
            return cls(*own[:4], made[1], made[4])
        return cls(**record)


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Return Spearman's correlation of two vectors, over entries where both are finite."""
    known = a.isfinite() & b.isfinite()
    a, b = (v[known].argsort().argsort().double() for v in (a, b))
    return torch.corrcoef(torch.stack([a, b]))[0, 1].item() if len(a) > 1 else nan
