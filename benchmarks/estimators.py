"""Estimators as people train them: their own uncertainty, and that of a posterior of their network.

    python benchmarks/estimators.py                             # all tables: an hour on a busy core
    python benchmarks/estimators.py --tables saheart --libraries skorch --seeds 0
    python benchmarks/estimators.py --report                    # the summary of results/estimators.jsonl

RealMLP and TabM need ``pip install "pytabkit[models]"``; without it they are left out. There are five real tables,
three of classes and two of numbers, with at most 800 examples to train on; pytabkit takes a fifth of these for early stopping. Up to
300 other examples fit a temperature (or σ, of numbers) for the estimator, and are used by ``calibrate``. The
hyperparameters are the defaults of the libraries except: at most 100 epochs (RealMLP: 64), early stopping by the
cross-entropy and no label smoothing, and TabM with k = 8 heads and two layers of 64 units. Skorch trains a network of
50 and 50 units. "one posterior each" is the mixture of k posteriors, one of each head.

Expected: see the table in docs/other_libraries.md.
"""

import argparse
import importlib.util
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from math import exp, log, pi
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from methods import markdown, tasks
from methods.provenance import provenance
from methods.resume import resume
from methods.tasks import Task
from torch import Tensor, nn
from torch.nn import functional as F

from torch_lla_em import LaplaceEnsemble, LinearisedLaplace
from torch_lla_em.compat import posterior

TABLES = "australian", "saheart", "satimage", "diabetes", "diamonds"
LIBRARIES = "scikit-learn", "skorch", "RealMLP", "TabM"
OWN, SCALED = "own", "own, held-out temperature or σ"
FITTED, CALIBRATED, EACH = "posterior", "posterior, calibrated", "one posterior each, calibrated"


class Head(nn.Module):
    """One head of a network whose outputs have the shape (B, k, C)."""

    def __init__(self, heads: nn.Module, number: int):
        super().__init__()
        self.heads, self.number = heads, number

    def forward(self, x: Tensor) -> Tensor:
        return self.heads(x)[:, self.number]


def trained(library: str, task: Task, seed: int, epochs: int) -> Any:
    """Return a trained estimator of a library."""
    x, y = task.train.x.numpy(), task.train.y.numpy()
    kind = "Classifier" if task.classes else "Regressor"
    y = y if task.classes else y[:, 0]
    if library == "scikit-learn":
        from sklearn import neural_network

        return getattr(neural_network, f"MLP{kind}")(max_iter=epochs, random_state=seed).fit(x, y)
    if library == "skorch":
        import skorch

        torch.manual_seed(seed)
        options: dict[str, Any] = {"optimizer": torch.optim.Adam, "lr": 3e-3, "verbose": 0}
        options |= {"criterion": nn.CrossEntropyLoss} if task.classes else {}
        network = task.network(0.0)
        net = getattr(skorch, f"NeuralNet{kind}")(network, max_epochs=epochs, **options)
        return net.fit(x, y if task.classes else y[:, None])
    import pytabkit

    options = {"device": "cpu", "random_state": seed, "n_threads": 1, "verbosity": 0}
    options |= {"val_metric_name": "cross_entropy"} if task.classes else {}
    if library == "TabM":
        options |= {"tabm_k": 8, "d_block": 64, "n_blocks": 2, "n_epochs": epochs}
    else:
        options |= {"n_epochs": min(epochs, 64)} | ({"use_ls": False} if task.classes else {})
    name = {"TabM": "TabM_D", "RealMLP": "RealMLP_TD"}[library]
    return getattr(pytabkit, f"{name}_{kind}")(**options).fit(x, y)


def of_classes(log_probs: Tensor, y: Tensor) -> dict[str, float]:
    """Return NLL and Brier score of labels."""
    brier = (log_probs.exp() - F.one_hot(y, log_probs.shape[1])).square().sum(1).mean()
    return {"nll": F.nll_loss(log_probs, y).item(), "score": brier.item()}


def of_numbers(centre: Tensor, variance: Tensor, y: Tensor) -> dict[str, float]:
    """Return NLL and CRPS of normal distributions."""
    nll = 0.5 * (variance.log() + (y - centre).square() / variance + log(2 * pi))
    spread, z = variance.sqrt(), (y - centre) / variance.sqrt()
    density, below = (-0.5 * z.square()).exp() / (2 * pi) ** 0.5, torch.special.ndtr(z)
    crps = spread * (z * (2 * below - 1) + 2 * density - pi**-0.5)
    return {"nll": nll.mean().item(), "score": crps.mean().item()}


def own(outputs: Callable[[Tensor], Tensor], task: Task) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the scores of the network's own outputs, and of those with a temperature or σ of held-out examples."""
    found, kept = outputs(task.test.x).double(), outputs(task.held_out.x).double()
    if task.classes:
        grid = torch.logspace(-1, 1.5, 200).double()
        losses = [F.cross_entropy(kept / t, task.held_out.y).item() for t in grid]
        best = grid[torch.tensor(losses).argmin()]
        yield OWN, of_classes(found.log_softmax(1), task.test.y)
        yield SCALED, of_classes((found / best).log_softmax(1), task.test.y)
        return
    for name, (rows, at) in {
        OWN: (task.train.y, outputs(task.train.x)),
        SCALED: (task.held_out.y, kept),
    }.items():
        variance = (rows - at).double().square().mean().expand_as(found)
        yield name, of_numbers(found, variance, task.test.y)


def scores(la: Any, x: Tensor, y: Tensor) -> dict[str, float]:
    """Return the scores of a posterior or an ensemble."""
    prediction = la.predict(x)
    if prediction.likelihood.gives_probabilities:
        log_probs = prediction.log_probs
        if log_probs.shape[1] == 1:  # one logit for two classes
            log_probs = torch.cat([torch.log1p(-prediction.probs), log_probs], 1)
        return of_classes(log_probs.double(), y)
    variance = prediction.predictive_variance
    return of_numbers(prediction.expectation.double(), variance.double(), y)


def measured(table: str, library: str, seed: int, epochs: int) -> Iterator[dict]:
    """Yield the records of an estimator and of its posteriors on one table."""
    task = tasks.task(table, seed, 800)
    task = task._replace(held_out=tasks.Rows(task.held_out.x[:300], task.held_out.y[:300]))
    clock = time.process_time()
    estimator = trained(library, task, seed, epochs)
    train_seconds = time.process_time() - clock
    common = {"kind": "classes" if task.classes else "numbers", "examples": len(task.train.x)}
    common |= {"train_seconds": train_seconds}
    converted = posterior(estimator, seed=seed)
    la, binary = converted.laplace, converted.laplace.likelihood.elementwise and task.classes == 2

    def outputs(x: Tensor) -> Tensor:
        with torch.no_grad():
            found = la.model(converted.inputs(x.numpy()))
        return torch.cat([torch.zeros_like(found), found], 1) if binary else found

    for method, found in own(outputs, task):
        yield common | {"method": method, **found}
    x, held, test = (converted.inputs(rows.x.numpy()) for rows in task[:3])
    flat = [rows.y.float()[:, None] if binary else rows.y for rows in task[:3]]
    flat = [y.to(x.dtype) if y.is_floating_point() else y for y in flat]
    clock = time.process_time()
    la.fit(x, flat[0], progress_bar=False)
    common |= {"seconds": time.process_time() - clock, "parameters": la.w_lin.numel()}
    yield common | {"method": FITTED, **scores(la, test, task.test.y)}
    la.calibrate(held, flat[1])
    yield common | {"method": CALIBRATED, **scores(la, test, task.test.y)}
    if library == "TabM":
        clock, heads, members = time.process_time(), la.model.module, []
        for number in range(heads(x[:1]).shape[1]):
            of_head = LinearisedLaplace(Head(heads, number), la.likelihood, seed=seed)
            members.append(of_head.fit(x, flat[0], progress_bar=False))
        ensemble = LaplaceEnsemble(members)
        common |= {"seconds": time.process_time() - clock}
        ensemble.calibrate(held, flat[1])
        yield common | {"method": EACH, **scores(ensemble, test, task.test.y)}


def summary(records: list[dict]) -> str:
    """Return a table of ratios to the estimator's own uncertainty, over tables and seeds."""
    of: dict[tuple, dict] = {}
    for r in records:
        of[(r["library"], r["table"], r["seed"], r["method"])] = r
    lines = []
    for library, method in dict.fromkeys((key[0], key[3]) for key in of):
        group = [(r, of[(*key[:3], OWN)]) for key, r in of.items() if key[::3] == (library, method)]
        classes = [(r, base) for r, base in group if r["kind"] == "classes"]
        numbers = [(r, base) for r, base in group if r["kind"] == "numbers"]
        line = {"library": library, "method": method}
        if classes:
            for name, key in (("NLL, classes", "nll"), ("Brier", "score")):
                line[name] = exp(_mean(classes, lambda r, base, key=key: log(r[key] / base[key])))
        if numbers:
            line["NLL, numbers"] = _mean(numbers, lambda r, base: r["nll"] - base["nll"])
            line["CRPS"] = exp(_mean(numbers, lambda r, base: log(r["score"] / base["score"])))
        if "seconds" in group[0][0]:
            line["price"] = exp(_mean(group, lambda r, _: log(r["seconds"] / r["train_seconds"])))
        lines.append(line)
    return markdown.table(lines, {"library": "library", "method": "method"}, COLUMNS)


def _mean(pairs: list[tuple[dict, dict]], of: Callable[..., float]) -> float:
    """Return the mean over tables of means over seeds."""
    tables: dict[str, list[float]] = {}
    for r, base in pairs:
        tables.setdefault(r["table"], []).append(of(r, base))
    return mean(map(mean, tables.values()))


COLUMNS = {
    "NLL, classes": "NLL of classes, ratio",
    "Brier": "Brier score, ratio",
    "NLL, numbers": "NLL of numbers, difference",
    "CRPS": "CRPS, ratio",
    "price": "fit / training",
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", nargs="+", default=TABLES)
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=LIBRARIES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=100, help="of training, at most")
    parser.add_argument("--report", action="store_true", help="only print the summary")
    parser.add_argument("--out", type=Path, default=Path("results/estimators.jsonl"))
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("torch_lla_em", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    packages = {"scikit-learn": "sklearn", "skorch": "skorch"}
    missing = [
        n for n in args.libraries if not importlib.util.find_spec(packages.get(n, "pytabkit"))
    ]
    print(*(f"{name} is left out: it is not installed" for name in missing), sep="\n")
    cases = [
        {"table": table, "library": library, "seed": seed}
        for seed in args.seeds
        for table in args.tables
        for library in args.libraries
        if library not in missing
    ]
    used = ["torch", "scikit-learn", "skorch"]
    used += ["pytabkit"] * any(case["library"] not in packages for case in cases)
    origin = provenance(tuple(used))
    cases = [] if args.report else cases
    found = resume(args.out, cases, partial(measured, epochs=args.epochs), origin)
    print("\n" + summary(found))


if __name__ == "__main__":
    main()
