"""Write docs/benchmarks.md and its pictures from benchmarks/results/*.jsonl.

    python benchmarks/report.py

takes seconds. Of repeated runs of one row the last counts. What is said between the tables
is in methods/words.md.
"""

import argparse
import json
from pathlib import Path
from statistics import mean, stdev

import matplotlib
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from methods.image_sections import sections
from methods.tasks import TASKS, make_task

HERE = Path(__file__).parent
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
}
HIGHER = ("accuracy",)
SCORES = ("accuracy", "rmse", "nll", "ece", "brier", "joint_dyadic", "joint_ten")
COSTS = ("fit_seconds", "predict_seconds", "megabytes", "passes")
TEMPERATURE = "temperature scaling"
PLAIN = "ours: scalar, plain prior, K=32"
LINEAR = "ours: scalar, plain prior, H at linear mode, K=32"
DAMPED = "ours: scalar, g-prior damped by 0.1, H at linear mode, K=32"
Groups = dict[str, list[dict]]


def load(folder: Path, *names: str) -> dict[tuple[str, int], Groups]:
    """Return the records of every (task, epochs), by row, one of each seed."""
    latest: dict[tuple, dict] = {}
    for path in (folder / f"{name}.jsonl" for name in names or ("compare", "scale")):
        for line in path.read_text().splitlines() if path.exists() else ():
            record = json.loads(line)
            latest[record["task"], record["epochs"], record["row"], record["seed"]] = record
    tables: dict[tuple[str, int], Groups] = {}
    for (task, epochs, row, _), record in latest.items():
        tables.setdefault((task, epochs), {}).setdefault(row, []).append(record)
    return dict(sorted(tables.items(), key=lambda item: (list(TASKS).index(item[0][0]), item[0][1])))


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
            cells.append(f"**{text}**" if winner else text)
        if failed:
            row += f" (fails for {len(failed)} of {len(group)} seeds: {failed[0].replace('|', '/')})"
        lines.append(f"| {row} | {len(group) - len(failed)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def title(key: str) -> str:
    return TITLES.get(key) or "AUROC " + key.removeprefix("auroc_")


def is_main(row: str) -> bool:
    """Whether a row is in the first table of a task: around the network's own output."""
    return not any(part in row for part in ("mean J w_lin", "two numbers"))


def ordered(groups: Groups) -> Groups:
    """Put peers before ours, as they were run."""
    return dict(sorted(groups.items(), key=lambda item: item[0].startswith("ours")))


def comparison(task: str, epochs: int, groups: Groups) -> str:
    """Return the section of one task."""
    groups = ordered(groups)
    first = next(iter(groups.values()))[0]
    found = {key for group in groups.values() for record in group for key in record}
    # single seeds of variants that were given up
    several = max(len(group) for group in groups.values()) > 1
    groups = {
        row: group
        for row, group in groups.items()
        if not several or len(group) > 1 or not row.startswith("ours")
    }
    keys = [key for key in SCORES if key in found]
    keys += sorted(key for key in found if key.startswith("auroc_"))
    main = {row: group for row, group in groups.items() if is_main(row)}
    text = [f"## {task}\n"]
    text.append((TASKS[task].__doc__ if task != "digits-conv" else CONV) or "")
    loss = cell([record["train_loss"] for record in groups["MAP"]])
    text.append(f"P = {first['weights']}, {epochs} epochs, training loss {loss}.\n")
    text.append(table(main, keys) + "\n")
    text.append("<details><summary>Costs</summary>\n")
    text.append(table(main, list(COSTS), bold=False) + "\n\n</details>\n")
    rest = {row: group for row, group in groups.items() if row not in main}
    if rest:
        text.append("<details><summary>Around the linear mode, and with two numbers</summary>\n")
        text.append(table(rest, keys) + "\n\n</details>\n")
    return "\n".join(text)


CONV = "The same digits, by a small convolutional network."


def aims(epochs: int, groups: Groups) -> str:
    """Return what every variant reaches of the four aims on digits."""
    def ratio(row: str, key: str) -> float:
        pairs = paired(groups[row], groups[TEMPERATURE], key)
        return mean(a for a, _ in pairs) / mean(b for _, b in pairs)

    def gain(row: str, key: str) -> float:
        return mean(a - b for a, b in paired(groups[row], groups["MAP"], key))

    lines = [
        "| | τ | NLL ÷ temperature's | joint ÷ temperature's | AUROC rotated − MAP | unseen − MAP | aims |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in groups:
        if not row.startswith(("ours", "dense", "library")) or len(values(groups[row], "nll")) < 2:
            continue
        nll, joint = ratio(row, "nll"), ratio(row, "joint_dyadic")
        rotated, unseen = gain(row, "auroc_rotated"), gain(row, "auroc_unseen")
        met = (nll <= 0.9) + (joint <= 0.5) + (rotated >= 0.2) + (unseen >= 0)
        scale = cell(values(groups[row], "scale"), 2)
        lines.append(
            f"| {row} | {scale} | {mark(nll, nll <= 0.9)} | {mark(joint, joint <= 0.5)} | "
            f"{mark(rotated, rotated >= 0.2)} | {mark(unseen, unseen >= 0)} | {met} of 4 |"
        )
    loss = cell([record["train_loss"] for record in groups["MAP"]], 4)
    lines[2:] = sorted(lines[2:], key=lambda line: line.rsplit("|", 2)[1], reverse=True)
    return f"**{epochs} epochs** (training loss {loss})\n\n" + "\n".join(lines) + "\n"


def summary(tables: dict[tuple[str, int], Groups]) -> str:
    """Return how many aims the main recipes meet on digits, by training length."""
    recipes = {
        "as it is: g-prior": "ours: scalar, g-prior, K=32",
        "as it is, calibrated": "ours: scalar, g-prior, K=32, calibrated",
        "plain prior": PLAIN,
        "plain prior, calibrated": f"{PLAIN}, calibrated",
        "plain prior, H at linear mode": LINEAR,
        "plain prior, H at linear mode, joint calibration": f"{LINEAR}, joint calibration",
        "damped g-prior, H at linear mode": DAMPED,
        "damped g-prior, H at linear mode, joint calibration": f"{DAMPED}, joint calibration",
        "damped g-prior, H and mean at linear mode, two numbers with a prior": (
            f"{DAMPED}, mean J w_lin, two numbers with a prior"
        ),
    }
    at = [key for key in tables if key[0] == "digits"]
    lines = ["| | " + " | ".join(f"{epochs} epochs" for _, epochs in at) + " |"]
    lines.append("|---" * (len(at) + 1) + "|")
    for name, row in recipes.items():
        found = []
        for key in at:
            line = [line for line in aims(key[1], tables[key]).splitlines() if line.startswith(f"| {row} |")]
            found.append(" / ".join(part.strip() for part in line[0].split("|")[3:7]) if line else "")
        if any(found):
            lines.append(f"| {name} | " + " | ".join(found) + " |")
    return "\n".join(lines) + "\n"


def paired(group: list[dict], reference: list[dict], key: str) -> list[tuple[float, float]]:
    """Return the values of two rows at the seeds that both have."""
    others = {record["seed"]: record for record in reference}
    return [
        (record[key], others[record["seed"]][key])
        for record in group
        if key in record and key in others.get(record["seed"], {})
    ]


def mark(value: float, holds: bool) -> str:
    return f"**{value:.3f}**" if holds else f"{value:.3f}"


def lengths(tables: dict[tuple[str, int], Groups]) -> str:
    """Return the study of the scale, over tasks and training lengths."""
    chosen = [TEMPERATURE]
    for name in (PLAIN, LINEAR, f"{LINEAR}, mean J w_lin"):
        chosen += [name, *(f"{name}, {how}" for how in ("calibrated", "joint calibration", "two numbers", "two numbers with a prior"))]
    chosen += ["ours: scalar, g-prior, K=32", "ours: scalar, g-prior, K=32, calibrated"]
    chosen += [DAMPED, *(f"{DAMPED}, {how}" for how in ("calibrated", "joint calibration", "two numbers", "two numbers with a prior"))]
    text = []
    for key in ("nll", "joint_dyadic", "ece"):
        columns = [at for at, groups in tables.items() if "MAP" in groups and values(groups["MAP"], "ece")]
        text.append(f"{title(key)}:\n")
        text.append("| | " + " | ".join(f"{task} {epochs}" for task, epochs in columns) + " |")
        text.append("|---" * (len(columns) + 1) + "|")
        for row in ["MAP", *chosen]:
            cells = [cell(values(tables[at].get(row, []), key)) for at in columns]
            text.append(f"| {row} | " + " | ".join(cells) + " |")
        text.append("")
    return "\n".join(text)


def shipped(tables: dict[tuple[str, int], Groups]) -> str:
    """Return the study of the library as it ships, over tasks and training lengths."""
    text = []
    rows = list(next(iter(tables.values())))
    for key in ("nll", "joint_dyadic", "auroc_rotated", "auroc_unseen", "auroc_far"):
        columns = [at for at, groups in tables.items() if values(groups["MAP"], key)]
        text.append(f"{title(key)}:\n")
        text.append("| | " + " | ".join(f"{task} {epochs}" for task, epochs in columns) + " |")
        text.append("|---" * (len(columns) + 1) + "|")
        for row in rows:
            cells = [cell(values(tables[at].get(row, []), key)) for at in columns]
            text.append(f"| {row} | " + " | ".join(cells) + " |")
        text.append("")
    for (task, epochs), groups in tables.items():
        if task == "digits":
            text.append(aims(epochs, groups))
    return "\n".join(text)


def bands(groups: Groups, path: Path) -> None:
    """Draw the gap regression: two standard deviations of y."""
    task = make_task("gap", 0)
    shown = {
        "dense posterior": "dense posterior, λ of ours",
        "ours, K = 32": PLAIN,
        "ours, g-prior, K = 32": "ours: scalar, g-prior, K=32",
        "laplace-torch, last layer": "laplace-torch: last layer, full",
        "deep ensemble of 5": "deep ensemble of 5",
        "mean-field variational": "mean-field variational",
    }
    exact = _picture(groups, shown["dense posterior"])
    x = task.grid[:, 0]
    figure, axes = plt.subplots(2, 3, figsize=(12, 6), sharex=True, sharey=True)
    for axis, (label, row) in zip(axes.flat, shown.items()):
        axis.set_title(label)
        axis.plot(task.train.x, task.train.y, ".", color="0.4", markersize=3)
        drawn = _picture(groups, row)
        if drawn is not None:
            m, sd = (torch.tensor(drawn[key]) for key in ("mean", "sd"))
            sd = (sd**2 + drawn["sigma"] ** 2).sqrt()
            axis.plot(x, m, color="C0")
            axis.fill_between(x, m - 2 * sd, m + 2 * sd, color="C0", alpha=0.25, linewidth=0)
        if exact is not None:
            m, sd = (torch.tensor(exact[key]) for key in ("mean", "sd"))
            sd = (sd**2 + exact["sigma"] ** 2).sqrt()
            axis.plot(x, m - 2 * sd, "k--", x, m + 2 * sd, "k--", linewidth=0.8)
        axis.set_ylim(-5, 5)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def confidence(groups: Groups, path: Path) -> None:
    """Draw the confidence of two-dimensional classifiers, far from the data too."""
    task = make_task("moons", 0)
    shown = {
        "MAP": "MAP",
        "deep ensemble of 5": "deep ensemble of 5",
        "laplace-torch, last layer": "laplace-torch: last layer, full",
        "dense posterior": "dense posterior, λ of ours",
        "ours, K = 32": PLAIN,
        "ours, H at linear mode": LINEAR,
    }
    side = int(len(task.grid) ** 0.5)
    corners = [*task.grid[:, 0].aminmax(), *task.grid[:, 1].aminmax()]
    figure, axes = plt.subplots(2, 3, figsize=(11, 7), sharex=True, sharey=True)
    for axis, (label, row) in zip(axes.flat, shown.items()):
        axis.set_title(label)
        drawn = _picture(groups, row)
        if drawn is not None:
            image = torch.tensor(drawn["confidence"]).view(side, side).T
            filled = axis.imshow(image, origin="lower", extent=corners, vmin=0.5, vmax=1)
            figure.colorbar(filled, ax=axis, shrink=0.8)
        axis.scatter(*task.train.x.T, c=task.train.y, s=3, cmap="coolwarm")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def scales(tables: dict[tuple[str, int], Groups], path: Path) -> None:
    """Draw NLL and joint NLL on digits over training lengths."""
    at = [key for key in tables if key[0] == "digits"]
    shown = ["MAP", TEMPERATURE, PLAIN, f"{PLAIN}, calibrated", LINEAR, f"{DAMPED}, joint calibration"]
    shown.append(f"{DAMPED}, mean J w_lin, two numbers with a prior")
    figure, axes = plt.subplots(1, 3, figsize=(13, 5), layout="constrained")
    for axis, key in zip(axes, ("nll", "joint_dyadic", "auroc_rotated")):
        for row in shown:
            points = [(k[1], values(tables[k].get(row, []), key)) for k in at]
            points = [(epochs, v) for epochs, v in points if len(v) > 1]
            errors = [stdev(v) / len(v) ** 0.5 for _, v in points]
            axis.errorbar([e for e, _ in points], [mean(v) for _, v in points], errors, label=row)
        axis.set_xscale("log")
        axis.set_yscale("log" if key != "auroc_rotated" else "linear")
        axis.set_xlabel("epochs")
        axis.set_title(title(key))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", fontsize=7, ncols=2)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def provenance(tables: dict[tuple[str, int], Groups]) -> str:
    """Return machine, versions, commit and command of all records, each once."""
    records = [r for groups in tables.values() for group in groups.values() for r in group]
    text = []
    for key in ("machine", "versions", "commit"):
        text.append(f"- {key}: " + "; ".join(sorted({str(record[key]) for record in records})))
    commands = sorted({record["command"] for record in records})
    text.append("\n<details><summary>Commands</summary>\n\n```\n" + "\n".join(commands) + "\n```\n\n</details>")
    return "\n".join(text)


def page(
    tables: dict[tuple[str, int], Groups],
    studies: dict[str, dict[tuple[str, int], Groups]],
    words: dict[str, str],
    images: list[str],
) -> str:
    """Return docs/benchmarks.md.

    Of the studies, "scale_fresh" is of seeds that nothing was chosen by, and "defaults" of the
    library as it ships.
    """
    text = [words.get("head", "# Benchmarks\n")]
    for task in TASKS:
        for (name, epochs), groups in tables.items():
            compared = any("deep ensemble" in row for row in groups)
            if name == task and compared:
                text.append(comparison(task, epochs, groups))
                text.append(words.get(task, ""))
    if studies["defaults"]:
        text.append(words.get("defaults", "## The library as it ships\n"))
        text.append(shipped(studies["defaults"]))
        text.append("Run: " + provenance(studies["defaults"]) + "\n")
    text.append(words.get("scale", "## The scale of the posterior\n"))
    text.append(summary(tables))
    text.append(words.get("found", ""))
    if studies["scale_fresh"]:
        text.append(words.get("fresh", ""))
        text.append(summary(studies["scale_fresh"]))
    text.append(lengths(tables))
    for (task, epochs), groups in tables.items():
        if task.startswith("digits") and TEMPERATURE in groups:
            text.append(f"<details><summary>{task}, {epochs} epochs</summary>\n")
            text.append(aims(epochs, groups) + "\n</details>\n")
    text.append(words.get("end", ""))
    text += images
    text.append("## How it was run\n\nIf not said above:\n\n" + provenance(tables))
    return "\n".join(text).rstrip() + "\n"


def _picture(groups: Groups, row: str) -> dict | None:
    drawn = [record["picture"] for record in groups.get(row, []) if "picture" in record]
    return drawn[0] if drawn else None


def _words(path: Path) -> dict[str, str]:
    """Return what is said between the tables: sections of a file, each after its ``%% name``."""
    if not path.exists():
        return {}
    parts = path.read_text().split("%% ")[1:]
    return {part.split("\n", 1)[0].strip(): part.split("\n", 1)[1] for part in parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--docs", type=Path, default=HERE.parent / "docs")
    args = parser.parse_args()
    tables = load(args.results)
    pictures = args.docs / "benchmarks"
    pictures.mkdir(parents=True, exist_ok=True)
    for (task, epochs), groups in tables.items():
        if task == "gap":
            bands(groups, pictures / "gap.png")
        if task == "moons" and any("picture" in r for r in groups.get("deep ensemble of 5", [])):
            confidence(groups, pictures / "moons.png")
    if len([task for task, _ in tables if task == "digits"]) > 1:
        scales(tables, pictures / "scale.png")
    studies = {name: load(args.results, name) for name in ("scale_fresh", "defaults")}
    words = _words(HERE / "methods" / "words.md")
    (args.docs / "benchmarks.md").write_text(page(tables, studies, words, list(sections(args.results, words))))


if __name__ == "__main__":
    main()
