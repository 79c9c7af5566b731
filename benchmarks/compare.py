"""One network, one data set, all methods: what a user of error bars can choose from.

    python benchmarks/compare.py digits --seeds 0 1 2 3 4

takes four minutes a seed on one core, of which laplace-torch's full posterior takes one or more,
and prints mean ± standard error over seeds. Expect on digits: NLL 0.066 of MAP, 0.074 of
temperature scaling, 0.065 of ours, calibrated (0.19 as fitted, as of the dense posterior); joint
NLL 0.068 of MAP, 0.025 of ours; AUROC of rotated digits 0.42 of MAP, 0.93 of ours.
Data sets: digits, digits-conv, cancer, moons, diabetes, gap; all come with scikit-learn.

    python benchmarks/compare.py digits --study scale

trains for several lengths, from early-stopped to interpolating, with MAP, temperature scaling
and the variants of our posterior alone.
"""

import argparse
import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import mean, stdev

import torch
from methods import baselines, ours, posteriors
from methods.baselines import Setting
from methods.measure import Meter
from methods.metrics import auroc
from methods.provenance import provenance
from methods.tasks import TASKS, Loader, Task, make_task

HERE = Path(__file__).parent
LENGTHS = {
    "digits": (8, 20, 300),
    "digits-conv": (60,),
    "cancer": (8, 20, 300),
    "moons": (20, 1000),
}
SHOWN = ("accuracy", "rmse", "nll", "ece", "brier", "joint_dyadic", "joint_ten")
COSTS = ("fit_seconds", "predict_seconds", "megabytes", "passes")
Method = Callable[[Setting], dict[str, baselines.Predictor]]


def methods(task: Task, study: str) -> dict[str, Method]:
    """Return what is compared, in the order of the table."""
    table: dict[str, Method] = {"map": baselines.map_estimate, "temperature": baselines.temperature}
    if study == "compare":
        table |= {
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
        plain = not any(part in row for part in ("calibrat", "mean J"))
        if setting.task.grid is not None and setting.seed == 0 and plain:
            record |= picture(predict, setting.task)
        yield {"row": row} | record | getattr(predict, "details", {})


def picture(predict: baselines.Predictor, task: Task) -> dict:
    """Return what is drawn over the task's grid."""
    prediction = predict(task.grid)
    if not hasattr(prediction, "scores") or isinstance(prediction, posteriors.Familiarity):
        return {}
    if task.regression:
        sd = prediction.covariance.diagonal().sqrt()
        values = {"mean": prediction.mean, "sd": sd, "sigma": torch.tensor(prediction.sigma)}
    else:
        values = {"confidence": prediction.log_probs.exp().amax(-1)}
    rounded = {key: (1e4 * value).round().div(1e4).tolist() for key, value in values.items()}
    return {"picture": rounded}


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
        "study": args.study,
        "seed": seed,
        "epochs": epochs,
        "train_seconds": seconds,
        "train_loss": loss,
        "weights": sum(p.numel() for p in network.parameters()),
    }
    setting = Setting(task, network, epochs, seed, Loader(task.train), args.quick)
    for name, method in methods(task, args.study).items():
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


def show(records: list[dict]) -> None:
    """Print mean ± standard error over seeds."""
    groups: dict[tuple, list[dict]] = {}
    for record in records:
        groups.setdefault((record["task"], record["epochs"], record["row"]), []).append(record)
    heading = None
    for (task, epochs, row), group in groups.items():
        keys = [key for key in group[0] if key in SHOWN + COSTS or key.startswith("auroc_")]
        if (task, epochs) != heading:
            heading = (task, epochs)
            seeds = len({record["seed"] for record in group})
            print(f"\n{task}, {epochs} epochs, {seeds} seed(s)")
        failed = [record["error"] for record in group if "error" in record]
        cells = failed[:1] or [f"{key} {summary([g[key] for g in group])}" for key in keys]
        print(f"{row:58}", "  ".join(cells), flush=True)


def summary(values: list[float | None]) -> str:
    """Return mean ± standard error."""
    if None in values:
        return "–"
    spread = stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{mean(values):.3f}±{spread:.3f}"


def _said(caught: list[warnings.WarningMessage]) -> dict[str, list[str]]:
    messages = sorted({str(warning.message).splitlines()[0] for warning in caught})
    return {"warnings": messages} if messages else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="+", choices=TASKS)
    parser.add_argument("--study", choices=["compare", "scale"], default="compare")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--epochs", type=int, nargs="+", help="training lengths")
    parser.add_argument("--methods", nargs="+", help="beginnings of names; default: all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="few steps, to try the script")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    logging.getLogger("torch_lla_em").setLevel(logging.ERROR)
    origin, records = provenance(), []
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.tasks:
        for seed in args.seeds:
            task = make_task(name, seed)
            lengths = args.epochs or (LENGTHS.get(name) if args.study != "compare" else None)
            for epochs in lengths or [task.epochs]:
                for record in run(task, args, epochs, seed):
                    records.append(record)
                    with open(args.out / f"{args.study}.jsonl", "a") as lines:
                        lines.write(json.dumps(record | origin) + "\n")
    show(records)


if __name__ == "__main__":
    main()
