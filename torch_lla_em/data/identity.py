"""Whether two passes see the same rows: one 64-bit number of all the bytes of each row."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_lla_em.data.batch import is_opaque

_BITS = 64
_FACTORS = 1 << 16
_AT_ONCE = 1 << 20
_GOLDEN, _MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9

# what is summed: whole rows, rows in order, what is no row in order; then each tensor, two ways
_WHOLE, _ORDERED, _INSIDE, _PER_TENSOR = range(4)
_BESIDE, _ALONE = 0, 1  # the targets


class Identity:
    """Numbers of the rows of a pass, added up: equal of the same rows, whatever their order.

    A row's number is made of the bytes of its targets and inputs together, so that labels which
    change places are other data. There is no tolerance: the bytes are those that the loader gave,
    which no move to another device changes; a loader that computes its rows must do so alike.
    Beside the sum over whole rows, each tensor has sums of its own, alone and with the targets.
    They are what is compared where some tensors cannot be: where every batch is padded to its own
    length, or in objects such as graphs, a tensor changes with the batch that a row is in. Those
    are compared once it is known that they come again as they were, and all rows in their order
    where a loader never changes it (``in_order``).
    """

    def __init__(self, in_order: bool = False) -> None:
        self.in_order = in_order
        self._sums = torch.zeros(0, dtype=torch.int64, device="cpu")
        self._shapes: dict[int, dict[tuple[int, ...], int]] = {}
        self._inside: set[int] = set()
        self._trusted: set[int] = set()

    def add(self, batch: Any, rows: Tensor | None = None) -> None:
        """Take in a batch (targets, inputs), and the numbers of its rows, shape (B,)."""
        found = list(contents(batch))
        if not found:
            return
        device, size = found[0][0].device, len(found[0][0])
        rows = torch.arange(size, device="cpu") if rows is None else rows
        places = rows.to(device, non_blocking=True) * _signed(_GOLDEN)
        factors, numbers = _factors(device)[: len(found), None], []
        others: dict[int, Tensor] = {}
        for position, (tensor, is_row) in enumerate(found):
            shapes, shape = self._shapes.setdefault(position, {}), tuple(tensor.shape[1:])
            shapes[shape] = shapes.get(shape, 0) + len(tensor)
            own = (row_hashes(tensor) + _factor(position)).to(device, non_blocking=True)
            if not is_row or len(tensor) != size:
                self._inside.add(position)
                others[position] = _mixed(own)
                own = places
            numbers.append(own)
        mixed, inside = _mixed(torch.stack(numbers)), torch.zeros_like(places[:1])
        if others:
            factors = factors.clone()
        for position, own in others.items():
            mixed[position], factors[position] = 0, 0
            mixed[position, 0] = own.sum()
            order = torch.arange(len(own), device=device) * _signed(_MIX)
            inside = inside + _mixed(own + order + places[0]).sum()
        whole = (mixed * factors).sum(0, keepdim=True)
        beside = _mixed(torch.cat([whole, whole + places, mixed + 3 * mixed[:1]])).sum(1)
        per_tensor = torch.stack([beside[2:], mixed.sum(1)], 1).flatten()
        self._sums = _added(self._sums, torch.cat([beside[:2], inside, per_tensor]))

    def agrees(self, other: Identity) -> bool:
        """Whether both may be of the same rows; in the same order where both keep theirs."""
        if self.in_order and other.in_order and self._shapes == other._shapes:
            return self._equal(other, _ORDERED)
        compared = {p for p in self._common(other) if self._compared(p, other)}
        if compared == self._shapes.keys() == other._shapes.keys() and not (
            self._inside | other._inside
        ):
            return self._equal(other, _WHOLE)
        kinds = (_ALONE, _BESIDE) if 0 in compared else (_ALONE,)
        return self._equal(other, *(_place(p, kind) for p in compared for kind in kinds))

    def repeats(self, other: Identity) -> bool:
        """Whether both are of the same rows, in one order and in the same batches."""
        return self._shapes == other._shapes and self._equal(other, _ORDERED, _INSIDE)

    def learn(self, later: Identity, is_next: bool) -> None:
        """Note which tensors a later pass, or the next, has shown to be the same every time.

        In passes after the next a loader that shuffles few rows might repeat the first by chance.
        """
        if is_next and later.repeats(self):
            self._trusted = set(self._shapes)
        for p in self._common(later) - self._inside - later._inside:
            # padded otherwise, and yet the same: by zeros at the end
            if self._shapes[p] != later._shapes[p] and self._equal(later, _place(p, _ALONE)):
                self._trusted.add(p)

    def trust(self, rows: bool) -> None:
        """Take the rows to be the same every time, or nothing."""
        self._trusted = self._shapes.keys() - self._inside if rows else set()

    def compared(self) -> set[int]:
        """Return the places in a batch of the tensors that another pass is compared by."""
        return {p for p in self._shapes if self._compared(p, self)}

    @property
    def is_padded(self) -> bool:
        """Whether rows of a tensor have several shapes."""
        return any(len(shapes) > 1 for shapes in self._shapes.values())

    def merge(self, other: Identity) -> None:
        """Take in the rows of another, beside this one's own."""
        self._inside |= other._inside
        self._sums = _added(self._sums, other._sums)
        for position, shapes in other._shapes.items():
            known = self._shapes.setdefault(position, {})
            for shape, rows in shapes.items():
                known[shape] = known.get(shape, 0) + rows

    @property
    def num_rows(self) -> int:
        """The number of rows taken in."""
        return sum(self._shapes.get(0, {}).values())

    def so_far(self) -> Identity:
        """Return what it is now, and stays; waits for nothing."""
        copied = Identity(self.in_order)
        copied.merge(self)
        copied._trusted = set(self._trusted)
        return copied

    def state(self) -> dict[str, Any]:
        """Return plain numbers that ``of`` restores."""
        return {
            "sums": self._sums.tolist(),
            "shapes": {
                str(position): [[list(shape), rows] for shape, rows in shapes.items()]
                for position, shapes in self._shapes.items()
            },
            "inside": sorted(self._inside),
            "trusted": sorted(self._trusted),
            "in order": self.in_order,
        }

    @classmethod
    def of(cls, state: dict[str, Any]) -> Identity:
        """Return the identity of a state."""
        identity = cls(state["in order"])
        identity._sums = torch.tensor(state["sums"], dtype=torch.int64, device="cpu")
        for position, shapes in state["shapes"].items():
            identity._shapes[int(position)] = {tuple(shape): rows for shape, rows in shapes}
        identity._inside, identity._trusted = set(state["inside"]), set(state["trusted"])
        return identity

    def _common(self, other: Identity) -> set[int]:
        return self._shapes.keys() & other._shapes.keys()

    def _compared(self, position: int, other: Identity) -> bool:
        if position in self._trusted | other._trusted:
            return True
        shapes = self._shapes[position].keys() | other._shapes[position].keys()
        return len(shapes) == 1 and position not in self._inside | other._inside

    def _equal(self, other: Identity, *places: int) -> bool:
        own, others = self._sums.tolist(), other._sums.tolist()
        return all(own[place : place + 1] == others[place : place + 1] for place in places)


def _place(position: int, kind: int) -> int:
    return _PER_TENSOR + 2 * position + kind


def _added(a: Tensor, b: Tensor) -> Tensor:
    """Return the sums of batches, some of which may hold more tensors than others."""
    few, many = sorted((a, b), key=len)
    return many + pad(few.to(many.device), (0, len(many) - len(few)))


def row_hashes(tensor: Tensor) -> Tensor:
    """Return Σ_j c_j word_j mod 2⁶⁴ of the words of each row, shape (B,), with odd factors c.

    Rows that differ have the same number with a probability of 2⁻³³ at most. Zeros at a row's end
    change nothing, so that what they pad may be compared.
    """
    words = _words(tensor)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    step = min(_FACTORS, 1 << max(0, (_AT_ONCE // max(len(words), 1)).bit_length() - 1))
    for start in range(0, max(words.shape[1], 1), step):
        piece, (block, first) = words[:, start : start + step].long(), divmod(start, _FACTORS)
        c = _factors(words.device)[first : first + piece.shape[1]]
        c = c * _factor(block) if block else c
        # integer matrix products are the faster way, which only CPUs know
        total = total + (piece @ c if piece.device.type == "cpu" else (piece * c).sum(1))
    return total


def contents(
    tree: Any, inside: bool = False, above: tuple[int, ...] = ()
) -> Iterator[tuple[Tensor, bool]]:
    """Yield every tensor that a batch holds, and whether its rows may be those of the data.

    Rows inside objects that move themselves (``.to``) may be of anything, as the nodes of
    graphs. Lists of words or numbers come as hashes of them.
    """
    if isinstance(tree, np.ndarray) and tree.dtype.kind in "biufc":
        plain = np.ascontiguousarray(tree)
        if not tree.dtype.isnative or tree.dtype.kind == "c" or tree.dtype.itemsize > 8:
            plain = plain.reshape(*plain.shape, 1).view(np.uint8)
        tree = torch.from_numpy(plain)
    if isinstance(tree, Tensor):
        yield from ((part, whole and not inside) for part, whole in _strided(tree.detach()))
    elif id(tree) not in above:
        parts = list(_parts(tree))
        if isinstance(tree, (tuple, list)) and parts:
            words = all(isinstance(part, (str, bytes)) for part in parts)
            if words or all(isinstance(part, (str, bytes, int, float)) for part in parts):
                yield torch.tensor([*map(_word, parts)], device="cpu"), words and not inside
                return
        inside = inside or is_opaque(tree)
        for part in parts:
            yield from contents(part, inside, (*above, id(tree)))


def _strided(tensor: Tensor) -> Iterator[tuple[Tensor, bool]]:
    if tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        return
    if tensor.layout == torch.sparse_coo:
        yield tensor._indices(), False
        yield tensor._values(), False
    elif tensor.layout == torch.strided:
        yield (tensor, True) if tensor.dim() else (tensor[None], False)


def _parts(tree: Any) -> Iterable[Any]:
    if isinstance(tree, Mapping):
        return tree.values()
    if isinstance(tree, (tuple, list)):
        return tree
    if is_dataclass(tree) and not isinstance(tree, type):
        return [getattr(tree, field.name) for field in fields(tree)]
    return getattr(tree, "__dict__", {}).values() if is_opaque(tree) else ()


def _word(part: Any) -> int:
    digest = hashlib.blake2b(repr(part).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _words(tensor: Tensor) -> Tensor:
    """Return the bytes of each row as 32-bit words, (B, W), the last of them filled with zeros."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    rows = tensor.reshape(len(tensor), tensor.shape[1:].numel()).contiguous()
    size = rows.element_size()
    if rows.shape[1] * size % 4:
        rows = pad(rows.view(torch.uint8), (0, -rows.shape[1] * size % 4))
    elif rows.storage_offset() * size % 4:
        rows = rows.clone()
    return rows.view(torch.int32)


def _mixed(x: Tensor) -> Tensor:
    """Return numbers whose sums are equal of equal numbers only: no linear map of x."""
    x = x ^ (x >> 32)
    x *= _signed(_MIX)
    return x.bitwise_xor_(x >> 29)


def _signed(number: int) -> int:
    number %= 1 << _BITS
    return number - (1 << _BITS) if number >> (_BITS - 1) else number


@functools.lru_cache(maxsize=1 << 10)
def _factor(index: int) -> int:
    """Return one odd factor of many that have nothing to do with each other."""
    return int(_factors(torch.device("cpu"))[-1 - index])


@functools.lru_cache(maxsize=8)
def _factors(device: torch.device) -> Tensor:
    places = torch.arange(1, _FACTORS + 1, dtype=torch.int64, device=device)
    return _mixed(_mixed(places * _signed(_GOLDEN))) | 1
