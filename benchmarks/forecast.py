"""The memory that ``la.plan`` expects, beside the peak of the fit.

    python benchmarks/forecast.py                     # the networks of cost.py
    python benchmarks/forecast.py --growth            # one perceptron of several sizes
    python benchmarks/forecast.py --problems mlp cnn

Each fit runs in a process of its own (on Linux). The peak is the largest resident set beyond what the process
held before the fit, after a first fit that loads parts of torch. "ratio" is the expected memory divided by the
peak. Lines go to results/forecast_memory.jsonl.

Expected: all peaks are below the upper bound, and ratios are between .6 and 1.7.
"""

import argparse
import ctypes
import gc
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

import cost
import torch
from methods import markdown
from methods.provenance import provenance

from torch_lla_em import LinearisedLaplace


def held_bytes() -> dict[str, int]:
    """Return the resident set of this process and its peak, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    held = (line.split() for line in lines if line.startswith("Vm"))
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in held}


def measured(name: str, problem: cost.Problem, num_samples: int) -> dict:
    """Return the memory that is expected of a fit, and the memory that it took, in MB."""
    cost.train(problem)
    small = cost.regression(100) if problem.regression else cost.mlp(100, 10)
    cost.fitted(small, 2)
    likelihood = "regression" if problem.regression else "classification"
    options = {"num_samples": num_samples, **problem.options}
    la = LinearisedLaplace(problem.network, likelihood, **options)
    plan = la.plan(problem.loader()).memory
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
    before, began = held_bytes()["VmRSS"], time.process_time()
    la.fit(problem.loader(), progress_bar=False)
    seconds, peak = time.process_time() - began, held_bytes()["VmHWM"] - before
    return {
        "problem": name,
        "rows": len(problem.x),
        "weights": la.w_lin.numel(),
        "K": num_samples,
        "expected": plan.expected / 1e6,
        "at most": plan.most / 1e6,
        "peak": peak / 1e6,
        "seconds": seconds,
        "ratio": plan.expected / peak,
        "holds": 0.5 <= plan.expected / peak <= 2 and peak <= plan.most,
    }


def in_own_process(name: str, args: argparse.Namespace) -> dict:
    """Return what ``measured`` returns in a fresh process, which gives freed memory back to the system."""
    command = [sys.executable, __file__, "--alone", name] + ["--growth"] * args.growth
    own = {"MALLOC_MMAP_THRESHOLD_": str(2**16)}
    run = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | own, check=True
    )
    return json.loads(run.stdout.splitlines()[-1])


def problems(args: argparse.Namespace) -> dict[str, tuple[Callable[[], cost.Problem], int | None]]:
    """Return what makes each network, with its number of samples, by name."""
    if not args.growth:
        return {name: (cost.PROBLEMS[name], None) for name in args.problems or cost.PROBLEMS}
    return {
        f"mlp, {grown} = {next(iter(sizes.values()), K)}": (partial(cost.mlp, **sizes), K)
        for grown, cases in cost.GROWTH.items()
        for sizes, K in cases
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", nargs="+", choices=cost.PROBLEMS)
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--memory", action="store_true", help="the default: memory is compared")
    parser.add_argument("--alone", help="measure one fit in this process")
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("torch_lla_em").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    every, found = problems(args), []
    if args.alone:
        make, num_samples = every[args.alone]
        problem = cost.made(make)
        num_samples = num_samples or problem.num_samples or 16
        print(json.dumps(measured(args.alone, problem, num_samples)))
        return
    for name in every:
        found.append(in_own_process(name, args))
        print(found[-1], flush=True)
        markdown.append(args.out / "forecast_memory.jsonl", [found[-1]], provenance(("torch",)))
    columns = ["rows", "weights", "K", "expected", "at most", "peak", "ratio", "holds"]
    print("\n" + markdown.table(found, ["problem"], columns))
    print(f"{sum(line['holds'] for line in found)} of {len(found)} forecasts hold.")


if __name__ == "__main__":
    main()
