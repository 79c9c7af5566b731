"""A table of fitted networks on the same validation set, and which differences are real."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import Data, paired
from torch_lla_em.prediction.fitted import Fitted
from torch_lla_em.prediction.held_out import JointLogProbs, pushed
from torch_lla_em.prediction.parts import Pushed, posterior_alone
from torch_lla_em.prediction.scores import Outcomes, joined, outcomes, scores
from torch_lla_em.prediction.tables import Lines, Shown

_CLEAR = 2.0
"""Standard errors beyond which a difference counts."""

_COLUMNS = "NLL", "network NLL", "accuracy", "ECE", "RMSE", "90 % coverage"


class _OnBatch(NamedTuple):
    """One posterior's outcomes on one batch."""

    posterior: Outcomes
    network: Tensor
    """log p(y | x) of the network alone, (B,)."""


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """What ``compare`` returns: print it for the table."""

    records: dict[str, dict[str, float]]
    """The scores of each posterior by name, in the order given."""

    log_probs: dict[str, Tensor]
    """log p(y | x) of each validation example, (N,), by name: paired across posteriors."""

    together: int
    """Examples predicted jointly in the held-out evidence."""

    @property
    def ranking(self) -> list[str]:
        """Names by validation NLL, the best first."""
        return sorted(self.records, key=lambda name: self.records[name]["NLL"])

    def behind(self, name: str) -> tuple[float, float]:
        """Return how much larger than the best a NLL is, and the paired standard error."""
        gap = self.log_probs[self.ranking[0]] - self.log_probs[name]
        error = gap.std().item() / len(gap) ** 0.5 if len(gap) > 1 else nan
        return gap.mean().item(), error

    @property
    def findings(self) -> list[str]:
        """What the table supports, as sentences."""
        best, *others = self.ranking
        lines = [f"{best!r} has the lowest NLL."]
        for name in others:
            gap, error = self.behind(name)
            noise = "" if gap > _CLEAR * error else ", which is within the noise"
            lines.append(f"{name!r} is worse by {gap:.2g} ± {error:.1g}{noise}.")
        return [
            *lines,
            "NLL ranks networks with their posteriors, network NLL ranks the networks alone, and "
            f"held-out evidence ranks joint predictions of {self.together} examples.",
            "log_marginal_likelihood is not shown: it compares priors on one network, not networks.",
        ]

    def __repr__(self) -> str:
        return "\n".join([super().__repr__(), *self.findings])

    def _repr_html_(self) -> str:
        return f"{super()._repr_html_()}<p>{'<br>'.join(map(escape, self.findings))}</p>"

    def _table(self) -> tuple[str, Lines]:
        count = len(self.log_probs[self.ranking[0]])
        known = [c for c in _COLUMNS if any(c in record for record in self.records.values())]
        rows = [("", *known, "held-out evidence", "EM seconds", "parameters")]
        for name, record in self.records.items():
            cells = [f"{record[c]:.4f}" if c in record else "" for c in known]
            evidence = f"{record['held-out evidence']:.1f} ± {record['evidence error']:.1f}"
            cost = f"{record['seconds']:.1f}" if "seconds" in record else ""
            rows.append((name, *cells, evidence, cost, f"{record['parameters']:,}"))
        return f"{len(self.records)} posteriors on {count:,} examples", rows


def compare(
    posteriors: Sequence[Fitted] | Mapping[str, Fitted],
    validation: Any,
    targets: Tensor | None = None,
    *,
    together: int = 10,
) -> Comparison:
    """Compare fitted posteriors on data that none was fitted to or calibrated on; one pass.

    ``posteriors``: fitted ``LinearisedLaplace`` objects, or a mapping from names to them.
    ``validation``: a loader, a Dataset or a list of batches; or inputs, with ``targets``. Batches
    are split as the first posterior's ``target_fn`` says.
    ``together`` (10): examples that the held-out evidence predicts jointly; they follow each other.

    Returns a ``Comparison``; print it. All posteriors see the same batches, so that differences
    in NLL have paired standard errors. Raises ``ValueError`` if there are none, or if
    some predict continuous targets and some do not: their NLLs are not on one scale.

    Example: ``print(compare({"small": la1, "wide": la2}, validation_loader))``.
    """
    named = dict(posteriors) if isinstance(posteriors, Mapping) else _named(posteriors)
    if not named:
        raise ValueError("compare takes one posterior or more.")
    if together < 1:
        raise ValueError(f"together must be 1 or more, not {together}.")
    likelihoods = [la.likelihood for la in named.values()]
    if len({(each.real_valued, each.gives_probabilities) for each in likelihoods}) > 1:
        raise ValueError(
            "Some of these posteriors predict continuous targets and others labels or counts: "
            "their NLLs are not on one scale. Compare posteriors of the same kind of targets."
        )
    for la in named.values():
        la._require_fit(surely=True)
    first = next(iter(named.values()))
    data = Data(paired(validation, targets), first._device, first.target_fn)
    seen: dict[str, list[_OnBatch]] = {name: [] for name in named}
    joint = {name: JointLogProbs(la.mixture, together) for name, la in named.items()}
    with torch.no_grad():
        for batch in data:
            for name, la in named.items():
                at = pushed(la, batch)
                joint[name].add(at)
                seen[name].append(_seen(la, at))
    records, log_probs = {}, {}
    for name, la in named.items():
        found = joined(each.posterior for each in seen[name])
        log_probs[name] = found.log_prob
        records[name] = {**scores(found), **_beside(la, seen[name], joint[name].values())}
    return Comparison(records, log_probs, together)


def _named(posteriors: Sequence[Fitted]) -> dict[str, Fitted]:
    return {f"{i}: {type(la.model).__name__}": la for i, la in enumerate(posteriors)}


def _seen(la: Fitted, at: Pushed) -> _OnBatch:
    found = outcomes(at.prediction(la.mixture), at.y)
    network = at.prediction(posterior_alone(scale=0.0)).log_prob(at.y).double()
    network = network[la.likelihood.labelled(at.y)].cpu()
    kept = Outcomes(*(None if part is None else part.cpu() for part in found))
    return _OnBatch(kept, network)


def _beside(la: Fitted, seen: list[_OnBatch], joint: Tensor) -> dict[str, float]:
    """Return what is no average over examples of the posterior's predictions."""
    record = {
        "network NLL": -torch.cat([each.network for each in seen]).mean().item(),
        "held-out evidence": joint.sum().item(),
        "evidence error": (len(joint) * joint.var()).sqrt().item() if len(joint) > 1 else nan,
        "parameters": sum(p.numel() for p in la.model.parameters()),
    }
    return {**record, "seconds": la.history[-1]["seconds"]} if la.history else record
