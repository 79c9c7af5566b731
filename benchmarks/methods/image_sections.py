"""The sections of docs/benchmarks.md on images: the ladder, and tomography."""

import json
from collections.abc import Iterator
from pathlib import Path

TITLES = {"mnist": "MNIST", "cifar100": "CIFAR-100", "imagenet": "ImageNet"}
SCORES = {
    "accuracy": "acc.",
    "nll": "NLL",
    "ece": "ECE",
    "brier": "Brier",
    "joint_dyadic": "joint, dyadic",
    "joint_ten": "joint, ten",
}
COSTS = {
    "fit_seconds": "fit, s",
    "megabytes": "peak, MB",
    "columns": "columns",
    "em_steps": "EM steps",
    "precision": "λ",
    "gamma": "γ",
    "gamma_error": "± of γ",
    "certificate": "certificate",
    "tau": "τ held-out",
    "temperature": "temperature",
}
SHIFTED = {key: SCORES[key] for key in ("accuracy", "nll", "ece", "joint_dyadic")} | {
    "auroc": "AUROC"
}
IMAGE = {
    "psnr": "PSNR, dB",
    "nll": "NLL",
    "nll_scaled": "NLL, scaled",
    "patch_nll": "NLL, patches",
    "pearson": "Pearson",
    "spearman": "Spearman",
    "coverage": "95 % covers",
    "mean_sd": "mean sd",
}
LOWER = "nll", "ece", "brier", "joint_dyadic", "joint_ten", "nll_scaled", "patch_nll"
UNRANKED = "coverage", "mean_sd"
Records = list[dict]


def sections(folder: Path, words: dict[str, str]) -> Iterator[str]:
    """Yield the sections of all tasks that have results."""
    for task in TITLES:
        for records in _groups(_read(folder / f"{task}.jsonl")):
            yield ladder(records) + "\n" + words.get(task, "")
    for records in _tomographies(_read(folder / "tomography.jsonl")):
        yield tomography(records) + "\n" + words.get("tomography", "")


def ladder(records: Records) -> str:
    """Return the section of one network on one data set."""
    first = records[0]
    clean = [record for record in records if not record["level"]]
    text = [
        f"## {TITLES[first['task']]}{', synthetic' if first['synthetic'] else ''}: {first['network']}\n"
    ]
    if first["synthetic"]:
        text.append(
            f"**These are not {TITLES[first['task']]}'s images**, but made-up ones of the same shape and "
            "number of classes, and few of them: the figures compare methods with each other, and say "
            "nothing of the data set.\n"
        )
    kept = "last layer" if first["parameters"] == "last_layer" else "all weights but normalisation"
    text.append(
        f"P = {first['weights']}, trained on {first['train_size']} images"
        + (
            f" for {first['epochs']} epochs ({first['train_seconds']:.0f} s)"
            if first["epochs"]
            else ""
        )
        + f", tested on {first['test_size']}; random: {kept}; K = {first['num_samples']}.\n"
    )
    text.append(_table(clean, SCORES) + "\n")
    text.append(_folded("Costs", _table(_fits(clean), COSTS, bold=False)))
    for name in dict.fromkeys(record["shift"] for record in records if record["level"]):
        chosen = [record for record in records if record["shift"] == name]
        tables = [f"{title}:\n\n{_over_levels(chosen, key)}\n" for key, title in SHIFTED.items()]
        text.append(_folded(name, "\n".join(tables)))
    text.append(_folded("How it was run", _provenance(records)))
    return "\n".join(text)


def tomography(records: Records) -> str:
    """Return the section on the reconstructed image."""
    first = records[0]
    text = ["## Tomography: one datum, many outputs\n"]
    text.append(
        f"A phantom of {first['size']} × {first['size']} = {first['outputs']} pixels from "
        f"{first['measurements']} noisy integrals along rays (σ = {first['sigma']:.4f}), by a U-Net of "
        f"{first['weights']} weights trained on them alone ({first['train_seconds']:.0f} s); "
        f"K = {first['num_samples']}.\n"
    )
    text.append(
        "![Phantom, reconstruction, error and predicted deviations](images/tomography.png)\n"
    )
    text.append(_table(records, IMAGE) + "\n")
    costs = COSTS | {"learnt_sigma": "σ learnt"}
    text.append(_folded("Costs", _table(_fits(records), costs, bold=False)))
    text.append(_folded("How it was run", _provenance(records)))
    return "\n".join(text)


def _read(path: Path) -> Records:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _groups(records: Records) -> list[Records]:
    """Return records of one run together; of repeated ones the last counts."""
    keys = "synthetic", "network", "parameters", "train_size", "num_samples"
    groups: dict[tuple, dict[tuple, dict]] = {}
    for record in records:
        group = groups.setdefault(tuple(record[key] for key in keys), {})
        group[record["row"], record["shift"], record["level"], record["seed"]] = record
    return [list(group.values()) for group in groups.values()]


def _tomographies(records: Records) -> list[Records]:
    groups: dict[tuple, dict[tuple, dict]] = {}
    for record in records:
        group = groups.setdefault((record["size"], record["weights"], record["num_samples"]), {})
        group[record["row"], record["seed"]] = record
    return [list(group.values()) for group in groups.values()]


def _fits(records: Records) -> Records:
    """Return one record of each fit: several rows may come from it."""
    found: dict[str, dict] = {}
    for record in records:
        if any(key in record for key in COSTS):
            found.setdefault(record["row"].partition(",")[0], record)
    return [record | {"row": name} for name, record in found.items()]


def _table(records: Records, columns: dict[str, str], bold: bool = True) -> str:
    """Return a table of the columns that anything was measured of; the best value is bold."""
    found = {
        key: title for key, title in columns.items() if any(key in record for record in records)
    }
    lines = ["| | " + " | ".join(found.values()) + " |", "|---" * (len(found) + 1) + "|"]
    values = {
        key: [record[key] for record in records if record.get(key) is not None] for key in found
    }
    best = {key: min(values[key]) if key in LOWER else max(values[key]) for key in found if bold}
    for record in records:
        cells = []
        for key in found:
            text = _shown(record.get(key))
            ranked = bold and key not in UNRANKED and record.get(key) == best[key]
            cells.append(f"**{text}**" if ranked else text)
        lines.append(f"| {record['row']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _over_levels(records: Records, key: str) -> str:
    levels = sorted({record["level"] for record in records})
    lines = ["| | " + " | ".join(f"{level:g}" for level in levels) + " |"]
    lines.append("|---" * (len(levels) + 1) + "|")
    at = {(record["row"], record["level"]): record[key] for record in records}
    best = {
        level: (min if key in LOWER else max)(
            value for (_, other), value in at.items() if other == level
        )
        for level in levels
    }
    for row in dict.fromkeys(record["row"] for record in records):
        cells = [(at[row, level], best[level]) for level in levels]
        shown = [f"**{value:.3f}**" if value == top else f"{value:.3f}" for value, top in cells]
        lines.append(f"| {row} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _shown(value: float | list | None) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return f"{min(value):.3g} to {max(value):.3g}"
    if isinstance(value, int):
        return str(value)
    return f"{value:.3f}" if value == 0 or 0.01 <= abs(value) < 1000 else f"{value:.3g}"


def _provenance(records: Records) -> str:
    lines = [
        f"- {key}: " + "; ".join(dict.fromkeys(record[key] for record in records))
        for key in ("machine", "versions", "commit")
    ]
    commands = dict.fromkeys(record["command"] for record in records)
    return "\n".join([*lines, "", "```", *commands, "```"])


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>\n"
