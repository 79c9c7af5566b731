"""JSON lines to a table in markdown: one function for every page."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev


def read(*paths: Path) -> list[dict]:
    """Return the records of files of JSON lines, in their order; none of a missing file."""
    files = [path.read_text().splitlines() for path in paths if path.exists()]
    return [json.loads(line) for lines in files for line in lines]


def append(path: Path, records: Iterable[dict], origin: dict | None = None) -> None:
    """Add JSON lines to a file, each with where it comes from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(record | (origin or {})) + "\n" for record in records)


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
    lines = [_line([""] * len(rows) + [*titles]), "|---" * (len(rows) + len(columns)) + "|"]
    for names, group in groups.items():
        cells = [cell([r[key] for r in group if r.get(key) is not None]) for key in columns]
        lines.append(_line([*map(str, names), *cells]))
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def cell(values: Sequence[float | str]) -> str:
    """Return mean ± standard error of numbers, or of the pair of both; of words, the first."""
    if not values or isinstance(values[0], str):
        return str(values[0]) if values else ""
    if len(values) == 1 and not isinstance(values[0], list):
        return number(values[0])
    centre, error = values[0] if len(values) == 1 else _mean(values, False)
    shown = number(centre)
    return f"{shown} ± {error:.{len(shown.partition('.')[2])}f}"


def number(value: float) -> str:
    """Return three digits of a number, all of a whole one."""
    if isinstance(value, int) or 1e3 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    if 0.01 <= abs(value) < 10:
        return f"{value:.3f}"
    return f"{value:#.3g}".removesuffix(".") if abs(value) >= 10 else f"{value:.2g}"


def means(records: Iterable[dict], by: Sequence[str]) -> list[dict]:
    """Return one record for every combination of values under ``by``: words as the first has
    them, and of each number the pair of mean and standard error, of several records."""
    groups: dict[tuple, list[dict]] = {}
    for record in records:
        groups.setdefault(tuple(record.get(key) for key in by), []).append(record)
    return [
        {key: _mean([r.get(key) for r in group], key in by) for key in group[0]}
        for group in groups.values()
    ]


def _mean(values: list, same: bool) -> object:
    numbers = [value for value in values if isinstance(value, int | float)]
    if same or len(numbers) < 2:
        return values[0]
    return [mean(numbers), stdev(numbers) / len(numbers) ** 0.5]


def across(records: Iterable[dict], rows: Sequence[str], column: str, value: str) -> list[dict]:
    """Return one record a row, which holds ``value`` under what its records have as ``column``."""
    found: dict[tuple, dict] = {}
    for record in records:
        line = found.setdefault(tuple(record[key] for key in rows), {k: record[k] for k in rows})
        line[str(record[column])] = record.get(value)
    return list(found.values())


def insert(page: Path, name: str, text: str) -> None:
    """Replace what stands between ``<!-- name -->`` and ``<!-- /name -->`` on a page."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, found, rest = page.read_text().partition(begin)
    if not found or end not in rest:
        raise SystemExit(f"{page} has no place for {name}: write {begin.strip()} and {end} there.")
    page.write_text(before + begin + text.rstrip() + "\n" + end + rest.partition(end)[2])
