"""Compares the data of two passes by the number of examples and the sum of their hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from heapq import nsmallest
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torch_lla_em.data.trees import tensors_in

_SAMPLED = 1024

_OF_BATCHES = ((-1,),)
"""Placeholder for the shapes of tensors of a batch that do not belong to single examples."""


class Identity:
    """Number of examples and the sum of their 64-bit hashes, in any order.

    A hash covers the bytes of the targets and the inputs of an example, so permuted labels or a
    changed column are noticed. Zeros at the end of either do not change the hash. The contents of
    objects such as graphs are not compared. If batches are padded to different lengths, or hold text,
    a hash depends on the batch of the example. Such hashes are compared only if every pass has the
    same batches, as with a list or a ``DataLoader``.
    """

    def __init__(self, same_batches: bool = False) -> None:
        self.same_batches = same_batches
        self.num_rows = self.num_targets = 0
        """Number of examples, and of entries of their targets."""

        self._sum = 0
        self.least: list[int] = []
        """The smallest hashes, at most 1,024: a sample of the examples that depends on them alone."""

        self._shapes: set[tuple[tuple[int, ...], ...]] = set()
        """Hashes of one example; several if they depend on the batch."""

    def add(self, batch: Any) -> None:
        """Add a batch: its targets, its inputs, and its weights if it has any.

        The sum covers the weights, and the smallest hashes do not, as validation sets have none.
        """
        size = len(batch[0])
        self.num_rows, self.num_targets = self.num_rows + size, self.num_targets + batch[0].numel()
        examples: list[np.ndarray] = []
        others: list[bytes] = []
        shapes: list[tuple[int, ...]] = []
        for tensor in map(Tensor.detach, tensors_in(batch)):
            if tensor.layout == torch.sparse_coo:
                others += [_bytes(part).tobytes() for part in (tensor._indices(), tensor._values())]
            elif tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
                continue
            elif tensor.dim() and len(tensor) == size:
                examples.append(_bytes(tensor))
                shapes.append(tuple(tensor.shape[1:]))
            else:
                others.append(_bytes(tensor[None]).tobytes())
        words = [part for part in tree_leaves(batch) if isinstance(part, (str, bytes, int, float))]
        others += [repr(words).encode()] if words else []
        hashes = [*map(_hash, zip(*examples))]
        total = sum(hashes)
        if examples and not others:
            weights = len(tensors_in(batch[2:]))
            self._keep([*map(_hash, zip(*examples[:-weights]))] if weights else hashes)
        if others:
            total += _hash([*others, str(total).encode()])
            self._shapes.add(_OF_BATCHES)
        self._sum = (self._sum + total) % (1 << 64)
        self._shapes.add(tuple(shapes))

    def _keep(self, hashes: list[int]) -> None:
        self.least = nsmallest(_SAMPLED, {*self.least, *hashes})

    def shared_with(self, least: Sequence[int]) -> tuple[float, int]:
        """Return the share of these examples among those with the smallest hashes ``least``, and of how many.

        Equal examples count once.
        """
        known, limit = set(least), _limit(least)
        limit = min(limit, _limit(self.least))
        own = [value for value in self.least if value <= limit]
        return sum(value in known for value in own) / max(1, len(own)), len(own)

    def agrees(self, other: Identity) -> bool:
        """Whether both can belong to the same examples."""
        if self.num_rows != other.num_rows or self._sum == other._sum:
            return self.num_rows == other.num_rows
        same_batches = self.same_batches and other.same_batches
        return not same_batches and len(self._shapes | other._shapes) > 1

    @classmethod
    def of(cls, parts: list[Identity]) -> Identity:
        """Return the identity of the examples of all ranks."""
        whole = cls(all(part.same_batches for part in parts))
        for name in ("num_rows", "num_targets", "_sum"):
            setattr(whole, name, sum(getattr(part, name) for part in parts))
        whole._sum %= 1 << 64
        for part in parts:
            whole._keep(part.least)
        whole._shapes = set().union(*(part._shapes for part in parts))
        return whole

    def state(self) -> dict[str, Any]:
        """Return numbers and tuples, from which ``from_state`` makes the same identity."""
        return {**vars(self), "_shapes": sorted(self._shapes)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Identity:
        """Return the identity of a state."""
        identity = cls()
        vars(identity).update({**state, "_shapes": set(state["_shapes"])})
        return identity


def _limit(least: Sequence[int]) -> int:
    """Return the largest hash up to which the smallest hashes of examples are known."""
    return max(least) if len(least) == _SAMPLED else 1 << 64


def distinct(least: Sequence[int], num_rows: int) -> float:
    """Return the share of different examples among all, estimated from the smallest hashes."""
    if len(least) < _SAMPLED:
        return len(least) / max(1, num_rows)
    return min(1.0, len(least) / max(least) * (1 << 64) / num_rows)


def _bytes(tensor: Tensor) -> np.ndarray:
    """Return the bytes of every row, (B, n)."""
    tensor = tensor.resolve_conj().resolve_neg().cpu()
    rows = tensor.reshape(len(tensor), tensor.shape[1:].numel()).contiguous()
    return rows.view(torch.uint8).numpy()


def _hash(parts: Any) -> int:
    """Return a hash of bytes without the zeros at their end, which can be padding."""
    joined = b"/".join(bytes(part).rstrip(b"\0") for part in parts)
    return int.from_bytes(hashlib.blake2b(joined, digest_size=8).digest(), "little")
