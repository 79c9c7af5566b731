"""Checkpoints: the result of every pass is kept, so that a killed run goes on where it was.

Passes over the data are nearly all of the cost, and everything between them is a function
of their results. A run that is started again reads the passes that are there instead of
the data, and ends bitwise where an unbroken one would.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from torch_lla_em import files, persistence
from torch_lla_em.batch import Batch
from torch_lla_em.batch_products import Cotangent
from torch_lla_em.files import write_atomically
from torch_lla_em.finite import OUTPUTS, is_finite
from torch_lla_em.first_outputs import FirstOutputs
from torch_lla_em.leaving import Leaving
from torch_lla_em.memory_plan import size_of
from torch_lla_em.partial_pass import PartialPass
from torch_lla_em.problem import BatchProduct, NoiseFeatures, Problem, State
from torch_lla_em.shortages import Shortages
from torch_lla_em.slices import over_slices
from torch_lla_em.sweeps import OtherOrderError, Rows, Work

logger = logging.getLogger("torch_lla_em")

FORMAT = 2
"""Of the files of a folder."""

T = TypeVar("T")


class PassLog:
    """A folder with one file per pass, in order, and a header of what they belong to."""

    warned = False
    """Whether it was said that other inputs would not be noticed."""

    def __init__(self, folder: str | os.PathLike, header: dict[str, Any]):
        self.folder = Path(folder)
        self.position = 0
        self.writing = True
        self.asked = torch.zeros(2)
        """Where the pass at hand is taken."""

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            files.remove_stumps(self.folder)
            write_atomically({"probe": torch.zeros(1)}, self.folder / "probe")
            files.remove(self.folder / "probe")
        except OSError as error:
            raise OSError(
                f"The checkpoint folder {str(self.folder)!r} cannot be written to ({error}): free "
                "space there, or pass another folder."
            ) from error
        self._check_header(header)
        if not os.path.exists(self.finished) and not files.take(self._header):
            logger.warning(
                "Another process is at work in the checkpoint folder %r: end one of them, since two "
                "runs replace each other's passes, or give this one another folder.",
                str(self.folder),
            )

    @property
    def _header(self) -> Path:
        return self.folder / "header.pt"

    @property
    def _shortages(self) -> Path:
        return self.folder / "shortages.pt"

    @property
    def finished(self) -> Path:
        """Where the posterior of a finished run lies."""
        return self.folder / "posterior.pt"

    @property
    def next_pass(self) -> Path:
        """Where the pass that comes next lies, or will."""
        return self._pass(self.position)

    def _pass(self, position: int) -> Path:
        return self.folder / f"pass-{position:05d}.pt"

    def posterior(self, device: torch.device) -> dict[str, Tensor] | None:
        """Return the posterior of a finished run, or None if it is not finished."""
        if not os.path.exists(self.finished):
            return None
        return persistence.read(self.finished, ("facts",), "Delete it to fit again.")

    def recorded(self, key: Tensor, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the pass at this position from its file, or compute and write it.

        ``key`` is what the pass is taken at: a resumed run must ask the same questions.
        """
        self.asked = mark_of(key)
        return self._entry(self.asked, key.device, compute)

    def _entry(
        self, asked: Tensor, device: torch.device, compute: Callable[[], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        known = self._known(asked, device)
        return self._computed(asked, compute) if known is None else known

    def _known(self, asked: Tensor, device: torch.device) -> dict[str, Tensor] | None:
        """Return the pass at this position from its file, if it is there and good."""
        path = self.next_pass
        if not os.path.exists(path):
            return None
        remedy = "Delete it and all passes of higher numbers, to go on from before it."
        last = not os.path.exists(self._pass(self.position + 1))
        try:
            entry = files.tensors_of(path, ("asked",), "" if last else remedy, device)
        except FileNotFoundError:  # another run has finished meanwhile
            return None
        except files.UnreadableError as error:
            if not last:
                raise
            logger.warning("%s The pass is computed again.", error)
            return None
        known = entry.pop("asked").cpu()
        if (asked - known).abs().max() > 1e-3 * (1 + known.abs().max()):
            raise ValueError(
                f"The checkpoint in {str(self.folder)!r} took another path than this run does: "
                "it is of another version of the program, memory ended here and not there, or "
                "another run is at work in it. Go on where there is more memory, or delete the "
                "folder to start anew."
            )
        self.position += 1
        return entry

    def _computed(self, asked: Tensor, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Compute the pass at this position and write it."""
        path, position = self.next_pass, self.position
        self.position += 1
        try:
            entry = compute()
        except Exception:  # perhaps of memory: then it is asked once more
            self.position = position
            raise
        if all(map(is_finite, entry.values())):
            self._write({**entry, "asked": asked}, path)
        return entry

    def compare(self, outputs: FirstOutputs | None) -> None:
        """Keep what the network made of its first batch, or refuse another network's."""
        if outputs is None:
            return
        path = self.folder / "outputs.pt"
        if not os.path.exists(path):
            self._write(outputs.tensors(), path)
            return
        remedy = "Delete it; then the next run is compared with the outputs of this one."
        if outputs.contradicts(outputs.known(files.tensors_of(path, ("batch", "numbers"), remedy))):
            raise ValueError(
                "The network's outputs on the first batch differ from those that the checkpoint in "
                f"{str(self.folder)!r} began with, for the same data and weights: its forward_fn, "
                "code or buffers have changed. Bring them back, or pass another folder."
            )

    def read_shortages(self) -> list[list[int]]:
        """Return where memory ended between passes, as far as it is known."""
        if not os.path.exists(self._shortages):
            return []
        remedy = "Delete the folder to start anew, or pass another."
        return files.tensors_of(self._shortages, ("shortages",), remedy)["shortages"].tolist()

    def write_shortages(self, known: list[list[int]]) -> None:
        """Keep where memory ended between passes, unless the passes that are there had more of it."""
        if not os.path.exists(self.next_pass):
            self._write({"shortages": torch.tensor(known)}, self._shortages)

    def _write(self, state: dict[str, Tensor], path: Path) -> None:
        if self.writing:
            try:
                write_atomically(state, path)
            except OSError as error:
                self.give_up(error)

    def give_up(self, error: OSError) -> None:
        """Write no more, and say so; what was written stays good."""
        self.writing = False
        logger.warning(
            "The checkpoint cannot be written any more (%s); the fit goes on without, and "
            "the passes before this one stay good.",
            error,
        )

    def finish(self, posterior: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Put the posterior, and what is known of its data, in the place of the passes."""
        files.leave(self._header)
        try:
            write_atomically({**posterior, "facts": persistence.to_bytes(facts)}, self.finished)
        except OSError as error:
            self.give_up(error)
            return
        for name in ("pass-*.pt", "partial.pt", "shortages.pt"):
            for path in self.folder.glob(name):
                files.remove(path)

    def require_room(self, passes: int) -> None:
        """Refuse to begin where two passes, of so many bytes, have no room; but go on."""
        free = files.room_in(self.folder)
        if free >= passes:
            return
        fault = (
            f"The checkpoint folder {str(self.folder)!r} has {size_of(free)} free, but two passes take "
            f"{size_of(passes)}: free space there, or take fewer samples (num_samples)."
        )
        if not os.path.exists(self._pass(0)):
            raise OSError(f"{fault} Or pass another folder.")
        logger.warning("%s", fault)

    def _check_header(self, header: dict[str, Any]) -> None:
        path = self._header
        if not path.exists():
            write_atomically({"header": persistence.to_bytes(header)}, path)
            return
        remedy = "Delete the folder to start anew, or pass another."
        known = persistence.from_bytes(files.tensors_of(path, ("header",), remedy)["header"])
        for name in sorted(known.keys() | header.keys()):
            if known.get(name) != header.get(name):
                raise ValueError(
                    f"The checkpoint in {str(self.folder)!r} is of another run: its {name} is "
                    f"{known.get(name)!r}, here it is {header.get(name)!r}. Delete the folder, or "
                    "pass another."
                )


def mark_of(key: Tensor) -> Tensor:
    """Return two numbers that tell one place where a pass is taken from another."""
    total = torch.stack([key.double().sum(), key.double().square().sum()])
    if key.is_floating_point():  # whole numbers are no vector, so that no rank has a slice of them
        total = over_slices(total)
    return torch.stack([total[0], total[1].sqrt()]).cpu()


class RecordedProblem(Problem):
    """A problem whose passes go through a log, in parts where they take long."""

    log: PassLog
    partial: PartialPass
    leaving: Leaving
    shortages: Shortages | None = None

    def record(self, log: PassLog, leaving: Leaving) -> None:
        """Begin to use a log; end at the next batch once it is time to leave."""
        self.log, self.leaving = log, leaving
        self.partial = PartialPass(log.folder / "partial.pt")
        if self.data.group.size == 1:
            self.shortages = Shortages(log)
            leaving.idle = lambda: self.partial.summed == self._read

    def ggn_product(self, w: Tensor) -> Tensor:
        """Return G w, shape (K, P)."""
        return self._recorded(w, lambda: {"Gw": super(RecordedProblem, self).ggn_product(w)})["Gw"]

    def loss_and_gradient(self, w: Tensor) -> tuple[float, Tensor]:
        """Return Σ_n -log p(y_n | J_n w) and its gradient, shape (P,)."""

        def compute() -> dict[str, Tensor]:
            loss, gradient = super(RecordedProblem, self).loss_and_gradient(w)
            return {"loss": torch.tensor(loss, dtype=torch.float64), "gradient": gradient}

        entry = self._recorded(w, compute)
        return entry["loss"].item(), entry["gradient"]

    def noise_features(self, num_samples: int, seed: int) -> NoiseFeatures:
        """Return η and s² from one pass, whose noise is keyed by (seed, row)."""

        def compute() -> dict[str, Tensor]:
            return super(RecordedProblem, self).noise_features(num_samples, seed)._asdict()

        entry = self._recorded(torch.tensor([num_samples, seed], device=self.device), compute)
        return NoiseFeatures(entry["eta"], entry["squares"])

    def rows(self) -> Tensor:
        """Return R, shape (N C, P), with G = RᵀR."""
        key = torch.zeros(1, device=self.device)
        return self._recorded(key, lambda: {"R": super(RecordedProblem, self).rows()})["R"]

    def kept(self, key: Tensor, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return what was computed at ``key``, from the log where it is there."""
        return self._recorded(key, compute)

    def with_room(self, run: Callable[[], T], make_room: Callable[[], bool]) -> T:
        """Return the result of ``run``, without what a run before this one had no room for."""
        if self.shortages is None:
            return super().with_room(run, make_room)
        return self.shortages.with_room(run, make_room)

    def room(self) -> float:
        """Return the bytes that were free when the fit first asked here, so that it chooses alike."""
        free = self.free_memory()
        key = torch.zeros(1, device=self.device)
        known = self.kept(key, lambda: {"bytes": torch.tensor(free, dtype=torch.float64)})
        begun = known["bytes"].item()
        if free < begun / 2:
            logger.warning(
                "The fit had %.2g GB free here, half of which a Krylov basis may take, and goes on "
                "so; now there are %.2g GB. If memory ends, go on where there is as much, or begin "
                "anew in another folder.",
                begun / 1e9,
                free / 1e9,
            )
        return begun

    def _accumulate(self, sums: dict[str, Tensor], add: Work[None], rows: Rows) -> None:
        """Run a pass whose work on each batch adds to the sums, in place.

        Of several ranks none keeps a part of a pass, since others may go on with the run.
        """
        if self.data.group.size > 1:
            return super()._accumulate(sums, add, rows)

        def counted(batch: Batch, done: int) -> int:
            add(batch, done)
            return int(batch.rows[-1]) + 1

        with self._kept_when_left(sums):
            for reached in self._gone_on_with(sums, partial(self._over, counted), rows):
                if reached == self.data.rows_seen and self.partial.due():
                    self._keep(sums)

    def _minibatches(
        self, cotangent: Cotangent, state: State = None, rows: Rows = Rows(in_step=True)
    ) -> Iterator[tuple[int, BatchProduct]]:
        """Yield the steps of an epoch, and keep the state between them where it takes long."""
        if state is None or self.data.group.size > 1:
            yield from super()._minibatches(cotangent, state, rows)
            return
        spent = self.cost.columns
        sums = {**state, "columns": torch.zeros((), dtype=torch.float64)}

        def steps(rows: Rows) -> Iterator[tuple[int, BatchProduct]]:
            self.cost.columns = spent + sums["columns"].item()
            yield from super(RecordedProblem, self)._minibatches(cotangent, state, rows)

        with self._kept_when_left(sums):
            for step in self._gone_on_with(sums, steps, rows):
                yield step
                sums["columns"].fill_(self.cost.columns - spent)
                if self.partial.due():
                    self._keep(sums)

    def _gone_on_with(
        self, sums: dict[str, Tensor], sweep: Callable[[Rows], Iterator[T]], rows: Rows
    ) -> Iterator[T]:
        """Yield from a sweep that changes the sums in place, after the rows they are known of."""
        self.partial.next_part()
        began, outputs = {}, self.data.num_outputs
        if self.partial.exists():
            began = {name: total.clone() for name, total in sums.items()}
        known = self.partial.restore(self.log.position, sums, self.data)
        left = rows
        if known is not None:
            left = rows._replace(skipped=known.skipped, prefix=known.prefix)
        try:
            yield from sweep(left)
        except OtherOrderError:  # a loader that shuffles: the sweep begins anew
            for name, total in began.items():
                sums[name].copy_(total)
            self.data.num_outputs = outputs
            yield from sweep(rows)

    def _batches(self, rows: Rows) -> Iterator[Batch]:
        self.partial.summed = self.data.num_passes, rows.skipped
        for batch in super()._batches(rows):
            yield batch
            # after the last piece of a batch, when its sums have been made
            if self.data.group.size > 1 or int(batch.rows[-1]) + 1 == self.data.rows_seen:
                self.partial.summed = self._read
                if self.leaving.requested:
                    raise self.leaving.requested

    @property
    def _read(self) -> tuple[int, int]:
        """Passes so far, and rows of the one under way."""
        return self.data.num_passes, self.data.rows_seen

    @contextmanager
    def _kept_when_left(self, sums: dict[str, Tensor]) -> Iterator[None]:
        """Keep the sums of whole batches where somebody asked to leave."""
        try:
            yield
        except BaseException as error:
            asked = self.leaving.requested
            if asked and (error is asked or isinstance(error, Exception)) and self.leaving.idle():
                self._keep(sums)
            raise

    def _keep(self, sums: dict[str, Tensor]) -> None:
        """Write the sums over the rows so far, if they are worth it."""
        if not (self.log.writing and self.data.fingerprint and self.data.rows_seen):
            return
        if self._finite.first_fault(OUTPUTS) is None and all(map(is_finite, sums.values())):
            self.refuse_changed_weights()
            try:
                self.partial.write(self.log.position, sums, self.data)
            except OSError as error:
                self.log.give_up(error)

    def _recorded(self, key: Tensor, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        computed = False
        if self.shortages is not None:
            self.shortages.meet()

        def counted() -> dict[str, Tensor]:
            nonlocal computed
            computed = True
            self.partial.begin(self.log.asked)
            return {**compute(), "facts": persistence.to_bytes(self._facts())}

        entry = self.log.recorded(key, counted)
        if computed:  # what is kept may be of a pass that comes after those that were read
            self.partial.forget()
            self._warn_of_other_inputs()
        facts = persistence.from_bytes(entry.pop("facts"))
        self.cost.columns = facts.pop("columns")
        self.data.restore(facts)
        return entry

    def _warn_of_other_inputs(self) -> None:
        if self.log.warned or self.data.group.rank > 0 or self.data.tells_inputs:
            return
        self.log.warned = True
        logger.warning(
            "Nothing of the inputs is compared at a restart: they are in objects that say nothing, "
            "or in batches that are made in another way at every pass. The checkpoint would go on "
            "with other inputs unnoticed."
        )

    def _facts(self) -> dict[str, Any]:
        return {"columns": self.cost.columns, **self.data.facts()}
