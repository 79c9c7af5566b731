"""JSON lines to a table in markdown: one function for every page."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev


def read(*paths: Path) -> list[dict]:
    """Return the records of files of JSON lines, in their order; none of a missing file."""
    files = [path.read_text().splitlines() for path in paths if path.exists()]
    return [json.loads(line) for lines in files for line in lines]


def append(path: Path, records: Iterable[dict], origin: dict | None = None) -> None:
    """Print records, and add them to a file of JSON lines, each with where it comes from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for record in records:
            shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in record.items()}
            print(*(f"{key}={value}" for key, value in shown.items()), flush=True)
            file.write(json.dumps(record | (origin or {})) + "\n")


def resume(
    path: Path, cases: Iterable[dict], measure: Callable[..., Iterable[dict]], origin: dict
) -> list[dict]:
    """Measure each case that has no record in the file, and return all records of the file.

    ``measure`` is called with a case's values by name. A killed run repeats only the case in which it was killed.
    """
    done = read(path)
    for case in cases:
        if not any(case.items() <= record.items() for record in done):
            append(path, [case | record for record in measure(**case)], origin)
    return read(path)


def table(
    records: Iterable[dict],
    rows: Sequence[str] | Mapping[str, str],
    columns: Sequence[str] | Mapping[str, str],
    best: Mapping[str, str] = {},
    decimals: int | None = None,
) -> str:
    """Return a table with a line for every combination of values under ``rows``.

    A cell holds the mean ± standard error of what the line's records have under a column's
    key, or the word that they have there. Mappings give the titles of the columns. ``best`` says
    of a column whether its "min" or its "max" is set in bold. ``decimals`` fixes their number.
    """
    groups: dict[tuple, list[dict]] = {}
    for record in records:
        groups.setdefault(tuple(record.get(key, "") for key in rows), []).append(record)
    first = [*rows.values()] if isinstance(rows, Mapping) else [""] * len(rows)
    titles = columns.values() if isinstance(columns, Mapping) else columns
    lines = [_line([*first, *titles]), "|---" * (len(rows) + len(columns)) + "|"]
    found = {
        key: [[r[key] for r in group if r.get(key) is not None] for group in groups.values()]
        for key in columns
    }
    shown = {key: _column(cells, best.get(key), decimals) for key, cells in found.items()}
    for number, names in enumerate(groups):
        texts = (f"{name:,}" if isinstance(name, int) else str(name) for name in names)
        lines.append(_line([*texts, *(shown[key][number] for key in columns)]))
    return "\n".join(lines)


def _column(cells: Sequence[list], best: str | None, decimals: int | None) -> list[str]:
    """Return the cells of a column as text, with the best value (and its equals) in bold."""
    texts = [cell(values, decimals) for values in cells]
    numbers = [None if not v or isinstance(v[0], str) else number(mean(v), decimals) for v in cells]
    known = [mean(values) for values, text in zip(cells, numbers, strict=True) if text is not None]
    if not best or len(known) < 2:
        return texts
    top = number((min if best == "min" else max)(known), decimals)
    return [
        f"**{text}**" if value == top else text for text, value in zip(texts, numbers, strict=True)
    ]


def _line(cells: Iterable[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def cell(values: Sequence[float | str], decimals: int | None = None) -> str:
    """Return the mean ± standard error of numbers; of words, the first."""
    if not values or isinstance(values[0], str):
        return str(values[0]) if values else ""
    if len(values) == 1:
        return number(values[0], decimals)
    shown, error = number(mean(values), decimals), stdev(values) / len(values) ** 0.5
    return f"{shown} ± {error:.{len(shown.partition('.')[2])}f}"


def number(value: float, decimals: int | None = None) -> str:
    """Return a number with so many decimals; by default three digits, and all of an integer."""
    if decimals is not None:
        shown = f"{value:.{decimals}f}"
        return shown if float(shown) else shown.removeprefix("-")
    if isinstance(value, int) or 1e3 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    if 0.01 <= abs(value) < 10:
        return f"{value:.3f}"
    return f"{value:#.3g}".removesuffix(".") if abs(value) >= 10 else f"{value:.2g}"


def insert(page: Path, name: str, text: str) -> None:
    """Replace what stands between ``<!-- name -->`` and ``<!-- /name -->`` on a page."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, found, rest = page.read_text().partition(begin)
    if not found or end not in rest:
        raise SystemExit(f"{page} has no place for {name}: write {begin.strip()} and {end} there.")
    page.write_text(before + begin + text.rstrip() + "\n" + end + rest.partition(end)[2])
