"""Compares the data of two passes by the number of examples and the sum of their hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest

import torch
from torch import Tensor

from torch_lla_em.data.batch import Batch
from torch_lla_em.data.trees import is_rows, is_sequence, leaves_of

_SAMPLED, _SIZE = 1024, 1 << 64
"""The largest number of hashes that are kept, and the number of different hashes."""


@dataclass
class Identity:
    """Number of examples, N, and sums of their 64-bit hashes; 0 before a pass.

    A hash covers the tensors with a row for each example. If sentences are padded to the length of
    their batch, hashes depend on the batch, and only numbers of examples are compared.
    """

    num_rows: int = 0
    num_targets: int = 0
    """Entries of all targets."""

    total: int = 0
    """The sum of hashes, in any order."""

    ordered: int = 0
    """The sum of hashes times the numbers of examples; it depends on the order."""

    least: tuple[int, ...] = ()
    """The smallest hashes of whole examples without weights, at most 1,024: a sample of the
    examples."""

    shapes: tuple[str, ...] = ()
    """Shapes of examples, ascending."""

    num_inputs: int = 0
    """Entries of a batch that are inputs: 1, or more if the batches are longer tuples."""

    num_outputs: int = 0
    num_labelled: int = 0
    """Entries of all outputs of the network, N C, and the number of examples with a label and a
    weight other than 0."""

    def add(self, batch: Batch) -> None:
        """Add the examples of a batch."""
        size, w = len(batch.rows), batch.weights
        leaves = leaves_of([batch.targets, batch.inputs])
        parts = [leaf for leaf in leaves if is_rows(leaf, size)]
        examples = [*zip(*map(_bytes, parts), strict=True)]
        hashes = [*map(_hash, examples)]
        least = (*hashes,) if len(parts) == len(leaves) else ()
        if w is not None:
            hashes = [_hash([*known, own]) for known, own in zip(examples, _bytes(w), strict=True)]
        ordered = sum(
            number * value for number, value in zip(batch.rows.tolist(), hashes, strict=True)
        )
        shapes = (str([tuple(part.shape[1:]) for part in parts]),)
        entries = len(batch.inputs) if is_sequence(batch.inputs) else 1
        part = Identity(size, batch.targets.numel(), total=sum(hashes), ordered=ordered)
        self._include(replace(part, least=least, shapes=shapes, num_inputs=entries))

    def _include(self, part: Identity) -> None:
        self.num_rows += part.num_rows
        self.num_targets += part.num_targets
        self.num_inputs = max(self.num_inputs, part.num_inputs)
        self.num_outputs += part.num_outputs
        self.num_labelled += part.num_labelled
        self.total = (self.total + part.total) % _SIZE
        self.ordered = (self.ordered + part.ordered) % _SIZE
        self.least = (*nsmallest(_SAMPLED, {*self.least, *part.least}),)
        self.shapes = (*sorted({*self.shapes, *part.shapes}),)

    def agrees(self, other: Identity) -> bool:
        """Whether both can belong to the same examples."""
        is_same = self.total == other.total or len({*self.shapes, *other.shapes}) > 1
        return is_same and self.num_rows == other.num_rows

    def shared_with(self, least: Sequence[int]) -> tuple[float, int]:
        """Estimate which share of these examples is among those with the smallest hashes ``least``.
        Return it with the number of examples that it is estimated from."""
        full = [known[-1] for known in (sorted(least), self.least) if len(known) == _SAMPLED]
        comparable = [value for value in self.least if value <= min(full, default=_SIZE)]
        return len({*comparable} & {*least}) / max(1, len(comparable)), len(comparable)

    @classmethod
    def of(cls, parts: list[Identity]) -> Identity:
        """Return the identity of the examples of all ranks."""
        whole = cls()
        for part in parts:
            whole._include(part)
        return whole


def distinct(least: Sequence[int], num_rows: int) -> float:
    """Return the share of examples that are distinct, estimated from the smallest hashes."""
    if len(least) < _SAMPLED:
        return len(least) / max(1, num_rows)
    return min(1.0, len(least) / max(least) * _SIZE / num_rows)


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
