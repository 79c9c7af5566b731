"""Tables on screen: as text, and in notebooks."""

from __future__ import annotations

from html import escape

import torch
from torch import Tensor

Lines = list[tuple[str, ...]]


class Shown:
    """Base class of what is shown as a title over a table."""

    def _table(self) -> tuple[str, Lines]:
        """Return the title, and the cells line by line."""
        raise NotImplementedError

    def __repr__(self) -> str:
        title, lines = self._table()
        widths = [max(map(len, column)) for column in zip(*lines)]
        rows = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in lines]
        return "\n".join([title, *(f"  {row.rstrip()}" for row in rows)])

    def _repr_html_(self) -> str:
        title, lines = self._table()
        rows = ["".join(f"<td>{escape(cell)}</td>" for cell in line) for line in lines]
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table><caption>{escape(title)}</caption>{body}</table>"


def cell(values: Tensor) -> str:
    """Return the first four numbers, with three digits."""
    numbers = torch.atleast_1d(values).tolist()
    shown = [str(n) if isinstance(n, int) else f"{n:.3g}" for n in numbers[:4]]
    return " ".join(shown) + (" …" if len(numbers) > 4 else "")
