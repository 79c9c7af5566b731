"""The tables of the pages, from benchmarks/results/*.jsonl.

    python benchmarks/report.py                          # fill the pages
    python benchmarks/report.py results/tables.jsonl     # first put a run in the place of what is kept

takes a second. Scripts write JSON lines to results/, which git ignores; what is kept of them in
benchmarks/results is a mean and a standard error a row. Of repeated runs of one row with one
seed the last counts.
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import tables
from methods import markdown

HERE = Path(__file__).parent
ROOT = HERE.parent
PROVENANCE = "machine", "versions", "command", "commit"


class Shown(NamedTuple):
    """A table of a page."""

    page: str
    file: str
    """Of benchmarks/results."""

    rows: tuple[str, ...]
    columns: dict[str, str]
    """Key of a line -> title."""

    where: dict = {}
    """What lines of the file have."""

    across: tuple[str, str] | None = None
    """What names the columns, and what their cells hold; ``columns`` are then its values."""


BENCHMARKS = "docs/benchmarks.md"
MORE = "docs/more_benchmarks.md"
SCORES = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE", "joint_dyadic": "joint NLL"}
COMPARED = SCORES | {
    "auroc_rotated": "rotated",
    "auroc_shuffled": "shuffled",
    "auroc_unseen": "unseen",
    "fit_seconds": "fit, s",
}
RELATIVE = {
    "nll": "NLL",
    "worst": "worst",
    "near": "neighbours",
    "dyadic": "dyadic",
    "brier": "Brier",
    "ece": "ECE",
    "accuracy": "accuracy",
    "gain": "AUROC",
    "seconds": "seconds",
}
TESTED = {"network": "network", "fitted": "ours, as fitted", "calibrated": "ours, calibrated"}
NUMBERS = {"nll": "NLL", "worst": "worst", "coverage": "90 % covers", "rmse": "RMSE"}
COSTS = {
    "before": "before",
    "epochs": "epochs",
    "F": "F",
    "predict F": "of 500 rows, F",
    "seconds": "seconds",
    "ensemble": "ensemble, s",
    "laplace_torch": "KFAC, s",
}
LENGTHS = {str(epochs): f"{epochs} epochs" for epochs in (8, 20, 60, 300)}
SHOWN = {"nll": "NLL", "auroc": "AUROC"}
MNIST = SCORES | {
    f"{key} rotation {level}": f"{SHOWN[key]}, {level}°"
    for key in ("nll", "auroc")
    for level in (15, 45)
}
TOMOGRAPHY = {
    "psnr": "PSNR, dB",
    "nll": "NLL",
    "patch_nll": "NLL, patches",
    "pearson": "Pearson",
    "coverage": "95 % covers",
    "mean_sd": "mean sd",
}
REACHED = {"10 %": "10 %", "3 %": "3 %", "1 %": "1 %"}
FIT = {
    "error": "certificate",
    "passes": "sample passes",
    "single": "single columns",
    "seconds": "seconds",
    "precision": "λ",
    "gamma": "γ",
}
SAMPLES = {
    f"{what}, {target}": f"{what}, {target}" for what in ("samples", "γ") for target in REACHED
}
EM = {f"λ, {target}": f"λ, {target}" for target in REACHED} | {
    "passes": "sample passes",
    "single": "single columns",
    "precision": "last λ",
    "error": "its error",
}
COLUMNS = {"1": "K = 1", "8": "K = 8", "32": "K = 32"}
BATCHES = {str(batch): f"batches of {batch}" for batch in (1, 8, 64, 100, 1024)}
RANKS = {"seconds": "wall s", "own_seconds": "own s", "bytes": "bytes / K P 4"}


TABLES = {
    "digits": Shown(
        "README.md",
        "digits",
        ("method",),
        {key: key for key in ("accuracy", "NLL", "joint NLL", "rotated", "noised", "shuffled")},
    ),
    "compare": Shown(MORE, "compare", ("row",), COMPARED, {"task": "digits"}),
    "tuning": Shown(MORE, "tables", ("network", "row"), RELATIVE, {"set": "tuning"}),
    "kept": Shown(BENCHMARKS, "tables", ("network", "row"), RELATIVE, {"set": "kept"}),
    "regression": Shown(BENCHMARKS, "tables", ("network", "row"), NUMBERS, {"set": "regression"}),
    "ranking": Shown(
        BENCHMARKS,
        "ranking",
        ("score",),
        {f"with {name}": title for name, title in TESTED.items()},
    ),
    "lengths": Shown(MORE, "lengths", ("row",), LENGTHS, {}, ("epochs", "nll")),
    "mnist": Shown(MORE, "mnist", ("row",), MNIST),
    "tomography": Shown(MORE, "tomography", ("row",), TOMOGRAPHY),
    "passes": Shown("docs/passes.md", "passes", ("problem", "solver"), REACHED, {"part": "solver"}),
    "fits": Shown("docs/passes.md", "passes", ("problem", "fit"), FIT, {"part": "fit"}),
    "deflation": Shown(
        "docs/passes.md",
        "passes",
        ("precision",),
        {key: key for key in ("block CG", "1 step", "2 steps", "3 steps")},
        {"part": "deflation"},
    ),
    "paper samples": Shown(
        "docs/passes.md", "paper_sgd", ("method",), SAMPLES, {"part": "samples"}
    ),
    "paper em": Shown("docs/passes.md", "paper_sgd", ("method",), EM, {"part": "em"}),
    "speed": Shown(
        "docs/speed.md", "speed", ("network", "rows", "means"), COLUMNS, {}, ("columns", "ratio")
    ),
    "cost": Shown("docs/speed.md", "cost", ("problem", "weights", "rows"), COSTS, {"part": "fits"}),
    "loaders": Shown(
        "docs/speed.md", "cost", ("problem",), BATCHES, {"part": "loaders"}, ("batch", "seconds")
    ),
    "growth": Shown(
        "docs/speed.md",
        "cost",
        ("problem", "weights", "rows", "classes", "K"),
        {key: key for key in ("epochs", "F", "seconds", "columns")},
        {"part": "growth"},
    ),
    "scaling": Shown("docs/scaling.md", "scaling", ("kind", "ranks", "rows", "shard"), RANKS),
}

BY = {"ranking": ("score",), "mnist": ("task", "network", "row"), "tomography": ("row",)}
"""What a kept line is a mean over the seeds of; of other files every line is kept."""


def kept(path: Path) -> list[dict]:
    """Return what is kept of a run: means over seeds, and where they come from."""
    lines = markdown.read(path)
    if path.stem == "tables":
        return [line | {"commit": lines[-1]["commit"]} for line in tables.lines(lines)]
    by = BY.get(path.stem)
    if by is None:
        return lines
    last = {tuple(line.get(key) for key in (*by, "table", "seed")): line for line in lines}
    found = markdown.means(last.values(), by)
    left_out = {"seed", "table", *PROVENANCE[:3]}
    return [{key: value for key, value in line.items() if key not in left_out} for line in found]


def fill(results: Path, root: Path) -> None:
    """Write every table whose lines are there into its page."""
    for name, shown in TABLES.items():
        lines = [
            line
            for line in markdown.read(results / f"{shown.file}.jsonl")
            if all(line.get(key) == value for key, value in shown.where.items())
        ]
        if shown.across:
            lines = markdown.across(lines, shown.rows, *shown.across)
        if lines:
            found = {k: v for k, v in shown.columns.items() if any(k in line for line in lines)}
            markdown.insert(root / shown.page, name, markdown.table(lines, shown.rows, found))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path, help="JSON lines to keep the means of")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the pages")
    args = parser.parse_args(arguments)
    results = args.root / "benchmarks" / "results"
    for path in args.runs:
        text = "".join(json.dumps(line) + "\n" for line in kept(path))
        (results / path.name).write_text(text)
    fill(results, args.root)


if __name__ == "__main__":
    main()
