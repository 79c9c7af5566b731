"""Compares the data of two passes by the number of examples and the sum of their hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torch_lla_em.data.trees import tensors_in

_SAMPLED = 1024


@dataclass
class Identity:
    """Number of examples and the sum of their 64-bit hashes, in any order.

    A hash covers the bytes of the targets and inputs of an example. Where it depends on the batch, as of sentences that
    are padded to several lengths, sums are compared only if every pass has the same batches.
    """

    same_batches: bool = False
    num_rows: int = 0
    num_targets: int = 0
    """Entries of all targets."""

    total: int = 0
    least: tuple[int, ...] = ()
    """The smallest hashes, at most 1,024: a sample of the examples that depends on them alone."""

    shapes: list[Any] = field(default_factory=list)
    """Shapes of examples; several if hashes depend on the batch."""

    def add(self, batch: Any) -> None:
        """Add (targets, inputs) or (targets, inputs, weights); the smallest hashes are without weights."""
        size = len(batch[0])
        each: list[Tensor] = []
        others: list[bytes] = []
        for tensor in tensors_in(batch):
            if tensor.layout == torch.sparse_coo:
                others += [*_bytes(tensor._indices()), *_bytes(tensor._values())]
            elif tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_meta:
                by_rows = tensor.dim() and len(tensor) == size
                each += [tensor] if by_rows else []
                others += [] if by_rows else _bytes(tensor[None])
        words = [part for part in tree_leaves(batch) if isinstance(part, str | bytes | int | float)]
        others += [repr(words).encode()] if words else []
        rows = [*zip(*map(_bytes, each))]
        total = sum(hashes := [*map(_hash, rows)])
        if others:
            total += _hash([*others, str(total).encode()])
        else:
            known = hashes if len(batch) < 3 else [_hash(parts[:-1]) for parts in rows]
            self.least = _least([*self.least, *known])
        found = [str([tuple(tensor.shape[1:]) for tensor in each]), *(["others"] if others else [])]
        self.shapes = sorted({*self.shapes, *found})
        self.total = (self.total + total) % (1 << 64)
        self.num_rows, self.num_targets = self.num_rows + size, self.num_targets + batch[0].numel()

    def agrees(self, other: Identity) -> bool:
        """Whether both can belong to the same examples."""
        if self.num_rows != other.num_rows or self.total == other.total:
            return self.num_rows == other.num_rows
        same_batches = self.same_batches and other.same_batches
        return not same_batches and len({*self.shapes, *other.shapes}) > 1

    def shared_with(self, least: Sequence[int]) -> tuple[float, int]:
        """Return the share of these examples among those with the smallest hashes ``least``, and of how many."""
        full = [known[-1] for known in (sorted(least), self.least) if len(known) == _SAMPLED]
        own = [value for value in self.least if value <= min(full, default=1 << 64)]
        return len({*own} & {*least}) / max(1, len(own)), len(own)

    @classmethod
    def of(cls, parts: list[Identity]) -> Identity:
        """Return the identity of the examples of all ranks."""
        rows, targets, total = (
            sum(getattr(part, name) for part in parts)
            for name in ("num_rows", "num_targets", "total")
        )
        least = _least([value for part in parts for value in part.least])
        shapes = sorted({shape for part in parts for shape in part.shapes})
        same = all(part.same_batches for part in parts)
        return cls(same, rows, targets, total % (1 << 64), least, shapes)


def distinct(least: Sequence[int], num_rows: int) -> float:
    """Return the share of different examples among all, estimated from the smallest hashes."""
    if len(least) < _SAMPLED:
        return len(least) / max(1, num_rows)
    return min(1.0, len(least) / max(least) * (1 << 64) / num_rows)


def _least(hashes: Iterable[int]) -> tuple[int, ...]:
    return tuple(nsmallest(_SAMPLED, {*hashes}))


def _bytes(tensor: Tensor) -> list[bytes]:
    """Return the bytes of every row."""
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu()
    shape = len(tensor), tensor.shape[1:].numel()
    rows = tensor.new_empty(shape).copy_(tensor.reshape(shape))  # a single row may have any stride
    return [row.tobytes() for row in rows.view(torch.uint8).numpy()]


def _hash(parts: Sequence[bytes]) -> int:
    """Return a hash of bytes without the zeros at their end, which can be padding."""
    joined = b"/".join(part.rstrip(b"\0") for part in parts)
    return int.from_bytes(hashlib.blake2b(joined, digest_size=8).digest(), "little")
