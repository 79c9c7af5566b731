"""What a network makes of its first batch: a checkpoint is refused where its code has changed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import Batch, Identity, map_tensors
from torch_lla_em.likelihoods import Example, is_named
from torch_lla_em.problem import Problem
from torch_lla_em.runtime import attempt, records

# rounding of one network on two machines, relative, at least; and in units of its own precision
_ROUNDING = 1e-4
_EPSILONS = 30


class FirstOutputs(NamedTuple):
    """A batch, by its identity, and its rows' outputs, by two numbers each."""

    batch: Identity

    numbers: Tensor
    """Sums of each row with fixed weights, and its norms, (2, B)."""

    rounding: float
    """By how much numbers may differ, relative."""

    example: Example | None = None
    """What a likelihood of one's own makes of the first of them."""

    @classmethod
    def of(cls, problem: Problem) -> FirstOutputs | None:
        """Look at the batch that the next pass goes on from; None where there is no telling."""
        network = problem.linear_model.network
        with network.guarded():
            part = problem.local.pieces(problem.data.first(), problem.fitting.rows)[0]

        def run() -> tuple[Tensor, Tensor]:
            with network.guarded(), network.computing("float32"):
                f = problem.linear_model.outputs(part.inputs).detach()
                rows = f.reshape(len(part.rows), -1)
                return torch.stack([_row_numbers(rows), rows.norm(dim=1).double()]), f

        found, _ = attempt(run) if _is_known(part) else (None, None)
        if found is None or not found[0].isfinite().all():
            return None
        numbers, f = found
        example = (
            None
            if is_named(problem.likelihood)
            else Example.of(problem.likelihood, f, part.targets)
        )
        identity = Identity()
        identity.add((part.targets, part.inputs), part.rows)
        dtypes = {parameter.dtype for parameter in network.module.parameters()}
        epsilon = max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)
        rounding = max(_ROUNDING, _EPSILONS * epsilon)
        return cls(identity, numbers.cpu(), rounding, example)

    def contradicts(self, other: FirstOutputs) -> bool:
        """Whether the batches are the same, but not what was made of them."""
        if not self.batch.repeats(other.batch):
            return False
        if self.numbers.shape != other.numbers.shape:
            return True
        size = max(self.numbers[1].norm(), other.numbers[1].norm())
        return bool((self.numbers - other.numbers).norm() > self.rounding * size)

    def tensors(self) -> dict[str, Tensor]:
        """Return what ``known`` takes."""
        own = {"batch": records.to_bytes(self.batch.state()), "numbers": self.numbers}
        return {**own, **(self.example.tensors() if self.example else {})}

    def known(self, tensors: dict[str, Tensor]) -> FirstOutputs:
        """Return those of a file."""
        batch = Identity.of(records.from_bytes(tensors["batch"]))
        example = Example.known(tensors)
        return self._replace(batch=batch, numbers=tensors["numbers"], example=example)


def _row_numbers(f: Tensor) -> Tensor:
    """Return a weighted sum of each row, (B,), no two of its weights alike."""
    places = torch.arange(1, f.shape[1] + 1, dtype=torch.float64, device=f.device)
    return f.double() @ (places * 0.618034).frac()


def _is_known(batch: Batch) -> bool:
    """Whether an identity tells the inputs from others."""
    tensors: list[bool] = []
    map_tensors(
        lambda tensor: tensors.append(bool(tensor.dim()) and tensor.layout == torch.strided),
        batch.inputs,
        lambda _: tensors.append(False),
    )
    return bool(tensors) and all(tensors)
