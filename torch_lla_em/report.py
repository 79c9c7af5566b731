"""An HTML page about a fitted posterior or an ensemble: scores, plots, warnings, advice.

It needs matplotlib: ``pip install torch_lla_em[report]``.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from html import escape
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from torch_lla_em import plot
from torch_lla_em.distil import Student
from torch_lla_em.prediction import (
    PredictedData,
    Predictor,
    as_html,
    outcomes,
    predicted_data,
    scores,
)

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:62rem;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0;display:block;overflow-x:auto}
td{padding:.2rem .8rem .2rem 0;border-bottom:1px solid #ddd;text-align:left}
caption{text-align:left;font-weight:bold}
div{display:grid;grid-template-columns:repeat(auto-fit,minmax(20rem,1fr));gap:1.5rem}
figure{margin:0}img{width:100%}figcaption{font-size:.85rem}
li{margin:.4rem 0}
"""
_EDGE = 2.0
"""Number of standard errors above which a posterior is reported as worse than its network."""


class Reports(Predictor):
    """Predictions, and a page about them."""

    def report(
        self,
        loader: Any,
        path: str | PathLike[str] = "report.html",
        other: Any = None,
        student: Student | None = None,
    ) -> None:
        """Write an HTML page with metrics, plots, warnings and recommendations; needs Matplotlib.

        Args:
            loader (DataLoader, Dataset or list of batches): Held-out data with targets.
            path (str): Name of the file. Default "report.html".
            other (DataLoader, Dataset or inputs, optional): Out-of-distribution inputs.
            student (Student, optional): A student of this posterior, whose error and scores are shown
                beside those of the posterior.

        Raises:
            TypeError: If ``student`` is something else.

        Example:
            >>> la.report(validation_loader)  # doctest: +SKIP
        """
        if not isinstance(student, Student | None):
            raise TypeError(f"student must be what la.distil has returned, not {student!r}.")
        _write(self, loader, path, other, student)


def _write(
    la: Any, loader: Iterable[Any], path: str | PathLike[str], other: Any, student: Student | None
) -> None:
    """Write a page about predictions of a loader's examples; ``other`` are OOD inputs."""
    rows, members = predicted_data(la, loader), list(getattr(la, "members", [la]))
    to_do = [*advice(la, rows), *(() if student is None else student.error.warnings)]
    each = [("" if len(members) == 1 else f"member {i}: ", one) for i, one in enumerate(members)]
    warned = [f"{name}{words}" for name, one in each for words in one.messages[1:]]
    parts = [
        la._repr_html_(),
        *([] if student is None else [student._repr_html_()]),
        as_html(f"Scores on {len(rows.targets):,} examples", _scored(rows, student)),
        "<h2>What to do</h2>",
        _list(to_do, "Nothing: no problem was found."),
        *_by_group(la, loader),
        "<h2>Plots</h2>",
        f"<div>{''.join(_figures(la, rows, other))}</div>",
        "<h2>Warnings of the fit</h2>",
        _list([*warned, *(la.messages if members != [la] else ())], "There were no warnings."),
        "<h2>All numbers of the fit</h2>",
        *(f"{escape(name)}{one.details()._repr_html_()}" for name, one in each),
    ]
    kinds = sorted({type(one.model).__name__ for one in members})
    ensemble = f"Ensemble of {len(members)} posteriors of" if members != [la] else "Posterior of"
    title = escape(f"{ensemble} {', '.join(kinds)}")
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{_STYLE}</style><h1>{title}</h1>{''.join(parts)}</html>\n"
    )
    Path(path).write_text(page, encoding="utf-8")


def advice(la: Any, rows: PredictedData) -> Iterator[str]:
    """Yield what to do about a fit, one sentence at a time; nothing if all is well."""
    gain = rows.network._log_prob(rows.targets) - rows.posterior._log_prob(rows.targets)
    error = gain.double().std() / len(gain) ** 0.5
    if gain.double().mean() > _EDGE * error:
        yield (
            f"The NLL of the posterior is higher than that of the network alone, by {gain.mean():.2g} "
            f"± {error:.1g} per example: call la.calibrate(validation_loader), or fit with "
            'curvature="variational".'
        )
    yield from (words for kind, words in la._table()[1] if kind == "to do")


def _by_group(la: Any, loader: Iterable[Any]) -> Iterator[str]:
    """Yield the coverage within groups of examples, if sets or intervals are possible."""
    if la.reference is None:
        return
    with suppress(TypeError, ValueError):  # segmentation, counts, or too few validation examples
        found = la.check(loader)
        yield from (found._repr_html_(), _list(found.findings, ""))


def _scored(rows: PredictedData, student: Student | None) -> list[tuple[str, ...]]:
    """Return the scores of the network, the posterior and a student, the heading first."""
    name = "networks" if rows.network.members else "network"
    predictions: dict[str, Any] = {name: rows.network, "posterior": rows.posterior}
    if student is not None and rows.inputs is not None:
        with torch.no_grad():  # classes last, as the targets
            predictions["student"] = replace(student.predict(rows.inputs), class_dim=-1)
    each = [scores(outcomes(p, rows.targets)) for p in predictions.values()]
    values = [(name, *(f"{found[name]:.4g}" for found in each)) for name in each[0]]
    return [("", *predictions), *values]


def _figures(la: Any, rows: PredictedData, other: Any) -> Iterator[str]:
    """Yield the plots that these predictions allow."""
    likelihood = la.likelihood
    if likelihood.gives_probabilities:
        yield _figure("Accuracy over confidence", plot.reliability, la, rows)
    if likelihood.real_valued and rows.posterior.expectation.shape == rows.targets.shape:
        yield _figure("Prediction intervals", plot.bands, la, rows)
        yield _figure("Coverage of prediction intervals", plot.coverage, la, rows)
    if other is not None:
        yield _figure("Out-of-distribution inputs", plot.out_of_distribution, la, rows, other)
    if any(posterior.history for posterior in la._members()):
        yield _figure("Prior precision over EM steps", plot.em_path, la)


def _figure(caption: str, draw: Callable[..., Any], *data: Any) -> str:
    from matplotlib.figure import Figure

    figure, png = Figure(figsize=(5, 3.6), layout="constrained"), BytesIO()
    draw(*data, axes=figure.add_subplot())
    figure.savefig(png, format="png", dpi=110, bbox_inches="tight")
    encoded = b64encode(png.getvalue()).decode()
    words = escape(caption)
    return (
        f'<figure><img alt="{words}" src="data:image/png;base64,{encoded}">'
        f"<figcaption>{words}</figcaption></figure>"
    )


def _list(lines: Iterable[str], otherwise: str) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else f"<p>{otherwise}</p>"
