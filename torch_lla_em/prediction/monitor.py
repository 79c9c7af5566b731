"""Evidence that the inputs of a deployed posterior or student are no longer distributed as its
validation set."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, log
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from torch_lla_em.data import AnyInputs, Values
from torch_lla_em.prediction.base import BasePrediction
from torch_lla_em.prediction.conformal import Compared, has_classes, has_values, require_share
from torch_lla_em.prediction.printed import Cells, Printed

_POWERS = 0.25, 0.5, 0.75, 2.0
"""A bet assumes that after a change P(p <= u) is u to one of these powers. Without .75, changes to
u^.7 and u^.8 take twice as long or are never detected; without 2, changes to larger p-values are
not detected; adding .125 gains nothing (median delays of 200 simulated streams)."""

_SHARE, _WINDOW, _POINTS = 0.05, 200, 1000
"""Share of inputs that ``is_ood`` flags without a change, number of last inputs for which the share
is shown, and largest number of points in a plot."""

_NEW: dict[str, Any] = {"seen": 0, "since": None, "evidence": 0.0, "counts": {}, "wealth": []}
_NEW |= {"history": [[0, 0.0]], "flags": [], "inside": []}
"""The state without any inputs."""


class Monitor(Printed):
    """Evidence that a stream of inputs is not distributed as the validation set;
    ``la.monitor(rate)`` returns it.

    The evidence is a test martingale, averaged over the out-of-distribution (OOD) scores. If the
    validation set and all inputs are exchangeable, the probability that an alarm is ever raised is
    at most ``rate``, for a stream of any length and a validation set of any size. Threads may call
    ``update`` at the same time. Pass every input once.

    Args:
        la (LinearisedLaplace, LaplaceEnsemble or Student): The calibrated object.
        rate (float): Largest probability that a false alarm is ever raised. Default 0.01.
        level (float): Level of the sets or intervals whose coverage is measured. Default 0.9.
        seed (int): Seed of the random order of equal scores. Default 0.

    Attributes:
        state (dict): ``seen`` inputs; the input ``since`` which the alarm is raised, or None; the
            logarithm of the ``evidence``; its ``history`` at up to 1,000 batches; and further plain
            numbers that ``load_state_dict`` needs.

    Example:
        >>> monitor = la.calibrate(x, y).monitor(rate=0.1)
        >>> is_raised = monitor.update(x[:10])
    """

    def __init__(self, la: Any, rate: float = 0.01, level: float = 0.9, seed: int = 0):
        """Begin without evidence; ``la.monitor`` documents the arguments."""
        self.rate, self.level = require_share(rate, "rate"), require_share(level)
        self._la, self._seed, self._lock, known = la, seed, Lock(), la.reference
        if known is None:
            raise ValueError(
                "A monitor compares inputs with a validation set, and there is none: call "
                "calibrate(validation_loader) of the posterior or of the student that is deployed."
            )
        if any(getattr(known, name, None) is not None for name in ("folds", "weights")):
            raise ValueError(
                "P-values by folds or with weights are not exact, so no rate of false alarms can "
                "be guaranteed: call calibrate(validation_loader) without weights."
            )
        self._mark = _mark_of(known.unusual)
        self.reset()

    def reset(self) -> None:
        """Begin again without evidence and without an alarm."""
        with self._lock:
            self.state: dict[str, Any] = {**_NEW}

    @property
    def alarm(self) -> bool:
        """Whether the alarm is raised; it stays so until ``reset``."""
        return self.state["since"] is not None

    def update(
        self, x: AnyInputs | BasePrediction, y: Tensor | None = None, groups: Values | None = None
    ) -> bool:
        """Return whether the alarm is raised, after a batch of new inputs.

        Args:
            x: Inputs, as the model takes them, or their prediction by ``la.predict``. Inputs with
                NaN count as the most unusual ones.
            y (Tensor, optional): Targets, if they are known; the coverage of sets or intervals is
                then measured.
            groups (integers, optional): The group of each input, if ``calibrate`` had groups.

        Raises:
            ValueError: If there are no inputs, or targets do not fit the outputs. The batch is then
                not counted.
            TypeError: If targets are several labels for each input, or counts.
        """
        with torch.no_grad():
            stated = {} if groups is None else {"groups": groups}
            prediction = x if isinstance(x, BasePrediction) else self._la.predict(x, **stated)
            found = prediction.compared()
            if _mark_of(found.reference) != self._mark:
                raise ValueError(
                    "Inputs are compared with another validation set than when this monitor was "
                    "made: la was calibrated again. Make another monitor, la.monitor(rate)."
                )
            if not len(found.scores):
                raise ValueError("The batch has no inputs: pass one or more.")
            inside = [] if y is None else _inside(prediction, y, self.level)
            flags = (prediction.p_value <= _SHARE).tolist()
        with self._lock:
            old, new = self.state, self._after(self.state, found)
            new["flags"] = (old["flags"] + flags)[-_WINDOW:]
            new["inside"] = (old["inside"] + inside)[-_WINDOW:]
            self.state = new
            return self.alarm

    def _after(self, old: dict[str, Any], found: Compared) -> dict[str, Any]:
        """Return the state after these inputs."""
        (count, columns), seen, counts = found.scores.shape, old["seen"], {**old["counts"]}
        powers = torch.tensor(_POWERS, dtype=torch.float64, device="cpu")
        bets = powers.new_zeros(count, columns, len(powers))
        for label, own, known in found.parts():
            cells, sizes = _cells(found.scores[own], found.room[own], known, (self._seed, seen))
            start = counts.get(label, sizes.expand(columns, -1).tolist())
            ones = one_hot(cells, len(sizes)).double()
            totals = ones.cumsum(0) + ones.new_tensor(start)
            # exact given all earlier inputs: the cells of exchangeable inputs are a Pólya urn
            urn = (totals - ones).gather(2, cells[..., None]) / (totals - ones).sum(2, True)
            ends = (sizes.cumsum(0) / sizes.sum())[:, None] ** powers
            bets[own.cpu()] = (ends.diff(dim=0, prepend=0 * ends[:1])[cells] / urn).log()
            counts[label] = totals[-1].tolist()
        # all changes before input t have the weight 1 - 1 / log(t + e) together
        left = 1 / (seen + torch.arange(count + 1, device="cpu").double() + torch.e).log()
        begun = ((left[:-1] - left[1:]) / len(powers)).log()[:, None, None]
        total, start = bets.cumsum(0), old["wealth"] or [[-inf] * len(powers)] * columns
        grown = (begun - (total - bets)).logcumsumexp(0)
        wealth = total + torch.logaddexp(powers.new_tensor(start), grown)
        evidence = (wealth.flatten(1).logsumexp(1) - log(columns)).logaddexp(left[1:].log())
        above = (evidence >= -log(self.rate)).nonzero()
        since = old["since"] or (seen + 1 + int(above[0]) if len(above) else None)
        last, seen = evidence[-1].item(), seen + count
        history = [*old["history"], [seen, last]]
        history = history if len(history) <= _POINTS else history[::2]
        new = {"seen": seen, "since": since, "evidence": last, "history": history}
        return new | {"counts": counts, "wealth": wealth[-1].tolist()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers, which JSON and ``torch.save`` can store."""
        return {
            "mark": self._mark,
            "rate": self.rate,
            "level": self.level,
            "seed": self._seed,
            **self.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state`` that ``state_dict`` has returned, of the same calibrated
        object."""
        own = self.state_dict()
        if {*state} != {*own} or any(state[k] != own[k] for k in {*own} - {*_NEW}):
            raise ValueError(
                "This is not the state of a monitor with the same rate, level and seed, of an "
                "object with the same validation set: make the monitor as the saved one was made."
            )
        with self._lock:
            self.state = {key: state[key] for key in _NEW}

    @property
    def findings(self) -> list[str]:
        """The conclusion from the evidence, as a sentence."""
        if self.alarm:
            return [
                "The inputs differ from the validation set: calibrate on new data, or call reset()."
            ]
        return [f"The probability that a false alarm is ever raised is at most {self.rate:g}."]

    def _table(self) -> tuple[str, Cells]:
        state, rows = self.state, list[tuple[str, ...]]()
        title = f"alarm since input {state['since']:,}" if self.alarm else "no alarm"
        rows.append(("inputs", f"{state['seen']:,}"))
        now, limit = state["evidence"] / log(10), -log(self.rate) / log(10)
        rows.append(("evidence", f"10^{now:.1f}; the alarm is raised at 10^{limit:.1f}"))
        for name, share, hits in (
            ("flagged", _SHARE, state["flags"]),
            ("coverage", self.level, state["inside"]),
        ):
            if hits:
                low, high = clopper_pearson(sum(hits), len(hits))
                words = (
                    f"{sum(hits) / len(hits):.3f} of the last {len(hits)}, 95 % interval {low:.3f} "
                    f"to {high:.3f}"
                )
                rows.append((name, f"{words}; without a change {share:g}"))
        return f"Monitor: {title}", rows


def _mark_of(scores: Tensor) -> list[float]:
    """Return numbers that identify a validation set, independent of the device."""
    finite = scores.double().nan_to_num(posinf=0.0)
    return [len(finite), float(f"{finite.sum().item():.9g}")]


def _cells(
    scores: Tensor, room: Tensor, known: Tensor, seeds: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return the cell of the rank of each score, (B, S), and the number of ranks in each cell,
    which doubles from the largest scores on.

    Equal scores have a random order, which is the same for the reference in all batches.
    """
    n, generator = len(known), torch.Generator("cpu").manual_seed(seeds[0])
    keys = torch.rand(n, generator=generator, device="cpu")
    generator.manual_seed(seeds[0] + 1 + seeds[1])
    draws = torch.rand(scores.shape, generator=generator, device="cpu")
    known = known.double().sort(0).values.T.contiguous()
    low, high = ((scores + sign * room).nan_to_num(nan=inf).T.contiguous() for sign in (-1, 1))
    above = (n - torch.searchsorted(known, high, right=True)).T.cpu()
    at_least = (n - torch.searchsorted(known, low)).T.cpu()
    places = torch.arange(n, device="cpu")
    for b in (at_least > above).any(1).nonzero()[:, 0]:
        tied = (above[b, :, None] <= places) & (places < at_least[b, :, None])
        above[b] += (tied & (keys > draws[b, :, None])).sum(-1)
    ends = [n + 1]
    while ends[0] > 1:
        ends.insert(0, -(-ends[0] // 2))
    last = torch.tensor(ends, device="cpu")
    return torch.searchsorted(last, above.contiguous() + 1), last.diff(
        prepend=0 * last[:1]
    ).double()


def _inside(prediction: BasePrediction, y: Tensor, level: float) -> list[bool]:
    """Return which labelled targets are in their prediction set or interval."""
    likelihood, f = prediction.likelihood, prediction._f
    if not (has_classes(likelihood, f) or has_values(likelihood, f)):
        raise TypeError(
            "Coverage needs one class label for each input, or continuous targets. "
            "Call update(x) without y."
        )
    y = prediction._aligned(y)
    kept = likelihood.labelled(y)
    if likelihood.real_valued:
        lower, upper = prediction.interval(level)
        inside = (lower <= y) & (y <= upper)
    else:
        inside = prediction.prediction_set(level).gather(1, y.where(kept, 0).long()[:, None])
    found: list[bool] = inside[kept].flatten().tolist()
    return found


def clopper_pearson(hits: int, count: int, level: float = 0.95) -> tuple[float, float]:
    """Return the exact interval for a probability by ``hits`` among ``count``, to three digits."""
    k = torch.arange(count + 1, dtype=torch.float64, device="cpu")
    ways = torch.lgamma(k[-1] + 1) - torch.lgamma(k + 1) - torch.lgamma(count - k + 1)
    p = torch.linspace(0, 1, 2001, dtype=torch.float64, device="cpu")[:, None]
    masses = (ways + torch.xlogy(k, p) + torch.xlogy(count - k, 1 - p)).exp()
    tails, least = (masses[:, hits:].sum(1), masses[:, : hits + 1].sum(1)), 0.5 * (1 - level)
    return p[tails[0] >= least].min().item(), p[tails[1] >= least].max().item()
