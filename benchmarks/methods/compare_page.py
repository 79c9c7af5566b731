"""Tables of docs/benchmarks.md: every method on one network, and the scale of the posterior."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev

from methods.tasks import TASKS

TITLES = {
    "accuracy": "acc.",
    "rmse": "RMSE",
    "nll": "NLL",
    "ece": "ECE",
    "brier": "Brier",
    "joint_dyadic": "joint, dyadic",
    "joint_ten": "joint, ten",
    "fit_seconds": "fit, s",
    "predict_seconds": "s per 1000",
    "megabytes": "peak, MB",
    "passes": "passes",
    "scale": "τ",
    "factor": "factor",
}
HIGHER = ("accuracy",)
SCORES = ("accuracy", "rmse", "nll", "ece", "brier", "joint_dyadic", "joint_ten")
COSTS = ("fit_seconds", "predict_seconds", "megabytes", "passes")
TEMPERATURE = "temperature scaling"
OURS = "ours: scalar, g-prior, K=32"
BEST = f"{OURS}, calibrated"
CONV = "The same digits, by a small convolutional network."
Groups = dict[str, list[dict]]
Tables = dict[tuple[str, int], Groups]


def load(folder: Path, *names: str) -> Tables:
    """Return the records of every (task, epochs), by row, one of each seed."""
    latest: dict[tuple, dict] = {}
    for path in (folder / f"{name}.jsonl" for name in names):
        for line in path.read_text().splitlines() if path.exists() else ():
            record = json.loads(line)
            latest[record["task"], record["epochs"], record["row"], record["seed"]] = record
    tables: Tables = {}
    for (task, epochs, row, _), record in latest.items():
        tables.setdefault((task, epochs), {}).setdefault(row, []).append(record)
    return dict(
        sorted(tables.items(), key=lambda item: (list(TASKS).index(item[0][0]), item[0][1]))
    )


def values(group: list[dict], key: str) -> list[float]:
    """Return what was measured of a row; nothing where it failed."""
    return [record[key] for record in group if record.get(key) is not None]


def cell(numbers: list[float], digits: int = 3) -> str:
    """Return mean ± standard error."""
    if not numbers:
        return ""
    if len(numbers) == 1:
        return f"{numbers[0]:.{digits}f}"
    return f"{mean(numbers):.{digits}f} ± {stdev(numbers) / len(numbers) ** 0.5:.{digits}f}"


def title(key: str) -> str:
    return TITLES.get(key) or "AUROC " + key.removeprefix("auroc_")


def table(groups: Groups, keys: list[str], bold: bool = True) -> str:
    """Return a table of rows; the best mean of each column is bold."""
    lines = ["| | seeds | " + " | ".join(title(key) for key in keys) + " |"]
    lines.append("|---" * (len(keys) + 2) + "|")
    best = {}
    for key in keys:
        means = [mean(values(group, key)) for group in groups.values() if values(group, key)]
        higher = key in HIGHER or key.startswith("auroc")
        best[key] = (max if higher else min)(means) if means and bold else None
    for row, group in groups.items():
        failed = [record["error"] for record in group if "error" in record]
        cells = []
        for key in keys:
            numbers = values(group, key)
            text = cell(numbers, 1 if key in ("megabytes", "passes") else 3)
            winner = bool(numbers) and best[key] is not None and mean(numbers) == best[key]
            cells.append(_mark(text, winner))
        if failed:
            row += (
                f" (fails for {len(failed)} of {len(group)} seeds: {failed[0].replace('|', '/')})"
            )
        lines.append(f"| {row} | {len(group) - len(failed)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def comparison(task: str, epochs: int, groups: Groups) -> str:
    """Return the section of one task: peers first, then the dense posterior, then ours."""
    kinds = ("score:", "dense", "ours")
    groups = dict(
        sorted(groups.items(), key=lambda item: [item[0].startswith(kind) for kind in kinds])
    )
    first = next(iter(groups.values()))[0]
    found = {key for group in groups.values() for record in group for key in record}
    keys = [key for key in SCORES if key in found]
    keys += sorted(key for key in found if key.startswith("auroc_"))
    main = {row: group for row, group in groups.items() if "mean " not in row}
    loss = cell([record["train_loss"] for record in groups["MAP"]])
    text = [f"## {task}\n", (TASKS[task].__doc__ if task != "digits-conv" else CONV) or ""]
    text.append(f"P = {first['weights']}, {epochs} epochs, training loss {loss}.\n")
    text.append(table(main, keys) + "\n")
    text.append(_folded("Costs", table(main, list(COSTS), bold=False)))
    rest = {row: group for row, group in groups.items() if row not in main}
    if rest:
        summary = "Around the linear mode, and calibrated around a mean that is given"
        text.append(_folded(summary, table(rest, keys)))
    return "\n".join(text)


def aims(tables: Tables, task: str = "digits") -> str:
    """Return the four aims on digits by training length: of the defaults around either mean,
    of other variants as fitted and as calibrated."""
    at = [key for key in tables if key[0] == task and TEMPERATURE in tables[key]]
    if not at:
        return ""
    rows = {
        row: None
        for key in at
        for row in tables[key]
        if row.startswith(OURS) or (row.startswith("ours") and "mean " not in row)
    }
    lines = ["| | " + " | ".join(f"{epochs} epochs" for _, epochs in at) + " |"]
    lines.append("|---" * (len(at) + 1) + "|")
    for row in rows:
        cells = [_four_aims(tables[key], row) for key in at]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _four_aims(groups: Groups, row: str) -> str:
    def means(key: str, reference: str) -> tuple[float, float]:
        pairs = paired(groups[row], groups[reference], key)
        return mean(a for a, _ in pairs), mean(b for _, b in pairs)

    if not values(groups.get(row, []), "nll"):
        return ""
    cells = []
    for key, bound in (("nll", 0.9), ("joint_dyadic", 0.5)):
        ours, theirs = means(key, TEMPERATURE)
        cells.append(_mark(f"{ours / theirs:.2f}", ours / theirs <= bound))
    for key, bound in (("auroc_rotated", 0.2), ("auroc_unseen", 0.0)):
        ours, theirs = means(key, "MAP")
        cells.append(_mark(f"{ours - theirs:+.3f}", ours - theirs >= bound))
    return " / ".join(cells)


def paired(group: list[dict], reference: list[dict], key: str) -> list[tuple[float, float]]:
    """Return the values of two rows at the seeds that both have."""
    others = {record["seed"]: record for record in reference}
    return [
        (record[key], others[record["seed"]][key])
        for record in group
        if key in record and key in others.get(record["seed"], {})
    ]


def lengths(tables: Tables, chosen: Callable[[str], bool]) -> str:
    """Return some rows over tasks and training lengths, a table for every score."""
    text = []
    for key in ("nll", "joint_dyadic", "ece", "auroc_rotated", "auroc_unseen", "scale", "factor"):
        columns = [at for at, groups in tables.items() if values(groups.get(BEST, []), key)]
        if not columns:
            continue
        lines = ["| | " + " | ".join(f"{task} {epochs}" for task, epochs in columns) + " |"]
        lines.append("|---" * (len(columns) + 1) + "|")
        for row in {row: None for at in columns for row in tables[at] if chosen(row)}:
            cells = [cell(values(tables[at].get(row, []), key)) for at in columns]
            if any(cells):
                lines.append(f"| {row} | " + " | ".join(cells) + " |")
        text.append(_folded(title(key), "\n".join(lines)))
    return "\n".join(text)


def provenance(tables: Tables) -> str:
    """Return machine, versions, commit and command of all records, each once."""
    records = [r for groups in tables.values() for group in groups.values() for r in group]
    text = []
    for key in ("machine", "versions", "commit"):
        text.append(f"- {key}: " + "; ".join(sorted({str(record[key]) for record in records})))
    commands = sorted({record["command"] for record in records})
    return "\n".join(text) + "\n\n" + _folded("Commands", "```\n" + "\n".join(commands) + "\n```")


def _folded(summary: str, text: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>\n"


def _mark(text: str, holds: bool) -> str:
    return f"**{text}**" if holds else text
