"""Passes over rows that were not trained on, and their log predictive, jointly in groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import Batch, Data
from torch_lla_em.inference import Estimate
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction.parts import posterior_alone, predicted
from torch_lla_em.prediction.prediction import Prediction
from torch_lla_em.prediction.pushing import push_forward
from torch_lla_em.problem import Problem
from torch_lla_em.runtime import group_of

if TYPE_CHECKING:
    from torch_lla_em.prediction.fitted import Fitted


class Rows(NamedTuple):
    """Rows of a loader, and what is said of them, classes last."""

    inputs: Any
    """One tensor, where batches are tensors of one shape; else None."""

    targets: Tensor
    network: Prediction
    """Of the network alone."""

    posterior: Prediction
    """As fitted, or as calibrated."""


class Pushed(NamedTuple):
    """A batch pushed through the linear model, classes last."""

    likelihood: Likelihood
    f: Tensor
    Jw: Tensor
    y: Tensor

    @classmethod
    def of(cls, fitted: Fitted, batch: Batch) -> Pushed:
        """Push a batch forward, and check that its targets fit."""
        model, likelihood = fitted._linear_model, fitted.likelihood
        f, Jw = push_forward(model, batch.inputs, fitted._columns())
        bad = ~f.isfinite().flatten(1).all(1)
        if bad.any():
            raise ValueError(
                f"The network's outputs are NaN or infinite for {bad.sum()} of the {len(f)} examples "
                f"of batch {batch.index}, the first of them example {bad.nonzero()[0].item()}. If "
                "their inputs hold NaN or infinite values, impute them or remove these examples."
            )
        y = likelihood.align(batch.targets.to(f.device), model.network.class_dim)
        likelihood.check(f, y)
        return cls(likelihood, f, Jw, y)

    def prediction(self, table: Tensor) -> Prediction:
        """Return the prediction of the batch."""
        return predicted(self.likelihood, self.f, self.Jw, table)

    def part(self, examples: slice) -> Pushed:
        """Return some examples of the batch."""
        return Pushed(self.likelihood, self.f[examples], self.Jw[:, examples], self.y[examples])


def joined(likelihood: Likelihood, parts: Iterable[Pushed]) -> Pushed:
    """Return the examples of several batches, one after the other."""
    _, f, Jw, y = zip(*parts)
    return Pushed(likelihood, torch.cat(f), torch.cat(Jw, 1), torch.cat(y))


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
                batch = joined(batch.likelihood, (self._rest, batch))
            else:
                self._take(self._rest)
        count = len(batch.f) - len(batch.f) % self._together
        for start in range(0, count, self._together):
            self._take(batch.part(slice(start, start + self._together)))
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


def rows_of(fitted: Fitted, loader: Iterable[Any]) -> Rows:
    """Return all rows of a loader, of this rank alone; one pass."""
    fitted._require_fit(surely=True)
    inputs, parts = [], []
    with torch.no_grad():
        for batch in Data(loader, fitted._device, fitted.target_fn):
            inputs.append(batch.inputs)
            parts.append(Pushed.of(fitted, batch))
    shapes = {x.shape[1:] if isinstance(x, Tensor) else None for x in inputs}
    whole = torch.cat(inputs) if len(shapes) == 1 and None not in shapes else None
    every = joined(fitted.likelihood, parts)
    tables = posterior_alone(scale=0.0), fitted.mixture
    return Rows(whole, every.y, *map(every.prediction, tables))


@contextmanager
def over(fitted: Fitted, loader: Iterable[Any]) -> Iterator[Problem]:
    """Open a pass over other data, which ranks that have fitted together take together."""
    model = fitted._linear_model
    with torch.inference_mode(False), torch.no_grad(), group_of(fitted._shard).joined() as group:
        data = Data(loader, model.network.device, fitted.target_fn, group)
        yield Problem(model, fitted.likelihood, data)


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
