"""How far a student's predictions are from those of the posterior."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.distil.targets import (
    StudentTargets,
    divergence,
    log_scores,
    rank_correlation,
    variance_of,
)
from torch_lla_em.likelihoods import Likelihood

_KL = {"held-out": 0.03, "made": 0.1}
"""Largest mean KL, in nats, of a student that is good enough; more is accepted far from the data."""

_CORRELATION = 0.8
"""Smallest rank correlation of epistemic uncertainties at held-out inputs, and of OOD scores at made
inputs. Those of held-out inputs are mostly noise, because all of them are near the training examples."""

_NARROW = 0.5
"""Spread of the logarithms of OOD scores at held-out inputs, relative to that at made inputs, below which they
are nearly equal."""

_NEARLY_EQUAL = (
    "The OOD scores of held-out inputs are nearly equal, since all are near the training data, so that their ranks "
    "are mostly noise. Judge the student by those of made inputs."
)


class Agreement(NamedTuple):
    """A student and the posterior at the same inputs, which were not used in training."""

    number: int
    """Number of inputs."""

    kl: float
    """Mean KL(posterior's prediction ‖ student's), in nats."""

    kl_error: float
    """Its standard error."""

    epistemic: float
    """Rank correlation of the epistemic uncertainties."""

    ood: float
    """Rank correlation of the out-of-distribution scores; the smallest, if there are several."""

    ood_spread: float = float("nan")
    """Standard deviation of the logarithms of the posterior's own scores, of the same ones."""

    def __str__(self) -> str:
        return (
            f"KL {self.kl:.2g} ± {self.kl_error:.1g}, rank correlation of epistemic "
            f"{self.epistemic:.3f}, of OOD scores {self.ood:.3f} ({self.number:,} inputs)"
        )


class Likelihoods(NamedTuple):
    """Negative log-likelihoods (NLL) of a labelled validation set."""

    network: float
    posterior: float
    student: float
    number: int
    gain_error: float = float("nan")
    """Standard error of the difference between network and posterior."""

    @property
    def kept(self) -> float:
        """The share of the posterior's gain over the network that the student keeps."""
        gain = self.network - self.posterior
        return (self.network - self.student) / gain if gain else float("nan")

    def __str__(self) -> str:
        gain, kept = self.network - self.posterior, ""
        if gain > 0:  # a share of a gain that may be none has no meaning
            kept = f": {self.kept:.0%} of the gain kept"
        if abs(gain) <= 2 * self.gain_error:
            kept = ": no measurable difference between network and posterior"
        return (
            f"network {self.network:.4f}, posterior {self.posterior:.4f}, student "
            f"{self.student:.4f}{kept} ({self.number:,} examples)"
        )


@dataclass(frozen=True)
class StudentError:
    """How far a student is from its posterior; ``print(student)`` shows it."""

    held_out: Agreement | None = None
    """At some of the given inputs, which were left out of the training."""

    made: Agreement | None = None
    """At inputs that were made from these."""

    nll: Likelihoods | None = None
    """On the labelled examples of ``validation``."""

    @property
    def warnings(self) -> list[str]:
        """What is not good enough, and what helps."""
        found = []
        for name, at in (("held-out", self.held_out), ("made", self.made)):
            if at is not None and not at.kl <= _KL[name]:
                found.append(f"its mean KL from the posterior at {name} inputs is {at.kl:.2g} nats")
        for words, at, field in (
            ("epistemic uncertainty at held-out", self.held_out, "epistemic"),
            ("OOD scores at made", self.made, "ood"),
        ):
            if at is not None and getattr(at, field) < _CORRELATION:
                found.append(
                    f"the rank correlation of its {words} inputs is {getattr(at, field):.2f}"
                )
        if not found:
            return []
        return [
            f"The student is not close to the posterior: {'; '.join(found)}. Pass more unlabelled "
            "inputs, increase num_inputs or steps, or pass a wider network as student=."
        ]

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of a table."""
        named = {"held-out inputs": self.held_out, "made inputs": self.made, "NLL": self.nll}
        rows = [(name, str(value)) for name, value in named.items() if value is not None]
        if self._scores_are_nearly_equal():
            rows.append(("note", _NEARLY_EQUAL))
        return rows + [("warning", words) for words in self.warnings]

    def _scores_are_nearly_equal(self) -> bool:
        """Whether held-out inputs have other ranks because their OOD scores hardly differ."""
        if self.held_out is None or not self.held_out.ood < _CORRELATION:
            return False
        usual = 1.0 if self.made is None else self.made.ood_spread
        return self.held_out.ood_spread < _NARROW * usual

    def record(self) -> dict[str, Any]:
        """Return the numbers as a JSON record."""
        return asdict(self)

    @classmethod
    def of(cls, record: dict[str, Any]) -> StudentError:
        """Return the error of a JSON record."""
        kinds: dict[str, Any] = {"held_out": Agreement, "made": Agreement, "nll": Likelihoods}
        return cls(**{n: None if v is None else kinds[n](*v) for n, v in record.items()})


def agreement(
    likelihood: Likelihood, found: list[tuple[Tensor, Tensor, Tensor, StudentTargets]]
) -> Agreement:
    """Compare outputs and heads of a student with the posterior's predictions at the same inputs."""
    each, own, theirs, scores, known = [], [], [], [], []
    for f, uncertainty, score, due in found:
        each.append(divergence(likelihood, f, variance_of(likelihood, uncertainty), due).double())
        parts = 1 if likelihood.gives_probabilities else 2
        own.append(uncertainty.chunk(parts, -1)[0].flatten())
        theirs.append(due.uncertainty.chunk(parts, -1)[0].flatten())
        scores.append(score)
        known.append(due.scores)
    kl, due_scores = torch.cat(each), log_scores(torch.cat(known)).T
    ood, spread = min(
        (rank_correlation(a, b), b[b.isfinite()].std(correction=0).item())
        for a, b in zip(torch.cat(scores).T, due_scores)
    )
    return Agreement(
        len(kl),
        kl.mean().item(),
        kl.std().item() / len(kl) ** 0.5 if len(kl) > 1 else float("nan"),
        rank_correlation(torch.cat(own), torch.cat(theirs)),
        ood,
        spread,
    )
