"""Passes over held-out data, and log predictive densities of groups of examples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import Batch, Data
from torch_lla_em.inference import Estimate
from torch_lla_em.prediction.parts import Pushed, joined, posterior_alone
from torch_lla_em.prediction.posterior import StoredPosterior
from torch_lla_em.prediction.prediction import Prediction
from torch_lla_em.prediction.pushing import push_forward
from torch_lla_em.problem import Problem
from torch_lla_em.runtime import group_of


class PredictedData(NamedTuple):
    """The examples of a loader and their predictions, classes last."""

    inputs: Any
    """One tensor, where batches are tensors of one shape; else None."""

    targets: Tensor
    network: Prediction
    """Of the network alone."""

    posterior: Prediction
    """As fitted, or as calibrated."""


class JointLogProbs:
    """log p of groups of consecutive examples, whatever batches they come in.

    Only the last group may be smaller, and one before examples of another shape.
    """

    def __init__(self, table: Tensor, together: int):
        self._table, self._together = table, together
        self._rest: Pushed | None = None
        self._found: list[Tensor] = []

    def add(self, batch: Pushed) -> None:
        """Take the groups that end in this batch; keep the examples that are left."""
        if self._rest is not None:
            if self._rest.f.shape[1:] == batch.f.shape[1:]:
                batch = joined((self._rest, batch))
            else:
                self._take(self._rest)
        count = len(batch.f) - len(batch.f) % self._together
        for group in batch.part(slice(count)).split(self._together):
            self._take(group)
        self._rest = batch.part(slice(count, None)) if count < len(batch.f) else None

    def values(self) -> Tensor:
        """Return log p of every group, (groups,), the smaller last one included."""
        if self._rest is not None:
            self._take(self._rest)
            self._rest = None
        return torch.stack(self._found) if self._found else self._table.new_zeros(0).double().cpu()

    def _take(self, group: Pushed) -> None:
        value = group.prediction(self._table).joint_log_prob(group.y)
        self._found.append(value.double().cpu())


def pushed(posterior: StoredPosterior, batch: Batch) -> Pushed:
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
    return Pushed(likelihood, f, Jw, y)


def predicted_data(posterior: StoredPosterior, loader: Iterable[Any]) -> PredictedData:
    """Return all examples of a loader with their predictions, on this rank alone; one pass."""
    posterior._require_fit(surely=True)
    inputs, parts = [], []
    with torch.no_grad():
        for batch in Data(loader, posterior._device, posterior.target_fn):
            inputs.append(batch.inputs)
            parts.append(pushed(posterior, batch))
    shapes = {x.shape[1:] if isinstance(x, Tensor) else None for x in inputs}
    whole = torch.cat(inputs) if len(shapes) == 1 and None not in shapes else None
    every = joined(parts)
    tables = posterior_alone(scale=0.0), posterior.mixture
    return PredictedData(whole, every.y, *map(every.prediction, tables))


@contextmanager
def over(posterior: StoredPosterior, loader: Iterable[Any]) -> Iterator[Problem]:
    """Open a pass over other data, which ranks that have fitted together take together."""
    model = posterior._linear_model
    with torch.inference_mode(False), torch.no_grad(), group_of(posterior._shard).joined() as group:
        data = Data(loader, model.network.device, posterior.target_fn, group)
        yield Problem(model, posterior.likelihood, data)


def held_out_evidence(problem: Problem, columns: Tensor, table: Tensor, together: int) -> Estimate:
    """Return Σ log p(y of a group | x of the group) over groups of examples; one pass.

    Each rank groups its own examples. The standard error is over groups; NaN for one group.
    """
    joint = JointLogProbs(table, together)
    for batch, f, Jw in problem.push_forward(columns):
        joint.add(Pushed(problem.likelihood, f, Jw, batch.targets))
    values = joint.values().to(problem.device)
    sums = torch.stack([torch.ones_like(values), values, values.square()]).sum(1)
    count, total, squares = problem.data.group.sum(sums)
    # of one group the spread is not known: 0 / 0 is NaN
    variance = (squares - total**2 / count).clamp_min(0) / (count - 1)
    return Estimate(total, (count * variance).sqrt())
