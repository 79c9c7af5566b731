"""How far a student's predictions are from those of the posterior."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

# largest mean KL, in nats, of a student that is good enough; more is accepted far from the data
_KL = {"held-out": 0.03, "made": 0.1}
# smallest rank correlation that is good enough
_CORRELATION = 0.8


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

    def __str__(self) -> str:
        return (
            f"KL {self.kl:.2g} ± {self.kl_error:.1g}, rank correlation of epistemic "
            f"{self.epistemic:.3f} ({self.number:,} inputs)"
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
        gain = self.network - self.posterior
        kept = f": {self.kept:.0%} of the gain kept" if gain > 0 else ""
        if abs(gain) <= 2 * self.gain_error:
            kept = ": no measurable difference between network and posterior"
        return (
            f"network {self.network:.4f}, posterior {self.posterior:.4f}, student "
            f"{self.student:.4f}{kept} ({self.number:,} examples)"
        )


class StudentError(NamedTuple):
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
        # OOD scores of held-out inputs are nearly equal, and their ranks noise: all are near the data
        for name, words, field in (
            ("held-out", "epistemic uncertainty", "epistemic"),
            ("made", "OOD scores", "ood"),
        ):
            at = self.held_out if name == "held-out" else self.made
            if at is not None and not at.kl <= _KL[name]:
                found.append(f"its mean KL from the posterior at {name} inputs is {at.kl:.2g} nats")
            if at is not None and getattr(at, field) < _CORRELATION:
                known = f"{getattr(at, field):.2f}"
                found.append(f"the rank correlation of its {words} at {name} inputs is {known}")
        if not found:
            return []
        return [
            f"The student is not close to the posterior: {'; '.join(found)}. Pass more unlabelled "
            "inputs, increase num_inputs or steps, or pass a wider network as student=."
        ]

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of a table."""
        named: dict[str, Any] = {"held-out inputs": self.held_out, "made inputs": self.made}
        if self.made is not None:
            named["OOD scores"] = f"rank correlation {self.made.ood:.3f} at made inputs"
        named["NLL"] = self.nll
        rows = [(name, str(value)) for name, value in named.items() if value is not None]
        return rows + [("warning", words) for words in self.warnings]

    @classmethod
    def of(cls, record: dict[str, Any]) -> StudentError:
        """Return the error of a JSON record; those of version 0.4 have more numbers at the end."""
        kinds: dict[str, Any] = {"held_out": Agreement, "made": Agreement, "nll": Likelihoods}
        return cls(**{n: v and kinds[n](*v[: len(kinds[n]._fields)]) for n, v in record.items()})


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Return Spearman's correlation of two vectors, over entries where both are finite."""
    known = a.isfinite() & b.isfinite()
    a, b = (v[known].argsort().argsort().double() for v in (a, b))
    if len(a) < 2:
        return float("nan")
    return torch.corrcoef(torch.stack([a, b]))[0, 1].item()
