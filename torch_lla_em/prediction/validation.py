"""Predictions of held-out data, log predictive densities, and tables of posteriors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import as_loader, paired
from torch_lla_em.inference import Estimate
from torch_lla_em.prediction.metrics import Outcomes, concatenated, outcomes, scores, warnings_of
from torch_lla_em.prediction.passes import over_batches, same_targets, under_all
from torch_lla_em.prediction.posterior import Components, Posterior
from torch_lla_em.prediction.prediction import Prediction
from torch_lla_em.prediction.predictor import Predictor, at_inputs, predicted
from torch_lla_em.prediction.pushforward import Pushforward, joined
from torch_lla_em.prediction.summary import Cells, Printed
from torch_lla_em.problem import Problem
from torch_lla_em.runtime import check_options, report

_CLEAR = 2.0
"""Number of standard errors above which a difference is reported as real."""

_COLUMNS = "NLL", "network NLL", "accuracy", "ECE", "RMSE", "90 % coverage"


# number of training examples whose predictions are checked, and of values that their samples take
_EXAMPLES, _NUMBERS = 256, 2**22


class PredictedData(NamedTuple):
    """The examples of a loader and their predictions, classes last."""

    inputs: Any
    """One tensor if batches are tensors of one shape, else None."""

    targets: Tensor
    network: Prediction
    """That of the network alone, or of all networks of an ensemble."""

    posterior: Prediction
    """That of the posterior, as fitted or as calibrated."""


class HeldOutEvidence:
    """Σ log p(y of some examples | x of them) over batches, of which no more than these are kept.

    So many consecutive examples are predicted ``together``, whatever the batches; only the last ones
    may be fewer, and those in front of examples of another shape.
    """

    def __init__(self, components: Components, together: int):
        self._components, self._together = components, together
        self._values: list[Tensor] = []
        self._rest: Pushforward | None = None
        """The last examples, which are too few."""

    def add(self, part: Pushforward) -> None:
        """Add the next examples."""
        rest, values = self._rest, []
        if rest is not None and rest.f.shape[1:] != part.f.shape[1:]:
            rest, values = None, [self._of(rest)]
        part = part if rest is None else joined([rest, part])
        whole = len(part.y) - len(part.y) % self._together
        values += [self._of(some) for some in part.part(slice(whole)).split(self._together)]
        rest = part.part(torch.arange(whole, len(part.y), device=part.f.device))
        # at once, since a batch is repeated if memory runs out
        self._values, self._rest = [*self._values, *values], rest if len(rest.y) else None

    def total(self) -> Estimate:
        """Return the sum so far."""
        rest = [] if self._rest is None else [self._of(self._rest)]
        values = torch.stack([*self._values, *rest])
        # the spread of one value is not known: 0 / 0 is NaN
        variance = (values - values.mean()).square().sum() / (len(values) - 1)
        return Estimate(values.sum(), (len(values) * variance).sqrt())

    def _of(self, some: Pushforward) -> Tensor:
        return self.predicted(some)._joint_log_prob(some.y).double()

    def predicted(self, part: Pushforward) -> Prediction:
        """Return the prediction of some examples."""
        return part.prediction(self._components.tables, self._components.noise)


def predicted_data(la: Predictor, loader: Iterable[Any]) -> PredictedData:
    """Return all examples of a loader with their predictions, on this rank alone; one pass for each network."""
    posteriors, components = la._members(surely=True), la._components
    inputs, parts = zip(*under_all(posteriors, loader))
    shapes = {x.shape[1:] if isinstance(x, Tensor) else None for x in inputs}
    whole = torch.cat(inputs) if len(shapes) == 1 and None not in shapes else None
    with torch.no_grad():
        every = joined(parts)
        found = every.prediction(components.tables, components.noise)
        return PredictedData(whole, every.y, every.network(), found)


@dataclass(frozen=True, repr=False)
class Comparison(Printed):
    """The result of ``compare``; print it for a table and what follows from it.

    Example:
        >>> best = compare([la, other], x, y).ranking[0]
    """

    records: dict[str, dict[str, float]]
    """The scores of each posterior by name, in the order given."""

    log_probs: dict[str, Tensor]
    """log p(y | x) of each validation example, (N,), by name; paired across posteriors."""

    together: int
    """Number of examples that the held-out evidence predicts jointly."""

    network_log_probs: dict[str, Tensor]
    """log p(y | x) of each validation example under the networks alone, (N,), by name."""

    @property
    def ranking(self) -> list[str]:
        """Names in the order of validation NLL, the best first."""
        return sorted(self.records, key=lambda name: self.records[name]["NLL"])

    def behind(self, name: str) -> tuple[float, float]:
        """Return by how much a posterior's NLL exceeds the best one, and the standard error.

        Args:
            name (str): One of ``ranking``.

        Returns:
            The mean difference per example and its paired standard error, NaN for one example.
        """
        return _mean_and_error(self.log_probs[self.ranking[0]] - self.log_probs[name])

    @property
    def findings(self) -> list[str]:
        """What follows from the table, as sentences."""
        best, *others = self.ranking
        lines = [f"{best!r} has the lowest NLL."]
        for name in others:
            gap, error = self.behind(name)
            noise = "" if gap > _CLEAR * error else " (no measurable difference)"
            lines.append(f"{name!r} is worse by {gap:.2g} ± {error:.1g}{noise}.")
        for name in self.ranking:
            gap, error = _mean_and_error(self.network_log_probs[name] - self.log_probs[name])
            if gap > _CLEAR * error:
                lines.append(
                    f"{name!r} is worse than its network alone, by {gap:.2g} ± {error:.1g}: call calibrate "
                    "with other held-out data, or predict by the network."
                )
        return [
            *lines,
            "NLL is that of each posterior, and network NLL that of its network alone: lower is better. Held-out "
            f"evidence is the log probability of {self.together} examples together: higher is better.",
        ]

    def __repr__(self) -> str:
        return "\n".join([super().__repr__(), *self.findings])

    def _repr_html_(self) -> str:
        return f"{super()._repr_html_()}<p>{'<br>'.join(map(escape, self.findings))}</p>"

    def _table(self) -> tuple[str, Cells]:
        count = len(self.log_probs[self.ranking[0]])
        known = [c for c in _COLUMNS if any(c in record for record in self.records.values())]
        rows = [("", *known, "held-out evidence", "EM seconds", "parameters")]
        for name, record in self.records.items():
            cells = [f"{record[c]:.4f}" if c in record else "" for c in known]
            joint = f"{record['held-out evidence']:.1f} ± {record['evidence error']:.1f}"
            cost = f"{record['seconds']:.1f}" if "seconds" in record else ""
            rows.append((name, *cells, joint, cost, f"{record['parameters']:,}"))
        return f"{len(self.records)} posteriors on {count:,} examples", rows


def compare(
    posteriors: Sequence[Any] | Mapping[str, Any],
    validation: Any,
    targets: Tensor | None = None,
    *,
    together: int = 10,
) -> Comparison:
    """Compare fitted posteriors on the same held-out data, each in one pass.

    Use data that no posterior was fitted to or calibrated on. All posteriors see the same batches,
    so differences in NLL have paired standard errors.

    Args:
        posteriors (sequence or mapping): Fitted ``LinearisedLaplace`` objects and
            ``LaplaceEnsemble`` objects, or a mapping from names to them.
        validation (DataLoader, Dataset, list of batches, or inputs): The data.
        targets (Tensor, optional): The targets, if ``validation`` are inputs.
        together (int): Number of consecutive examples that the held-out evidence predicts jointly.
            Default 10; 1 ignores dependence between examples.

    Returns:
        A ``Comparison``; print it.

    Raises:
        TypeError: If one of them is not a posterior. The networks alone have their own column.
        ValueError: If there are no posteriors, or if some predict continuous targets and others do
            not, since their NLLs are not on one scale.

    Example:
        >>> print(compare({"wide prior": la, "narrow prior": other}, x, y))  # doctest: +SKIP
    """
    named = (
        dict(posteriors)
        if isinstance(posteriors, Mapping)
        else {f"{i}: {_name(la)}": la for i, la in enumerate(posteriors)}
    )
    if not named:
        raise ValueError("compare takes one posterior or more.")
    for name, la in named.items():
        if not isinstance(la, Predictor):
            raise TypeError(
                f"compare takes fitted posteriors, and {name!r} is of the class {type(la).__name__}: pass "
                "LinearisedLaplace or LaplaceEnsemble objects. The network alone of each posterior is "
                'compared too, in the column "network NLL".'
            )
    check_options(together=together)
    members = {name: la._members(surely=True) for name, la in named.items()}
    likelihoods = [each[0].likelihood for each in members.values()]
    if len({(each.real_valued, each.gives_probabilities) for each in likelihoods}) > 1:
        raise ValueError(
            "Some of these posteriors predict continuous targets and others labels or counts: "
            "their NLLs are not on one scale. Compare posteriors of the same kind of targets."
        )
    loader = as_loader(paired(validation, targets))
    records, log_probs, networks, known = {}, {}, {}, None
    for name, la in named.items():
        evidence = HeldOutEvidence(la._components, together)
        if len(members[name]) == 1:
            found = over_batches(members[name][0], loader, partial(_scored_batch, evidence))
        else:
            found = [_scored(part, evidence) for _, part in under_all(members[name], loader)]
        y, parts, network = zip(*found)
        known = same_targets(list(y), known)
        records[name], log_probs[name] = _record(la, concatenated(parts), evidence.total())
        records[name]["network NLL"] = -torch.cat(network).mean().item()
        networks[name] = torch.cat(network).cpu()
    return Comparison(records, log_probs, together, networks)


def _mean_and_error(gap: Tensor) -> tuple[float, float]:
    """Return a mean over examples and its standard error, NaN for one example."""
    error = gap.std().item() / len(gap) ** 0.5 if len(gap) > 1 else nan
    return gap.mean().item(), error


def _name(la: Any) -> str:
    members = getattr(la, "members", None)
    model = type(getattr(la, "model", la)).__name__
    return model if members is None else f"ensemble of {len(members)}"


def _scored_batch(
    evidence: HeldOutEvidence, _: Any, part: Pushforward
) -> tuple[Tensor, Outcomes, Tensor]:
    return _scored(part, evidence)


def _scored(part: Pushforward, evidence: HeldOutEvidence) -> tuple[Tensor, Outcomes, Tensor]:
    """Return targets, outcomes, and log p(y | x) under the network alone, of each example of a batch."""
    kept = part.likelihood.labelled(part.y)
    found = part.y, outcomes(evidence.predicted(part), part.y)
    network = part.network()._log_prob(part.y).double()[kept]
    evidence.add(part)
    return *found, network


def _record(la: Any, found: Outcomes, evidence: Estimate) -> tuple[dict[str, float], Tensor]:
    """Return the scores of a posterior by name, and log p(y | x) of each example."""
    each = list(getattr(la, "members", [la]))
    record = {
        **scores(found),
        "held-out evidence": evidence.value.item(),
        "evidence error": evidence.standard_error.item(),
        "parameters": sum(p.numel() for one in each for p in one.model.parameters()),
    }
    if all(one.history for one in each):
        record["seconds"] = sum(one.history[-1]["seconds"] for one in each)
    return record, found.log_prob.cpu()


def warn_of_collapse(posterior: Posterior, problem: Problem) -> None:
    """Report a warning for each sign that a fit has failed, judged by some training examples."""
    data = problem.data
    most = _NUMBERS // (
        len(posterior.result.w_samples) * max(data.facts.num_outputs // data.facts.num_rows, 1)
    )
    if data.group.rank > 0 or not most:
        return
    batch = next(data.first().split(min(_EXAMPLES, most)))
    if len(batch.rows) > most:  # a batch that cannot be split
        return
    y = problem.sweep.aligned(batch).targets
    examples = at_inputs([posterior], batch.inputs).classes_last()
    prediction = predicted(examples, posterior.components, judged=False)
    for words in warnings_of(posterior, prediction, y):
        report("log", words)
