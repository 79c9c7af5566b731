"""The charts of the documentation, from benchmarks/results/*.jsonl.

    python benchmarks/charts.py

takes a few seconds and writes to docs/images/charts. ``benchmarks/report.py`` calls it as well, so
that tables and charts always show the same results.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev

import matplotlib
from methods import markdown
from methods.names import named

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
OURS, OTHERS = "C0", "0.55"
METHODS = {
    "network": "network alone",
    "temperature": "temperature scaling",
    "ensemble of 5": "ensemble of five",
    "ensemble of 5, temperature": "ensemble of five,\ntemperature scaling",
    "ours, as fitted": "torch_lla_em, as fitted",
    "ours, calibrated": "torch_lla_em, calibrated",
}
STAGES = {"early": "early stopping", "on": "100 epochs"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "charts")
    given = parser.parse_args(arguments)
    draw(given.results, given.out)


def draw(results: Path, out: Path) -> None:
    """Draw every chart whose results are stored."""
    out.mkdir(parents=True, exist_ok=True)
    for name, (file, chart) in CHARTS.items():
        lines = markdown.read(results / f"{file}.jsonl")
        if lines:
            figure = chart(lines)
            # without the version of matplotlib, equal charts are equal files
            figure.savefig(out / f"{name}.png", dpi=100, metadata={"Software": None})
            plt.close(figure)


def classification(lines: list[dict]) -> plt.Figure:
    """NLL relative to temperature scaling: mean over data sets, and the worst of them."""
    return compared(lines, "kept", "test NLL / that of temperature scaling", 1)


def regression(lines: list[dict]) -> plt.Figure:
    """Difference of the NLL to a network with the noise of a validation set."""
    return compared(lines, "regression", "test NLL − that of the network", 0)


def compared(lines: list[dict], data: str, label: str, reference: float) -> plt.Figure:
    """Return dots for means over data sets, and lines to the worst data set."""
    figure, columns = plt.subplots(1, 2, figsize=(7, 2.9), sharey=True, layout="constrained")
    for axes, (stage, title) in zip(columns, STAGES.items(), strict=True):
        found = {line["row"]: line for line in lines if _is(line, data, stage)}
        rows = [row for row in METHODS if row in found]
        best = min(_centre(found[row]["nll"]) for row in rows)
        for height, row in enumerate(reversed(rows)):
            colour = OURS if row.startswith("ours") else OTHERS
            value, worst = (_centre(found[row][key]) for key in ("nll", "worst"))
            axes.plot([value, worst], [height, height], color=colour, linewidth=1, alpha=0.6)
            axes.plot(worst, height, "|", color=colour, markersize=8)
            axes.plot(value, height, "o", color=colour)
            weight = "bold" if round(value, 2) == round(best, 2) else "normal"
            place = {"xytext": (0, 5), "textcoords": "offset points", "ha": "center"}
            axes.annotate(
                f"{value:.2f}", (value, height), color=colour, size=8, weight=weight, **place
            )
        axes.margins(x=0.1)
        axes.axvline(reference, color="black", linewidth=0.8, linestyle=":")
        names = {"temperature": "network,\nvalidation noise"} if data == "regression" else {}
        names = METHODS | names
        axes.set_yticks(range(len(rows)), [names[row] for row in reversed(rows)], fontsize=9)
        axes.set(title=title, ylim=(-0.6, len(rows) - 0.3))
        axes.set_xlabel(label, fontsize=9)
    return figure


def _is(line: dict, data: str, stage: str) -> bool:
    return line["set"] == data and line["network"] == stage


def _centre(value: float | list[float]) -> float:
    return value[0] if isinstance(value, list) else value


def ood(lines: list[dict]) -> plt.Figure:
    """AUROC of detecting test examples with permuted columns."""
    figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
    rows = [row for row in METHODS if row != "temperature"]
    names = [METHODS[row].replace("\n", " ") for row in rows]
    values = {
        title: {
            METHODS[line["row"]].replace("\n", " "): _centre(line["auroc"])
            for line in lines
            if _is(line, "kept", stage) and line["row"] in rows
        }
        for stage, title in STAGES.items()
    }
    return bars(figure, axes, names, values, "mean AUROC of permuted columns", start=0.5)


def cost(lines: list[dict]) -> plt.Figure:
    """CPU seconds of a fit, of four more trainings, and of laplace-torch's KFAC."""
    fits = [line for line in lines if line["part"] == "fits" and line.get("ensemble")]
    titles = {"seconds": "torch_lla_em", "ensemble": "ensemble of five"}
    titles["laplace_torch"] = "laplace-torch, KFAC"
    names = [f"{named(line['problem'])} ({line['rows']:,})" for line in fits]
    figure, axes = plt.subplots(figsize=(7, 4.6), layout="constrained")
    values = {
        title: {name: line.get(key) for name, line in zip(names, fits, strict=True)}
        for key, title in titles.items()
    }
    bars(
        figure,
        axes,
        names,
        values,
        "CPU seconds in addition to training (in brackets: examples)",
    )
    axes.set_xscale("log")
    return figure


def lengths(lines: list[dict]) -> plt.Figure:
    """NLL on digits, by how long the network was trained."""
    shown = [
        "network (MAP)",
        "temperature scaling",
        'ours, curvature="linear"',
        "the same, calibrated",
    ]
    titles = ["network alone", "temperature scaling", "torch_lla_em, as fitted"]
    titles.append("torch_lla_em, calibrated")
    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    for row, title, style in zip(shown, titles, ("0.5:", "0.5-", "C0:", "C0-"), strict=True):
        found = [line for line in lines if line["row"] == row]
        x, (y, error) = [line["epochs"] for line in found], zip(*(line["nll"] for line in found))
        colour, dash = style[:-1], style[-1]
        axes.errorbar(
            x, y, error, color=colour, linestyle=dash, marker="o", markersize=4, label=title
        )
    axes.set(xscale="log", yscale="log", xlabel="epochs of training", ylabel="test NLL")
    axes.set_xticks([8, 20, 60, 300], ["8", "20", "60", "300"])
    axes.set_yticks([0.06, 0.1, 0.2, 0.4, 0.8], ["0.06", "0.1", "0.2", "0.4", "0.8"])
    axes.minorticks_off()
    axes.legend(fontsize=8)
    return figure


def ranking(lines: list[dict]) -> plt.Figure:
    """Rank correlation of a score with the test NLL, over twelve networks a data set."""
    titles = {"network": "network alone", "fitted": "posterior, as fitted"}
    titles["calibrated"] = "posterior, calibrated"
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    names = [named(line["score"]) for line in lines]
    values = {
        title: {named(line["score"]): line[f"with {key}"] for line in lines}
        for key, title in titles.items()
    }
    return bars(figure, axes, names, values, "rank correlation with −(test NLL) of")


def coverage(lines: list[dict]) -> plt.Figure:
    """Coverage of prediction sets and intervals at a level of 0.9."""
    methods = {
        "prediction_set": "prediction_set, interval",
        "interval": "prediction_set, interval",
        "MAPIE lac, network": "MAPIE LAC, absolute residuals",
        "MAPIE absolute, network": "MAPIE LAC, absolute residuals",
        "MAPIE aps, network": "MAPIE APS",
    }
    found: dict[str, dict[str, list[float]]] = {}
    for line in lines:
        if line.get("level") == 0.9 and line.get("method") in methods:
            row = found.setdefault(methods[line["method"]], {})
            row.setdefault(line["table"], []).append(line["coverage"])
    figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
    names = list(dict.fromkeys(table for row in found.values() for table in row))
    order = sorted(found, key=lambda title: title.startswith("MAPIE"))
    for number, title in enumerate(order):
        for height, name in enumerate(reversed(names)):
            values = found[title].get(name)
            if values:
                error = stdev(values) / len(values) ** 0.5
                colour, marker = ((OURS, "o"), (OTHERS, "s"), (OTHERS, "^"))[number]
                label = title if height == len(names) - 1 else None
                place = height + 0.2 * (1 - number)
                axes.errorbar(
                    mean(values), place, xerr=error, fmt=marker, color=colour, label=label
                )
    axes.axvline(0.9, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(names)), list(reversed(names)))
    axes.set_xlabel("share of test examples covered, at a level of 0.9")
    axes.legend(fontsize=8, loc="lower right")
    return figure


def bars(
    figure: plt.Figure,
    axes: plt.Axes,
    names: Sequence[str],
    values: dict[str, dict[str, float | list[float] | None]],
    label: str,
    start: float = 0.0,
) -> plt.Figure:
    """Draw groups of horizontal bars, with error bars where a value is [mean, error]."""
    width = 0.8 / len(values)
    colours: Iterable[str] = ("C0", "0.45", "0.75")
    for number, (title, row) in enumerate(values.items()):
        colour = [*colours][number]
        for height, name in enumerate(reversed(names)):
            value = row.get(name)
            if value is not None:
                centre, error = value if isinstance(value, list) else (value, None)
                place = height + width * ((len(values) - 1) / 2 - number)
                legend = {"label": title} if name == names[0] else {}
                axes.barh(place, centre - start, width, start, xerr=error, color=colour, **legend)
    axes.set_yticks(range(len(names)), list(reversed(names)), fontsize=9)
    axes.set_xlabel(label, fontsize=9)
    figure.legend(*axes.get_legend_handles_labels(), fontsize=8, loc="outside upper right", ncols=3)
    return figure


CHARTS = {
    "classification": ("tables", classification),
    "regression": ("tables", regression),
    "ood": ("tables", ood),
    "cost": ("cost", cost),
    "lengths": ("lengths", lengths),
    "ranking": ("ranking", ranking),
    "coverage": ("coverage", coverage),
}
"""Name of a chart -> the file of its results, and what draws it."""


if __name__ == "__main__":
    main()
