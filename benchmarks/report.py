"""Write docs/benchmarks.md and its pictures from benchmarks/results/*.jsonl.

    python benchmarks/report.py

takes seconds. Of repeated runs of one row the last counts. What is said between the tables
is in methods/words.md.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from methods.compare_page import (
    OURS,
    TEMPERATURE,
    Tables,
    aims,
    comparison,
    lengths,
    load,
    provenance,
)
from methods.compare_pictures import bands, confidence, scales
from methods.image_sections import sections
from methods.tasks import TASKS

HERE = Path(__file__).parent


def page(tables: Tables, fresh: Tables, words: dict[str, str], images: list[str]) -> str:
    """Return docs/benchmarks.md; ``fresh`` are seeds that nothing was chosen by."""
    text = [words.get("head", "# Benchmarks\n")]
    for task in TASKS:
        for (name, epochs), groups in tables.items():
            if name == task and "deep ensemble of 5" in groups:
                text += [comparison(task, epochs, groups), words.get(task, "")]
    text += [words.get("scale", "## The scale of the posterior\n"), aims(tables)]
    text += [words.get("found", ""), words.get("conv", ""), aims(tables, "digits-conv")]
    if fresh:
        text += [words.get("fresh", ""), aims(fresh)]
    text.append(lengths(tables, lambda row: row == "MAP" or row.startswith((TEMPERATURE, OURS))))
    text += [words.get("end", ""), *images]
    text.append("## How it was run\n\nIf not said above:\n\n" + provenance(tables))
    if fresh:
        text.append("Other seeds:\n\n" + provenance(fresh))
    return "\n".join(text).rstrip() + "\n"


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
    tables = load(args.results, "compare", "scale")
    pictures = args.docs / "benchmarks"
    pictures.mkdir(parents=True, exist_ok=True)
    for (task, _), groups in tables.items():
        if task == "gap":
            bands(groups, pictures / "gap.png")
        if task == "moons" and any("picture" in r for r in groups.get("deep ensemble of 5", [])):
            confidence(groups, pictures / "moons.png")
    if len([task for task, _ in tables if task == "digits"]) > 1:
        scales(tables, pictures / "scale.png")
    fresh = load(args.results, "scale_fresh")
    words = _words(HERE / "methods" / "words.md")
    images = list(sections(args.results, words))
    (args.docs / "benchmarks.md").write_text(page(tables, fresh, words, images))


if __name__ == "__main__":
    main()
