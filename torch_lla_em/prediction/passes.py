"""Passes over held-out data, of which products with the vectors of posteriors are taken."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.data import Batch, Data, Identity, distinct
from torch_lla_em.prediction.posterior import Posterior
from torch_lla_em.prediction.pushforward import Pushforward, joined, stack_members
from torch_lla_em.problem import Problem
from torch_lla_em.runtime import Group

_LEAST, _MANY, _DISTINCT = 50, 0.5, 0.8
"""Number and share of training examples in a validation set that are refused, and the share of different
training examples below which equal ones are no sign of it."""


def over_batches(
    posterior: Posterior, loader: Iterable[Any], group: Group = Group(), unseen: bool = False
) -> list[tuple[Batch, Pushforward]]:
    """Return every batch of a loader with its products; one pass, of which each rank has batches of its own.

    If all examples are to be ``unseen``, training examples are refused.
    """
    model, columns = posterior.setting.linear_model, posterior.columns()

    def at(batch: Batch, f: Tensor, Jw: Tensor) -> tuple[Batch, Pushforward]:
        return batch, posterior.of_products(f, Jw, batch.targets)

    with torch.inference_mode(False), torch.no_grad():
        data = Data(loader, model.network.device, posterior.setting.target_fn, group.joined())
        found = Problem(model, posterior.likelihood, data).push_forward(columns, at)
        if group.size > 1:
            data.read()  # the share of another rank, to refuse ranks with different data
        if unseen and data.identity is not None:
            refuse_training_data(data.identity, posterior.trained_on, posterior.num_data)
        return found


def under_all(
    posteriors: Iterable[Posterior], loader: Iterable[Any], group: Group | None = None
) -> tuple[Tensor | None, Pushforward]:
    """Return all inputs of a loader, if they are tensors of one shape, and all products; one pass for each posterior.

    With a ``group`` each rank computes its share, and training examples of a posterior are refused.

    Raises:
        ValueError: If the examples of a pass differ from those of the first.
    """
    each: list[Pushforward] = []
    for posterior in posteriors:
        if group is not None:
            group.agree(partial(posterior.require, surely=True))
        own = over_batches(posterior, loader, group or Group(), unseen=group is not None)
        each.append(_of_all_ranks(own, posterior, group or Group()))
        same_targets([each[-1].y], each[0].y.flatten().cpu())
    inputs = [batch.inputs for batch, _ in own]
    shapes = {x.shape[1:] if isinstance(x, Tensor) else None for x in inputs}
    x = torch.cat(inputs) if len(shapes) == 1 and None not in shapes else None
    return x, stack_members(each)


def _of_all_ranks(
    own: list[tuple[Batch, Pushforward]], posterior: Posterior, group: Group
) -> Pushforward:
    """Return the examples of all ranks in the order of the data."""
    if group.size == 1:
        return joined(part for _, part in own)
    constant, device = posterior.result.constant, posterior.setting.linear_model.network.device

    def parts() -> tuple[Tensor, Pushforward]:
        if own:
            numbers = torch.cat([batch.rows for batch, _ in own])
            return numbers.to(device), joined(part for _, part in own)
        outputs, count = (1,) if constant is None else constant.shape, len(posterior.columns())
        none = torch.zeros(count, 0, *outputs, device=device)  # gets the form that others have
        return none[0].flatten().long(), posterior.of_products(none[0], none, none[0].flatten())

    numbers, data = group.agree(parts)
    order, columns = group.gather(numbers).argsort(), data.Jw[0].movedim(1, 0)
    f, y, Jw = (group.gather(rows)[order] for rows in (data.f, data.y, columns))
    return data._replace(y=y, outputs=(f,), Jw=(Jw.movedim(0, 1),))


def same_targets(each: list[Tensor], known: Tensor | None) -> Tensor:
    """Return the targets of a pass; raise an error if those of an earlier one were others."""
    y = torch.cat([part.flatten().cpu() for part in each])
    if known is not None and not torch.equal(y, known):
        raise ValueError(
            "The loader has other examples, or another order of them, in every pass: pass a "
            "list of batches, so that all posteriors see the same."
        )
    return y


def refuse_training_data(
    validation: Identity, trained_on: Sequence[int], num_data: int | None
) -> None:
    """Raise an error if many validation examples are training examples, of which some hashes are known."""
    share, _ = validation.shared_with(trained_on)
    count = share * validation.num_rows
    if count < _LEAST or share < _MANY:
        return
    if distinct(trained_on, num_data or 1) < _DISTINCT:
        return
    raise ValueError(
        f"About {share:.0%} of the {validation.num_rows:,} validation examples are training examples of "
        "this posterior. The network has been fitted to them, so calibrated probabilities would be "
        "overconfident, and no error rate would be guaranteed. Pass examples that were used neither "
        "for training nor for fit. If there are none, use the predictions as fitted, or "
        "LaplaceEnsemble.from_folds, which needs no validation set."
    )
