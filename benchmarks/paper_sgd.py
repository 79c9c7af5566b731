"""The paper's recipe against ours on one trained network: errors over passes through the data.

    python benchmarks/paper_sgd.py                       # digits, K = 8, as on the paper's MNIST
    python benchmarks/paper_sgd.py --num-samples 32 --parts ours em

takes about half an hour on one core. At the λ that dense algebra finds, the error of the
samples and of γ over passes: of block Krylov and block CG; of the paper's stochastic gradient
descent with its own settings; and of the same with the best of a grid of step sizes, for every
number of epochs anew and two batch sizes. The paper's gradients are clipped by their norm, its mode starts at
zero and its loss is summed over the batch. Then λ over the passes of the whole EM against the
dense fixed point. Expect block Krylov at 1 % in about 12 passes and gradient descent, at its
best, at 3 % in about 80. Lines go to results/paper_sgd.jsonl.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from math import inf, isfinite, nan
from pathlib import Path

import torch
from methods.counted import Counted, problem_of
from methods.fits import dense_fixed_point
from methods.markdown import append
from methods.networks import PROBLEMS, trained
from methods.provenance import provenance
from methods.race import TARGETS, Race
from methods.recipe import (
    CIFAR_MODE,
    CIFAR_PRECISION,
    CIFAR_SAMPLES,
    MNIST_SAMPLES,
    RATES,
    Recipe,
    Task,
    batches_of,
    expectation_maximisation,
    solve_samples,
    with_rate,
)

from torch_lla_em.inference import Statistics
from torch_lla_em.inference.iterative_e_step import starting_precision
from torch_lla_em.inference.learn import Watch, learn
from torch_lla_em.inference.options import FitOptions
from torch_lla_em.inference.stochastic_prior import get_sto_samples
from torch_lla_em.problem.operators import WhitenedGGN
from torch_lla_em.solvers import BlockCG, BlockKrylov, DivergenceError

PARTS = "ours", "paper", "tuned", "em"
EPOCHS = 5, 10, 20, 40, 80
MODE_RATES = 0.003, 0.01, 0.03, 0.1
COLUMNS = 2
"""Samples that gradient descent is judged by: its systems do not know of one another."""

OWN = {"paper, CIFAR-100's settings": CIFAR_SAMPLES, "paper, MNIST's settings": MNIST_SAMPLES}
TUNED = {
    "L', batches of 100": Recipe(0.0, 100, 0, decay=1 / 330),
    "L', batches of 20": Recipe(0.0, 20, 0, decay=1 / 330),
}


class Study:
    """One network, its noise, its dense λ, and the record that grows part by part."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.model, self.batches = trained(args.problem, args.rows, args.train_epochs)
        self.problem = problem_of(self.model, self.batches)
        self.noise = get_sto_samples(self.problem, args.num_samples)
        start = torch.tensor(starting_precision(self.problem, self.noise)).double()
        self.dense = {
            name: dense_fixed_point(self.problem, self.noise, start, name == "averaged")
            for name in ("averaged", "function")
        }
        self.precision = torch.tensor(self.dense["averaged"]).double()
        self.race = Race(self.problem, self.noise, self.precision)
        largest = self.race.largest_eigenvalue() * self.precision.item()
        self.task = Task(self.problem, self.noise, largest)
        self.start = start.item()

    def rebatched(self, size: int) -> Counted:
        """Return the problem in batches of another size, its rows counted."""
        problem = problem_of(self.model, batches_of(self.batches, size))
        problem.loss_and_gradient(problem.zeros(1)[0])
        return problem

    def product(self, recipe: Recipe) -> WhitenedGGN:
        """Return the product in the recipe's batches."""
        return WhitenedGGN(self.rebatched(recipe.batch_size), self.race.product.deviation)

    def ours(self, solver: str) -> Iterator[list[float]]:
        """Yield passes, error of samples and error of γ of one of our solvers."""
        for passes, _, x in getattr(self.race, solver)():
            error = self.race.error(x)
            yield [passes, error, self.race.dims_error(x)]
            if error < 0.01:
                return

    def paper(self, recipe: Recipe) -> Iterator[list[float]]:
        """Yield passes, errors and step size of the paper's settings, and at more epochs."""
        product = self.product(recipe)
        for epochs in sorted({recipe.epochs, *(e for e in EPOCHS if e > recipe.epochs)}):
            yield self.judged(product, replace(recipe, epochs=epochs))

    def tuned(self, recipe: Recipe) -> Iterator[list[float]]:
        """Yield passes, errors and step size of the best step size for every number of epochs."""
        product, rates = self.product(recipe), RATES
        for epochs in EPOCHS:
            points = [self.judged(product, with_rate(recipe, rate, epochs)) for rate in rates]
            best = min(points, key=lambda point: point[1])
            yield best
            if epochs >= 10:  # the best step size moves little with the number of epochs
                at = RATES.index(best[3])
                rates = RATES[max(0, at - 1) : at + 2]
            if best[1] < 0.01:
                return

    def judged(self, product: WhitenedGGN, recipe: Recipe) -> list[float]:
        try:
            # the norm that clips is that of all samples together
            columns = COLUMNS if recipe.clip is None else self.args.num_samples
            x = solve_samples(self.task, product, recipe, self.precision, columns)
        except DivergenceError:
            return [recipe.epochs, inf, inf, recipe.learning_rate]
        errors = self.race.error(x), self.race.dims_error(x, averaged=False)
        return [recipe.epochs, *errors, recipe.learning_rate]

    def our_em(self, solver: BlockKrylov | BlockCG) -> list[list[float]]:
        """Return sample passes, single columns and λ after every EM step of a whole fit."""
        problem, path, K = problem_of(self.model, self.batches), [], self.args.num_samples

        def note(found: Statistics | None, *_: object) -> None:
            if found is not None:
                spent = problem.spent["columns"] / K, problem.spent["single"]
                path.append([*spent, found.precision.item()])

        options = FitOptions(K, 0, True, False, solver, 0.05, "network", "mackay", 20, None)
        learn(problem, options, Watch(note))
        return path

    def paper_em(self, stages: tuple[Recipe, Recipe], precision: float) -> list[list[float]]:
        """Return the same of ten EM steps by the recipe; what there is where it diverges."""
        samples, mode = stages
        parts = batches_of(self.batches, mode.batch_size)
        problems = self.rebatched(samples.batch_size), [problem_of(self.model, [p]) for p in parts]
        path = []
        try:
            for point in expectation_maximisation(self.task, stages, problems, precision):
                path.append(list(point))
        except DivergenceError:
            path.append([*(path[-1][:2] if path else (0, 0)), nan])
        return path

    def tuned_em(self, samples: Recipe) -> dict[str, list[list[float]]]:
        """Return the paths of the mode's step size that ends nearest to the dense λ.

        At the paper's numbers of epochs, and at four times as many.
        """
        modes = [
            Recipe(rate, 100, CIFAR_MODE.epochs, decay=CIFAR_MODE.decay, relative=True)
            for rate in MODE_RATES
        ]
        paths = [self.paper_em((samples, mode), self.start) for mode in modes]
        best = min(range(len(modes)), key=lambda i: self.off(paths[i][-1][2]))
        longer = tuple(replace(r, epochs=4 * r.epochs) for r in (samples, modes[best]))
        return {
            f"SGD, best step sizes ({samples.learning_rate:g}, {MODE_RATES[best]:g})": paths[best],
            "the same, four times the epochs": self.paper_em(longer, self.start),
        }

    def off(self, precision: float) -> float:
        """Return the relative error of λ by the paper's estimator; inf where it diverged."""
        error = abs(precision / self.dense["function"] - 1)
        return error if error < inf else inf


def held(errors: list[tuple[float, float]], target: float) -> str:
    """Return the passes from which on the error stays below, or a dash and the last error."""
    if not errors or not isfinite(errors[-1][1]):
        return "diverges"
    above = [i for i, (_, error) in enumerate(errors) if not error <= target]
    first = above[-1] + 1 if above else 0
    if first == len(errors):
        return f"– ({errors[-1][1]:.2g} at {errors[-1][0]:.0f})"
    return f"{errors[first][0]:.0f}"


def measured(args: argparse.Namespace) -> Iterator[dict]:
    """Yield a line of each method in the wanted parts."""
    study = Study(args)
    samples: dict[str, list] = {}
    wanted = {"ours": {"block krylov": None, "block cg": None}, "paper": OWN, "tuned": TUNED}
    for part in (part for part in args.parts if part != "em"):
        for name, recipe in wanted[part].items():
            given = recipe or name.replace(" ", "_")
            points = samples[name] = list(getattr(study, part)(given))
            line = {"part": "samples", "method": name}
            for i, what in enumerate(("samples", "γ"), 1):
                errors = [(point[0], point[i]) for point in points]
                line |= {f"{what}, {key}": held(errors, t) for key, t in TARGETS.items()}
            yield line
    if "em" in args.parts:
        stages, start = (CIFAR_SAMPLES, CIFAR_MODE), CIFAR_PRECISION * study.task.rows
        paths = {"block krylov": study.our_em(BlockKrylov()), "block cg": study.our_em(BlockCG())}
        paths["paper, CIFAR-100's settings"] = study.paper_em(stages, start)
        for name, path in (paths | study.tuned_em(tuned_samples(samples))).items():
            dense = study.dense["averaged" if name in ("block krylov", "block cg") else "function"]
            errors = [(p + s / args.num_samples, abs(found / dense - 1)) for p, s, found in path]
            line = {"part": "em", "method": name, "passes": path[-1][0], "single": path[-1][1]}
            line |= {f"λ, {key}": held(errors, target) for key, target in TARGETS.items()}
            yield line | {
                "precision": path[-1][2],
                "error": errors[-1][1],
                "path": [p[2] for p in path],
            }


def tuned_samples(samples: dict[str, list]) -> Recipe:
    """Return the best of what was tuned for L' at the paper's number of epochs."""
    epochs, found = CIFAR_SAMPLES.epochs, []
    for name, recipe in TUNED.items():
        points = [p for p in samples.get(name, []) if p[0] == epochs and isfinite(p[1])]
        found += [(error, rate, recipe) for _, error, _, rate in points]
    _, rate, recipe = min(
        found, key=lambda f: f[0], default=(inf, 0.2, TUNED["L', batches of 100"])
    )
    return with_rate(recipe, rate, epochs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problem", choices=PROBLEMS, default="digits")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--num-samples", type=int, default=8)
    parser.add_argument("--rows", type=int, help="how many images; default: each problem's own")
    parser.add_argument("--train-epochs", type=int, help="default: each problem's own")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for line in measured(args):
        print(line, flush=True)
        line |= {"problem": args.problem, "num_samples": args.num_samples}
        append(args.out / "paper_sgd.jsonl", [line], provenance(("torch",)))


if __name__ == "__main__":
    main()
