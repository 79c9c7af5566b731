"""Passes over a loader: batches on the right device, with rows counted and checked."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.data import orders
from torch_lla_em.data.batch import Batch, Keeping
from torch_lla_em.data.batches import TargetFn, default_targets, inputs_of, to_device
from torch_lla_em.data.identity import Fingerprint, Tally, same, together
from torch_lla_em.data.shares import Marks, Share
from torch_lla_em.runtime import Group, free_memory


class Chain:
    """Several loaders, one after the other, at every pass."""

    def __init__(self, loaders: Sequence[Iterable[Any]]):
        self.loaders = tuple(loaders)

    def __iter__(self) -> Iterator[Any]:
        for loader in self.loaders:
            yield from loader

    def __deepcopy__(self, memo: dict[int, Any]) -> Chain:
        return self

    def __reduce__(self) -> tuple[type[Chain], tuple[tuple[()]]]:
        """Leave the data out of pickles."""
        return Chain, ((),)


class Data:
    """A re-iterable loader; every pass must see the same rows, in any order.

    Batches are (inputs, targets), longer tuples that end with the targets, mappings with
    "labels", or anything that ``target_fn`` takes targets from. Of several ranks each sees
    its share; counts are of all of them.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device,
        target_fn: TargetFn | None = None,
        group: Group = Group(),
    ):
        if isinstance(loader, Iterator):
            raise ValueError(
                "The loader is a generator or an iterator, which is exhausted after one pass; "
                "fitting takes several. Pass a DataLoader, or a list of its batches."
            )
        if not isinstance(loader, Iterable):
            raise TypeError(
                f"The loader is a {type(loader).__name__}, which cannot be iterated over: pass a "
                "DataLoader, or a list of batches."
            )
        self.group = group
        self._loader = loader
        loaders = loader.loaders if isinstance(loader, Chain) else (loader,)
        marks = Marks(self._describe, _agree)
        self._shares = [Share(part, group, marks) for part in loaders]
        self._device = device
        self._target_fn = target_fn
        self._first: Fingerprint | None = None
        self._read = self._restored = False
        self._steps: set[int] = set()
        self._begun: tuple[Batch, Iterator[Batch]] | None = None
        self._begun_in: list[str] = []
        self._peeked: tuple[Any, Tensor] | None = None
        self._kept_in: list[str] = []
        """Where the generators were when the pass that is kept began."""

        self._candidate: list[Batch] | None = None
        self.keep = True
        """Whether batches may be kept."""

        self.kept: list[Batch] | None = None
        """All batches, once three passes were the same and if a quarter of the memory holds them."""

        self.num_rows: int | None = None
        """N, known after the first pass."""

        self.num_targets = 0
        """Entries of all targets: N, or N C where every output has one."""

        self.num_outputs = 0
        """Entries of all outputs, N C: set by whoever sees them first."""

        self.num_passes = 0
        """Passes over the data so far."""

        self.rows_seen = 0
        """Rows of this pass so far."""

        self.fingerprint: Fingerprint | None = None
        """Of the rows of this pass so far, while passes are compared."""

    def first(self) -> Batch:
        """Return the first batch, which the next pass goes on from.

        Of several ranks, some may have none: there it is the loader's, read once more.
        """
        if self.group.size > 1:
            if self._peeked is None:
                with torch.random.fork_rng(devices=[]):
                    self._peeked = self._split(self._peek())
            inputs, targets = self._peeked
            return Batch(0, torch.arange(len(targets)), inputs, targets)
        if self._begun is None:
            batches, self._begun_in = self._pass(False, False), self._orders()
            self._begun = next(batches), batches
        return self._begun[0]

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def batches(self, whole: bool = False, in_step: bool = False) -> Iterator[Batch]:
        """Yield this rank's batches of one pass, or all of them.

        ``in_step``: as many on every rank, the last of them empty where one has fewer.
        """
        self._peeked = None
        if self._begun is None:
            return self._pass(whole, in_step)
        (batch, rest), self._begun = self._begun, None
        return chain([batch], rest)

    def _pass(self, whole: bool, in_step: bool) -> Iterator[Batch]:
        own, steps = Tally(), 0
        self.rows_seen = 0
        compared = self.num_passes == 0 or self._first is not None
        self.fingerprint = own.fingerprint if compared else None
        # steps are taken in the loader's own order, which may be another every time
        held = None if in_step else self.kept
        drawn = [] if held else self._orders()
        again = self._kept_in if drawn and not in_step else []  # as an unbroken run goes over them
        orders.restore(self._loader, again)
        for batch in self._counted(held, own) if held else self._turns(whole, own):
            steps += 1
            yield batch._replace(step_rows=self._step(len(batch.rows))) if in_step else batch
        while in_step and (rows := self._step(0)):
            steps += 1
            yield Batch(-1, torch.arange(0), None, torch.zeros(0), rows)
        if in_step or self.group.size == 1:
            self._steps.add(steps)
        if again:
            orders.restore(self._loader, drawn)
        own.outputs = self.num_outputs
        own.fingerprint = own.fingerprint.on_cpu()
        every = self.group.meet("the end of a pass", own, same if whole else together)
        self.num_targets = every.targets
        if self.num_passes == 0:
            self.num_outputs = every.outputs
        kept = self.kept
        self._finish_pass(every.rows, every.fingerprint)
        if self.kept is not kept and not again:
            self._kept_in = drawn

    def _counted(self, batches: Iterable[Batch], own: Tally) -> Iterator[Batch]:
        """Yield batches, and count them in ``own``."""
        for batch in batches:
            own.reached, own.rows = own.reached + len(batch.rows), own.rows + len(batch.rows)
            own.targets += batch.targets.numel()
            self.rows_seen = own.reached
            if self.fingerprint is not None:
                self.fingerprint.add((batch.targets, batch.inputs), int(batch.rows[:1].sum()))
            yield batch

    def _turns(self, whole: bool, own: Tally) -> Iterator[Batch]:
        """Yield this rank's batches and count what goes by; keep them from the third pass on."""
        index, keeping = 0, Keeping(self._room() if self.num_passes > 1 else 0.0)
        for share in self._shares:
            start = own.reached
            for turn in share.turns(whole):
                if not turn.taken:
                    own.reached += self._num_rows(turn.batch) if turn.size is None else turn.size
                    index += 1
                    continue
                inputs, targets = self._split(turn.batch)
                size = self._count(inputs, targets, index)
                if turn.size not in (None, size):
                    raise ValueError(
                        f"Batch {index} has {size} rows, made of {turn.size} of the dataset: "
                        "several ranks can only share out data whose rows go one to one."
                    )
                here = torch.arange(own.reached, own.reached + size)
                rows = here if turn.rows is None else start + turn.rows
                batch = Batch(index, rows, inputs, targets)
                keeping.see(batch)
                yield from self._counted([batch], own)
                index += 1
        self._candidate = keeping.batches()

    def _room(self) -> float:
        """Return the bytes that batches may take; ranks whose passes differ keep none."""
        return free_memory(self._device) / 4 if self.keep and self.group.size == 1 else 0.0

    def _orders(self) -> list[str]:
        """Return what the next pass draws its order from; of several ranks nothing is put back."""
        return orders.states(self._loader) if self.group.size == 1 else []

    def _step(self, rows: int) -> int:
        """Return the rows of all ranks' next batches."""
        return self.group.meet("a step", rows, sum)

    def _peek(self) -> Any:
        """Return the loader's first batch, and leave its generator as it was."""
        generator = getattr(self._loader, "generator", None)
        before = None if generator is None else generator.get_state()
        for batch in self._loader:
            if before is not None:
                generator.set_state(before)
            return batch
        raise ValueError("The loader is empty: it yielded no rows.")

    def num_batches(self) -> int | None:
        """Return the batches of a pass over all ranks, if that is known without one."""
        counts = [share.num_batches() for share in self._shares]
        return None if None in counts else sum(counts)

    def num_steps(self) -> int | None:
        """Return the steps of a pass that goes batch by batch, if they are known to be as many each time."""
        if self._steps:
            return next(iter(self._steps)) if len(self._steps) == 1 else None
        counts = [share.num_steps() for share in self._shares]
        return None if None in counts else sum(counts)

    @property
    def tells_inputs(self) -> bool:
        """Whether other inputs would be noticed, as far as two passes have shown."""
        if self._first is None or self.num_passes < 2:
            return True
        return bool(self._first.compared() - {0})  # targets come first

    @property
    def is_shared_out(self) -> bool:
        """Whether a sampler has given every rank its share already."""
        return any(share.is_shared_out for share in self._shares)

    def facts(self) -> dict[str, Any]:
        """Return what passes have found out, as plain numbers that ``restore`` takes."""
        return {
            "num_rows": self.num_rows,
            "num_targets": self.num_targets,
            "num_outputs": self.num_outputs,
            "num_passes": self.num_passes,
            "first": None if self._first is None else self._first.state(),
            "steps": sorted(self._steps),
            "kept_in": self._kept_in,
            "orders": self._orders(),
        }

    def restore(self, facts: dict[str, Any]) -> None:
        """Take over what passes of an earlier run have found out; its data must be these."""
        if self._begun is None or facts["orders"] != self._begun_in:
            # the pass that was begun comes in its own order, not in that of an unbroken run
            self._begun = None
            orders.restore(self._loader, facts["orders"])
        if self._read:
            return
        self.num_rows, self.num_targets = facts["num_rows"], facts["num_targets"]
        self.num_outputs, self.num_passes = facts["num_outputs"], facts["num_passes"]
        self._first = None if facts["first"] is None else Fingerprint.of(facts["first"])
        if self._first and self.is_shared_out:  # batches, and so their padding, go by the ranks
            self._first.trust(rows=False)
        self._steps, self._kept_in = set(facts["steps"]), facts["kept_in"]
        self._restored = True

    def confirm(self) -> None:
        """Read the data once where an earlier run alone has, so that others are refused.

        What is known of them, and the order that comes next, stay as they are.
        """
        if not self._restored:
            return
        self.keep, known = False, self.facts()
        if self._begun is not None:
            known["orders"] = self._begun_in
        for _ in self:
            pass
        self.num_passes = known["num_passes"]
        self.restore(known)

    def _split(self, batch: Any) -> tuple[Any, Tensor]:
        batch = to_device(batch, self._device)
        if self._target_fn is None:
            targets, inputs = default_targets(batch), inputs_of(batch)
        else:
            targets = self._target_fn(batch)
            inputs = inputs_of(batch, targets)
        return inputs, torch.as_tensor(targets).to(self._device)

    def _num_rows(self, batch: Any) -> int:
        """Return the rows of a batch that stays where it is."""
        return len(torch.as_tensor((self._target_fn or default_targets)(batch)))

    def _describe(self, batch: Any) -> dict[str, Any]:
        fingerprint = Fingerprint()
        fingerprint.add(batch)
        return fingerprint.state()

    def _count(self, inputs: Any, targets: Tensor, index: int) -> int:
        if targets.dim() == 0:
            raise ValueError(f"The targets of batch {index} are a single number, not one per row.")
        if isinstance(inputs, Tensor) and inputs.dim() and len(inputs) != len(targets):
            raise ValueError(
                f"Batch {index} has {len(inputs)} inputs but {len(targets)} targets: every row "
                "needs one of each."
            )
        return len(targets)

    def _finish_pass(self, rows: int, fingerprint: Fingerprint) -> None:
        self.num_passes += 1
        self._read = True
        if self._restored:
            self._refuse_other_data(rows, fingerprint)
        if self.num_rows is None:
            if rows == 0:
                raise ValueError("The loader is empty: it yielded no rows.")
            self.num_rows, self._first = rows, fingerprint
            if all(share.keeps_order for share in self._shares):
                fingerprint.trust(rows=True)
        elif rows != self.num_rows:
            raise ValueError(
                f"The loader yielded {rows} rows in this pass but {self.num_rows} in the first. "
                "Every pass must see the same data: make the loader re-iterable and finite."
            )
        elif self._first is not None and not fingerprint.agrees(self._first):
            warnings.warn(self._disagreement(), stacklevel=2)
            self._first = None
        elif self._first is not None:
            if not self.is_shared_out:
                self._first.learn(fingerprint, is_next=self.num_passes == 2)
            self.kept = self.kept or self._candidate

    def _refuse_other_data(self, rows: int, fingerprint: Fingerprint) -> None:
        """Raise where the checkpoint's passes went over other rows."""
        if rows != self.num_rows or (self._first and not fingerprint.agrees(self._first)):
            cut = ", or batches cut and padded in another way" if fingerprint.is_padded else ""
            raise ValueError(
                f"The checkpoint is of other data: it saw {self.num_rows} rows, and these are "
                f"{rows} rows of another content{cut}. Delete its folder, or pass another."
            )
        self._restored = False

    def _disagreement(self) -> str:
        if _drops_random_rows(self._loader):
            return (
                "The loader shuffles and has drop_last=True, so every pass leaves out other rows. "
                "The posterior is that of fixed data: set drop_last=False."
            )
        return (
            "Two passes over the loader disagree: its data change from pass to pass, as under "
            "random augmentation. The posterior is that of fixed data: fit on a loader without "
            "augmentation."
        )


def _agree(mine: dict[str, Any], others: dict[str, Any]) -> bool:
    return Fingerprint.of(mine).agrees(Fingerprint.of(others))


def _drops_random_rows(loader: Any) -> bool:
    if isinstance(loader, Chain):
        return any(map(_drops_random_rows, loader.loaders))
    if not isinstance(loader, torch.utils.data.DataLoader) or not loader.drop_last:
        return False
    sequential = torch.utils.data.SequentialSampler
    try:
        drops = len(loader.dataset) % loader.batch_size != 0
    except TypeError:  # an iterable dataset without a length
        return False
    return drops and not isinstance(loader.sampler, sequential)
