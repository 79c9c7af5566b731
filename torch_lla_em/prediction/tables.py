"""Tables of a prediction's first rows, and tables as text and in notebooks."""

from __future__ import annotations

from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch_lla_em.prediction.prediction import Prediction

_ROWS = 6

Rows = list[tuple[str, ...]]


def of_prediction(prediction: Prediction) -> tuple[str, Rows]:
    """Return a title, and a table of the first rows, its heading first."""
    title = f"Prediction under {type(prediction.likelihood).__name__}"
    count, few = len(prediction.centre), _first(prediction)
    if prediction.centre.dim() != 2 or not count:
        shape = tuple(prediction.mean.shape)
        return title, [("outputs", f" of shape {shape}, {len(prediction.deviations)} samples")]
    if prediction.likelihood.real_valued:
        mean, variance = few.moments()
        columns = {"mean": mean, "± σ": variance.sqrt(), "of it epistemic": few.epistemic.sqrt()}
    elif prediction.likelihood.gives_probabilities and not prediction.likelihood.elementwise:
        best = few.probs.max(-1)
        error = few.standard_error.gather(-1, best.indices[:, None])
        columns = {"class": best.indices, "probability": best.values, "Monte Carlo error": error}
        columns |= {"entropy": few.entropy, "epistemic": few.epistemic}
    else:
        columns = {"E[y]": few.expectation, "Monte Carlo error": few.standard_error}
        if prediction.likelihood.gives_probabilities:
            columns |= {"epistemic": few.epistemic}
    cells = [[_cell(values[row]) for values in columns.values()] for row in range(len(few.centre))]
    table: Rows = [("row", *columns), *((str(i), *row) for i, row in enumerate(cells))]
    return title, table if count <= _ROWS else [*table, (f"of {count}", *("…" for _ in columns))]


def as_text(title: str, rows: Rows) -> str:
    """Return a table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in rows]
    return "\n".join([title, *(f"  {line.rstrip()}" for line in lines)])


def as_html(title: str, rows: Rows) -> str:
    """Return a table for a notebook."""
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><caption>{escape(title)}</caption>{body}</table>"


def _first(prediction: Prediction) -> Prediction:
    beside = prediction.beside
    return replace(
        prediction,
        centre=prediction.centre[:_ROWS].detach(),
        deviations=prediction.deviations[:, :_ROWS].detach(),
        beside=None if beside is None else beside[:, :_ROWS].detach(),
    )


def _cell(values: Tensor) -> str:
    numbers = torch.atleast_1d(values).tolist()
    shown = [str(n) if isinstance(n, int) else f"{n:.3g}" for n in numbers[:4]]
    return " ".join(shown) + (" …" if len(numbers) > 4 else "")
