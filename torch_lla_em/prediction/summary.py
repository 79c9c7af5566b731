"""Tables on screen and in notebooks: of a prediction, and of a fitted posterior with advice."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from textwrap import TextWrapper
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction.functions import MODE, NETWORK, SCALE, WEIGHT
from torch_lla_em.solvers import is_accurate, relative_error

Cells = list[tuple[str, ...]]

# number of examples that are printed
_SHOWN = 6
# characters of a line of the last column
_WIDTH = 76
# relative error above which the number of effective parameters is reported as not well known
_TOO_LARGE = 0.1

CALL = "Call la.calibrate(validation_loader)"
"""The remedy in warnings about predictions as fitted, which calibrated ones do not have."""

CALIBRATE = f"{CALL} to calibrate the predictions on held-out data."


class Printed:
    """Base class of objects that are printed as a title above a table."""

    def _table(self) -> tuple[str, Cells]:
        """Return the title and the cells, row by row."""
        raise NotImplementedError

    def __repr__(self) -> str:
        title, rows = self._table()
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = []
        for row in rows:
            before = "".join(f"{cell:{width}}  " for cell, width in zip(row[:-1], widths))
            wrapper = TextWrapper(len(before) + _WIDTH, before, " " * len(before))
            wrapper.break_on_hyphens = False
            lines += wrapper.wrap(row[-1]) or [before]
        return "\n".join([title, *(f"  {line.rstrip()}" for line in lines)])

    def _repr_html_(self) -> str:
        return as_html(*self._table())


def as_html(title: str, rows: Cells) -> str:
    """Return a table in HTML."""
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><caption>{escape(title)}</caption>{body}</table>"


def of_prediction(prediction: Any) -> tuple[str, Cells]:
    """Return a title and a table of the first examples of a ``Prediction``."""
    count = len(prediction.centre)
    if prediction.centre.dim() < 2 or not count:
        shape, samples = tuple(prediction.mean.shape), len(prediction.deviations)
        title = f"Prediction under {type(prediction.likelihood).__name__}"
        return title, [("outputs", f"of shape {shape}, {samples} samples")]
    return of_examples("Prediction", prediction)


def of_examples(title: str, prediction: Any) -> tuple[str, Cells]:
    """Return a title and a table of the first examples of a prediction."""
    count, some = len(prediction.centre), prediction.first(_SHOWN)
    title += f" under {type(prediction.likelihood).__name__}"
    if prediction.centre.dim() == 2:
        columns = _columns(some, prediction.likelihood)
    else:
        title += f", outputs of shape {tuple(prediction.expectation.shape)}"
        columns = _over_sites(some, prediction.likelihood)
    rows: Cells = [("example", *columns)]
    for i in range(min(count, _SHOWN)):
        rows.append((str(i), *(_cell(values[i]) for values in columns.values())))
    return title, rows if count <= _SHOWN else [*rows, (f"of {count}", *("…" for _ in columns))]


def _over_sites(prediction: Any, likelihood: Likelihood) -> dict[str, Tensor]:
    """Return summaries over the pixels or tokens of each example."""
    if likelihood.gives_probabilities and not likelihood.elementwise:
        best = prediction.probs.max(prediction.class_dim)
        columns = {"most frequent class": best.indices.flatten(1).mode(1).values}
        columns["lowest probability"] = best.values.flatten(1).min(1).values
        means = {"probability": best.values, "entropy": prediction.entropy}
    else:
        columns, means = {}, {"E[y]": prediction.expectation}
    if likelihood.real_valued:
        means["sd of y"] = prediction.predictive_variance.sqrt()
    elif likelihood.gives_probabilities:
        means["epistemic"] = prediction.epistemic
    return columns | {f"mean {name}": v.flatten(1).mean(1) for name, v in means.items()}


def _columns(prediction: Any, likelihood: Likelihood) -> dict[str, Tensor]:
    if likelihood.real_valued:
        of_y, of_mean = prediction.predictive_variance.sqrt(), prediction.epistemic.sqrt()
        return {"mean": prediction.expectation, "sd of y": of_y, "sd of its mean": of_mean}
    error = getattr(prediction, "standard_error", None)  # students have none
    if likelihood.gives_probabilities and not likelihood.elementwise:
        best = prediction.probs.max(-1)
        columns = {"class": best.indices, "probability": best.values}
        if error is not None:
            columns["Monte Carlo error"] = error.gather(-1, best.indices[:, None])
        return {**columns, "entropy": prediction.entropy, "epistemic": prediction.epistemic}
    columns = {"E[y]": prediction.expectation}
    if error is not None:
        columns["Monte Carlo error"] = error
    if likelihood.gives_probabilities:
        columns["epistemic"] = prediction.epistemic
    return columns


def _cell(values: Tensor) -> str:
    """Return the first four numbers, with three digits."""
    numbers = torch.atleast_1d(values).tolist()
    shown = [str(n) if isinstance(n, int) else f"{n:.3g}" for n in numbers[:4]]
    return " ".join(shown) + (" …" if len(numbers) > 4 else "")


class Accuracy(NamedTuple):
    """The numerical error of the posterior samples, in posterior standard deviations.

    Example:
        >>> error = la.accuracy.error
    """

    error: float
    """The root mean square error over all directions that the data determine: the number that fits,
    warnings and ``print`` compare with the tolerance."""

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
            f"{self.tolerance:.2g}), at most {self.bound:.2g} for any single output"
        )


class Details(Printed):
    """Everything that a fit has found, as a table; print it."""

    def __init__(self, title: str, rows: Cells):
        self._cells = title, rows

    def _table(self) -> tuple[str, Cells]:
        return self._cells


class PrintedPosterior(Printed):
    """Base class of a fitted posterior, which shows its results."""

    tolerance: float
    _posterior: Any

    @property
    def accuracy(self) -> Any:
        """The numerical error of the samples, its bound and the tolerance; None before ``fit``.

        Example:
            >>> la.accuracy.is_reached
            True
        """
        if self._posterior is None:
            return None
        result = self._posterior.result
        error = relative_error(result.certificate, result.effective_dim.value.sum())
        return Accuracy(error, result.certificate.max().item(), self.tolerance)

    def details(self) -> Details:
        """Return all numbers of the fit in the terms of the method, such as λ and γ; print it.

        ``print(la)`` shows the result in words.

        Example:
            >>> print(la.details())  # doctest: +SKIP
        """
        return details_of(self)

    def _table(self) -> tuple[str, Cells]:
        return of_fit(self)


def of_fit(la: Any) -> tuple[str, Cells]:
    """Return a title and the results of a fit in words: what it is, what is good, what to do."""
    title, rows = f"{type(la).__name__} of {type(la.model).__name__}", [_likelihood(la)]
    if la.w_samples is None:
        size = f"none yet: call la.fit(train_loader); {_size(la)}"
        return title, [*rows, ("posterior", size)]
    seconds = f", fitted in {la.history[-1]['seconds']:.3g} s" if la.history else ""
    rows += [
        ("posterior", f"{len(la.w_samples)} samples of {_size(la)}"),
        ("training data", f"{la.num_data:,} examples{seconds}"),
    ]
    if la.sigma_noise is not None:
        rows.append(("observation noise", f"{_several(la.sigma_noise)} (standard deviation)"))
    return title, [*rows, *_of_reference(la.reference), *findings(la)]


def of_ensemble(ensemble: Any) -> tuple[str, Cells]:
    """Return a title and the results of an ensemble in words; ``print`` a member for its own."""
    members = list(ensemble.members)
    kinds = ", ".join(sorted({type(la.model).__name__ for la in members}))
    title = f"{type(ensemble).__name__} of {len(members)} posteriors"
    rows: Cells = [_likelihood(members[0])]
    rows.append(("networks", f"{kinds}, {_size(members[0])} in the posterior"))
    fitted = [la for la in members if la.accuracy is not None]
    if len(fitted) < len(members):
        words = f"{len(members) - len(fitted)} of {len(members)} members are not fitted"
        return title, [*rows, ("to do", f"{words}: call fit of each")]
    counts = sorted({la.num_data for la in members})
    seconds = [la.history[-1]["seconds"] for la in members if la.history]
    some = f"{counts[0]:,}" + (f" to {counts[-1]:,}" if len(counts) > 1 else "")
    rows.append(("training data", f"{some} examples for each, fitted in {sum(seconds):.3g} s"))
    rows += _of_reference(ensemble.reference)
    worst = max(members, key=lambda la: la.accuracy.error / la.accuracy.tolerance)
    kind, words = _of_accuracy(worst)
    rows += [(kind, words.replace("The samples", "The samples of the worst member"))]
    rows += of_calibration(ensemble.calibration)
    calibrated = ensemble.calibration is not None
    warned = [i for i, la in enumerate(members) if any(_warnings(la, calibrated))]
    if warned:
        which = ", ".join(map(str, warned))
        rows.append(("warning", f"Members {which} have warnings: print(ensemble.members[i])."))
    rows += [("warning", words) for words in ensemble.messages]
    if not calibrated and not members[0].likelihood.is_quadratic:
        rows.append(("to do", CALIBRATE.replace("la.", "ensemble.")))
    return title, rows


def _likelihood(la: Any) -> tuple[str, str]:
    return "likelihood", type(la.likelihood).__name__


def _size(la: Any) -> str:
    chosen = la._linear_model.layout.size
    total = sum(p.numel() for p in la.model.parameters())
    return f"all {total:,} parameters" if chosen == total else f"{chosen:,} of {total:,} parameters"


def _of_reference(reference: Any) -> Iterator[tuple[str, str]]:
    if reference is not None:
        words = f"{len(reference.unusual):,} validation examples"
        if reference.classes is not None:
            words += ", those of each class apart"
        elif reference.groups is not None:
            words += f" in {len(reference.groups.unique())} groups"
        words += " with weights" if reference.weights is not None else ""
        yield "reference", f"{words}, for p-values, OOD flags, sets and intervals"


def details_of(la: Any) -> Details:
    """Return the numbers of a fit in the terms of the method."""
    title, rows = of_fit(la)
    if la.w_samples is None:
        return Details(title, rows)
    evidence, spread = (each.item() for each in la._posterior.result.log_evidence)
    gamma, error = la.effective_dim.sum(), la.effective_dim_error.norm()
    rows += [
        ("prior precision λ", _several(la.prior_precision)),
        ("effective dimension γ", f"{gamma:.4g} ± {error:.2g}"),
        ("log evidence", f"{evidence:.6g} ± {spread:.2g}"),
        ("predictions", _components(la.mixture)),
    ]
    if la.history:
        last = la.history[-1]
        steps, passes, seconds = last["step"], last["data_passes"], last["seconds"]
        rows.append(("EM", f"{steps} steps, {passes} passes, {seconds:.3g} s"))
    return Details(title, [*rows, *(("memory plan", plan) for plan in la.messages[:1])])


def details_of_ensemble(ensemble: Any) -> Details:
    """Return the results of an ensemble, then the numbers of each fit."""
    title, rows = of_ensemble(ensemble)
    for i, la in enumerate(ensemble.members):
        name, own = details_of(la)._table()
        rows += [(f"member {i}", name), *(row for row in own if row != ("to do", CALIBRATE))]
    return Details(title, rows)


def findings(la: Any) -> Iterator[tuple[str, str]]:
    """Yield what is good about a fit, what is not, and what to do, each with its kind."""
    yield _of_accuracy(la)
    gamma, error = la.effective_dim.sum(), la.effective_dim_error.norm()
    if error > _TOO_LARGE * gamma:
        yield (
            "to do",
            f"The samples are too few: the number of parameters that the data determine is only known "
            f"to {error / gamma:.0%}. Increase num_samples.",
        )
    yield from of_calibration(la.calibration)
    for words in _warnings(la, la.calibration is not None):
        yield "warning", words
    if la.calibration is None and not la.likelihood.is_quadratic:
        yield "to do", CALIBRATE


def _warnings(la: Any, calibrated: bool) -> Iterator[str]:
    """Yield the warnings of a fit, without those that calibrated predictions do not have."""
    yield from (words for words in la.messages[1:] if not (calibrated and CALL in words))


def _of_accuracy(la: Any) -> tuple[str, str]:
    found = la.accuracy
    if found.is_reached:
        return "good", f"The samples are accurate: {found}."
    remedy = "Use a float64 model, or a solver with a larger max_passes."
    if not la._posterior.result.complete:
        remedy = "The budget ended the fit: call fit with a larger budget, or without one."
    return "to do", f"The samples are not accurate: {found}. {remedy}"


def of_calibration(found: Any) -> Iterator[tuple[str, str]]:
    """Yield the result of ``calibrate``, if it was called."""
    if found is None:
        return
    if found.applied:
        kind = "good" if found.is_measurable else "calibration"
        yield kind, f"calibrated on {found.num_rows:,} examples: validation NLL {found}"
    else:
        yield "calibration", str(found)


def _components(table: Tensor) -> str:
    """Return the components of predictions in words."""
    words = []
    for row in table.tolist():
        centre = [
            name if abs(row[i] - 1) < 1e-9 else f"{name} × {row[i]:.3g}"
            for name, i in (("linear mode", MODE), ("network", NETWORK))
            if row[i]
        ]
        posterior = f"posterior (τ = {row[SCALE]:.3g}) around " if row[SCALE] else ""
        weight = f"{row[WEIGHT]:.0%} " if len(table) > 1 else ""
        words.append(f"{weight}{posterior}{' + '.join(centre)}")
    return ", ".join(words)


def _several(values: Tensor) -> str:
    if not values.dim():
        return f"{values:.4g}"
    return f"{values.min():.3g} to {values.max():.3g} ({len(values)} values)"
