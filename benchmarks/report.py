"""Writes the tables of the documentation, from benchmarks/results/*.jsonl.

    python benchmarks/report.py                          # update the pages
    python benchmarks/report.py results/tables.jsonl     # first replace the stored results by a run's

takes a few seconds. Benchmarks write JSON lines to results/, which git ignores; benchmarks/results has those that
the documentation shows. Of tables.py it has means over tables and seeds. The headline (README, benchmarks, paper) is
made of tables.jsonl alone.
"""

import argparse
import json
import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

import cifar
import distil
import images
import interface
import labels
import mixtures
import monitor
import residuals
import scaling
import scores
import tables
import testbed
import uci
from methods import markdown

HERE = Path(__file__).parent
ROOT = HERE.parent

NAMES = {
    "network": "network alone",
    "temperature": "temperature scaling",
    "ensemble of 5": "ensemble of five",
    "ensemble of 5, temperature": "ensemble of five, temperature scaling",
    "laplace-torch, last layer, grid search": "laplace-torch, last layer, tuned on validation set",
    "ours": "torch_lla_em, all layers",
    "ours, last layer": "torch_lla_em, last layer",
    "ours, as fitted": "torch_lla_em, as fitted",
    "ours, budget of 60 s, as fitted": "torch_lla_em, a budget of 60 s, as fitted",
    "ours, calibrated": "torch_lla_em, calibrated",
    "ours, last layer (validation=False), as fitted": "torch_lla_em, last layer, `validation=False`",
    "ours, last layer, as fitted": "torch_lla_em, last layer, as fitted",
    "ours, last layer, calibrated": "torch_lla_em, last layer, calibrated",
    "many rows": "MLP, many examples",
    "many rows, regression": "MLP, many examples, regression",
    "diamonds": "MLP, diamonds (price)",
    "flights, late or not": "MLP, flights (late or not)",
    "flights, delay": "MLP, flights (delay)",
    "bert, last_layer": "BERT, last layer",
    "segment, last_layer": "MLP, segment, last layer",
    "resnet18": "ResNet-18",
    "resnet20": "ResNet-20",
    "resnet50": "ResNet-50",
    "vit_s": "ViT-S",
    "lenet": "LeNet",
}
"""Names of rows in the results -> names on the pages."""

STAGES = {"early": "early stopping", "on": "100 epochs", "late": "400 epochs"}
HEADED = {"dyadic": "joint NLL", "accuracy": "accuracy", "gain": "OOD AUROC"}
METHODS = (
    *("network", "temperature", "ensemble of 5", "ensemble of 5, temperature"),
    *("laplace-torch, last layer", "laplace-torch, last layer, Monte Carlo"),
    "laplace-torch, last layer, grid search",
    *("laplace-torch, all layers", "laplace-torch, all layers, Monte Carlo"),
    *("ours, as fitted", "ours, calibrated"),
    *("ours, last layer (validation=False), as fitted", "ours, last layer, as fitted"),
    "ours, last layer, calibrated",
)


class Shown(NamedTuple):
    """A table of a page."""

    page: str
    file: str
    """Its name in benchmarks/results, without the suffix."""

    rows: dict[str, str]
    """Keys whose values name a row -> titles of their columns."""

    columns: dict[str, str]
    """Keys of the columns -> their titles."""

    where: dict = {}
    """Values that a line must have to be in the table; tuples hold several."""

    best: dict[str, str] = {}
    """Columns whose "min" or "max" is set in bold."""

    decimals: int | None = None


BENCHMARKS, COST, CALIBRATION, COMING = (
    f"docs/{name}.md" for name in ("benchmarks", "cost", "calibration", "coming_from_laplace_torch")
)
STAGED = {
    "near": "joint NLL, neighbours",
    "dyadic": "joint NLL, dyadic",
    "ece": "ECE",
    "accuracy": "accuracy",
    "gain": "OOD AUROC",
}
PROMISED = {"coverage": "coverage of 90 %", "flagged": "false alarms at 5 %"}
PROMISES = {"set": "unseen", "row": "ours, calibrated"}
OF_NETWORK = {"problem": "network", "weights": "parameters", "rows": "examples", "K": "samples"}
FIT = {"seconds": "fit, s", "trainings": "fit / training"}
COSTS = FIT | {
    "training_seconds": "training, s",
    "epochs": "fit, training epochs",
    "network_curvature": 'fit with `curvature="network"`, s',
    "ensemble": "four more networks, s",
    "laplace_torch": "laplace-torch KFAC, s",
}
UNSEEN = tuple(
    f"last layer, {size}"
    for size in (
        *("1000 x 50 x 7", "2000 x 128 x 10", "5000 x 512 x 10", "30000 x 256 x 10"),
        *("50000 x 512 x 10", "2000 x 64 x 50", "20000 x 256 x 100", "10000 x 64 x 1000"),
    )
)
LAST_LAYERS = {
    "seconds": "fit, s",
    "epochs": "fit, training epochs",
    "last_kron": "laplace-torch KFAC, s",
    "last_full": "laplace-torch full, s",
    "network_nll": "NLL, network",
    "nll": "NLL, posterior",
    "last_kron_nll": "NLL, laplace-torch KFAC",
    "last_full_nll": "NLL, laplace-torch full",
}
PREDICTIONS = {
    "predict F": "`la(x)` of 500 examples / forward pass",
    "served 1": "exported, 1 example / five networks",
    "served 8": "exported, 8 examples / five networks",
}
SMALL = {
    "forward": "forward pass, ms",
    "predict F": "`la(x)` / forward pass",
    "p_value F": "with `p_value` / forward pass",
}
PREDICTED = (
    *("mlp", "regression", "lenet", "resnet20", "bert", "bert, last_layer", "flights, late or not"),
    *("many rows", *(f"last layer, {size}" for size in ("5000 x 512 x 10", "2000 x 64 x 50"))),
)
GPU_FITS = FIT | {
    "epochs": "fit, training epochs",
    "relative_certificate": "error of samples, in standard deviations",
    "peak_gb": "peak memory, GB",
}
GPU_NETWORK = {"network": "network", "weights": "parameters", "rows": "images", "K": "samples"}
SEGMENTED = {
    "weights": "parameters",
    "network": "NLL, network",
    "posterior": "NLL, posterior",
    "seconds": "fit, CPU s",
    "trainings": "fit / training",
    "error": "error of samples",
}
LARGE = {
    "rmse": "RMSE",
    "nll": "NLL",
    "crps": "CRPS",
    "coverage": "coverage of 90 %",
    "fit_seconds": "fit, CPU s",
}
TABLES = {
    "large": Shown(BENCHMARKS, "large", {"rows": "examples", "row": "method"}, LARGE, decimals=3),
    "segmentation": Shown(
        BENCHMARKS, "segmentation", {"images": "images", "layers": "posterior over"}, SEGMENTED
    ),
    "conformal": Shown(
        "docs/other_libraries.md",
        "conformal",
        {"name": "table", "row": "intervals of 90 %"},
        {"coverage": "coverage", "width": "width", "score": "interval score"},
        decimals=2,
    ),
    "language": Shown(
        BENCHMARKS, "language", {"row": "method"}, {"nll": "NLL", "seconds": "CPU s"}, decimals=3
    ),
    "passes": Shown(
        BENCHMARKS, "paper", {"solver": "solver"}, {s: s for s in ("10 %", "3 %", "1 %")}
    ),
    "promises": Shown(
        CALIBRATION, "tables", {"network": "network"}, PROMISED, PROMISES, decimals=3
    ),
    "cost": Shown(COST, "cost", OF_NETWORK, COSTS, {"part": "fits"}),
    "cost of last layers": Shown(
        COST, "cost", OF_NETWORK, LAST_LAYERS, {"part": "fits", "problem": UNSEEN}, decimals=3
    ),
    "cost of predictions": Shown(
        COST, "cost", OF_NETWORK, PREDICTIONS, {"part": "fits", "problem": PREDICTED}
    ),
    "predictions of small networks": Shown(
        COST,
        "cost",
        {"problem": "network", "rows": "inputs"},
        SMALL,
        {"part": "predictions"},
        decimals=2,
    ),
    "gpu fits": Shown(COST, "gpu", GPU_NETWORK, GPU_FITS, {"part": "fit"}),
    "gpu cost": Shown(COST, "gpu", OF_NETWORK, COSTS | PREDICTIONS, {"part": "cost"}),
}


def headline(lines: list[dict], sampled: bool = False) -> str:
    """Return mean and worst ratio of the NLL at each stage, and other scores after 100 epochs, a row for each method."""
    known = {(ln["row"], ln["network"]): ln for ln in lines if ln["set"] == "unseen"}
    columns = STAGES | HEADED
    chosen = [r for r in METHODS if (r, "on") in known and (sampled or "Carlo" not in r)]
    rows = [{"row": NAMES.get(row, row)} for row in chosen]
    for key in columns:
        score, stage, best = ("nll", key, min) if key in STAGES else (key, "on", max)
        best = min if score == "dyadic" else best
        found = [known[row, stage] for row in chosen]
        shown = [markdown.number(line[score], 2 + (score == "accuracy")) for line in found]
        top = best(shown, key=float)
        for cells, line, text in zip(rows, found, shown, strict=True):
            cells[key] = f"**{text}**" if text == top else text
            cells[key] += f" ({line['worst']:.1f})" if score == "nll" else ""
    return markdown.table(rows, {"row": "test NLL / temperature scaling's: mean (worst)"}, columns)


def staged(lines: list[dict]) -> str:
    """Return the other scores at the three stages, a row for each method."""
    known = {(ln["row"], ln["network"]): ln for ln in lines if ln["set"] == "unseen"}
    rows = []
    for row in METHODS:
        found = [known[row, stage] for stage in STAGES if (row, stage) in known]
        places = {key: 3 if key in ("ece", "accuracy") else 2 for key in STAGED}
        cells = {
            k: " / ".join(markdown.number(ln[k], n) for ln in found) for k, n in places.items()
        }
        rows.append({"row": NAMES.get(row, row)} | cells)
    return markdown.table(rows, {"row": " / ".join(STAGES.values())}, STAGED)


TEXTS = {
    "headline": ("README.md", "tables", headline),
    "headline of the benchmarks": (BENCHMARKS, "tables", partial(headline, sampled=True)),
    "stages": (BENCHMARKS, "tables", staged),
    "headline of the paper": ("paper/paper.md", "tables", headline),
    "images": (
        BENCHMARKS,
        "images",
        lambda lines: images.report(with_names(lines)),
    ),
    "cifar": (BENCHMARKS, "cifar", lambda lines: cifar.report(with_names(lines))),
    "mixtures": ("docs/mixtures.md", "mixtures", mixtures.report),
    "intervals": (COMING, "interface", interface.of_intervals),
    "probabilities": (COMING, "interface", interface.of_probabilities),
    "testbed": (BENCHMARKS, "testbed", testbed.summary),
    "distil": ("docs/serving.md", "distil", distil.summary),
    "uci": (BENCHMARKS, "uci", uci.summary),
    "scaling": ("docs/method.md", "scaling", scaling.report),
    "residuals": ("docs/regression.md", "residuals", residuals.report),
    "scores": ("docs/out_of_distribution.md", "scores", scores.report),
    "labels": ("docs/wrong_labels.md", "labels", labels.wrong),
    "labels, none wrong": ("docs/wrong_labels.md", "labels", labels.right),
    "monitor, alarms": ("docs/out_of_distribution.md", "monitor", monitor.of_alarms),
    "monitor": (BENCHMARKS, "monitor", monitor.of_delays),
}
"""Tables that a benchmark makes itself: page, file, and how."""


SHORT = "uci", "images", "cifar", "large", "labels", "monitor", "residuals", "scaling", "scores"
"""Results of many short lines."""


def named(name: object) -> object:
    """Return what the pages call a row."""
    if not isinstance(name, str):
        return name
    name = re.sub(r"^ours\b", "torch_lla_em", (NAMES | STAGES).get(name, name))
    name = re.sub(r"\b(mlp|cnn|bert)\b", lambda word: word[0].upper(), name)
    return re.sub("|".join(("resnet18", "resnet50", "vit_s", "lenet")), lambda w: NAMES[w[0]], name)


def with_names(lines: list[dict]) -> list[dict]:
    """Return lines with the names that rows have on the pages."""
    return [line | {"row": named(line["row"])} for line in lines]


def kept(path: Path) -> list[dict]:
    """Return the lines of a run that are stored: for tables.py, means over tables and seeds, with commit."""
    lines = markdown.read(path)
    if path.stem == "tables":
        return [line | {"commit": lines[-1]["commit"]} for line in tables.lines(lines)]
    if path.stem not in SHORT:
        return lines
    left_out = "machine", "versions", "command"  # of one run
    return [
        {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in line.items()}
        for line in ({k: v for k, v in ln.items() if k not in left_out} for ln in lines)
    ]


def replaced(stored: list[dict], lines: list[dict]) -> list[dict]:
    """Replace stored lines by those of a run; in comparisons, lines of methods that were not run stay."""
    keys = "kind", "set", "network", "row"
    if not all(key in line for line in lines for key in keys):
        return lines
    known = {tuple(line[key] for key in keys): line for line in (*stored, *lines)}
    return [*known.values()]


def fill(results: Path, root: Path) -> None:
    """Write all tables into their pages."""
    for name, shown in TABLES.items():
        lines = [
            line
            for line in markdown.read(results / f"{shown.file}.jsonl")
            if all(_is(line.get(key), value) for key, value in shown.where.items())
        ]
        lines = [line | {k: named(line[k]) for k in shown.rows if k in line} for line in lines]
        if lines:
            found = {k: v for k, v in shown.columns.items() if any(k in line for line in lines)}
            text = markdown.table(lines, shown.rows, found, shown.best, shown.decimals)
            markdown.insert(root / shown.page, name, text)

    for name, (page, file, text_of) in TEXTS.items():
        lines = markdown.read(results / f"{file}.jsonl")
        if lines:
            markdown.insert(root / page, name, text_of(lines))


def _is(value: object, asked: object) -> bool:
    return value in asked if isinstance(asked, tuple) else value == asked


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path, help="results to store: JSON lines of runs")
    parser.add_argument("--root", type=Path, default=ROOT, help="root of the repository")
    args = parser.parse_args(arguments)
    results = args.root / "benchmarks" / "results"
    for path in args.runs:
        stored = markdown.read(results / path.name)
        text = "".join(json.dumps(line) + "\n" for line in replaced(stored, kept(path)))
        (results / path.name).write_text(text)
    fill(results, args.root)


if __name__ == "__main__":
    main()
