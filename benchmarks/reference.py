"""Reference fits that show the effect of a change of the library: run it before and after the
change.

    python benchmarks/reference.py                     # about ten minutes; compares with results/reference.jsonl
    python benchmarks/reference.py --groups tables --only vowel pima
    python benchmarks/reference.py --out results/reference.jsonl --store    # freeze the present code
    python benchmarks/reference.py --report --out new.jsonl   # compare lines that were measured earlier

One thread, processor seconds. Each line is a fit with default options: the ten tuning tables (networks with early
stopping, and after 100 epochs; two seeds), networks and last layers of cost.py, two regressions in their natural
units, a segmentation, and two students. "NLL of q" is that of the linear model alone (``mean="linear"``), "NLL"
that of the default prediction. All NLLs are of test data. A change is accepted if the geometric mean of the NLL is
within .5 %, no table is worse by 3 %, no λ collapses, and no fit takes more than 1.2 times as long.

Expected: ratios of 1.000, except for seconds, which differ by up to a quarter between two runs of
    the same code.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean

import torch
from cost import PROBLEMS, Problem, made
from cost import train as train_problem
from methods import markdown, tasks
from methods.learning import train
from methods.provenance import begin, provenance, script_parser
from segmentation import batches, nll, scenes, trained
from torch import Tensor, nn

from torch_lla_em import Classification, LinearisedLaplace

STORED = Path(__file__).parent / "results" / "reference.jsonl"
NETWORKS = "mlp", "regression", "cnn", "lenet", "bert, last_layer"
HEADS = "segment, last_layer", "last layer, 2000 x 128 x 10", "last layer, 5000 x 512 x 10"
NATURAL = "diabetes", "friedman2"
STUDENTS = "vehicle", "vowel"
ROWS, EPOCHS = 800, 100
RATIOS = "lambda", "sigma", "gamma", "nll_q", "nll", "columns", "seconds"
HELD_OUT = 0.25
Wanted = Callable[[str], bool]
"""Whether lines of a name are to be measured."""


def timed(la: LinearisedLaplace, data: tuple) -> dict:
    """Fit, and return the figures of the fit."""
    began = time.process_time()
    la.fit(*data, progress_bar=False)
    seconds, last = time.process_time() - began, la.history[-1]
    return {
        "lambda": la.prior_precision.mean().item(),
        "sigma": None if la.sigma_noise is None else float(torch.as_tensor(la.sigma_noise).mean()),
        "gamma": la.effective_dim.sum().item(),
        "bound": last["log_evidence"],
        "columns": last["columns"],
        "error": max(last["mode_residual"], last["sample_residual"]),
        "seconds": seconds,
    }


def scored(la: LinearisedLaplace, x: Tensor, y: Tensor) -> dict:
    """Return the NLL of the linear model alone, and of the default prediction."""
    found = {}
    for name, mean in (("nll_q", {"mean": "linear"}), ("nll", {})):
        parts = zip(x.split(500), y.split(500), strict=True)
        sums = [la.predict(a, **mean).log_prob(b).sum().item() for a, b in parts]
        found[name] = -sum(sums) / y.shape[0]
    return found


def tables(wanted: Wanted) -> Iterator[dict]:
    """Yield a line of every tuning table, stage and seed."""
    for name in filter(wanted, tasks.TUNING):
        for seed in (0, 1):
            task = tasks.task(name, seed, ROWS)
            for stage, network in zip(("early", "on"), train(task, seed, EPOCHS), strict=True):
                la = LinearisedLaplace(network, "classification", seed=seed)
                found = timed(la, tuple(task.train))
                yield {"name": f"{name} {stage} {seed}"} | found | scored(la, *task.test)


def split(problem: Problem) -> tuple[Problem, tuple[Tensor, Tensor]]:
    """Return a problem without its last quarter, and that quarter."""
    rows = int(len(problem.x) * (1 - HELD_OUT))
    rest = problem.x[rows:], problem.y[rows:]
    return problem._replace(x=problem.x[:rows], y=problem.y[:rows]), rest


def cost(wanted: Wanted) -> Iterator[dict]:
    """Yield a line of networks and last layers of cost.py."""
    for name in filter(wanted, (*NETWORKS, *HEADS)):
        problem, test = split(made(PROBLEMS[name]))
        train_problem(problem)
        likelihood = "regression" if problem.regression else "classification"
        K = problem.num_samples or 16
        la = LinearisedLaplace(problem.network, likelihood, num_samples=K, **problem.options)
        yield {"name": name} | timed(la, (problem.loader(),)) | scored(la, *test)


def natural(wanted: Wanted) -> Iterator[dict]:
    """Yield a line of regressions whose targets have a mean and a size of their own."""
    for name in filter(wanted, NATURAL):
        task, (_, y, _) = tasks.task(name, 0, ROWS), tasks._read(name)
        size, mean = float(y.std()), float(y.mean())
        network = train(task, 0, 60)[0]
        with torch.no_grad():
            network[-1].weight.mul_(size)
            network[-1].bias.mul_(size).add_(mean)
        x, test = task.train.x, task.test
        la = LinearisedLaplace(network, "regression")
        found = timed(la, (x, size * task.train.y + mean))
        yield {"name": f"{name}, natural units"} | found | scored(la, test.x, size * test.y + mean)


def segmentation(wanted: Wanted) -> Iterator[dict]:
    """Yield a line of the last layer of a small U-Net."""
    if not wanted("segmentation"):
        return
    x, y = scenes(20, 64, 0)
    test = scenes(5, 64, 1)
    network, _ = trained(x, y, 6)
    options = {"class_dim": 1, "num_samples": 16, "parameters": "last_layer"}
    la = LinearisedLaplace(network, Classification(), **options)
    found, parts = timed(la, (batches(x, y),)), batches(*test)
    for name, mean in (("nll_q", {"mean": "linear"}), ("nll", {})):
        found[name] = nll([la.predict(a, **mean).log_probs for a, _ in parts], test[1])
    yield {"name": "segmentation, last layer"} | found


def students(wanted: Wanted) -> Iterator[dict]:
    """Yield a line of students; γ and λ are those of their posteriors."""
    for name in filter(wanted, STUDENTS):
        task = tasks.task(name, 0, ROWS)
        la = LinearisedLaplace(train(task, 0, EPOCHS)[0], "classification")
        la.fit(*task.train, progress_bar=False)
        began = time.process_time()
        student = la.distil(task.train.x, progress_bar=False)
        seconds = time.process_time() - began
        nll = nn.functional.nll_loss(student(task.test.x).log(), task.test.y).item()
        found = {"lambda": la.prior_precision.item(), "gamma": la.effective_dim.item()}
        yield {"name": f"student of {name}", "nll": nll, "seconds": seconds} | found


GROUPS = {f.__name__: f for f in (tables, cost, natural, segmentation, students)}


def ratio(key: str, before: Mapping, after: Mapping) -> float | None:
    """Return after / before; of NLLs of densities, which may be negative, the exponential of the difference."""
    a, b = before.get(key), after.get(key)
    if not a or not b:
        return None
    if key.startswith("nll") and before.get("sigma"):
        return math.exp(b - a)
    return b / a if a * b > 0 else None


def compared(before: list[dict], after: list[dict]) -> str:
    """Return a table of ratios after / before, and their geometric means and extremes."""
    found = {line["name"]: line for line in after}
    pairs = [(line, found[line["name"]]) for line in before if line["name"] in found]
    width = max((len(line["name"]) for line, _ in pairs), default=0)
    lines = [" " * width + "".join(f"{key:>9}" for key in RATIOS)]
    every: dict[str, list[tuple[float, str]]] = {key: [] for key in RATIOS}
    for old, new in pairs:
        cells = ""
        for key in RATIOS:
            value = ratio(key, old, new)
            cells += f"{'' if value is None else f'{value:.3f}':>9}"
            if value is not None:
                every[key].append((value, old["name"]))
        lines.append(f"{old['name']:{width}}{cells}")
    for key, values in every.items():
        if values:
            mean = math.exp(fmean(math.log(value) for value, _ in values))
            (least, where), (most, there) = min(values), max(values)
            lines.append(
                f"{key:8} mean {mean:.4f}, least {least:.3f} ({where}), most {most:.3f} ({there})"
            )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = script_parser(__doc__, "reference")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--only", nargs="+", help="parts of names")
    parser.add_argument("--before", type=Path, default=STORED, help="lines to compare with")
    parser.add_argument("--store", action="store_true", help="do not compare")
    args = begin(parser, arguments)
    if args.report:
        print(compared(markdown.read(args.before), markdown.read(args.out)))
        return
    lines, origin = [], provenance(("torch",))
    wanted = lambda name: not args.only or any(part in name for part in args.only)  # noqa: E731
    for group in args.groups:
        for line in GROUPS[group](wanted):
            lines.append(line)
            markdown.append(args.out, [line], origin)
    if not args.store:
        print(compared(markdown.read(args.before), lines))


if __name__ == "__main__":
    main()
