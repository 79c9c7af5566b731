"""Passes over held-out data that compute products with the vectors of posteriors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.data import Batch, Data, Identity, Loader, distinct
from torch_lla_em.prediction.posterior import Posterior, required
from torch_lla_em.prediction.pushforward import Pushforward, require_one_shape, stack_members
from torch_lla_em.problem import Problem
from torch_lla_em.runtime import Group

_LEAST, _MANY, _DISTINCT = 50, 0.5, 0.8
"""A validation set with at least this number and this share of training examples is refused, unless
the share of distinct training examples is below the last number: then equal examples prove
nothing."""


def pushed(
    posteriors: Iterable[Posterior], loader: Loader, group: Group | None = None
) -> tuple[Tensor | None, Pushforward]:
    """Return all inputs of a loader, if they are tensors of one shape, and all products, by one
    pass for each posterior.

    With a ``group``, each rank computes its share, and training examples of a posterior are
    refused.
    """
    each: list[Pushforward] = []
    for posterior in posteriors:
        if group is not None:
            group.agree(partial(required, posterior, surely=True))
        inputs, own = _pushed_by(posterior, loader, group)
        each.append(own)
        same_targets(own.y, each[0].y)
    shapes = {x.shape[1:] if isinstance(x, Tensor) else None for x in inputs}
    x = torch.cat(inputs) if len(shapes) == 1 and None not in shapes else None
    return x, stack_members(each)


def _pushed_by(
    posterior: Posterior, loader: Loader, shared: Group | None
) -> tuple[list[Any], Pushforward]:
    """Return this rank's batches of inputs, and the examples of all ranks with their products, by
    one pass."""
    device, group = posterior.setting.linear_model.network.device, shared or Group()

    def at(batch: Batch, f: Tensor, Jw: Tensor) -> tuple[Any, ...]:
        return batch.inputs, f, Jw, batch.rows.to(device), batch.targets

    with torch.inference_mode(False), torch.no_grad():
        data = Data(loader, device, posterior.setting.target_fn, group)
        setting = posterior.setting
        problem = Problem(setting.linear_model, posterior.likelihood, data, setting.state)
        each = problem.push_forward(posterior.columns(), at)
        if group.size > 1:
            data.read()  # the share of another rank, to refuse ranks with different data
        if shared is not None:
            refuse_training_data(data.facts, posterior.trained_on, posterior.num_data)
        group.agree(lambda: require_one_shape([f for _, f, *_ in each]))
        none = torch.zeros(1, 0, device=device)  # other ranks determine the shape
        empty = [((), none[0], none[0], none[0], none[0])]
        inputs, *columns = zip(*(each or empty), strict=True)
        axes = 0, 1, 0, 0  # the samples of J w come before the examples
        f, Jw, rows, y = (
            torch.cat(c, axis) if len(c) > 1 else c[0]
            for c, axis in zip(columns, axes, strict=True)
        )
        if group.size > 1:
            Jw = (Jw if each else none).movedim(1, 0)
            order = group.gather(rows.long()).argsort()
            f, Jw, y = (group.gather(values)[order] for values in (f, Jw, y))
            Jw = Jw.movedim(0, 1)
        return list(inputs) if each else [], posterior.of_products(f, Jw, y)


def same_targets(y: Tensor, known: Tensor) -> None:
    """Raise an error if the targets of a pass are not those of an earlier one."""
    if not torch.equal(y.flatten().cpu(), known.flatten().cpu()):
        raise ValueError(
            "The loader yields other examples, or another order of them, in every pass: pass a "
            "list of batches, so that all posteriors see the same examples."
        )


def refuse_training_data(
    validation: Identity, trained_on: Sequence[int], num_data: int | None
) -> None:
    """Raise an error if many validation examples are training examples, by the hashes
    ``trained_on`` of some of these."""
    share, _ = validation.shared_with(trained_on)
    count = share * validation.num_rows
    if count < _LEAST or share < _MANY or distinct(trained_on, num_data or 1) < _DISTINCT:
        return
    raise ValueError(
        f"About {share:.0%} of the {validation.num_rows:,} validation examples are training "
        "examples of this posterior. The network has been fitted to them, so calibrated "
        "probabilities would be overconfident, and no error rate would be guaranteed. Pass "
        "examples that were used neither for training nor for fit. If there are none, use the "
        "predictions as fitted, or LaplaceEnsemble.from_folds, which needs no validation set."
    )
