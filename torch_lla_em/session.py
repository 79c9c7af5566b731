"""Everything around a fit: ranks, checkpoints, the progress bar, and the history of EM steps."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from torch_lla_em.checkpoint import POSTERIOR, STATE, Folder, computed_by
from torch_lla_em.data import Identity
from torch_lla_em.inference import (
    FitOptions,
    Progress,
    State,
    Step,
    has_memory,
    record,
    settings_of,
    takes_features,
)
from torch_lla_em.prediction import refuse_training_data
from torch_lla_em.problem import (
    KEPT_OUTPUTS,
    Plan,
    Problem,
    duration,
    prepare,
    seconds_of_pass,
    time_of_fit,
)
from torch_lla_em.runtime import Compute, Group, collected, tf32

logger = logging.getLogger("torch_lla_em")

# the next step is expected to take this multiple of the time of the last one, since the span of
# directions grows
_GROWTH = 1.2

_LEARNING = "learning the prior and the posterior"

PASSES, LARGEST = 15.0, 5.0
"""Number of passes of a usual fit, and its multiple for the upper bound: 51 fits of
benchmarks/reference.py took 4 to 20 passes."""


class Budget:
    """Decides after which step a fit ends; all ranks decide the same."""

    def __init__(self, seconds: float, group: Group = Group()):
        self._group, self._stepped = group, time.monotonic()
        self._end = self._stepped + seconds

    def left(self, spare: float = 0.0) -> float:
        """Return the seconds that are left on the slowest rank, minus the seconds that each rank
        spares."""
        return self._group.meet(self._end - time.monotonic() - spare, min)

    def ends(self) -> bool:
        """Return whether the step after the one that ends now would exceed the budget."""
        began, self._stepped = self._stepped, time.monotonic()
        return self.left(_GROWTH * (self._stepped - began)) < 0


class Session:
    """The surroundings of a fit: ranks, checkpoint, progress bar and history."""

    def __init__(
        self,
        problem: Problem,
        header: dict[str, Any],
        compute: Compute = Compute(),
        has_bar: bool = False,
        unseen: Identity | None = None,
    ):
        """``unseen`` are the validation examples, which must not be training examples."""
        checkpoint, budget = compute.checkpoint, compute.budget
        self._has_bar, self._unseen, self._stage = has_bar, unseen, "checking the network"
        self.problem, self._group, self._device = problem, problem.data.group, problem.device
        self._began = time.monotonic()
        self._budget = None if budget is None else Budget(budget, self._group)
        self.history: list[dict[str, Any]] = []
        self.messages: list[str] = []
        """The memory plan, and the warnings of the fit."""

        self._first_pass = self._began, 0  # when it began, and the number of passes before it
        settings = {"checkpoint": checkpoint is not None, "budget": budget is not None, **header}
        if self._group.size > 1:
            compare_ranks(self._group, self._device, settings)
        self._checkpoint, self._header = checkpoint, header
        self._folder: Folder | None = None

    @contextmanager
    def running(self) -> Iterator[Session]:
        """Collect warnings, show the bar, and set torch's modes for a fit."""
        looks = {"bar_format": "{desc}: {elapsed}{postfix}", "mininterval": 0.5, "miniters": 0}
        looks["disable"] = self._group.rank > 0 or not self._has_bar
        with ExitStack() as stack:
            stack.enter_context(collected(self.messages))
            self._bar = stack.enter_context(tqdm(desc=self._stage, **looks))
            for device in {"cpu", self._device.type}:
                stack.enter_context(torch.autocast(device, enabled=False))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            # solvers compute in full precision; that of the network is set for each of its calls
            if self._device.type == "cuda":
                stack.enter_context(tf32(False))
            yield self

    def plan(self, options: FitOptions, compute: Compute, timed: bool = False) -> Plan:
        """Return the plan of the memory. If ``timed``, and if the number of examples is known, it
        includes the seconds of a pass."""
        data, plan = self.problem.data, prepare(self.problem, options.num_samples, compute)
        every = data.facts.num_rows or data.source.num_batches() * len(data.first().rows)
        rows = every * data.largest_share
        if 0 < rows < math.inf:
            plan = plan._replace(memory=memory_of(self.problem, options, plan, rows))
            if timed:
                plan = plan._replace(pass_seconds=seconds_of_pass(self.problem, plan, rows))
        return plan._replace(is_last_layer=self.problem.linear_model.is_last_layer)

    def finished(self) -> dict[str, Tensor] | None:
        """Return the posterior if the checkpoint is that of a finished fit. Raise an error for a
        checkpoint of another fit or of other data."""
        if self._checkpoint is None:
            return None
        computed = computed_by(self.problem)
        self._folder = Folder(self._checkpoint, self._header, self._group, computed)
        state: dict[str, Any] | None = self._folder.load(POSTERIOR, self._device)
        if state is not None:
            self.problem.data.restore(state["facts"])
            self.problem.data.confirm()
        return state

    def begin(self, plan: Plan) -> Progress | None:
        """Log the plan, and show the fit's progress from now on. Return the last state of an
        earlier run of this fit, or None if there is none."""
        self._stage = "drawing random numbers"
        self._first_pass = time.monotonic(), self.problem.data.num_passes
        self.problem.sweep.watch(self._draw)
        self.messages.insert(0, str(plan))
        logger.info("%s", plan)
        saved = None if self._folder is None else self._folder.load(STATE, self._device)
        if saved is None:
            return None
        self.problem.data.restore(saved["facts"])
        self.history[:] = saved["history"]
        self.messages += [words for words in saved["messages"] if words not in self.messages]
        self._stage = _LEARNING
        self.problem.sweep.resume(saved["columns"])
        self._began -= saved["seconds"]
        logger.info("Resuming from the checkpoint after EM step %d.", len(self.history))
        progress: Progress = saved["progress"]
        return progress

    # calls by the fit

    def drawn(self, progress: Progress) -> None:
        """Raise an error if validation examples are training examples. Log the expected time of a
        long fit."""
        if self._unseen is not None:
            facts = self.problem.data.facts
            refuse_training_data(self._unseen, facts.least, facts.num_labelled)
        began, passes = self._first_pass
        seconds = (time.monotonic() - began) / max(1, self.problem.data.num_passes - passes)
        words = time_of_fit(seconds, self.problem.linear_model.is_last_layer, only_long=True)
        if self._group.rank == 0 and words:
            logger.warning("%s", words)
        self._saved_if_due(lambda: progress)  # at least one step is taken
        self._stage = _LEARNING

    def run(self, steps: Iterable[Step], saved: Callable[[State], Progress], number: int) -> State:
        """Run the steps of a fit until they end or the budget is spent, and return the last state.

        Each step may be saved. It has an entry in the history if its number is larger than that of
        the last entry, which means that λ, σ and H were computed again.
        """
        q: State | None = None
        for posterior, q in steps:
            self._draw()
            fate, is_end = q.fate, posterior is q and bool(q.fate.why)
            if fate.number > number or fate.why == "budget" or (is_end and not fate.number):
                number = fate.number
                self.history.append(
                    {
                        "step": len(self.history) + 1,
                        **record(posterior, self.problem.sweep.columns),
                        "data_passes": self.problem.data.num_passes,
                        "seconds": self._seconds(),
                    }
                )
            if self._saved_if_due(partial(saved, q)) and not is_end:
                return posterior._replace(fate=posterior.fate._replace(why="budget"))
        assert q is not None
        return q

    def _saved_if_due(self, progress: Callable[[], Progress]) -> bool:
        """Save the state if that is due, and return whether the budget is spent."""
        ends = self._budget is not None and self._budget.ends()
        if self._folder is not None:
            self.problem.sweep.refuse_changes()
            if self._folder.is_due() or ends:
                saved: dict[str, Any] = {
                    "columns": self.problem.sweep.columns,
                    "seconds": self._seconds(),
                }
                saved |= {"history": self.history, "messages": self.messages[1:]}
                saved |= {"facts": self.problem.data.state()}
                self._folder.save(lambda: {**saved, "progress": progress()})
        return ends

    def is_late(self) -> bool:
        """Return whether the time of the fit is over; all ranks return the same."""
        return self._budget is not None and self._budget.left() < 0

    def _seconds(self) -> float:
        """Return the seconds of the fit so far, including those before it was resumed."""
        return time.monotonic() - self._began

    def _draw(self) -> None:
        """Show the stage, the pass, and the seconds of a pass."""
        if self._bar.disable:
            return
        passes = self.problem.data.num_passes
        self._bar.set_description_str(f"{self._stage}, pass {passes + 1}", refresh=False)
        speed = f"{duration(self._seconds() / passes)} per pass" if passes else ""
        self._bar.set_postfix_str(speed, refresh=False)
        self._bar.update(0)

    # the end

    def end(self, why: str) -> None:
        """Record why the fit ended. Raise an error if the data are not those of the checkpoint, or
        if the weights have changed."""
        if self.history:  # the last record has the seconds of the whole fit
            self.history[-1].update(seconds=self._seconds(), why=why)
        if not self._bar.disable:
            self._bar.set_postfix_str("", refresh=False)
            self._bar.set_description_str("fitted")
        self.problem.data.confirm()
        self.problem.sweep.refuse_changes()

    def keep(self, state: Callable[[], dict[str, Tensor]]) -> None:
        """Replace the state in the checkpoint by the posterior."""
        if self._folder is not None:
            self._folder.save(lambda: {**state(), "facts": self.problem.data.state()}, POSTERIOR)


def compare_ranks(group: Group, device: torch.device, settings: dict[str, Any]) -> None:
    """Raise an error that names the difference if a rank has another model, settings or device."""

    def same(every: list[dict[str, Any]]) -> None:
        for rank, settings in enumerate(every):
            for name in sorted(every[0].keys() | settings.keys()):
                here, first = (repr(each.get(name))[:80] for each in (settings, every[0]))
                if settings.get(name) != every[0].get(name):
                    raise ValueError(
                        f"Rank {rank} has another {name} than rank 0: {here} instead of {first}. "
                        "Construct and fit the same object on every rank. To fit a different one "
                        "on each rank, pass Compute(shard=None)."
                    )

    group.meet({"device": device.type, **settings}, same)
    # this fails before any computation if a backend does not support the device
    group.sum(torch.zeros(1, device=device))


def memory_of(
    problem: Problem, options: FitOptions, plan: Plan, rows: float
) -> tuple[float, float]:
    """Return the bytes of the vectors and directions of usual and of long fits, for this number of
    examples.

    The memory of the network for a batch is not counted, because pieces are halved until they fit.
    The number of directions depends on the spectrum of the GGN, which is not known before the fit.
    """
    P, example, room = plan.size, plan.example, options.span_memory or plan.free / 2
    if options.layerwise or options.solver is not None:  # without directions
        return plan.vectors, 2 * plan.vectors
    outputs = rows * example.outputs
    if example.outputs > example.classes:
        outputs = min(outputs, KEPT_OUTPUTS)
    if takes_features(problem, P, plan.num_samples):
        sites = outputs / (example.classes * problem.data.largest_share)
        of_features = settings_of(problem, options, sites, example.classes, room)[1]
        if has_memory(of_features, room):
            return of_features, of_features
    of_one = P + 2 * outputs  # as in Span.bytes_of
    usual, most = (
        min(room, min(P, times * PASSES * (plan.num_samples + 1)) * of_one * problem.dtype.itemsize)
        for times in (1, LARGEST)
    )
    return usual + 0.5 * plan.vectors, most + plan.vectors
