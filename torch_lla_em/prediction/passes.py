"""Passes over held-out data, of which products with the vectors of posteriors are taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from torch_lla_em.data import Batch, Data, Identity, distinct
from torch_lla_em.prediction.posterior import Posterior
from torch_lla_em.prediction.pushforward import Pushforward, stack_members
from torch_lla_em.problem import Problem
from torch_lla_em.runtime import Group

Taken = TypeVar("Taken")

_LEAST, _MANY, _DISTINCT = 50, 0.5, 0.8
"""Number and share of training examples in a validation set that are refused, and the share of different
training examples below which equal ones are no sign of it."""


def over_batches(
    posterior: Posterior,
    loader: Iterable[Any],
    take: Callable[[Any, Pushforward], Taken],
    group: Group = Group(),
    unseen: bool = False,
) -> list[Taken]:
    """Return the values of ``take(inputs, products)`` at every batch of a loader; one pass.

    Products are not kept beyond the batch unless ``take`` returns them. Each rank of the group has
    batches of its own; a rank without data has one without examples. If all examples are to be
    ``unseen``, training examples are refused.
    """
    model, columns = posterior.setting.linear_model, posterior.columns()

    def at(batch: Batch, f: Tensor, Jw: Tensor) -> Taken:
        return take(batch.inputs, posterior.of_products(f, Jw, batch.targets))

    with torch.inference_mode(False), torch.no_grad():
        data = Data(loader, model.network.device, posterior.setting.target_fn, group.joined())
        found = Problem(model, posterior.likelihood, data).push_forward(columns, at)
        if unseen and data.identity is not None:
            refuse_training_data(data.identity, posterior.trained_on, posterior.num_data)
        outputs = (1,) if posterior.result.constant is None else posterior.result.constant.shape
        none = torch.zeros(len(columns), 0, *outputs, device="cpu")
        empty = posterior.of_products(none[0], none, none.new_zeros(0))
        return found or [take(None, empty)]


def pushed(
    posterior: Posterior, loader: Iterable[Any], group: Group = Group(), unseen: bool = False
) -> list[tuple[Any, Pushforward]]:
    """Return the inputs of every batch of a loader and their products; one pass."""
    return over_batches(posterior, loader, lambda *pair: pair, group, unseen)


def under_all(
    posteriors: Iterable[Posterior], loader: Iterable[Any]
) -> list[tuple[Any, Pushforward]]:
    """Return the inputs of every batch and their products under all posteriors; one pass for each.

    Raises:
        ValueError: If the examples of a pass differ from those of the first.
    """
    each, known = [], None
    for posterior in posteriors:
        each.append(pushed(posterior, loader))
        known = same_targets([part.y for _, part in each[-1]], known)
    batches = (zip(*of_batch) for of_batch in zip(*each))
    return [(inputs[0], stack_members(parts)) for inputs, parts in batches]


def pushed_under_each(
    posteriors: Iterable[Posterior], loader: Iterable[Any], group: Group = Group()
) -> Iterator[list[Pushforward]]:
    """Yield the batches of a loader under each posterior; raise an error if passes differ.

    Training examples of a posterior are refused.
    """
    known = None
    for posterior in posteriors:
        posterior.setting.require(surely=True)
        parts = [part for _, part in pushed(posterior, loader, group, unseen=True)]
        known = same_targets([part.y for part in parts], known)
        yield parts


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
