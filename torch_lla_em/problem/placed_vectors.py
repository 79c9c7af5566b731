"""Where vectors in weight space live: what a fit will hold, and how many columns visit the network."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf

import torch
from torch import Tensor

from torch_lla_em.data import Batch, Data
from torch_lla_em.jacobian import LinearModel, ParameterLayout
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.problem.memory_plan import Activations, Plan, make_plan
from torch_lla_em.problem.spread import DataSpread
from torch_lla_em.problem.sweeps import Sweeps
from torch_lla_em.runtime import Compute, DoesNotFit, attempt, free_memory, least_share, place_of

logger = logging.getLogger("torch_lla_em")


class _Host:
    """The memory of a card's host: pinned, which copies fast, as long as there is any."""

    def __init__(self) -> None:
        self.pinned = torch.cuda.is_available()

    def zeros(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return zeros on the CPU."""
        if self.pinned:
            try:
                return torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=True)
            except RuntimeError as error:  # drivers have several words for it
                self.pinned = False
                what = str(error).split("\n")[0]
                logger.warning("Pinned memory ended, pageable memory is taken instead (%s).", what)
        return torch.zeros(shape, dtype=dtype, device="cpu")


class PlacedVectors(Sweeps):
    """Passes whose sums are vectors, on the network's device or beside it, whole or in slices."""

    def __init__(self, linear_model: LinearModel, likelihood: Likelihood, data: Data):
        super().__init__(linear_model, likelihood, data)
        self.spread = DataSpread(data.group)
        w_MAP = linear_model.w_MAP
        self.device = w_MAP.device
        self.dtype = torch.promote_types(w_MAP.dtype, torch.float32)
        self._group: int | None = None
        self._host = _Host()

    def prepare(self, num_samples: int, compute: Compute) -> Plan:
        """Look at the first batch, before anything is allocated: probe the network, plan memory."""
        linear_model = self.linear_model
        linear_model.network.precision = compute.precision
        self.data.keep = compute.keep_data
        first = self.data.first()
        part, activations = self._measured(first, compute.rows)
        if len(part.rows) < min(compute.rows or inf, len(first.rows)):
            linear_model.take(None, len(part.rows))
        plan_for = partial(
            make_plan,
            linear_model,
            self.spread.columns_held(num_samples),
            activations=activations,
            free_on=self._share_of_memory(),
        )
        plan = plan_for(compute)
        meet, elsewhere = self.data.group.meet, plan.group is not None
        if meet("where vectors live", elsewhere, any) and not elsewhere:
            plan = plan_for(replace(compute, vectors="cpu"))
        plan = plan._replace(group=meet("columns at once", plan.group, _least))
        linear_model.take(plan.columns, plan.rows)
        self.device, self._group = plan.vectors_on, plan.group
        return plan

    def _measured(self, first: Batch, rows: int | None) -> tuple[Batch, Activations]:
        """Probe the network on as many rows of a batch as fit, and measure a forward pass."""
        part = first if rows is None else next(first.split(rows))

        def measure() -> Activations:
            with self.linear_model.network.guarded():
                self._probe(part)
                inputs = self.linear_model.prepare(part.inputs)
                return Activations.of(self.linear_model, inputs, len(part.rows))

        while True:
            try:
                activations, shortage = attempt(measure)
            except DoesNotFit as error:
                activations, shortage = None, str(error)
            if shortage is None:
                return part, activations
            half = next(part.split(max(1, len(part.rows) // 2)))
            if len(half.rows) == len(part.rows):
                raise DoesNotFit(self._no_room(part, shortage))
            part = half

    @property
    def alone(self) -> bool:
        """Whether no other rank has to do what this one does."""
        return self.data.group.size == 1

    @property
    def size(self) -> int:
        """P, or how many of the weights lie on this rank."""
        return self.layout.size

    @property
    def layout(self) -> ParameterLayout:
        """The random weights, or what of them lies on this rank."""
        return self.spread.layout(self.linear_model.layout)

    @property
    def w_MAP(self) -> Tensor:
        """The trained weights, shape (P,), where vectors live."""
        return self.spread.own(self.linear_model.w_MAP.to(self.device, self.dtype))

    def free_memory(self) -> float:
        """Return the bytes that every rank may still allocate for vectors."""
        here = place_of(self.device), free_memory(self.device)
        return self.data.group.meet("free memory", here, least_share)

    def room(self) -> float:
        """Return the bytes that choices between solvers go by: what is free, or was at first."""
        return self.free_memory()

    def _share_of_memory(self) -> Callable[[torch.device], float]:
        """Return the map from a device to the bytes free there for each process that uses it."""
        here = {
            place_of(device) for device in (torch.device("cpu"), self.linear_model.network.device)
        }
        sharing = self.data.group.meet("devices", here, _counted)
        return lambda device: free_memory(device) / sharing[place_of(device)]

    def zeros(self, num_vectors: int) -> Tensor:
        """Return vectors in weight space, shape (num_vectors, P)."""
        return torch.zeros(num_vectors, self.size, dtype=self.dtype, device=self.device)

    def _whole_zeros(self, num_vectors: int) -> Tensor:
        shape = num_vectors, self.linear_model.layout.size
        if self._group is None:
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        return self._host.zeros(shape, self.dtype)

    def _near_zeros(self, num_vectors: int) -> Tensor:
        """Return whole vectors of zeros where the network is."""
        shape, device = (
            (num_vectors, self.linear_model.layout.size),
            self.linear_model.network.device,
        )
        return torch.zeros(shape, dtype=self.dtype, device=device)

    def _groups(self, num_columns: int) -> list[slice]:
        """Return the columns that one pass takes: all, unless vectors live off the device."""
        if self._group is None:
            return [slice(0, num_columns)]
        # as many on every rank, the last of them empty where one has fewer columns
        count = self.data.group.meet("groups of columns", -(-num_columns // self._group), max)
        ends = [min(i * self._group, num_columns) for i in range(count + 1)]
        return [slice(start, end) for start, end in zip(ends, ends[1:])]

    def _near(self, vectors: Tensor) -> Tensor:
        """Return vectors where the network is: themselves, or a copy."""
        return (
            vectors
            if self._group is None
            else vectors.to(self.linear_model.network.device, copy=True)
        )

    def _put(self, near: Tensor, home: Tensor) -> None:
        if self._group is not None:
            home.copy_(near)


def _least(every: list[int | None]) -> int | None:
    return min((number for number in every if number is not None), default=None)


def _counted(every: list[set[tuple[str, str]]]) -> Counter[tuple[str, str]]:
    return Counter(place for places in every for place in places)
