"""Gaussian mixtures next to scikit-learn's: the same start, steps, threads and data.

    python benchmarks/mixtures.py --rows 1000000 --threads 1

A million rows of 16 columns, 8 components, 10 EM steps in double precision: expect a
third to a sixth of scikit-learn's time, and mean log-likelihoods that agree to 1e-12.
It takes a minute or two; ``--rows 20000`` takes seconds. The table of
``docs/mixtures.md`` comes from here.
"""

import argparse
import time
import warnings
from pathlib import Path

import torch
from methods.markdown import append
from methods.provenance import provenance
from sklearn.mixture import GaussianMixture as Theirs
from threadpoolctl import threadpool_limits

from torch_lla_em.mixtures import GaussianMixture

NAMES = {"full": "full", "diagonal": "diag"}


def draw(args: argparse.Namespace) -> torch.Tensor:
    """Return rows from overlapping clusters, shape (N, D)."""
    generator = torch.Generator().manual_seed(args.seed)
    centres = 0.7 * torch.randn(args.components, args.columns, generator=generator)
    owner = torch.randint(args.components, (args.rows,), generator=generator)
    noise = torch.randn(args.rows, args.columns, generator=generator)
    return (centres[owner] + noise).to(getattr(torch, args.dtype))


def compare(x: torch.Tensor, structure: str, args: argparse.Namespace) -> dict:
    """Time both from the parameters after our first step."""
    options = {"covariance": structure, "max_steps": 1 + args.steps, "tolerance": 0.0}
    ours = GaussianMixture(args.components, **options)
    states = ours.steps(x)
    next(states)
    weights, means, covariances = ours.parameters
    clock = time.perf_counter()
    steps = len(list(states))
    seconds = time.perf_counter() - clock

    theirs = Theirs(
        args.components,
        covariance_type=NAMES[structure],
        max_iter=steps,
        tol=0.0,
        reg_covar=0.0,
        weights_init=weights.numpy(),
        means_init=means.numpy(),
        precisions_init=(covariances.inverse() if structure == "full" else 1 / covariances).numpy(),
    )
    clock = time.perf_counter()
    theirs.fit(x.numpy())
    peer_seconds = time.perf_counter() - clock
    difference = ours.history[-1].objective / len(x) - theirs.lower_bound_
    return {
        "covariance": structure,
        "steps": steps,
        "seconds": round(seconds, 3),
        "sklearn_seconds": round(peer_seconds, 3),
        "times_faster": round(peer_seconds / seconds, 2),
        "log_likelihood_difference": abs(difference),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--columns", type=int, default=16)
    parser.add_argument("--components", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["float64", "float32"], default="float64")
    parser.add_argument("--covariance", choices=NAMES, nargs="+", default=list(NAMES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    x = draw(args)
    common = {
        name: getattr(args, name)
        for name in ("rows", "columns", "components", "dtype", "threads", "seed")
    } | provenance(("torch", "scikit-learn"))
    print(f"{'covariance':12}{'ours':>10}{'sklearn':>10}{'ratio':>8}{'difference':>14}")
    with threadpool_limits(args.threads), warnings.catch_warnings():
        # Both stop after --steps, settled or not.
        warnings.simplefilter("ignore")
        compare(x[:50_000], "full", args)
        for structure in args.covariance:
            result = compare(x, structure, args)
            print(
                f"{structure:12}{result['seconds']:9.2f}s{result['sklearn_seconds']:9.2f}s"
                f"{result['times_faster']:8.1f}{result['log_likelihood_difference']:14.1e}",
                flush=True,
            )
            append(args.out / "mixtures.jsonl", [result], common)


if __name__ == "__main__":
    main()
