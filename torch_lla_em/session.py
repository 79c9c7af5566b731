"""Everything around a fit: ranks, checkpoints, the progress bar, and the history of EM steps."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from torch_lla_em.checkpoint import Folder
from torch_lla_em.data import Identity, paired, with_weights
from torch_lla_em.inference import Estimate, FitOptions, Progress, Watch, log_evidence, memory_of
from torch_lla_em.prediction import refuse_training_data, required
from torch_lla_em.problem import (
    Plan,
    Problem,
    duration,
    is_long,
    prepare,
    seconds_of_pass,
    time_of_fit,
)
from torch_lla_em.runtime import (
    Budget,
    Compute,
    Group,
    collected,
    report,
    tf32,
)

logger = logging.getLogger("torch_lla_em")

_SECONDS_BETWEEN_UPDATES = 0.5
_BAR = "{desc}: {elapsed}{postfix}"
_STAGES = {
    "checking the network": "checking the network",
    "random probes": "drawing random numbers",
    "E-step": "learning the prior and the posterior",
    "linear mode": "finding the most probable weights",
    "posterior samples": "drawing posterior samples",
}
"""What a fit does, in words."""


class Run(NamedTuple):
    """What a fit may use, and the arguments of ``fit`` for what surrounds it."""

    compute: Compute = Compute()
    progress_bar: bool = False
    unseen: Identity | None = None
    """The validation examples, which must not be training examples."""


class Session:
    """What surrounds a fit: ranks, checkpoint, progress bar and history."""

    def __init__(
        self,
        problem: Problem,
        header: dict[str, Any],
        run: Run = Run(),
    ):
        compute, progress_bar, self._unseen = run
        checkpoint, budget = compute.checkpoint, compute.budget
        self.problem, self._has_bar = problem, progress_bar
        self._group, self._device = problem.data.group, problem.device
        self._began, self.budget = time.monotonic(), Budget(budget, self._group)
        self.history: list[dict[str, Any]] = []
        """Records of the EM steps so far."""

        self.messages: list[str] = []
        """The memory plan, and the warnings of the fit."""

        self._left = math.inf
        """The seconds that the fit still took after the last step, if the error goes on falling."""

        self._stepped = self._began
        self._first_pass = self._began, 0
        """When the first pass began, and the number of passes before it."""

        settings = {"checkpoint": checkpoint is not None, "budget": budget is not None, **header}
        compare_ranks(self._group, self._device, settings)
        self._folder: Folder | None = None
        if checkpoint is not None:
            self._folder = Folder(checkpoint, header, self._group)

    @contextmanager
    def running(self) -> Iterator[Session]:
        """Collect warnings, show the bar, and set torch's modes for a fit."""
        silent = self._group.rank > 0 or not self._has_bar
        with ExitStack() as stack:
            stack.enter_context(collected(self.messages))
            looks = {
                "bar_format": _BAR,
                "mininterval": _SECONDS_BETWEEN_UPDATES,
                "miniters": 0,
            }
            self._bar = stack.enter_context(
                tqdm(desc=self.problem.cost.stage, disable=silent, **looks)
            )
            for device in {"cpu", self._device.type}:
                stack.enter_context(torch.autocast(device, enabled=False))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            # solvers compute in full precision; that of the network is set for each of its calls
            stack.enter_context(tf32(self._device, False))
            yield self

    def finished(self) -> dict[str, Tensor] | None:
        """Return the posterior if the checkpoint is of a finished fit; refuse other data."""
        state = None if self._folder is None else self._folder.posterior(self._device)
        if state is not None:
            self.problem.data.restore(state["facts"])
            self.problem.data.confirm()
        return state

    def plan(self, options: FitOptions, compute: Compute) -> Plan:
        """Return the plan of the memory."""
        plan = prepare(self.problem, options.num_samples, compute)
        rows = self._expected_rows()
        if rows < math.inf:
            plan = plan._replace(memory=memory_of(self.problem, options, plan, rows))
        return plan

    def follow(self, plan: Plan) -> None:
        """Log the plan, and show the fit's progress from now on."""
        self._first_pass = time.monotonic(), self.problem.data.num_passes
        if not self._bar.disable:
            self.problem.sweep.watch(self._draw)
        self.messages.insert(0, plan.of_memory)  # so that it is not stored a second time
        if plan.tight:
            report("log", plan.of_memory)
        else:
            logger.info("%s", plan.of_memory)

    def timed(self, plan: Plan) -> Plan:
        """Return the plan with the seconds of a pass, if the number of examples is known."""
        rows = self._expected_rows()
        if rows == math.inf:
            return plan
        return plan._replace(pass_seconds=seconds_of_pass(self.problem, plan, rows))

    def _expected_rows(self) -> float:
        """Return the largest number of examples of a rank; infinity if the loader does not state its length."""
        data = self.problem.data
        every = data.facts.num_rows or data.num_batches() * len(data.first().rows) or math.inf
        return every * data.largest_share

    def begin(self) -> Progress | None:
        """Return the last state of an earlier run of this fit, None if there is none."""
        if self._folder is None:
            return None
        problem = self.problem
        saved = self._folder.load(problem.device)
        if saved is None:
            return None
        problem.data.restore(saved["facts"])
        numbers = problem.data.numbers
        progress: Progress = self._folder.with_blocks(saved["progress"], problem.device, numbers)
        self.history[:] = saved["history"]
        self.messages += [words for words in saved["messages"] if words not in self.messages]
        problem.cost.add(saved["columns"] - problem.cost.columns)
        self._began -= saved["seconds"]
        logger.info("Resuming from the checkpoint after EM step %d.", len(self.history))
        return progress

    @property
    def watch(self) -> Watch:
        """What is called after the steps of the fit, and within them."""
        return Watch(self.on_step, lambda: self.budget.left() < 0)

    def on_step(self, found: dict[str, Any] | None, progress: Progress, left: float) -> bool:
        """Record an EM step, save the state, and return whether the budget ends."""
        if progress.state is None:
            if self._unseen is not None:
                refuse_training_data(self._unseen, *self.trained_on())
            self._tell_time()
        self._left, self._stepped = left, time.monotonic()
        self._record(found)
        self._save(progress)
        return self.budget.ends()

    def trained_on(self) -> tuple[tuple[int, ...], int]:
        """Return hashes of some training examples, none if they are not known, and the number of all."""
        identity = self.problem.data.identity
        known = () if identity is None else tuple(identity.least)
        return known, self.problem.data.facts.num_labelled

    def _record(self, found: dict[str, Any] | None) -> None:
        """Append an EM step to the history, if there is one."""
        if found is not None:
            passes, seconds = self.problem.data.num_passes, self._seconds()
            own = {"data_passes": passes, "seconds": seconds}
            self.history.append({"step": len(self.history) + 1, **found, **own})

    def _save(self, progress: Progress) -> None:
        """Save the state in the checkpoint folder, if there is one."""
        if self._folder is None:
            return
        self.problem.sweep.refuse_changes()
        state = {
            "history": self.history,
            "messages": self.messages[1:],
            "columns": self.problem.cost.columns,
            "seconds": self._seconds(),
            "facts": self.problem.data.state(),
            "progress": progress,
        }
        self._folder.save(state)

    def _tell_time(self) -> None:
        """Show how long a fit with such passes takes, after the first one, if it is long."""
        began, passes = self._first_pass
        seconds = (time.monotonic() - began) / max(1, self.problem.data.num_passes - passes)
        if self._group.rank == 0 and is_long(seconds):
            report("show", time_of_fit(seconds))

    def _seconds(self) -> float:
        """Return the seconds of the fit so far, with those before it was resumed."""
        return time.monotonic() - self._began

    def _draw(self, share: float | None) -> None:
        """Show the stage, the pass, the seconds of a pass, and how long the fit still takes, if the error falls."""
        stage, passes = self.problem.cost.stage, self.problem.data.num_passes
        words = f"{_STAGES.get(stage, stage)}, pass {passes + 1}"
        words += "" if share is None else f" ({share:.0%})"
        self._bar.set_description_str(words, refresh=False)
        known = [f"{duration(self._seconds() / passes)} per pass"] if passes else []
        left = self._left - (time.monotonic() - self._stepped)
        if 0 < left < math.inf:
            known.append(f"about {duration(max(1.0, left))} left")
        self._bar.set_postfix_str(", ".join(known), refresh=False)
        self._bar.update(0)

    def end(self, why: str) -> None:
        """Note why the fit ended; raise an error if the data are not those of the checkpoint, or the weights have changed."""
        if self.history:  # the last record has the seconds of the whole fit
            self.history[-1].update(seconds=self._seconds(), why=why)
        if not self._bar.disable:
            self._bar.set_postfix_str("", refresh=False)
            self._bar.set_description_str("fitted")
        self.problem.data.confirm()
        self.problem.sweep.refuse_changes()

    def keep(self, state: dict[str, Tensor]) -> None:
        """Replace the state in the checkpoint by the posterior."""
        if self._folder is not None:
            self._folder.finish(state, self.problem.data.state())


def compare_ranks(group: Group, device: torch.device, settings: dict[str, Any]) -> None:
    """Raise an error that names the difference if a rank has another model, settings or device."""
    group.meet({"device": device.type, **settings}, _same)
    if group.size > 1:  # fail before any computation if a backend does not support the device
        group.sum(torch.zeros(1, device=device))


def _same(every: list[dict[str, Any]]) -> None:
    for rank, settings in enumerate(every):
        for name in sorted(every[0].keys() | settings.keys()):
            own, first = settings.get(name), every[0].get(name)
            if own != first:
                raise ValueError(
                    f"Rank {rank} has another {name} than rank 0: {_short(own)} against "
                    f"{_short(first)}. Construct and fit the same object on every rank. To fit a "
                    "different one on each rank, pass Compute(shard=None)."
                )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def log_marginal_likelihood(
    la: Any, loader: Any = None, targets: Tensor | None = None, *, weights: Any = None
) -> Estimate:
    """Return log p(y | λ, σ) of the linear model, an ``Estimate`` with its standard error over samples.

    It compares priors, noise levels and likelihoods on the features of one network. It does not
    compare networks, whose features were learnt from the same targets: use ``compare`` for these.

    Args:
        la (LinearisedLaplace): The posterior; ``la.log_marginal_likelihood()`` passes it.
        loader (DataLoader, Dataset, list of batches, or inputs, optional): The training data, for a fit by a
            solver or with ``prior="layerwise"``: it takes up to 120 passes then. Default None: found by the fit.
        targets (Tensor, optional): The targets, if ``loader`` are inputs.
        weights (Tensor, str or callable, optional): The ``weights`` of the fit.

    Raises:
        ValueError: If the training data are needed.

    Example:
        >>> evidence = la.log_marginal_likelihood().value
    """
    found = required(la).members[0].result
    if loader is None:
        if found.log_evidence.value.isnan():
            raise ValueError(
                "A fit by a solver computes no evidence, which takes up to 120 passes over the data. Pass the "
                "training data: la.log_marginal_likelihood(train_loader)."
            )
        return found.log_evidence
    data = paired(loader, targets)
    if weights is not None:
        data, weights = with_weights(data, weights)
    problem = la._problem(data, Group(), weights)
    with Session(problem, {}).running() as run:
        run.plan(la._options(), la.compute)
        return log_evidence(problem, found, la._options())
