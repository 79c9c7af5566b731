"""Tables on screen and in notebooks: of a prediction, and of a fitted posterior with advice."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from textwrap import TextWrapper
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.solvers import is_accurate, relative_error

Cells = list[tuple[str, ...]]

_SHOWN, _WIDTH = 6, 76
"""Number of examples that are printed, and of characters of a line of the last column."""

_FEW = 38
"""Number of validation examples below which a calibration is not called good: ``is_ood`` needs as
many for its rate."""

CALL = "Call la.calibrate(validation_loader)"
"""The remedy in warnings about predictions as fitted, which calibrated ones do not have."""


class Printed:
    """Base class of objects that are printed as a title, a table, and the sentences of
    ``findings``, if they have some."""

    def _table(self) -> tuple[str, Cells]:
        """Return the title and the cells, row by row."""
        raise NotImplementedError

    def __repr__(self) -> str:
        title, rows = self._table()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            before = "".join(
                f"{cell:{width}}  " for cell, width in zip(row[:-1], widths[:-1], strict=True)
            )
            wrapper = TextWrapper(len(before) + _WIDTH, before, " " * len(before))
            wrapper.break_on_hyphens = False
            lines += wrapper.wrap(row[-1]) or [before]
        return "\n".join(
            [title, *(f"  {line.rstrip()}" for line in lines), *getattr(self, "findings", ())]
        )

    def _repr_html_(self) -> str:
        title, rows = self._table()
        lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        below = "".join(f"<li>{escape(line)}</li>" for line in getattr(self, "findings", ()))
        table = f"<table><caption>{escape(title)}</caption>{body}</table>"
        return f"{table}<ul>{below}</ul>" if below else table


class Table(Printed):
    """A title and cells; print it."""

    def __init__(self, title: str, rows: Cells):
        self.title, self.rows = title, rows

    def _table(self) -> tuple[str, Cells]:
        return self.title, self.rows


def of_examples(title: str, prediction: Any) -> tuple[str, Cells]:
    """Return a title and a table of the first examples of a prediction."""
    likelihood, count = prediction.likelihood, len(prediction._f)
    title = f"{title} under {type(likelihood).__name__}"
    if prediction._f.dim() != 2 or not count:
        return title, [("outputs", f"of shape {tuple(prediction.expectation.shape)}")]
    p = prediction._map(Tensor.detach, slice(_SHOWN))
    columns = {"E[y]": p.expectation}
    if likelihood.real_valued:
        columns = {"mean": p.expectation, "sd of y": p.predictive_variance.sqrt()}
        columns["sd of its mean"] = p.epistemic.sqrt()
    elif likelihood.gives_probabilities:
        if not likelihood.elementwise:
            best = p.probs.max(1)
            columns = {"class": best.indices, "probability": best.values, "entropy": p.entropy}
        columns["epistemic"] = p.epistemic
    rows: Cells = [("example", *columns)]
    rows += [
        (str(i), *map(_cell, each)) for i, each in enumerate(zip(*columns.values(), strict=True))
    ]
    return title, rows if count <= _SHOWN else [*rows, (f"of {count}", *("…" for _ in columns))]


def _cell(values: Tensor) -> str:
    """Return the first four numbers, with three digits."""
    numbers = torch.atleast_1d(values).tolist()
    shown = [str(n) if isinstance(n, int) else f"{n:.3g}" for n in numbers[:4]]
    return " ".join(shown) + (" …" if len(numbers) > 4 else "")


class Accuracy(NamedTuple):
    """The numerical error of the samples and the mode of a posterior, in posterior standard
    deviations."""

    error: float
    """The larger one of two errors: the root mean square error of the samples over all directions
    that the data determine, and the error of the mode relative to its norm."""

    bound: float
    """An upper bound on the error of every output of every sample, at any input."""

    tolerance: float
    """The largest error that the fit was to have."""

    @property
    def is_reached(self) -> bool:
        """Whether the error is within the tolerance."""
        return is_accurate(self.error, self.tolerance)

    def __str__(self) -> str:
        return (
            f"numerical error {self.error:.2g} posterior standard deviations (tolerance "
            f"{self.tolerance:.2g}), at most {self.bound:.2g} for any output"
        )


def accuracy(la: Any) -> Accuracy:
    """Return the numerical error of samples and mode, its bound and the tolerance."""
    result = la.posterior.result
    error = relative_error(result.certificate, result.effective_dim.value.sum())
    error = max(error, result.mode_error)
    tolerance = la.posterior.tolerance or la.tolerance
    return Accuracy(error, result.certificate.max().item(), tolerance)


def details(la: Any) -> Table:
    """Return all numbers of the fit in the terms of the method."""
    members, (title, rows) = _members(la), table_of(la)
    for i, member in enumerate(members):
        name = f"member {i}: " if members != [la] else ""
        rows += [(f"{name}{kind}", words) for kind, words in _numbers(member)]
    return Table(title, rows)


def _numbers(la: Any) -> Iterator[tuple[str, str]]:
    """Yield the numbers of a fit in the terms of the method."""
    if la.posterior is None:
        return
    result, last = la.posterior.result, la.history[-1] if la.history else None
    evidence, spread = (each.item() for each in result.log_evidence)
    gamma, error = result.effective_dim
    yield "prior precision λ", _several(result.prior_precision)
    yield "effective dimension γ", f"{gamma.sum():.4g} ± {error.norm():.2g}"
    if evidence == evidence:  # otherwise a solver has not computed it
        yield "log evidence", f"{evidence:.6g} ± {spread:.2g}"
    if last is not None:
        yield "EM", f"{last['step']} steps, {last['data_passes']} passes, {last['seconds']:.3g} s"
    yield from (("memory plan", plan) for plan in la.messages[:1])


def table_of(la: Any) -> tuple[str, Cells]:
    """Return the title and the table that ``print(la)`` shows, of a posterior or an ensemble."""
    members = _members(la)
    several, first = members != [la], members[0]
    kinds = ", ".join(sorted({type(one.model).__name__ for one in members}))
    title = f"{type(la).__name__} of {f'{len(members)} posteriors of ' if several else ''}{kinds}"
    rows = [("likelihood", type(first.likelihood).__name__)]
    chosen = first._linear_model.layout.size
    total = sum(p.numel() for p in first.model.parameters())
    size = f"{f'all {total:,}' if chosen == total else f'{chosen:,} of {total:,}'} parameters"
    if missing := sum(one.posterior is None for one in members):
        words = f"{missing} of {len(members)} members are not fitted: call fit of each"
        words = words if several else "none yet: call la.fit(train_loader)"
        return title, [*rows, ("posterior", f"{words}; {size}")]
    counts = sorted({one.num_data for one in members})
    seconds = [one.history[-1]["seconds"] for one in members if one.history]
    ends = sorted({one.posterior.result.why for one in members} - {"accurate"})
    data = " to ".join(f"{n:,}" for n in dict.fromkeys((counts[0], counts[-1]))) + " examples"
    data += f", fitted in {sum(seconds):.3g} s" if seconds else ""
    data += f" (ended by: {', '.join(ends)})" if ends else ""
    samples = f"{len(first.w_samples)} samples of {size}{' each' if several else ''}"
    rows += [("posterior", samples), ("training data", data)]
    if first.sigma_noise is not None:
        sigma = torch.stack([one.sigma_noise for one in members]).squeeze(0)
        rows.append(("observation noise", f"{_several(sigma)} (standard deviation)"))
    if la.reference is not None:
        words = f"{len(la.reference.unusual):,} validation examples"
        if la.reference.classes is not None:
            words += ", those of each class apart"
        elif la.reference.groups is not None:
            words += f" in {len(la.reference.groups.unique())} groups"
        words += " with weights" if la.reference.weights is not None else ""
        rows.append(("reference", f"{words}, for p-values, OOD flags, sets and intervals"))
    return title, [*rows, *advice(la)]


def advice(la: Any) -> Iterator[tuple[str, str]]:
    """Yield what is good about a fitted posterior or ensemble, what is not, and what to do."""
    members, calibrated = _members(la), la.calibration is not None and la.calibration.length is None
    several = members != [la]
    worst = max(members, key=lambda one: one.accuracy.error / one.accuracy.tolerance)
    kind, verdict = ("good", "") if worst.accuracy.is_reached else ("accuracy", "not ")
    which = " of the worst" if several else ""
    yield kind, f"Samples and mode{which} are {verdict}accurate: {worst.accuracy}."
    gamma, error = worst.effective_dim.sum(), worst.effective_dim_error.norm()
    if error > 0.1 * gamma:
        yield (
            "to do",
            "The samples are too few: the number of parameters that the data determine is only "
            f"known to {error / gamma:.0%}. Increase num_samples.",
        )
    yield from of_calibration(la.calibration)

    def remaining(one: Any) -> list[str]:
        return [words for words in one.messages[1:] if not (calibrated and CALL in words)]

    found = [] if several else remaining(la)
    warned = [str(i) for i, one in enumerate(members) if several and remaining(one)]
    if warned:
        found.append(f"Members {', '.join(warned)} have warnings: print(ensemble.members[i]).")
    yield from (("warning", words) for words in found)
    told = any(CALL in words for words in found)
    if not calibrated and not members[0].likelihood.is_quadratic and not told:
        name = "ensemble." if several else "la."
        yield "to do", f"{CALL.replace('la.', name)} to calibrate the predictions on held-out data."


def of_calibration(found: Any) -> Iterator[tuple[str, str]]:
    """Yield the result of ``calibrate``, if it was called."""
    if found is None:
        return
    per, words = "NLL per label" if found.labels > 1 else "NLL", str(found)
    if found.applied:
        words = f"calibrated on {found.num_rows:,} examples: {found.source} {per} {found}"
        if found.num_rows < _FEW:
            words += f". Fewer than {_FEW} examples measure it badly: use more"
    is_good = found.is_measurable and found.num_rows >= _FEW and not found.unlike
    yield "good" if is_good else "calibration", words
    if found.unlike:
        yield "warning", found.unlike
    if found.network is not None:
        words = f"network alone {found.network:.4g}"
        if found.temperature is not None:
            words += f", with temperature scaling {found.temperature:.4g}"
        yield "compared", f"{found.source} {per}: {words}"


def _members(la: Any) -> list[Any]:
    return list(getattr(la, "members", [la]))


def _several(values: Tensor) -> str:
    if not values.dim():
        return f"{values:.4g}"
    return f"{values.min():.3g} to {values.max():.3g} ({values.numel()} values)"
