"""Passes over held-out data, which yield products with the vectors of one or several posteriors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from torch_lla_em.data import Data
from torch_lla_em.prediction.posterior import Posterior
from torch_lla_em.prediction.pushed import Pushed
from torch_lla_em.problem import Problem
from torch_lla_em.runtime import Group


def pushed(
    posterior: Posterior, loader: Iterable[Any], group: Group = Group()
) -> list[tuple[Any, Pushed]]:
    """Return the inputs of every batch of a loader and their products; one pass.

    Each rank of the group has batches of its own.
    """
    model, columns = posterior.setting.linear_model, posterior.columns()
    with torch.inference_mode(False), torch.no_grad():
        data = Data(loader, model.network.device, posterior.setting.target_fn, group.joined())
        found = Problem(model, posterior.likelihood, data).push_forward(columns)
    of = posterior.of_products
    parts = [(batch.inputs, of(f, Jw, batch.targets)) for batch, f, Jw in found]
    none = torch.zeros(0, 1, device="cpu")  # for a rank without data
    return parts or [(None, of(none, none.expand(len(columns), 0, 1), none[:, 0]))]


def pushed_under_each(
    posteriors: Iterable[Posterior], loader: Iterable[Any], group: Group = Group()
) -> Iterator[list[Pushed]]:
    """Yield the batches of a loader under each posterior; raise an error if passes differ."""
    known = None
    for posterior in posteriors:
        posterior.setting.require(surely=True)
        parts = [part for _, part in pushed(posterior, loader, group)]
        y = torch.cat([part.y.flatten().cpu() for part in parts])
        if known is not None and not torch.equal(y, known):
            raise ValueError(
                "The loader has other examples, or another order of them, in every pass: pass a "
                "list of batches, so that all posteriors see the same."
            )
        known = y
        yield parts
