"""Whether two passes see the same data: numbers of examples, and sums of hashes of examples."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_lla_em.data.trees import is_opaque
from torch_lla_em.runtime import mixed

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FACTORS = 1 << 16
_LOW = (1 << 32) - 1


class Identity:
    """Number of examples and sums of their 64-bit hashes, in any order and in the order of a pass.

    A hash covers the bytes of an example's targets and inputs together, so that permuted labels or
    a changed column are other data. Where batches are padded to their own lengths, or hold objects
    such as graphs, hashes depend on the batch that an example is in: these are compared only if the
    loader keeps its order, as a list or a ``DataLoader`` does.
    """

    def __init__(self, in_order: bool = False) -> None:
        self.in_order, self.num_rows = in_order, 0
        self._shapes: set[tuple[tuple[int, ...], ...]] = set()
        self._has_objects = False
        # of hashes, and of hashes together with the numbers of their examples
        self._sums = torch.zeros(2, dtype=torch.int64, device="cpu")

    def add(self, batch: Any, rows: Tensor | None = None) -> None:
        """Add a batch (targets, inputs), and the numbers of its examples, shape (B,)."""
        leaves = list(contents(batch))
        if not leaves:
            return
        size, device = len(leaves[0][0]), leaves[0][0].device
        rows = (
            torch.arange(self.num_rows, self.num_rows + size, device="cpu")
            if rows is None
            else rows
        )
        hashes = torch.zeros(size, dtype=torch.int64, device=device)
        others, shapes = [], []
        for place, (leaf, of_examples) in enumerate(leaves):
            key = int(_factors(torch.device("cpu"))[-1 - place])
            own = mixed(row_hashes(leaf).to(device, non_blocking=True) + key)
            if of_examples and len(own) == size:
                hashes = hashes + own * key
                shapes.append(tuple(leaf.shape[1:]))
            else:  # one hash for the whole batch
                numbers = torch.arange(len(own), device=device)
                others.append(mixed(own + numbers * _GOLDEN).sum() * key)
        whole = mixed(torch.stack([*others, hashes.sum()]).sum()) if others else hashes[:0].sum()
        places = rows.to(device, non_blocking=True) * _GOLDEN
        self._sums = self._sums.to(device, non_blocking=True) + torch.stack(
            [mixed(hashes).sum() + whole, mixed(hashes + places).sum() + whole * (places[0] | 1)]
        )
        self._shapes.add(tuple(shapes))
        self._has_objects |= bool(others)
        self.num_rows += size

    def agrees(self, other: Identity) -> bool:
        """Whether both may be of the same examples; in the same order if both keep theirs."""
        if self.num_rows != other.num_rows:
            return False
        mine, theirs = self._sums.tolist(), other._sums.tolist()
        if self.in_order and other.in_order:
            return mine[1] == theirs[1]
        if mine[0] == theirs[0]:
            return True
        return self._has_objects or other._has_objects or len(self._shapes | other._shapes) > 1

    def merge(self, other: Identity) -> None:
        """Add the examples of another, which are not in this one."""
        self.num_rows += other.num_rows
        self._sums = self._sums + other._sums.to(self._sums.device)
        self._has_objects |= other._has_objects
        self._shapes |= other._shapes

    @classmethod
    def of(cls, parts: list[Identity]) -> Identity:
        """Return the identity of the examples of all parts, on the CPU."""
        whole = cls(all(part.in_order for part in parts))
        for part in parts:
            whole.merge(part)
        return whole

    def state(self) -> dict[str, Any]:
        """Return plain numbers, from which ``from_state`` makes the same identity."""
        own = {
            name: value for name, value in vars(self).items() if name not in ("_sums", "_shapes")
        }
        return {**own, "sums": self._sums.tolist(), "shapes": sorted(self._shapes)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Identity:
        """Return the identity of a state."""
        identity, own = cls(), dict(state)
        identity._sums = torch.tensor(own.pop("sums"), dtype=torch.int64, device="cpu")
        identity._shapes = {tuple(map(tuple, shapes)) for shapes in own.pop("shapes")}
        vars(identity).update(own)
        return identity


def row_hashes(tensor: Tensor) -> Tensor:
    """Return Σ_j c_j word_j mod 2⁶⁴ over the 64-bit words of each row, shape (B,), with odd c.

    Each word's upper half is added to its lower half (exclusive or) before, without which changes of
    two highest bits would cancel. Zeros at the end of a row do not change its hash, so that rows
    padded with zeros can be compared.
    """
    words = _words(tensor)
    words = words ^ ((words >> 32) & _LOW)
    total = torch.zeros(len(words), dtype=torch.int64, device=words.device)
    for block, piece in enumerate(words.split(_FACTORS, dim=1)):
        c = _factors(words.device)[: piece.shape[1]] * (2 * block + 1)
        # integer matrix products are faster, but not implemented on GPUs
        total = total + (piece @ c if piece.device.type == "cpu" else (piece * c).sum(1))
    return total


def contents(
    tree: Any, of_examples: bool = True, above: tuple[int, ...] = ()
) -> Iterator[tuple[Tensor, bool]]:
    """Yield every tensor that a batch holds, and whether its rows may be those of examples.

    Rows inside objects such as graphs may be of anything, as of nodes. Lists of words come as
    hashes of them.
    """
    if isinstance(tree, np.ndarray):
        tree = _from_numpy(tree)
    if isinstance(tree, Tensor):
        tree = tree.detach()
        if tree.layout == torch.sparse_coo:
            yield from ((part, False) for part in (tree._indices(), tree._values()))
        elif tree.layout == torch.strided and not (
            tree.is_nested or tree.is_quantized or tree.is_meta
        ):
            yield (tree, of_examples) if tree.dim() else (tree[None], False)
        return
    if isinstance(tree, Mapping):
        parts = list(tree.values())
    elif isinstance(tree, (tuple, list)):
        parts = list(tree)
    else:
        own = is_opaque(tree) or (is_dataclass(tree) and not isinstance(tree, type))
        parts = list(getattr(tree, "__dict__", {}).values()) if own else []
    of_examples = of_examples and not is_opaque(tree)
    if parts and all(isinstance(part, (str, bytes, int, float)) for part in parts):
        yield torch.tensor([_word(part) for part in parts], device="cpu"), of_examples
    elif id(tree) not in above:  # objects may contain themselves
        for part in parts:
            yield from contents(part, of_examples, (*above, id(tree)))


def _from_numpy(array: np.ndarray) -> Any:
    """Return an array as a tensor of its bytes, or as a list if it holds objects."""
    if array.dtype.hasobject:
        return array.tolist()
    plain = np.ascontiguousarray(array)
    return torch.from_numpy(plain.reshape(*plain.shape, 1).view(np.uint8))


def _word(part: Any) -> int:
    digest = hashlib.blake2b(repr(part).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _words(tensor: Tensor) -> Tensor:
    """Return the bytes of each row as 64-bit words, (B, W), the last of them filled with zeros."""
    tensor = tensor.resolve_conj().resolve_neg()
    rows = tensor.reshape(len(tensor), tensor.shape[1:].numel()).contiguous()
    size = rows.element_size()
    if rows.shape[1] * size % 8:
        rows = pad(rows.view(torch.uint8), (0, -rows.shape[1] * size % 8))
    elif rows.storage_offset() * size % 8:
        rows = rows.clone()
    return rows.view(torch.int64)


@functools.lru_cache(maxsize=8)
def _factors(device: torch.device) -> Tensor:
    places = torch.arange(1, _FACTORS + 1, dtype=torch.int64, device=device)
    return mixed(mixed(places * _GOLDEN)) | 1
