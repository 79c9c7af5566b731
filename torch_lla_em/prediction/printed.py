"""Tables on screen and in notebooks."""

from __future__ import annotations

from html import escape
from textwrap import TextWrapper
from typing import Any

import torch
from torch import Tensor

Cells = list[tuple[str, ...]]

_SHOWN, _WIDTH = 6, 76
"""Number of examples that are printed, and of characters of a line of the last column."""

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
