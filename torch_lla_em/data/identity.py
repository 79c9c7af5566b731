"""Whether two passes see the same rows: sums of one 64-bit hash of all the bytes of each row."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping
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

# what is summed: hashes of whole rows; of rows and their places; of targets alone
_ROWS, _ORDER, _TARGETS = range(3)
_PLAIN = "in_order", "repeated", "num_rows", "has_objects"


class Identity:
    """Sums of row hashes: equal for the same rows, whatever their order and their batches.

    A row's hash is made of the bytes of its targets and inputs together, so that permuted labels
    or a changed column are other data. Nothing is rounded: the bytes are those that the loader
    gave. Where batches are padded to their own lengths, or hold objects such as graphs, hashes
    change with the batch that a row is in. Such rows are compared where the loader keeps its order
    (``in_order``), or once a second pass has shown that they come again as they were; else their
    targets alone are.
    """

    def __init__(self, in_order: bool = False) -> None:
        self.in_order, self.repeated, self.num_rows = in_order, False, 0
        self._sums = torch.zeros(3, dtype=torch.int64, device="cpu")
        self._shapes: dict[int, set[tuple[int, ...]]] = {}
        self.has_objects = False

    def add(self, batch: Any, rows: Tensor | None = None) -> None:
        """Take in a batch (targets, inputs), and the numbers of its rows, shape (B,)."""
        found = list(contents(batch))
        if not found:
            return
        device, size = found[0][0].device, len(found[0][0])
        rows = torch.arange(size, device="cpu") if rows is None else rows
        hashes = torch.zeros(size, dtype=torch.int64, device=device)
        targets, beside = hashes, []
        for position, (tensor, is_row) in enumerate(found):
            own = _mixed((row_hashes(tensor) + _factor(position)).to(device, non_blocking=True))
            if is_row and len(own) == size:
                self._shapes.setdefault(position, set()).add(tuple(tensor.shape[1:]))
                hashes = hashes + own * _factor(position)
                targets = own if position == 0 else targets
            else:  # an object, or what does not go by rows: one hash for the whole batch
                places = torch.arange(len(own), device=device) * _signed(_MIX)
                beside.append(_mixed(own + places).sum() * _factor(position))
        places = rows.to(device, non_blocking=True) * _signed(_GOLDEN)
        whole, ordered = [hashes], [hashes + places]
        if beside:
            self.has_objects, apart = True, torch.stack(beside).sum()[None]
            whole.append(apart + targets.sum())
            ordered.append(apart + places[:1])
        sums = [_mixed(torch.cat(whole)).sum(), _mixed(torch.cat(ordered)).sum(), targets.sum()]
        self._sums = self._sums.to(device, non_blocking=True) + torch.stack(sums)
        self.num_rows += size

    @property
    def is_padded(self) -> bool:
        """Whether rows of a tensor have several shapes."""
        return any(len(shapes) > 1 for shapes in self._shapes.values())

    @property
    def tells_inputs(self) -> bool:
        """Whether other inputs with the same targets are told from these."""
        varies = self.has_objects or self.is_padded
        some = len(self._shapes) + self.has_objects > 1
        return some and (self.in_order or self.repeated or not varies)

    def agrees(self, other: Identity) -> bool:
        """Whether both may be of the same rows; in the same order where both keep theirs."""
        if self.num_rows != other.num_rows:
            return False
        if self.in_order and other.in_order:
            return self._equal(other, _ORDER)
        if self.has_rows_of(other):
            return True
        both = Identity()
        both.merge(self)
        both.merge(other)
        varies = both.has_objects or both.is_padded
        if not varies or self.repeated or other.repeated:
            return False
        return len(both._shapes.get(0, ())) != 1 or self._equal(other, _TARGETS)

    def has_rows_of(self, other: Identity) -> bool:
        """Whether both are surely of the same rows."""
        return self.num_rows == other.num_rows and self._equal(other, _ROWS)

    def repeats(self, other: Identity) -> bool:
        """Whether both are of the same rows in one order."""
        return self.num_rows == other.num_rows and self._equal(other, _ORDER)

    def learn(self, second: Identity) -> None:
        """Note whether a second pass has shown that rows come again as they were."""
        self.repeated = self.has_rows_of(second)

    def merge(self, other: Identity) -> None:
        """Take in the rows of another, beside this one's own."""
        self.num_rows += other.num_rows
        self._sums = self._sums + other._sums.to(self._sums.device)
        self.has_objects |= other.has_objects
        for position, shapes in other._shapes.items():
            self._shapes.setdefault(position, set()).update(shapes)

    def on_cpu(self) -> Identity:
        """Return it as other ranks can have it."""
        found = Identity(self.in_order)
        found.merge(self)
        return found

    def state(self) -> dict[str, Any]:
        """Return plain numbers that ``of`` restores."""
        shapes = {str(key): sorted(map(list, value)) for key, value in self._shapes.items()}
        own = {name: value for name, value in vars(self).items() if name in _PLAIN}
        return {**own, "sums": self._sums.tolist(), "shapes": shapes}

    @classmethod
    def of(cls, state: dict[str, Any]) -> Identity:
        """Return the identity of a state."""
        identity = cls()
        vars(identity).update({name: state[name] for name in _PLAIN})
        identity._sums = torch.tensor(state["sums"], dtype=torch.int64, device="cpu")
        identity._shapes = {int(p): set(map(tuple, s)) for p, s in state["shapes"].items()}
        return identity

    def _equal(self, other: Identity, which: int) -> bool:
        return self._sums.tolist()[which] == other._sums.tolist()[which]


def row_hashes(tensor: Tensor) -> Tensor:
    """Return Σ_j c_j word_j mod 2⁶⁴ of the words of each row, shape (B,), with odd factors c.

    Rows that differ have the same hash with a probability of 2⁻³³ at most. Zeros at a row's end
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
        tree = tree.detach()
        if tree.layout == torch.sparse_coo:
            yield from ((part, False) for part in (tree._indices(), tree._values()))
        elif tree.layout == torch.strided and not (
            tree.is_nested or tree.is_quantized or tree.is_meta
        ):
            yield (tree, not inside) if tree.dim() else (tree[None], False)
        return
    parts: list[Any] = []
    if isinstance(tree, Mapping):
        parts = list(tree.values())
    elif isinstance(tree, (tuple, list)):
        parts = list(tree)
    elif is_dataclass(tree) and not isinstance(tree, type):
        parts = [getattr(tree, field.name) for field in fields(tree)]
    elif is_opaque(tree):
        parts = list(getattr(tree, "__dict__", {}).values())
    if parts and all(isinstance(part, (str, bytes, int, float)) for part in parts):
        if isinstance(tree, (tuple, list)):
            words = all(isinstance(part, (str, bytes)) for part in parts)
            yield torch.tensor([*map(_word, parts)], device="cpu"), words and not inside
        return
    for part in parts if id(tree) not in above else ():
        yield from contents(part, inside or is_opaque(tree), (*above, id(tree)))


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
