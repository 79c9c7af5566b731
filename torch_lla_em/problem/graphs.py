"""CUDA graphs: what a kept batch adds to a product, recorded once and replayed from then on."""

from __future__ import annotations

import logging
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from torch_lla_em.data import Batch
from torch_lla_em.problem.passes import Pass, Sums
from torch_lla_em.runtime import is_shortage

logger = logging.getLogger("torch_lla_em")

# products of a width, before it is worth recording: solvers pass through some of them once
_BEFORE = 2


class Recording(NamedTuple):
    """The work of one batch on so many columns, at fixed places in memory."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    """Whose memory the graph reads."""


class Graphs:
    """Replays what a kept batch adds, in the place of its hundreds of launches.

    Each batch has a graph of its own, which reads its inputs or factors where they are; columns
    and sums visit a place that all batches share. Temporaries of all graphs lie in one pool.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._known: WeakKeyDictionary[object, dict[tuple, int | Recording]] = WeakKeyDictionary()
        self._columns: dict[int, tuple[Tensor, Sums]] = {}
        self._captures = True

    def clear(self) -> None:
        """Forget all, as where other batches are kept."""
        self._known.clear()
        self._columns.clear()

    def add(self, task: Pass, batch: Batch, w: Tensor, sums: Sums) -> None:
        """Add what a batch has to say, by a graph where it has come often enough."""
        known, key = self._known.setdefault(task.fixed, {}), (batch.place, len(w))
        found = known.get(key, 0)
        if found == _BEFORE and self._captures:
            found = self._record(task, batch, w, sums) or found
        if not isinstance(found, Recording):
            known[key] = min(found + 1, _BEFORE)
            task.add(batch, w, sums)
            return
        known[key] = found
        own_w, own = self._columns[len(w)]
        own_w.copy_(w)
        found.graph.replay()
        for name, total in sums.items():
            total += own[name]

    def _record(self, task: Pass, batch: Batch, w: Tensor, sums: Sums) -> Recording | None:
        """Return the graph of a batch's work, or None where it cannot be captured."""
        if len(w) not in self._columns:
            own = {name: torch.empty_like(total) for name, total in sums.items()}
            self._columns[len(w)] = torch.empty_like(w), own
        own_w, own = self._columns[len(w)]
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                # a loader's thread may pin memory meanwhile
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                for total in own.values():
                    total.zero_()
                task.add(batch, own_w, own)
        except RuntimeError as error:
            if is_shortage(error):
                raise
            reason = str(error).partition("\n")[0]
            logger.info("A batch's work cannot be captured in a CUDA graph: %s", reason)
            self._captures = False
            return None
        return Recording(graph, batch)
