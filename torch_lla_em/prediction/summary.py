"""Tables on screen and in notebooks: of a prediction, and of a fitted posterior with advice."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from textwrap import TextWrapper
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction.functions import MODE, NETWORK, SCALE, WEIGHT
from torch_lla_em.solvers import relative_error

Cells = list[tuple[str, ...]]

# number of examples that are printed
_SHOWN = 6
# characters of a line of the last column
_WIDTH = 76
# relative errors above which a number is reported as not well known
_TOO_LARGE, _BEYOND_TOLERANCE = 0.1, 1.1

CALIBRATE = "Call la.calibrate(validation_loader) to calibrate the predictions on held-out data."


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
    title = f"Prediction under {type(prediction.likelihood).__name__}"
    count = len(prediction.centre)
    if prediction.centre.dim() != 2 or not count:
        shape = tuple(prediction.mean.shape)
        return title, [("outputs", f"of shape {shape}, {len(prediction.deviations)} samples")]
    columns = _columns(prediction.first(_SHOWN), prediction.likelihood)
    rows: Cells = [("example", *columns)]
    for i in range(min(count, _SHOWN)):
        rows.append((str(i), *(_cell(values[i]) for values in columns.values())))
    return title, rows if count <= _SHOWN else [*rows, (f"of {count}", *("…" for _ in columns))]


def _columns(prediction: Any, likelihood: Likelihood) -> dict[str, Tensor]:
    if likelihood.real_valued:
        of_y, of_mean = prediction.predictive_variance.sqrt(), prediction.epistemic.sqrt()
        return {"mean": prediction.expectation, "sd of y": of_y, "sd of its mean": of_mean}
    if likelihood.gives_probabilities and not likelihood.elementwise:
        best = prediction.probs.max(-1)
        error = prediction.standard_error.gather(-1, best.indices[:, None])
        columns = {"class": best.indices, "probability": best.values, "Monte Carlo error": error}
        return {**columns, "entropy": prediction.entropy, "epistemic": prediction.epistemic}
    columns = {"E[y]": prediction.expectation, "Monte Carlo error": prediction.standard_error}
    if likelihood.gives_probabilities:
        columns["epistemic"] = prediction.epistemic
    return columns


def _cell(values: Tensor) -> str:
    """Return the first four numbers, with three digits."""
    numbers = torch.atleast_1d(values).tolist()
    shown = [str(n) if isinstance(n, int) else f"{n:.3g}" for n in numbers[:4]]
    return " ".join(shown) + (" …" if len(numbers) > 4 else "")


def of_fit(la: Any) -> tuple[str, Cells]:
    """Return a title, and the results of a fit: numbers, what is good, what is not, what to do."""
    layout, module = la._linear_model.layout, la._linear_model.network.module
    title = f"{type(la).__name__} of {type(module).__name__}"
    size = f"{layout.size:,} of {sum(p.numel() for p in module.parameters()):,}"
    rows: Cells = [("likelihood", type(la.likelihood).__name__)]
    if la.w_samples is None:
        rows.append(("parameters in the posterior", size))
        return title, [*rows, ("posterior", "none yet: call la.fit(train_loader)")]
    evidence, spread = la._posterior.log_evidence.tolist()
    gamma, error = la.effective_dim.sum(), la.effective_dim_error.norm()
    rows += [
        ("parameters in the posterior", f"{size}, {len(la.w_samples)} samples"),
        ("training examples", f"{la.num_data:,}"),
        ("prior precision λ", _several(la.prior_precision)),
        ("effective dimension γ", f"{gamma:.4g} ± {error:.2g}"),
    ]
    if la.sigma_noise is not None:
        rows.append(("observation noise σ", _several(la.sigma_noise)))
    rows += [
        ("log evidence", f"{evidence:.6g} ± {spread:.2g}"),
        ("largest solver error", f"{la.certificate.max():.2g} posterior standard deviations"),
        ("predictions", _components(la.mixture)),
    ]
    if la._posterior.reference is not None:
        count = f"{len(la._posterior.reference.unusual):,} validation examples"
        rows.append(("reference of p-values and sets", count))
    if la.history:
        last = la.history[-1]
        steps, passes, seconds = last["step"], last["data_passes"], last["seconds"]
        rows.append(("EM", f"{steps} steps, {passes} passes, {seconds:.3g} s"))
    rows += [("memory plan", plan) for plan in la.messages[:1]]
    return title, [*rows, *findings(la)]


def findings(la: Any) -> Iterator[tuple[str, str]]:
    """Yield what is good about a fit, what is not, and what to do, each with its kind."""
    found, gamma, error = la.calibration, la.effective_dim.sum(), la.effective_dim_error.norm()
    solver_error = relative_error(la.certificate, gamma)
    if solver_error <= _BEYOND_TOLERANCE * la.tolerance:
        words = f"The samples are accurate: the relative error of the solver is {solver_error:.1g}."
        yield "good", words
    else:
        yield (
            "to do",
            f"The samples have a relative error of {solver_error:.1g}, above the tolerance of "
            f"{la.tolerance:.1g}: use a float64 model, or a solver with a larger max_passes.",
        )
    if error > _TOO_LARGE * gamma:
        words = f"The standard error of γ is {error / gamma:.0%} of it: increase num_samples."
        yield "to do", words
    if found is not None:
        kind = "good" if found.applied else "not applied"
        yield kind, f"validation NLL {found}, {found.num_rows:,} examples"
    for words in la.messages[1:]:
        yield "warning", words
    if found is None and not la.likelihood.is_quadratic:
        yield "to do", CALIBRATE


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
