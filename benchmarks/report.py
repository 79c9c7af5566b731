"""Writes the tables and draws the charts of the benchmark pages, from benchmarks/results/*.jsonl.

    python benchmarks/report.py                          # update the pages
    python benchmarks/report.py results/tables.jsonl     # first replace the stored results by a run's

takes a few seconds. Benchmarks write JSON lines to results/, which git ignores. What is stored in
benchmarks/results is the mean and the standard error over seeds. If a run has repeated lines of one
seed, the last of them counts.
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import aims
import charts
import distil
import durations
import estimators
import folds
import language
import linear_posterior
import ood
import scalings
import seeds
import sizes
import tables
import testbed
from methods import markdown
from methods.names import named

HERE = Path(__file__).parent
ROOT = HERE.parent
PROVENANCE = "machine", "versions", "command", "commit"


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

    across: tuple[str, str] | None = None
    """A key whose values name the columns, and the key of their cells; ``columns`` are then values."""

    best: dict[str, str] = {}
    """Columns whose "min" or "max" is set in bold."""

    decimals: int | None = None

    names: dict[str, str] = {}
    """Names of rows on the page, where they differ from those on the other pages."""


BENCHMARKS = "docs/benchmarks.md"
MORE = "docs/more_benchmarks.md"
SEGMENTED = {
    "weights": "parameters",
    "network": "NLL, network",
    "posterior": "NLL, posterior",
    "seconds": "fit, CPU s",
    "trainings": "fit / training",
    "GB": "memory, GB",
    "error": "error of samples",
}
LIMITED = {
    "budget": "budget, s",
    "seconds": "fit, s",
    "steps": "steps",
    "longest": "longest step, s",
    "error": "error",
}
SCORES = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE", "joint_dyadic": "joint NLL"}
COMPARED = {
    "nll": "NLL",
    "ece": "ECE",
    "joint_dyadic": "joint NLL",
    "auroc_rotated": "AUROC rotated",
    "auroc_unseen": "AUROC unseen",
    "fit_seconds": "fit, s",
}
RELATIVE = {
    "nll": "NLL",
    "worst": "worst NLL",
    "near": "joint NLL, neighbours",
    "dyadic": "joint NLL, dyadic",
    "ece": "ECE",
    "accuracy": "accuracy",
    "gain": "OOD AUROC",
}
LEAST = dict.fromkeys(("nll", "worst", "near", "dyadic", "ece"), "min")
RELATIVE_BEST = LEAST | {"accuracy": "max", "gain": "max"}
LOW_HIGH = {"accuracy": "max", "nll": "min", "ece": "min", "joint_dyadic": "min"}
TESTED = {
    "network": "network alone",
    "fitted": "posterior, as fitted",
    "calibrated": "posterior, calibrated",
}
NUMBERS = {"nll": "NLL", "worst": "worst NLL", "coverage": "coverage of 90 %", "rmse": "RMSE"}
VALIDATION_NOISE = {
    "temperature": "network, validation noise",
    "ensemble of 5, temperature": "ensemble of five, validation noise",
}
STAGES = {"early": "early stopping", "on": "100 epochs"}
LARGE_STAGES = {"early": "early stopping", "on": "20 epochs"}
PRICE = {"trainings": "price, trainings"}
CONFORMAL = {
    "MAPIE lac, network": "MAPIE LAC, network",
    "MAPIE aps, network": "MAPIE APS, network",
    "MAPIE lac, posterior as fitted": "MAPIE LAC, posterior as fitted",
    "MAPIE aps, posterior as fitted": "MAPIE APS, posterior as fitted",
    "MAPIE absolute, network": "MAPIE absolute residuals, network",
    "MAPIE absolute, posterior as fitted": "MAPIE absolute residuals, posterior as fitted",
    "prediction_set": "**`prediction_set`**",
    "interval": "**`interval`**",
}
COVERED = {"coverage": "coverage", "size": "set size or width", "score": "interval score"}
FLAGGED = {
    "flagged test": "test data",
    "flagged permuted": "permuted columns",
    "flagged x 3": "inputs × 3",
    "flagged noise": "noise of 10 σ",
}
COSTS = {
    "training_seconds": "training, s",
    "seconds": "fit, s",
    "trainings": "fit / training",
    "epochs": "fit, training epochs",
    "F": "fit, forward passes",
    "network_curvature": 'fit with `curvature="network"`, s',
    "ensemble": "four more networks, s",
    "laplace_torch": "laplace-torch KFAC, s",
}
PREDICTIONS = {
    "predict F": "`la(x)` of 500 examples / forward pass",
    "served 1": "exported, 1 example / five networks",
    "served 8": "exported, 8 examples / five networks",
}
GPU_FITS = {
    "seconds": "fit, s",
    "trainings": "fit / training",
    "epochs": "fit, training epochs",
    "relative_certificate": "error of samples, in standard deviations",
    "peak_gb": "peak memory, GB",
}
GPU_PRODUCTS = {
    "forward": "forward pass, s",
    "product": "product, s",
    "ratio": "product / (1 + 4 K) passes",
    "precision_error": "rounding error",
    "peak_gb": "peak memory, GB",
}
SERVED = {
    "CPU ms of 1": "1 image: CPU, ms",
    "ensembles, 1": "1 image / ensemble",
    "CPU ms of 8": "8 images: CPU, ms",
    "ensembles, 8": "8 images / ensemble",
}
OF_NETWORK = {"problem": "network", "weights": "parameters", "rows": "examples", "K": "samples"}
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
    "coverage": "coverage of 95 %",
    "mean_sd": "mean standard deviation",
}
REACHED = {"10 %": "10 %", "3 %": "3 %", "1 %": "1 %"}
FIT = {
    "error": "error bound",
    "passes": "passes, samples",
    "single": "columns, mode",
    "seconds": "seconds",
    "precision": "λ",
    "gamma": "γ",
}
SAMPLES = {
    f"{what}, {target}": f"{what}, {target}" for what in ("samples", "γ") for target in REACHED
}
EM = {f"λ, {target}": f"λ, {target}" for target in REACHED} | {
    "passes": "passes, samples",
    "single": "columns, mode",
    "precision": "final λ",
    "error": "error of λ",
}
COLUMNS = {"1": "K = 1", "8": "K = 8", "32": "K = 32"}
BATCHES = {str(batch): f"batches of {batch}" for batch in (1, 8, 64, 100)} | {"all": "one tensor"}
RANKS = {
    "seconds": "wall-clock, s",
    "own_seconds": "CPU of a rank, s",
    "bytes": "bytes sent / 4 K P",
}


TABLES = {
    "headline": Shown(
        "README.md",
        "tables",
        {"row": "test NLL / that of temperature scaling"},
        STAGES,
        {"set": "kept", "row": tuple(charts.METHODS)},
        ("network", "nll"),
        dict.fromkeys(STAGES, "min"),
        2,
    ),
    "coverage": Shown(
        "docs/calibration.md",
        "coverage",
        {"table": "data", "method": "method"},
        COVERED,
        {"method": tuple(CONFORMAL)},
        names=CONFORMAL,
    ),
    "flagged": Shown(
        "docs/out_of_distribution.md",
        "coverage",
        {"table": "data"},
        FLAGGED,
        {"method": ("prediction_set", "interval")},
    ),
    "large classes": Shown(
        BENCHMARKS,
        "tables",
        {"network": "network", "row": "method"},
        RELATIVE | PRICE,
        {"set": "large", "kind": "classes"},
        decimals=3,
        names=LARGE_STAGES,
    ),
    "large regression": Shown(
        BENCHMARKS,
        "tables",
        {"network": "network", "row": "method"},
        NUMBERS | PRICE,
        {"set": "large", "kind": "regression"},
        decimals=3,
        names=VALIDATION_NOISE | LARGE_STAGES,
    ),
    "digits": Shown(
        MORE,
        "digits",
        {"method": "method"},
        {key: key for key in ("accuracy", "NLL", "joint NLL", "rotated", "noised", "shuffled")},
        best={"NLL": "min", "joint NLL": "min"}
        | dict.fromkeys(("accuracy", "rotated", "noised", "shuffled"), "max"),
        decimals=3,
    ),
    "compare": Shown(
        MORE,
        "compare",
        {"row": "method"},
        COMPARED,
        {"task": "digits"},
        best=LOW_HIGH | {f"auroc_{name}": "max" for name in ("rotated", "unseen")},
    ),
    "ranking": Shown(
        BENCHMARKS,
        "ranking",
        {"score": "ranked by"},
        {f"with {name}": title for name, title in TESTED.items()},
        best={f"with {name}": "max" for name in TESTED},
        decimals=2,
    ),
    "lengths": Shown(
        MORE,
        "lengths",
        {"row": "method"},
        LENGTHS,
        across=("epochs", "nll"),
        best=dict.fromkeys(LENGTHS, "min"),
    ),
    "mnist": Shown(
        MORE,
        "mnist",
        {"row": "method"},
        MNIST,
        best={key: "max" if "a" in key[:1] else "min" for key in MNIST},
    ),
    "tomography": Shown(
        MORE,
        "tomography",
        {"row": "method"},
        TOMOGRAPHY,
        best={"nll": "min", "patch_nll": "min", "pearson": "max"},
    ),
    "segmentation": Shown(
        MORE,
        "segmentation",
        {"images": "images", "layers": "posterior over"},
        SEGMENTED,
    ),
    "budget": Shown("docs/long_runs.md", "budget", {"problem": "network"}, LIMITED),
    "passes": Shown(
        "docs/passes.md",
        "passes",
        {"problem": "network and data", "solver": "solver"},
        REACHED,
        {"part": "solver"},
    ),
    "fits": Shown(
        "docs/passes.md",
        "passes",
        {"problem": "network and data", "fit": "solver"},
        FIT,
        {"part": "fit"},
    ),
    "paper samples": Shown(
        "docs/passes.md", "paper_sgd", {"method": "solver"}, SAMPLES, {"part": "samples"}
    ),
    "paper em": Shown("docs/passes.md", "paper_sgd", {"method": "solver"}, EM, {"part": "em"}),
    "speed": Shown(
        "docs/speed.md",
        "speed",
        {"network": "network", "rows": "batch size", "means": "method"},
        COLUMNS,
        across=("columns", "ratio"),
    ),
    "cost": Shown(
        "docs/speed.md",
        "cost",
        OF_NETWORK,
        COSTS,
        {"part": "fits"},
    ),
    "cost of predictions": Shown(
        "docs/speed.md", "cost", OF_NETWORK, PREDICTIONS, {"part": "fits"}
    ),
    "loaders": Shown(
        "docs/speed.md",
        "cost",
        {"problem": "network"},
        BATCHES,
        {"part": "loaders"},
        ("batch", "seconds"),
    ),
    "first fits": Shown(
        "docs/speed.md",
        "cost",
        {"problem": "network"},
        {name: f"{name}, s" for name in ("first fit", "second fit")},
        {"part": "first"},
    ),
    "growth": Shown(
        "docs/speed.md",
        "cost",
        {
            "problem": "varied",
            "weights": "parameters P",
            "rows": "examples N",
            "classes": "classes C",
            "K": "samples K",
        },
        {"epochs": "epochs", "F": "forward passes", "seconds": "seconds", "columns": "columns"},
        {"part": "growth"},
    ),
    "gpu fits": Shown(
        "docs/gpu.md",
        "gpu",
        {"network": "network", "weights": "parameters", "rows": "images", "K": "samples"},
        GPU_FITS,
        {"part": "fit"},
    ),
    "gpu cost": Shown(
        "docs/gpu.md",
        "gpu",
        OF_NETWORK,
        {"training_seconds": "training, s"} | GPU_FITS | PREDICTIONS,
        {"part": "cost"},
    ),
    "gpu products": Shown(
        "docs/gpu.md",
        "gpu",
        {"step": "product", "rows": "images"},
        GPU_PRODUCTS,
        {"part": "product", "columns": 8},
    ),
    "gpu small batches": Shown(
        "docs/gpu.md",
        "gpu",
        {"network": "network", "rows": "images"},
        {key: GPU_PRODUCTS[key] for key in ("forward", "product", "ratio")},
        {"part": "launches"},
    ),
    "gpu memory": Shown(
        "docs/gpu.md",
        "gpu",
        {"of": "memory"},
        {"precision": "λ", "gamma": "γ"} | {key: GPU_FITS[key] for key in ("seconds", "peak_gb")},
        {"part": "recovery"},
    ),
    "serving": Shown("docs/serving.md", "serving", {"predictor": "predictor"}, SERVED),
    "scaling": Shown(
        "docs/scaling.md",
        "scaling",
        {"kind": "scaling", "ranks": "ranks", "rows": "examples"},
        RANKS,
    ),
}
TABLES["headline of the paper"] = TABLES["headline"]._replace(page="paper/paper.md")
for stage in STAGES:
    for name, page, columns, best in (
        ("kept", BENCHMARKS, RELATIVE, RELATIVE_BEST),
        ("peers", BENCHMARKS, RELATIVE | PRICE, RELATIVE_BEST),
        ("regression", BENCHMARKS, NUMBERS, dict.fromkeys(("nll", "worst", "rmse"), "min")),
        ("tuning", MORE, RELATIVE, RELATIVE_BEST),
    ):
        where = {"set": name, "network": stage}
        TABLES[f"{name} {stage}"] = Shown(
            page,
            "peers" if name == "peers" else "tables",
            {"row": "method"},
            columns,
            where,
            best=best,
            decimals=3,
            names=VALIDATION_NOISE if name == "regression" else {},
        )

TEXTS = {
    "aims": (BENCHMARKS, "aims", aims.aims_table),
    "aims each": (BENCHMARKS, "aims", aims.each_table),
    "ensembles": ("docs/calibration.md", "aims", aims.ensembles_table),
    "folds": ("docs/calibration.md", "folds", folds.summary),
    "testbed": ("docs/testbed.md", "testbed", testbed.summary),
    "distil": ("docs/distil.md", "distil", distil.summary),
    "ood scores": ("docs/out_of_distribution.md", "ood", ood.scores_table),
    "ood confidence": ("docs/out_of_distribution.md", "ood", ood.confidence_table),
    "scalings": ("docs/prior_precision.md", "scalings", scalings.summary),
    "seeds": ("docs/method.md", "seeds", seeds.summary),
    "linear posterior": ("docs/curvature.md", "linear_posterior", linear_posterior.summary),
    "sizes": ("docs/which_method.md", "sizes", sizes.summary),
    "durations": ("docs/speed.md", "durations", durations.summary),
    "language": ("docs/other_libraries.md", "language", language.scores_table),
    "language needs": ("docs/other_libraries.md", "language", language.needs_table),
    "estimators": ("docs/other_libraries.md", "estimators", estimators.summary),
}
"""Tables that a benchmark makes itself: page, file, and how."""

BY = {"ranking": ("score",), "mnist": ("task", "network", "row"), "tomography": ("row",)}
"""Keys of the lines that are averaged over seeds; of other files every line is stored."""


def kept(path: Path) -> list[dict]:
    """Return what is stored of a run: means over seeds, with their commit."""
    lines = markdown.read(path)
    if path.stem in ("tables", "peers"):
        common = {"commit": lines[-1]["commit"]} | (
            {"set": "peers"} if path.stem == "peers" else {}
        )
        return [line | common for line in tables.lines(lines)]
    by = BY.get(path.stem)
    if by is None:
        return lines
    last = {tuple(line.get(key) for key in (*by, "table", "seed")): line for line in lines}
    found = markdown.means(last.values(), by)
    left_out = {"seed", "table", *PROVENANCE[:3]}
    return [{key: value for key, value in line.items() if key not in left_out} for line in found]


def replaced(stored: list[dict], lines: list[dict]) -> list[dict]:
    """Return a run's lines in the place of those stored; of comparisons, other methods' lines stay."""
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
        if shown.across:
            lines = markdown.across(lines, [*shown.rows], *shown.across)
        lines = [
            line | {k: shown.names.get(line[k]) or named(line[k]) for k in shown.rows if k in line}
            for line in lines
        ]
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
    charts.draw(results, args.root / "docs" / "images" / "charts")


if __name__ == "__main__":
    main()
