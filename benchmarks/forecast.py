"""Forecasts of the time of fits, compared with the fits.

    python benchmarks/forecast.py                     # the networks of cost.py
    python benchmarks/forecast.py --growth            # one perceptron of several sizes
    python benchmarks/forecast.py --problems mlp cnn

One thread, processor seconds for the forecast and for the fit, since other programs may use the
machine. "before" is the range that ``la.plan`` returns, from a trial on the first examples. "revised"
is the share of the forecasts after the steps of a fit whose range held the time that was left. The
numbers of passes in ``inference/forecast.py`` were chosen on networks of cost.py, and on none of --growth.
Lines go to results/forecast.jsonl.

Expected: nine of ten ranges hold.
"""

import argparse
import json
import logging
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import cost
import torch
from methods import markdown
from methods.provenance import provenance

from torch_lla_em import LinearisedLaplace, session


def compared(name: str, problem: cost.Problem, num_samples: int) -> dict:
    """Return the forecasts of a fit, and the seconds that it took."""
    cost.train(problem)
    likelihood = "regression" if problem.regression else "classification"
    options = {"num_samples": num_samples, **problem.options}
    la = LinearisedLaplace(problem.network, likelihood, **options)
    began, revised = time.process_time(), []
    before = la.plan(problem.loader()).time
    of_trial = time.process_time() - began
    forecasts = session.time_left

    def noted(*arguments: object) -> object:
        found = forecasts(*arguments)
        revised.append((time.process_time(), found))
        return found

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
        "revised": sum(held) / len(held),
        "trial": of_trial,
    }


def problems(args: argparse.Namespace) -> Iterator[tuple[str, cost.Problem, int]]:
    """Yield the networks with their names and numbers of samples."""
    if args.growth:
        for grown, cases in cost.GROWTH.items():
            for sizes, num_samples in cases:
                size = next(iter(sizes.values()), num_samples)
                yield (
                    f"mlp, {grown} = {size}",
                    cost.made(lambda s=sizes: cost.mlp(**s)),
                    num_samples,
                )
        return
    for name in args.problems or cost.PROBLEMS:
        problem = cost.made(cost.PROBLEMS[name])
        yield name, problem, problem.num_samples or 16


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", nargs="+", choices=cost.PROBLEMS)
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("torch_lla_em").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    args.out.mkdir(parents=True, exist_ok=True)
    found = []
    clocks = (
        patch("torch_lla_em.problem.trial.perf_counter", time.process_time),
        patch.object(session.time, "monotonic", time.process_time),
    )
    with clocks[0], clocks[1]:
        for name, problem, num_samples in problems(args):
            found.append(compared(name, problem, num_samples))
            print(found[-1], flush=True)
            with open(args.out / "forecast.jsonl", "a") as lines:
                lines.write(json.dumps(found[-1] | provenance(("torch",))) + "\n")
    columns = ["rows", "weights", "K", "low", "high", "seconds", "holds", "revised", "trial"]
    print("\n" + markdown.table(found, ["problem"], columns))
    held = sum(line["holds"] for line in found)
    print(f"{held} of {len(found)} ranges hold the time of the fit.")


if __name__ == "__main__":
    main()
