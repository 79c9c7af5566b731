"""One network, one data set, all methods: what a user of error bars can choose from.

    python benchmarks/compare.py digits --seeds 0 1 2 3 4

takes four minutes a seed on one core, of which laplace-torch's full posterior takes one or more,
and prints mean ± standard error over seeds. Expect on digits: NLL 0.066 of MAP, 0.074 of
temperature scaling, 0.065 of ours, calibrated (0.19 as fitted, as of the dense posterior); joint
NLL 0.068 of MAP, 0.025 of ours; AUROC of rotated digits 0.42 of MAP, 0.93 of ours.
Data sets: digits, digits-conv, cancer, moons, diabetes, gap; all come with scikit-learn.

    python benchmarks/compare.py digits --epochs 8 20 60 300 --methods map temperature ours

trains for several lengths, from early-stopped to interpolating. Lines go to results/compare.jsonl.
"""

import argparse
import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from methods import baselines, markdown, ours, posteriors
from methods.baselines import Setting
from methods.measure import Meter
from methods.metrics import auroc
from methods.provenance import provenance
from methods.tasks import TASKS, Loader, Task, make_task

SHOWN = "accuracy", "rmse", "nll", "ece", "brier", "joint_dyadic", "joint_ten"
Method = Callable[[Setting], dict[str, baselines.Predictor]]


def methods(task: Task) -> dict[str, Method]:
    """Return what is compared, in the order of the table."""
    table: dict[str, Method] = {
        "map": baselines.map_estimate,
        "temperature": baselines.temperature,
        "dropout": baselines.dropout,
        "variational": baselines.variational,
        "ensemble": baselines.ensemble,
    }
    for subset in ("last_layer", "all"):
        for structure in ("full", "diag", "kron"):
            peer = partial(posteriors.laplace_torch, subset, structure)
            table[f"laplace-torch: {subset}, {structure}"] = peer
    for name, g_prior in (("dense: g-prior", True), ("dense: plain", False)):
        table[name] = partial(posteriors.dense, g_prior)
    table["familiarity"] = posteriors.familiarity
    return table | {variant.name: variant for variant in ours.variants(task.regression)}


def measured(method: Method, setting: Setting) -> Iterator[dict]:
    """Fit a method and yield a record of each of its rows."""
    passes = setting.loader.passes
    with Meter() as fit:
        predictors = method(setting)
    costs = {
        "fit_seconds": fit.seconds,
        "megabytes": fit.megabytes,
        "passes": setting.loader.passes - passes,
    }
    x, y = setting.task.test
    for row, predict in predictors.items():
        with Meter() as clock:
            prediction = predict(x)
        record = prediction.scores(y)
        for name, shifted in setting.task.shifted.items():
            score = predict(shifted).unfamiliarity
            record[f"auroc_{name}"] = auroc(prediction.unfamiliarity, score)
        record |= costs | {"predict_seconds": 1000 * clock.seconds / len(x)}
        yield {"row": row} | record | getattr(predict, "details", {})


def run(task: Task, args: argparse.Namespace, epochs: int, seed: int) -> Iterator[dict]:
    """Train one network, and yield the records of all methods on it."""
    setting = Setting(task, torch.nn.Identity(), epochs, seed, Loader(task.train), args.quick)
    clock = time.perf_counter()
    network = baselines.fresh(setting, offset=0)
    seconds = time.perf_counter() - clock
    with torch.no_grad():
        loss = task.loss(network(task.train.x), task.train.y).item()
    common = {
        "task": task.name,
        "seed": seed,
        "epochs": epochs,
        "train_seconds": seconds,
        "train_loss": loss,
        "weights": sum(p.numel() for p in network.parameters()),
    }
    setting = Setting(task, network, epochs, seed, Loader(task.train), args.quick)
    for name, method in methods(task).items():
        if args.methods and not any(name.startswith(chosen) for chosen in args.methods):
            continue
        state = {key: value.clone() for key, value in network.state_dict().items()}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            try:
                for record in measured(method, setting):
                    yield common | {"method": name} | record | _said(caught)
            except Exception as error:  # a peer that fails is reported as failing
                message = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                yield common | {"method": name, "row": name, "error": message}
        for key, value in network.state_dict().items():
            value.copy_(state[key])
        network.eval()


def _said(caught: list[warnings.WarningMessage]) -> dict[str, list[str]]:
    messages = sorted({str(warning.message).splitlines()[0] for warning in caught})
    return {"warnings": messages} if messages else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="+", choices=TASKS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--epochs", type=int, nargs="+", help="training lengths")
    parser.add_argument("--methods", nargs="+", help="beginnings of names; default: all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="few steps, to try the script")
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    logging.getLogger("torch_lla_em").setLevel(logging.ERROR)
    origin, records = provenance(), []
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.tasks:
        for seed in args.seeds:
            task = make_task(name, seed)
            for epochs in args.epochs or [task.epochs]:
                for record in run(task, args, epochs, seed):
                    records.append(record)
                    with open(args.out / "compare.jsonl", "a") as lines:
                        lines.write(json.dumps(record | origin) + "\n")
    scores = [key for key in SHOWN if any(key in record for record in records)]
    scores += sorted({key for record in records for key in record if key.startswith("auroc_")})
    print(markdown.table(records, ("task", "epochs", "row"), [*scores, "fit_seconds", "error"]))


if __name__ == "__main__":
    main()
