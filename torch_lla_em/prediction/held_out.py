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
        y = likelihood.align(batch.targets.to(f.device), model.network.class_dim)
        likelihood.check(f, y)
        return cls(likelihood, f, Jw, y)

    def prediction(self, table: Tensor, examples: slice = slice(None)) -> Prediction:
        """Return the prediction of some examples of the batch."""
        return predicted(self.likelihood, self.f[examples], self.Jw[:, examples], table)

    def joint_log_probs(self, table: Tensor, together: int) -> Tensor:
        """Return log p of each group of consecutive examples, (groups,)."""
        groups = [slice(start, start + together) for start in range(0, len(self.f), together)]
        values = [self.prediction(table, each).joint_log_prob(self.y[each]) for each in groups]
        return torch.stack(values).double() if values else self.f.new_zeros(0).double()


def rows_of(fitted: Fitted, loader: Iterable[Any]) -> Rows:
    """Return all rows of a loader, of this rank alone; one pass."""
    fitted._require_fit(surely=True)
    inputs, parts = [], []
    with torch.no_grad():
        for batch in Data(loader, fitted._device, fitted.target_fn):
            inputs.append(batch.inputs)
            parts.append(Pushed.of(fitted, batch)[1:])
    f, Jw, y = (torch.cat(each, dim) for dim, each in zip((0, 1, 0), zip(*parts)))
    shapes = {x.shape[1:] if isinstance(x, Tensor) else None for x in inputs}
    whole = torch.cat(inputs) if len(shapes) == 1 and None not in shapes else None
    every = Pushed(fitted.likelihood, f, Jw, y)
    tables = posterior_alone(scale=0.0), fitted.mixture
    return Rows(whole, y, *map(every.prediction, tables))


@contextmanager
def over(fitted: Fitted, loader: Iterable[Any]) -> Iterator[Problem]:
    """Open a pass over other data, which ranks that have fitted together take together."""
    model = fitted._linear_model
    with torch.inference_mode(False), torch.no_grad(), group_of(fitted._shard).joined() as group:
        data = Data(loader, model.network.device, fitted.target_fn, group)
        yield Problem(model, fitted.likelihood, data)


def held_out_evidence(problem: Problem, columns: Tensor, table: Tensor, together: int) -> Estimate:
    """Return Σ log p(y of a group | x of the group) over groups of rows; one pass.

    Groups are of rows that follow each other in a batch. The standard error is that over groups.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=problem.device)
    for batch, f, Jw in problem.push_forward(columns):
        at = Pushed(problem.likelihood, f, Jw, batch.targets)
        values = at.joint_log_probs(table, together).to(sums.device)
        sums += torch.stack([torch.ones_like(values), values, values.square()]).sum(1)
    count, total, squares = problem.data.group.sum(sums)
    variance = (squares / count - (total / count) ** 2).clamp_min(0)
    return Estimate(total, (count * variance).sqrt())
