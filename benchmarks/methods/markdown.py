"""JSON lines to a table in markdown: one function for every page."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev


def read(*paths: Path) -> list[dict]:
    """Return the records of files of JSON lines, in their order; none of a missing file."""
    files = [path.read_text().splitlines() for path in paths if path.exists()]
    return [json.loads(line) for lines in files for line in lines]


def table(
    records: Iterable[dict], rows: Sequence[str], columns: Sequence[str] | Mapping[str, str]
) -> str:
    """Return a line for every combination of values under ``rows``, in order of appearance.

    A cell holds the mean ± standard error of what the line's records have under a column's
    key, or the word that they have there. A mapping gives the columns' titles.
    """
    groups: dict[tuple, list[dict]] = {}
    for record in records:
        groups.setdefault(tuple(record.get(key, "") for key in rows), []).append(record)
    titles = columns.values() if isinstance(columns, Mapping) else columns
    lines = [
        "| " + " | ".join([*([""] * len(rows)), *titles]) + " |",
        "|---" * (len(rows) + len(columns)) + "|",
    ]
    for names, group in groups.items():
        cells = [cell([r[key] for r in group if r.get(key) is not None]) for key in columns]
        lines.append("| " + " | ".join([*map(str, names), *cells]) + " |")
    return "\n".join(lines)


def cell(values: Sequence[float | str]) -> str:
    """Return mean ± standard error of numbers; of words, the first."""
    if not values or isinstance(values[0], str):
        return str(values[0]) if values else ""
    if len(values) == 1:
        return number(values[0])
    return f"{number(mean(values))} ± {stdev(values) / len(values) ** 0.5:.1g}"


def number(value: float) -> str:
    """Return three digits of a number, all of a whole one."""
    if isinstance(value, int) or 1e3 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:.3f}" if 1e-3 <= abs(value) < 1 else f"{value:#.3g}".removesuffix(".")
