"""The section of docs/passes.md on the paper's recipe, and its picture."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from methods.provenance import source
from methods.recipe import RATES

TARGETS = 0.1, 0.03, 0.01
HEAD = """## Against the paper's gradient descent

Samples and γ at the λ of the dense fixed point, from scratch, for the digits network. The
paper's settings are taken over as its code states them, at its own number of epochs and at
more; they were chosen for other networks. "SGD" is the same descent with the best of six step
sizes, chosen against the truth for every number of epochs anew, with Nesterov momentum 0.9
and linear decay: L keeps the noise of the targets in the minibatches, L' in the centre.
A star: at the most passes the best step size was at the edge of the grid, so that a better one
may lie beyond. A cell gives the passes from which on the error stays below the target (the
method stops once the samples are below 1 %), or a dash and the last error. Errors
of γ and λ are against dense answers with the same noise, so that they are the solver's alone.
"""
EM_HEAD = """λ over the whole EM. Passes are columns over K: a single column of the mode counts 1/K.
"""
TUNED_HEAD = """SGD takes 10 epochs for the samples and 25 for the mode at each of
ten steps, as in the paper, warm-started, the mode from the trained weights; in brackets its
step sizes, times the largest eigenvalue, of which the mode's is the best of four from 0.003 to 0.1
(so at the edge of its grid where it is 0.1).
"""


def section(records: list[dict]) -> str:
    """Return the section, or nothing where nothing was run."""
    if not records:
        return ""
    text = [HEAD]
    for record in records:
        text.append(f"**K = {record['num_samples']}**, λ = {record['precision']:.4g}\n")
        text.append(samples(record["samples"]) + "\n")
    text.append(EM_HEAD)
    if any(name.startswith("SGD") for record in records for name in record["em"]):
        text.append(TUNED_HEAD)
    for record in records:
        text.append(f"**K = {record['num_samples']}**\n\n" + paths(record) + "\n")
        text.append(source(record) + "\n")
    text.append("![errors over passes against the paper's gradient descent](paper_sgd.png)\n")
    return "\n".join(text)


def samples(methods: dict[str, list]) -> str:
    """Return the table of passes to every error of samples and of γ."""
    heads = [f"{what} {100 * target:g} %" for what in ("samples", "γ") for target in TARGETS]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for name, points in methods.items():
        cells = []
        for column in (1, 2):
            errors = [(point[0], point[column]) for point in points]
            cells += [held(errors, target) for target in TARGETS]
        edge = name.startswith("L") and points[-1][3] in (min(RATES), max(RATES))
        star = "*" if edge else ""
        lines.append(f"| {label(name)}{star} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def label(name: str) -> str:
    return f"SGD, {name}" if name.startswith("L") else name


def held(errors: list[tuple[float, float | None]], target: float) -> str:
    """Return the passes from which on all errors are at most the target, or the last error."""
    since = None
    for passes, error in reversed(errors):
        if error is None or error > target:
            break
        since = passes
    if since is not None:
        return f"{since:.0f}"
    passes, error = errors[-1]
    return "diverges" if error is None else f"– ({error:.2g} at {passes:.0f})"


def paths(record: dict) -> str:
    """Return the table of passes to every error of λ, over the whole EM."""
    heads = [f"λ {100 * target:g} %" for target in TARGETS]
    heads += ["in all: sample passes", "single columns", "last λ", "its error"]
    lines = ["| EM by | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for name, path in record["em"].items():
        errors = precision_errors(record, name)
        cells = [held(errors, target) for target in TARGETS]
        columns, single, precision = path[-1]
        found = "–" if precision is None else f"{precision:.4g}"
        off = "–" if precision is None else f"{100 * errors[-1][1]:.1f} %"
        lines.append(
            f"| {name} | "
            + " | ".join(cells)
            + f" | {columns:.0f} | {single:.0f} | {found} | {off} |"
        )
    return "\n".join(lines)


def precision_errors(record: dict, name: str) -> list[tuple[float, float | None]]:
    """Return (passes, relative error of λ), against the fixed point of the same estimator of γ."""
    ours = name.startswith("block")
    dense = record["dense"]["averaged" if ours else "function"]
    return [
        (columns + single / record["num_samples"], precision and abs(precision / dense - 1))
        for columns, single, precision in record["em"][name]
    ]


def draw(record: dict, path: Path) -> None:
    """Draw the errors of samples, of γ and of λ over passes."""
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.2), sharey=True)
    for name, points in record["samples"].items():
        for axis, column in zip(axes, (1, 2)):
            shown = [(p[0], p[column]) for p in points if p[column] is not None]
            if shown:
                axis.plot(*zip(*shown), **style(name), label=label(name))
    for name in record["em"]:
        shown = [
            (passes, error) for passes, error in precision_errors(record, name) if error is not None
        ]
        if shown:
            axes[2].plot(*zip(*shown), **style(name), label=name)
    for axis, title in zip(
        axes, ("samples", "effective dimension γ", "prior precision λ, whole EM")
    ):
        axis.set(xscale="log", yscale="log", xlabel="passes", title=title, ylim=(1e-3, 10))
        ticks = [2, 5, 10, 20, 50, 100, 200]
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.set_xticks([], minor=True)
        for target in TARGETS:
            axis.axhline(target, color="0.8", linewidth=0.8, zorder=0)
    axes[0].set_ylabel("relative error")
    axes[0].legend(fontsize=7)
    axes[2].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def style(name: str) -> dict:
    """Return ours with lines, the paper's dotted, the tuned dashed."""
    kind = "-" if name.startswith("block") else ":" if name.startswith("paper") else "--"
    return {"linestyle": kind, "marker": "o", "markersize": 3}
