"""Tables on screen and in notebooks."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from textwrap import TextWrapper

Cells = list[tuple[str, ...]]


class Printed:
    """Base class of objects that are printed as a title, a table, and the sentences of ``findings``
    if there are any."""

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
            wrapper = TextWrapper(len(before) + 76, before, " " * len(before))
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


@dataclass(repr=False)
class Table(Printed):
    """A title and cells; print it."""

    title: str
    rows: Cells

    def _table(self) -> tuple[str, Cells]:
        return self.title, self.rows
