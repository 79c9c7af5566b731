"""Forecasts of the time and memory of fits, compared with the fits.

    python benchmarks/forecast.py                     # the networks of cost.py
    python benchmarks/forecast.py --growth            # one perceptron of several sizes
    python benchmarks/forecast.py --overfitted        # perceptrons that have learnt their labels
    python benchmarks/forecast.py --problems mlp cnn
    python benchmarks/forecast.py --memory            # memory, of each fit in a process of its own
    python benchmarks/forecast.py --memory --growth
    python benchmarks/forecast.py --budget 3          # fits that may take three seconds each

One thread, processor seconds for the forecast and for the fit, since other programs may use the
machine. "before" is the range that ``la.plan`` returns, from a trial on the first examples. "revised"
is the share of the forecasts after the steps of a fit whose range held the time that was left. The
numbers of passes in ``inference/forecast.py`` were chosen on networks of cost.py and --growth, and on none of
--overfitted. Lines go to results/forecast.jsonl, with the trial from which the range is computed: a test of
the package computes the ranges of all lines again.

``--memory`` (on Linux) compares the memory that ``la.plan`` expects with the largest resident set of a
process beyond what it held before the fit, after a first fit that loads parts of torch. "ratio" is that of
the expected memory and this peak. Lines go to results/forecast_memory.jsonl.

``--budget`` fits each network with so many processor seconds. "longest" is the longest of its steps, "left" what
it had left at its end (negative if it took longer), and "in time" whether it took at most a tenth longer, or a
single step. Lines go to results/budget.jsonl.

Expected: nine of ten ranges hold. All peaks are below the upper bound, and ratios are between .5 and 2.
"""

import argparse
import ctypes
import gc
import itertools
import json
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import cost
import torch
from memory import held_bytes
from methods import markdown
from methods.provenance import provenance

from torch_lla_em import LinearisedLaplace, session


def compared(name: str, problem: cost.Problem, num_samples: int) -> dict:
    """Return the forecasts of a fit, and the seconds that it took."""
    cost.train(problem)
    likelihood = "regression" if problem.regression else "classification"
    options = {"num_samples": num_samples, **problem.options}
    la = LinearisedLaplace(problem.network, likelihood, **options)
    revised = []
    forecasts, before_it, of_plan = session.time_left, session.time_of, []

    def kept(*arguments: object) -> object:
        of_plan.append(arguments)
        return before_it(*arguments)

    def noted(*arguments: object) -> object:
        found = forecasts(*arguments)
        revised.append((time.process_time(), found))
        return found

    with patch("torch_lla_em.session.time_of", kept):
        began = time.process_time()
        before = la.plan(problem.loader()).time
        of_trial = time.process_time() - began
    trial, course, rows, room = of_plan[0]
    with patch("torch_lla_em.session.time_left", noted):
        began = time.process_time()
        la.fit(problem.loader(), progress_bar=False)
        ended = time.process_time()
    held = [found.low <= ended - then <= found.high for then, found in revised]
    return {
        "problem": name,
        "rows": len(problem.x),
        "weights": la.w_lin.numel(),
        "K": num_samples,
        "low": before.low,
        "high": before.high,
        "seconds": ended - began,
        "holds": before.low <= ended - began <= before.high,
        "revised": sum(held) / len(held) if held else None,  # small fits make no forecast
        "trial_seconds": of_trial,
        "trial": trial._asdict(),
        "course": [*course[:3], course.options.tolerance, rows, room],
    }


def measured(
    name: str, problem: cost.Problem, num_samples: int, budget: float | None = None
) -> dict:
    """Return the memory that is expected of a fit, and the memory that it took, in MB."""
    cost.train(problem)
    likelihood = "regression" if problem.regression else "classification"
    small = cost.regression(100) if problem.regression else cost.mlp(100, 10)
    first = LinearisedLaplace(small.network, likelihood, num_samples=2)
    first.fit(small.loader(), progress_bar=False)
    options = {"num_samples": num_samples, **problem.options}
    la = LinearisedLaplace(problem.network, likelihood, **options)
    plan = la.plan(problem.loader()).memory
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
    before = held_bytes()["VmRSS"]
    began = time.process_time()
    la.fit(problem.loader(), progress_bar=False, budget=budget)
    seconds = time.process_time() - began
    peak = held_bytes()["VmHWM"] - before
    return {
        "problem": name,
        "rows": len(problem.x),
        "weights": la.w_lin.numel(),
        "K": num_samples,
        "expected": plan.expected / 1e6,
        "at most": plan.most / 1e6,
        "peak": peak / 1e6,
        "seconds": seconds,
        "error": la.accuracy.error,
        "ratio": plan.expected / peak,
        "holds": 0.5 <= plan.expected / peak <= 2 and peak <= plan.most,
    }


def limited(name: str, problem: cost.Problem, num_samples: int, budget: float) -> dict:
    """Return how long a fit with a budget of processor seconds took."""
    cost.train(problem)
    likelihood = "regression" if problem.regression else "classification"
    options = {"num_samples": num_samples, **problem.options}
    la = LinearisedLaplace(problem.network, likelihood, **options)
    began = time.process_time()
    la.fit(problem.loader(), progress_bar=False, budget=budget)
    seconds = time.process_time() - began
    steps = [0.0, *(step["seconds"] for step in la.history)]
    longest = max(after - before for before, after in itertools.pairwise(steps))
    cut = any("budget" in text for text in la.messages)
    return {
        "problem": name,
        "budget": budget,
        "seconds": seconds,
        "steps": len(la.history),
        "longest": longest,
        "left": budget - seconds,
        "cut short": cut,
        "error": la.accuracy.error,
        "in time": seconds <= 1.1 * budget or len(la.history) == 1,
    }


def in_own_process(name: str, args: argparse.Namespace) -> dict:
    """Return what ``measured`` returns in a fresh process, which gives freed memory back to the system."""
    command = [sys.executable, __file__, "--memory", "--alone", name] + ["--growth"] * args.growth
    command += ["--budget", str(args.budget)] if args.budget else []
    own = {"MALLOC_MMAP_THRESHOLD_": str(2**16)}
    run = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | own, check=True
    )
    return json.loads(run.stdout.splitlines()[-1])


OVERFITTED = (1500, 150, 30), (2500, 100, 12), (1000, 300, 50)
"""Examples, units of each layer, and classes."""


def overfitted(rows: int, width: int, classes: int) -> cost.Problem:
    """Return a perceptron that is trained for 150 epochs."""
    return cost.mlp(rows, width, classes)._replace(epochs=150)


Made = Callable[[], tuple[cost.Problem, int]]


def problems(args: argparse.Namespace) -> dict[str, Made]:
    """Return what makes each network, with its number of samples, by name."""

    def made(make: Callable[[], cost.Problem], num_samples: int | None) -> tuple[cost.Problem, int]:
        problem = cost.made(make)
        return problem, num_samples or problem.num_samples or 16

    if args.overfitted:
        return {
            f"overfitted, {rows} x {width} x {classes}": partial(
                made, partial(overfitted, rows, width, classes), 32
            )
            for rows, width, classes in OVERFITTED
        }
    if not args.growth:
        return {n: partial(made, cost.PROBLEMS[n], None) for n in args.problems or cost.PROBLEMS}
    return {
        f"mlp, {grown} = {next(iter(sizes.values()), K)}": partial(
            made, partial(cost.mlp, **sizes), K
        )
        for grown, cases in cost.GROWTH.items()
        for sizes, K in cases
    }


def append(out: Path, name: str, line: dict) -> None:
    """Print a result, and append it to a file of the results."""
    print(line, flush=True)
    out.mkdir(parents=True, exist_ok=True)
    with open(out / f"{name}.jsonl", "a") as lines:
        lines.write(json.dumps(line | provenance(("torch",))) + "\n")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", nargs="+", choices=cost.PROBLEMS)
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--overfitted", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--budget", type=float, help="processor seconds of each fit")
    parser.add_argument("--alone", help="measure the memory of one fit in this process")
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("torch_lla_em").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    every, found = problems(args), []
    if args.alone:
        print(json.dumps(measured(args.alone, *every[args.alone](), args.budget)))
        return
    if args.memory:
        for name in every:
            found.append(in_own_process(name, args))
            append(args.out, "forecast_memory", found[-1])
        columns = ["rows", "weights", "K", "expected", "at most", "peak", "ratio", "holds"]
        print("\n" + markdown.table(found, ["problem"], columns))
        print(f"{sum(line['holds'] for line in found)} of {len(found)} forecasts hold.")
        return
    clocks = (
        patch("torch_lla_em.problem.trial.perf_counter", time.process_time),
        patch.object(session.time, "monotonic", time.process_time),
    )
    with clocks[0], clocks[1]:
        if args.budget:
            small = cost.mlp(100, 10)  # a first fit loads parts of torch
            LinearisedLaplace(small.network, "classification").fit(
                small.loader(), progress_bar=False
            )
        for name, make in every.items():
            if args.budget:
                found.append(limited(name, *make(), args.budget))
                append(args.out, "budget", found[-1])
                continue
            found.append(compared(name, *make()))
            append(args.out, "forecast", found[-1])
    if args.budget:
        columns = ["seconds", "steps", "longest", "left", "cut short", "error", "in time"]
        print("\n" + markdown.table(found, ["problem"], columns))
        return
    columns = [
        "rows",
        "weights",
        "K",
        "low",
        "high",
        "seconds",
        "holds",
        "revised",
        "trial_seconds",
    ]
    print("\n" + markdown.table(found, ["problem"], columns))
    held = sum(line["holds"] for line in found)
    print(f"{held} of {len(found)} ranges hold the time of the fit.")


if __name__ == "__main__":
    main()
