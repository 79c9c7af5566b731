"""Checkpoint folders: the last state of a fit or its posterior, and the settings that they belong to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from torch_lla_em.data import Share
from torch_lla_em.jacobian import LinearModel
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.runtime import Group, TensorList, files, first, report

FORMAT = 12
"""Version of the files in a checkpoint folder."""

_HEADER, _STATE, _FINISHED = "header.pt", "state.pt", "posterior.pt"
_BLOCK = "block-{}.pt"
_REMEDY = "Delete the folder to start a new fit, or pass another one."


class Folder:
    """A folder with the state after the last EM step, and one file for each block of a ``TensorList``.

    Of several ranks, rank 0 reads and writes the files; the others receive what it has read. Blocks
    with rows for examples have one file for the examples of each rank, which rank 0 receives one at a
    time. Any number of ranks can read them.
    """

    def __init__(
        self, folder: str | os.PathLike[str], header: dict[str, Any], group: Group = Group()
    ):
        if not os.fspath(folder):
            raise ValueError("checkpoint='' is not the name of a folder. Pass a name, or None.")
        self.path, self._group = Path(folder), group
        self._reads = self.writes = group.rank == 0
        """Whether this process reads and writes the files."""

        self._blocks: set[str] = set()
        """Names of the blocks that have been written."""

        if self._reads:
            self._open(header)
        # an error on rank 0 ends the other ranks here
        group.meet(None, len)

    def posterior(self, device: torch.device) -> dict[str, Any] | None:
        """Return the posterior of a finished fit, or None if it is not finished."""
        path, state = self.path / _FINISHED, None
        if self._reads and os.path.exists(path):
            state = files.read(path, "posterior", ("facts",), "Delete it to fit again.")
        received: dict[str, Any] | None = self._received(state, device)
        return received

    def load(self, device: torch.device) -> Any:
        """Return the last state without its blocks, its tensors on the device, or None if there is none."""
        return self._received(self._read() if self._reads else None, device)

    def with_blocks(self, state: Any, device: torch.device, numbers: Callable[[], Tensor]) -> Any:
        """Return what ``load`` returned with its blocks; ``numbers`` returns those of this rank's examples."""
        shared = any(value.numbers is not None for value in _tensor_lists_in(state))
        own = numbers() if shared else None

        def with_parts(value: TensorList) -> TensorList:
            rows = None if value.numbers is None else own
            parts = [self._part(names, rows, device) for names in value.parts]
            return value._replace(parts=parts, numbers=rows)

        return tree_map_only(TensorList, with_parts, state, is_leaf=_is_tensor_list)

    def save(self, state: Any) -> None:
        """Replace the last state; blocks that have been written are not written again."""
        if not self._group.meet(self.writes, first):
            return
        blocks = [
            (part, value.numbers, names)
            for value in _tensor_lists_in(state)
            for part, names in zip(value.parts, self._names(value))
        ]
        known = self._group.meet([self._blocks.issuperset(names) for *_, names in blocks], first)
        for (part, numbers, names), is_known in zip(blocks, known):
            if not is_known:
                self._write_block(part, numbers, names)

        def without_parts(value: TensorList) -> TensorList:
            numbers = None if value.numbers is None else value.numbers[:0]
            return value._replace(parts=self._names(value), numbers=numbers)

        state = tree_map_only(TensorList, without_parts, state, is_leaf=_is_tensor_list)
        self._write({"state": state}, self.path / _STATE)
        if self.writes:
            self._blocks = {name for *_, names in blocks for name in names}
            self._remove_blocks()

    def finish(self, posterior: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Replace the state by the posterior and the facts about its data."""
        self._write({**posterior, "facts": facts}, self.path / _FINISHED)
        if self.writes:
            files.remove(self.path / _STATE)
            self._blocks = set()
            self._remove_blocks()
        self._group.meet(None, len)

    def _open(self, header: dict[str, Any]) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            files.remove_temporary(self.path)
            self._check_header(header)
        except OSError as error:
            raise OSError(
                f"The checkpoint folder {str(self.path)!r} cannot be used ({error}): free space "
                "there, or pass another folder."
            ) from error

    def _check_header(self, header: dict[str, Any]) -> None:
        path = self.path / _HEADER
        if not path.exists():
            for name in (_FINISHED, _STATE):
                if (self.path / name).exists():
                    raise ValueError(
                        f"{str(self.path / name)!r} is not part of a checkpoint, although it has the "
                        "name of such a file: pass another folder as checkpoint."
                    )
            files.write_atomically({"header": header}, path)
            return
        known = files.contents_of(path, ("header",), _REMEDY)["header"]
        if not isinstance(known, dict):
            raise ValueError(
                f"The checkpoint in {str(self.path)!r} was written by another release. {_REMEDY}"
            )
        for name in sorted(known.keys() | header.keys()):
            if known.get(name) != header.get(name):
                raise ValueError(
                    f"The checkpoint in {str(self.path)!r} belongs to another fit: its {name} is "
                    f"{known.get(name)!r}, but here it is {header.get(name)!r}. {_REMEDY}"
                )

    def _block(self, name: str) -> Path:
        return self.path / _BLOCK.format(name)

    def _read(self) -> Any:
        """Return the last state without its blocks, None if there is none; remove other blocks."""
        state = None
        if os.path.exists(self.path / _STATE):
            state = files.contents_of(self.path / _STATE, ("state",), _REMEDY)["state"]
            self._blocks = {
                name for value in _tensor_lists_in(state) for names in value.parts for name in names
            }
        self._remove_blocks()
        return state

    def _names(self, value: TensorList) -> list[list[str]]:
        """Return the names of the blocks of each part: one, or one for the examples of every rank."""
        size = 1 if value.numbers is None else self._group.size
        ranks = [f"-{rank}of{size}" for rank in range(size)] if size > 1 else [""]
        return [[f"{value.key}-{i}{rank}" for rank in ranks] for i in range(len(value.parts))]

    def _write_block(self, part: Tensor, numbers: Tensor | None, names: list[str]) -> None:
        """Write a tensor, or the rows of every rank with the numbers of their examples."""
        if numbers is None:
            self._write({"block": part}, self._block(names[0]))
            return
        every = self._group.each(numbers.to(part.device)), self._group.each(part)
        for name, rows, block in zip(names, *every):
            self._write({"block": block, "numbers": rows}, self._block(name))

    def _part(self, names: list[str], own: Tensor | None, device: torch.device) -> Tensor:
        """Return a tensor from its blocks: its rows for the examples with the numbers ``own``, or all."""
        found: Tensor | None = None
        for name in names:
            path = self._block(name)
            read = files.contents_of(path, ("block",), _REMEDY) if self._reads else None
            contents = self._received(read, device)
            block: Tensor = contents["block"]
            if own is None:
                return block
            numbers = contents["numbers"].cpu()
            if torch.equal(numbers, own):
                found = block
            elif len(numbers):
                each = block.unflatten(0, (len(numbers), -1))
                if found is None:
                    found = block.new_empty(len(own) * each.shape[1], *block.shape[1:])
                places, rows = Share(numbers, len(numbers)).find(own)
                found.unflatten(0, (len(own), each.shape[1]))[places] = each[rows]
        return block[:0] if found is None else found

    def _remove_blocks(self) -> None:
        """Remove the blocks that do not belong to the last state."""
        kept = {self._block(name) for name in self._blocks}
        for path in set(self.path.glob(_BLOCK.format("*-*"))) - kept:
            files.remove(path)

    def _write(self, state: dict[str, Any], path: Path) -> None:
        """Write a file; if that fails, warn once and write no more."""
        if not self.writes:
            return
        try:
            files.write_atomically(state, path)
        except OSError as error:
            self.writes = False
            report(
                "log",
                f"The checkpoint cannot be written any more ({error}). The fit continues without it; the "
                "last state that was written remains valid.",
            )

    def _received(self, state: Any, device: torch.device) -> Any:
        """Return rank 0's state, with its tensors on this rank's device."""
        if self._group.size == 1:
            return tree_map_only(Tensor, lambda tensor: tensor.to(device), state)
        shapes = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), state)
        leaves, form = tree_flatten(self._group.meet(shapes, first))
        own = tree_leaves(state) if self._reads else leaves
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                here = own[place] if self._reads else torch.empty_like(leaf, device=device)
                leaves[place] = self._group.from_first(here.to(device).contiguous())
        return tree_unflatten(leaves, form)


def header_of(model: LinearModel, options: Any, likelihood: Likelihood) -> dict[str, Any]:
    """Return what a checkpoint is compared with, by name."""
    layout, network = model.layout, model.network
    settings = {name: files.plain(value) for name, value in vars(options).items()}
    return {
        "format": f"{files.VERSION}.{FORMAT}",
        "network weights": bytes(files.fingerprint(network.module).tolist()).hex(),
        "layers": [type(layer).__qualname__ for layer in network.module.modules()],
        "parameters in the posterior": list(layout.names),
        "likelihood": type(likelihood).__name__,
        "options of the likelihood": files.plain(vars(likelihood)),
        "class_dim": network.class_dim,
        "outputs": files.plain(network.forward_fn),
        "precision": network.precision,
        **settings,
    }


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, TensorList)


def _tensor_lists_in(state: Any) -> list[TensorList]:
    return [leaf for leaf in tree_leaves(state, is_leaf=_is_tensor_list) if _is_tensor_list(leaf)]
