"""Fits of mixtures from many seeds, next to the best of five starts of scikit-learn's.

    python benchmarks/mixture_starts.py

Twenty data sets of clusters, overlapping and apart, long and round, even and uneven. For each seed
and library: how far the mean log-likelihood ends below the best that any fit of the data found.
A fit fails if that is more than 0.02 nats per example. The variational mixtures have twice as many
components as there are clusters, and the number that they keep is counted.
"""

import argparse
import time
import warnings
from pathlib import Path

import torch
from methods.markdown import append
from methods.provenance import provenance
from sklearn.mixture import BayesianGaussianMixture
from sklearn.mixture import GaussianMixture as Theirs
from threadpoolctl import threadpool_limits

from torch_lla_em.mixtures import GaussianMixture, VariationalGaussianMixture

FAILED = 0.02
"""Nats per example below the best fit."""


def draw(seed: int) -> tuple[torch.Tensor, int]:
    """Return rows from clusters, shape (N, D), and the number of clusters."""
    generator = torch.Generator().manual_seed(seed)
    normal = {"generator": generator, "dtype": torch.float64}

    def one_of(*choices: float) -> float:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    clusters, dim, count = one_of(3, 4, 6, 10), one_of(2, 3, 8), one_of(400, 1000, 4000)
    apart, stretch, evenness = one_of(2, 4, 8), one_of(0, 1), one_of(1, 20)
    centres = apart * torch.randn(clusters, dim, **normal)
    roots = torch.linalg.qr(torch.randn(clusters, dim, dim, **normal)).Q
    roots = roots * (stretch * torch.randn(clusters, 1, dim, **normal)).exp()
    shares = torch.rand(clusters, generator=generator).add(0.1 * evenness)
    owner = torch.multinomial(shares, count, True, generator=generator)
    noise = torch.randn(count, dim, 1, **normal)
    return centres[owner] + (roots[owner] @ noise)[..., 0], clusters


def fits(x: torch.Tensor, clusters: int, seed: int) -> dict[str, tuple[float, float]]:
    """Return the mean log-likelihood and the seconds of each method."""
    ours = GaussianMixture(clusters, max_steps=1000, seed=seed)
    theirs = {"max_iter": 1000, "tol": 1e-4, "random_state": seed}
    methods = {
        "ours": lambda: ours.fit(x).log_prob(x).mean().item(),
        "scikit-learn": lambda: Theirs(clusters, **theirs).fit(x.numpy()).score(x.numpy()),
        "scikit-learn, best of 5": lambda: (
            Theirs(clusters, n_init=5, **theirs).fit(x.numpy()).score(x.numpy())
        ),
    }
    found = {}
    for name, method in methods.items():
        clock = time.process_time()
        found[name] = method(), time.process_time() - clock
    return found


def kept(x: torch.Tensor, clusters: int, seed: int) -> dict[str, int]:
    """Return the number of components with a hundredth of the examples, of twice the clusters."""
    ours = VariationalGaussianMixture(2 * clusters, max_steps=1000, seed=seed).fit(x)
    theirs = BayesianGaussianMixture(
        n_components=2 * clusters, max_iter=1000, tol=1e-4, random_state=seed
    )
    weights = {
        "ours": ours.parameters.expected().weights,
        "scikit-learn": torch.as_tensor(theirs.fit(x.numpy()).weights_),
    }
    return {name: int((w > 0.01).sum()) for name, w in weights.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first data set")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()

    torch.set_num_threads(1)
    results = []
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a fit of scikit-learn's may take more steps
        for number in range(args.first, args.first + args.sets):
            x, clusters = draw(number)
            runs = [fits(x, clusters, seed) for seed in range(args.seeds)]
            counted = kept(x, clusters, 0)
            best = max(value for run in runs for value, _ in run.values())
            for name in runs[0]:
                below = [best - run[name][0] for run in runs]
                results.append(
                    {
                        "set": number,
                        "clusters": clusters,
                        "shape": list(x.shape),
                        "method": name,
                        "fits": len(below),
                        "failed": sum(gap > FAILED for gap in below),
                        "mean_gap": sum(below) / len(below),
                        "worst_gap": max(below),
                        "seconds": sum(run[name][1] for run in runs),
                        "kept": counted.get(name),
                    }
                )
                print(
                    f"{number:3} {x.shape!s:24}{clusters:3} {name:24}"
                    f"{results[-1]['failed']:3} of {len(below)}{results[-1]['worst_gap']:9.3f}"
                    f"{results[-1]['seconds']:8.2f}s  kept {counted.get(name)}",
                    flush=True,
                )
    for name in dict.fromkeys(result["method"] for result in results):
        own = [result for result in results if result["method"] == name]
        total = {key: sum(r[key] for r in own) for key in ("failed", "fits", "seconds")}
        gap = sum(r["mean_gap"] for r in own) / len(own)
        print(
            f"{name:24} failed {total['failed']} of {total['fits']}, mean gap {gap:.4f}, "
            f"{total['seconds']:.1f} s"
        )
    append(args.out / "mixture_starts.jsonl", results, provenance(("torch", "scikit-learn")))


if __name__ == "__main__":
    main()
