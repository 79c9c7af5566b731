"""Passes over held-out data, of which products with the vectors of posteriors are taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from torch_lla_em.data import Batch, Data
from torch_lla_em.prediction.posterior import Posterior
from torch_lla_em.prediction.pushed import Pushed
from torch_lla_em.problem import Problem
from torch_lla_em.runtime import Group

Taken = TypeVar("Taken")


def over_batches(
    posterior: Posterior,
    loader: Iterable[Any],
    take: Callable[[Any, Pushed], Taken],
    group: Group = Group(),
) -> list[Taken]:
    """Return the values of ``take(inputs, products)`` at every batch of a loader; one pass.

    Products are not kept beyond the batch unless ``take`` returns them. Each rank of the group has
    batches of its own; a rank without data has one without examples.
    """
    model, columns = posterior.setting.linear_model, posterior.columns()

    def at(batch: Batch, f: Tensor, Jw: Tensor) -> Taken:
        return take(batch.inputs, posterior.of_products(f, Jw, batch.targets))

    with torch.inference_mode(False), torch.no_grad():
        data = Data(loader, model.network.device, posterior.setting.target_fn, group.joined())
        found = Problem(model, posterior.likelihood, data).push_forward(columns, at)
        none = torch.zeros(0, 1, device="cpu")
        empty = posterior.of_products(none, none.expand(len(columns), 0, 1), none[:, 0])
        return found or [take(None, empty)]


def pushed(
    posterior: Posterior, loader: Iterable[Any], group: Group = Group()
) -> list[tuple[Any, Pushed]]:
    """Return the inputs of every batch of a loader and their products; one pass."""
    return over_batches(posterior, loader, lambda *pair: pair, group)


def pushed_under_each(
    posteriors: Iterable[Posterior], loader: Iterable[Any], group: Group = Group()
) -> Iterator[list[Pushed]]:
    """Yield the batches of a loader under each posterior; raise an error if passes differ."""
    known = None
    for posterior in posteriors:
        posterior.setting.require(surely=True)
        parts = [part for _, part in pushed(posterior, loader, group)]
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
