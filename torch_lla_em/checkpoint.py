"""Checkpoint folders: the last state of a fit or its posterior, and the settings that they belong
to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from torch_lla_em.inference import FitOptions
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.problem import FEW, Problem
from torch_lla_em.runtime import Group, files, first, report

FORMAT = 18
"""Version of the files in a checkpoint folder."""

SHARE = 0.05
"""Largest share of the time that saving takes."""

STATE, POSTERIOR = "state.pt", "posterior.pt"
_REMEDY = "Delete the folder to start a new fit, or pass another one."


class Folder:
    """A folder with the last state, or the posterior; rank 0 reads and writes, and the others
    receive what it has read."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        header: dict[str, Any],
        group: Group = Group(),
        computed: dict[str, Any] | None = None,
    ):
        if not os.fspath(folder):
            raise ValueError("checkpoint='' is not the name of a folder. Pass a name, or None.")
        self.path, self._group = Path(folder), group
        self._reads = self._writes = group.rank == 0
        self._saved, self._took = time.monotonic(), 0.0
        """When the last state was saved, and how long that took."""

        if self._reads:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                files.remove(self.path, ".writing-" + 32 * "?")
                self._check_header(header, computed)
            except OSError as error:
                raise OSError(
                    f"The checkpoint folder {str(self.path)!r} cannot be used ({error}): free "
                    "space there, or pass another folder."
                ) from error
        # an error on rank 0 ends the other ranks here
        group.meet(None, len)

    def load(self, name: str, device: torch.device) -> Any:
        """Return the contents of a file with its tensors on the device, or None if there is no
        file."""
        path, state = self.path / name, None
        if self._reads and path.exists():
            state = files.contents_of(path, ("facts",), _REMEDY)
        if self._group.size == 1:
            return tree_map_only(Tensor, lambda tensor: tensor.to(device), state)
        shapes = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), state)
        leaves, form = tree_flatten(self._group.meet(shapes, first))
        leaves_here = tree_leaves(state) if self._reads else leaves
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                here = leaves_here[place] if self._reads else torch.empty_like(leaf, device=device)
                leaves[place] = self._group.from_first(here.to(device).contiguous())
        return tree_unflatten(leaves, form)

    def is_due(self) -> bool:
        """Return whether a state is due to be saved: saving takes at most ``SHARE`` of the time."""
        due = self._writes and time.monotonic() - self._saved >= self._took / SHARE
        return self._group.meet(due, first)

    def save(self, state: Callable[[], dict[str, Any]], name: str = STATE) -> None:
        """Write the result of a function, which all ranks call, to a file. If writing fails, warn
        and stop writing."""
        began, contents = time.monotonic(), state()
        try:
            if self._writes:
                files.write_atomically(contents, self.path / name)
        except OSError as error:
            self._writes = False
            report(
                "log",
                f"The checkpoint cannot be written any more ({error}). The fit continues without "
                "it; the last state that was written remains valid.",
            )
        if name == POSTERIOR and self._writes:
            files.remove(self.path, STATE)
        self._saved = time.monotonic()
        self._took = self._saved - began

    def _check_header(self, header: dict[str, Any], computed: dict[str, Any] | None) -> None:
        """Write the header, or raise an error that names the first entry in which it differs from
        the folder's."""
        path = self.path / "header.pt"
        if not path.exists():
            files.write_atomically({"header": header, "computed": computed}, path)
        contents = files.contents_of(path, ("header",), _REMEDY)
        saved, before = contents["header"], contents.get("computed")
        for name in sorted(saved.keys() | header.keys()):
            if saved.get(name) != header.get(name):
                raise ValueError(
                    f"The checkpoint in {str(self.path)!r} belongs to another fit: its {name} is "
                    f"{saved.get(name)!r}, but here it is {header.get(name)!r}. {_REMEDY}"
                )
        if computed is not None and before is not None and (words := _differs(computed, before)):
            raise ValueError(
                f"The checkpoint in {str(self.path)!r} belongs to another fit: the {words} are not "
                "those that the network, Adapter(outputs=...) and the likelihood computed for it, "
                f"although their names and weights are the same. {_REMEDY}"
            )


def computed_by(problem: Problem) -> dict[str, Any]:
    """Return the results of the network and the likelihood for the first training examples, and a
    hash of these examples. They reveal functions that differ although their names are equal."""
    network, sweep = problem.linear_model.network, problem.sweep
    with network.guarded(), torch.no_grad():
        few = sweep.aligned(sweep.pieces(problem.data.first(), FEW)[0])
        f = network.outputs(few.inputs)
        loss = problem.loss(few.targets, few.weights)
        loss.check(f)
        data = files.plain((few.inputs, few.targets, few.weights))
        return {"data": data, "outputs": f.cpu(), "losses": loss.value(f[None])[None].cpu()}


def _differs(here: dict[str, Any], there: dict[str, Any]) -> str:
    """Return a description of the result that differs by more than rounding, or an empty string.
    Other training data are refused later."""
    rounding = torch.finfo(here["outputs"].dtype).eps ** 0.5
    for name in ("outputs", "losses") if here["data"] == there["data"] else ():
        own, other = here[name].double(), there[name].double()
        if own.shape != other.shape or (own - other).norm() > rounding * own.norm():
            return f"{name} for the first training examples"
    return ""


def header_of(problem: Problem, options: FitOptions, likelihood: Likelihood) -> dict[str, Any]:
    """Return the settings that a checkpoint must agree with, by name."""
    layout, network = problem.layout, problem.linear_model.network
    settings = {name: files.plain(value) for name, value in vars(options).items()}
    return {
        "format": f"{files.VERSION}.{FORMAT}",
        "network weights": bytes(problem.sweep.begun_with.fingerprint.tolist()).hex(),
        "layers": [type(layer).__qualname__ for layer in network.module.modules()],
        "parameters in the posterior": list(layout.names),
        "likelihood": type(likelihood).__name__,
        "options of the likelihood": files.plain(vars(likelihood)),
        "class_dim": network.class_dim,
        "precision": network.precision,
        **settings,
    }
