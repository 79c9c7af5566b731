"""Passes over held-out data: predictions, log predictive densities, and tables of posteriors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import Batch, Data, paired
from torch_lla_em.inference import Estimate
from torch_lla_em.prediction.metrics import Outcomes, concatenated, outcomes, scores
from torch_lla_em.prediction.posterior import StoredPosterior
from torch_lla_em.prediction.prediction import Prediction
from torch_lla_em.prediction.pushed import Pushed, joined, push_forward
from torch_lla_em.prediction.summary import Printed, Rows
from torch_lla_em.prediction.training_examples import TrainingExamples
from torch_lla_em.problem import Problem
from torch_lla_em.runtime import check_options, group_of

_CLEAR = 2.0
"""Number of standard errors above which a difference is reported as real."""

_COLUMNS = "NLL", "network NLL", "accuracy", "ECE", "RMSE", "90 % coverage"


class PredictedData(NamedTuple):
    """The examples of a loader and their predictions, classes last."""

    inputs: Any
    """One tensor if batches are tensors of one shape, else None."""

    targets: Tensor
    network: Prediction
    """That of the network alone."""

    posterior: Prediction
    """That of the posterior, as fitted or as calibrated."""


class JointLogProbs:
    """log p of groups of consecutive examples, which do not depend on the batches.

    Only the last group may be smaller, and one in front of examples of another shape.
    """

    def __init__(self, table: Tensor, together: int):
        self._table, self._together = table, together
        self._rest: Pushed | None = None
        self._found: list[Tensor] = []

    def add(self, batch: Pushed) -> None:
        """Evaluate the groups that end in this batch, and keep the remaining examples."""
        if self._rest is not None:
            if self._rest.f[0].shape[1:] == batch.f[0].shape[1:]:
                batch = joined((self._rest, batch))
            else:
                self._evaluate(self._rest)
        count = len(batch.y) - len(batch.y) % self._together
        for group in batch.part(slice(count)).split(self._together):
            self._evaluate(group)
        self._rest = batch.part(slice(count, None)) if count < len(batch.y) else None

    def values(self) -> Tensor:
        """Return log p of every group, (groups,), including a smaller last one."""
        if self._rest is not None:
            self._evaluate(self._rest)
            self._rest = None
        return torch.stack(self._found) if self._found else self._table.new_zeros(0).double().cpu()

    def _evaluate(self, group: Pushed) -> None:
        value = group.prediction(self._table).joint_log_prob(group.y)
        self._found.append(value.double().cpu())


def push_batch(posterior: StoredPosterior, batch: Batch) -> Pushed:
    """Push a batch through the linear model, and check its outputs and targets."""
    model, likelihood = posterior._linear_model, posterior.likelihood
    f, Jw = push_forward(model, batch.inputs, posterior._columns())
    bad = ~f.isfinite().flatten(1).all(1)
    if bad.any():
        raise ValueError(
            f"The network's outputs are NaN or infinite for {bad.sum()} of the {len(f)} examples "
            f"of batch {batch.index}, the first of them example {bad.nonzero()[0].item()}. If "
            "their inputs hold NaN or infinite values, impute them or remove these examples."
        )
    y = likelihood.align(batch.targets.to(f.device), model.network.class_dim)
    likelihood.check(f, y)
    return Pushed.of(likelihood, f, Jw, y, posterior._training())


def predicted_data(posterior: StoredPosterior, loader: Iterable[Any]) -> PredictedData:
    """Return all examples of a loader with their predictions, on this rank alone; one pass."""
    posterior._require_fit(surely=True)
    inputs, parts = [], []
    with torch.no_grad():
        for batch in Data(loader, posterior._device, posterior.target_fn):
            inputs.append(batch.inputs)
            parts.append(push_batch(posterior, batch))
    shapes = {x.shape[1:] if isinstance(x, Tensor) else None for x in inputs}
    whole = torch.cat(inputs) if len(shapes) == 1 and None not in shapes else None
    every = joined(parts)
    return PredictedData(whole, every.y, every.network(), every.prediction(posterior.mixture))


@contextmanager
def over(posterior: StoredPosterior, loader: Iterable[Any]) -> Iterator[Problem]:
    """Open a pass over other data, shared by the ranks that have fitted together."""
    model = posterior._linear_model
    with torch.inference_mode(False), torch.no_grad(), group_of(posterior._shard).joined() as group:
        data = Data(loader, model.network.device, posterior.target_fn, group)
        yield Problem(model, posterior.likelihood, data)


def held_out_evidence(
    problem: Problem,
    columns: Tensor,
    table: Tensor,
    together: int,
    training: TrainingExamples | None = None,
) -> Estimate:
    """Return Σ log p(y of a group | x of the group) over groups of examples; one pass.

    Each rank forms groups of its own examples. The standard error is over groups, NaN for one group.
    """
    joint = JointLogProbs(table, together)
    for batch, f, Jw in problem.push_forward(columns):
        joint.add(Pushed.of(problem.likelihood, f, Jw, batch.targets, training))
    values = joint.values().to(problem.device)
    sums = torch.stack([torch.ones_like(values), values, values.square()]).sum(1)
    count, total, squares = problem.data.group.sum(sums)
    # the spread of one group is not known: 0 / 0 is NaN
    variance = (squares - total**2 / count).clamp_min(0) / (count - 1)
    return Estimate(total, (count * variance).sqrt())


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
        gap = self.log_probs[self.ranking[0]] - self.log_probs[name]
        error = gap.std().item() / len(gap) ** 0.5 if len(gap) > 1 else nan
        return gap.mean().item(), error

    @property
    def findings(self) -> list[str]:
        """What follows from the table, as sentences."""
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

    def _table(self) -> tuple[str, Rows]:
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
    posteriors: Sequence[StoredPosterior] | Mapping[str, StoredPosterior],
    validation: Any,
    targets: Tensor | None = None,
    *,
    together: int = 10,
) -> Comparison:
    """Compare fitted posteriors on the same held-out data, in one pass.

    Use data that no posterior was fitted to or calibrated on. All posteriors see the same batches,
    so differences in NLL have paired standard errors.

    Args:
        posteriors (sequence or mapping): Fitted ``LinearisedLaplace`` objects, or a mapping from
            names to them.
        validation (DataLoader, Dataset, list of batches, or inputs): The data. Batches are split
            into inputs and targets as by the first posterior's ``target_fn``.
        targets (Tensor, optional): The targets, if ``validation`` are inputs.
        together (int): Number of consecutive examples that the held-out evidence predicts jointly.
            Default 10; 1 ignores dependence between examples.

    Returns:
        A ``Comparison``; print it.

    Raises:
        ValueError: If there are no posteriors, or if some predict continuous targets and others do
            not, since their NLLs are not on one scale.

    Example:
        >>> print(compare({"wide prior": la, "narrow prior": other}, x, y))  # doctest: +SKIP
    """
    named = (
        dict(posteriors)
        if isinstance(posteriors, Mapping)
        else {f"{i}: {type(la.model).__name__}": la for i, la in enumerate(posteriors)}
    )
    if not named:
        raise ValueError("compare takes one posterior or more.")
    check_options(together=together)
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
    seen: dict[str, list[Outcomes]] = {name: [] for name in named}
    alone: dict[str, list[Tensor]] = {name: [] for name in named}
    joint = {name: JointLogProbs(la.mixture, together) for name, la in named.items()}
    with torch.no_grad():
        for batch in data:
            for name, la in named.items():
                at = push_batch(la, batch)
                joint[name].add(at)
                found = outcomes(at.prediction(la.mixture), at.y)
                seen[name].append(
                    Outcomes(*(part if part is None else part.cpu() for part in found))
                )
                network = at.network().log_prob(at.y).double()
                alone[name].append(network[la.likelihood.labelled(at.y)].cpu())
    records, log_probs = {}, {}
    for name, la in named.items():
        whole, evidence = concatenated(seen[name]), joint[name].values()
        error = (len(evidence) * evidence.var()).sqrt().item() if len(evidence) > 1 else nan
        log_probs[name] = whole.log_prob
        records[name] = {
            **scores(whole),
            "network NLL": -torch.cat(alone[name]).mean().item(),
            "held-out evidence": evidence.sum().item(),
            "evidence error": error,
            "parameters": sum(p.numel() for p in la.model.parameters()),
        }
        if la.history:
            records[name]["seconds"] = la.history[-1]["seconds"]
    return Comparison(records, log_probs, together)
