"""The paper's recipe: stochastic gradient descent for the samples and the mode, ten EM steps.

Its step sizes belong to the mean over data and outputs of the loss, in coordinates whose G
has a diagonal of ones; here they are carried over to the sum, in whitened coordinates.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from methods.counted import Counted
from torch_lla_em.inference.stochastic_prior import StochasticPrior
from torch_lla_em.problem.operators import WhitenedGGN, WhitenedLoss
from torch_lla_em.problem.problem import Problem
from torch_lla_em.solvers import SGD, DivergenceError


@dataclass(frozen=True)
class Recipe:
    """One stage of the recipe, as the paper's code states it."""

    learning_rate: float
    batch_size: int
    epochs: int
    clip: float | None = None
    """Of the norm of a step's gradient, all samples together."""

    averaging: float | None = None
    decay: float = 1.0
    """Last step size over the first."""

    relative: bool = False
    """Whether the step size is in units of 1 / the largest eigenvalue of G + λ."""

    summed: bool = False
    """Whether a step's gradient is the sum over its batch, not the mean."""


CIFAR_SAMPLES = Recipe(1e-2, 100, 10, clip=1.0, decay=1 / 330)
CIFAR_MODE = Recipe(5e-3, 2000, 25, clip=0.1, decay=1 / 33, summed=True)
CIFAR_PRECISION = 1000.0
MNIST_SAMPLES = Recipe(200.0, 40, 20, averaging=0.01)
"""Of 2000 of 60 000 images a batch; of 40 of 1200 an epoch has as many steps."""

EM_STEPS = 10
RATES = 0.05, 0.1, 0.2, 0.5, 1.0, 1.5
"""The grid of step sizes for the samples, times the largest eigenvalue."""


class Task:
    """The problem in batches of any size, its noise, and what the paper's units need."""

    def __init__(self, problem: Counted, noise: StochasticPrior, largest: float):
        self.problem, self.noise = problem, noise
        self.largest = largest
        """The largest eigenvalue of the scaled G."""

        self.rows = problem.data.facts.num_rows
        self.outputs = problem.data.facts.num_outputs // self.rows

    def solver(self, recipe: Recipe, precision: float) -> SGD:
        """Return the recipe in whitened coordinates at λ, for the sum over data."""
        # coordinates where the sum of squared features is 1 have a precision of λ / N
        paper_precision, count = precision / self.rows, self.rows * self.outputs
        batch = min(recipe.batch_size, self.rows) if recipe.summed else 1
        if recipe.relative:
            rate = recipe.learning_rate / (self.largest / precision + 1)
        else:
            rate = recipe.learning_rate * paper_precision / count * batch
        clip = None
        if recipe.clip is not None:
            clip = recipe.clip * count / paper_precision**0.5 / batch
        return SGD(
            epochs=recipe.epochs,
            learning_rate=rate,
            averaging=recipe.averaging,
            clip=clip,
            decay=recipe.decay,
        )


def batches_of(batches: list[tuple[Tensor, Tensor]], size: int) -> list[tuple[Tensor, Tensor]]:
    """Return the same data in batches of another size."""
    x, y = (torch.cat(parts) for parts in zip(*batches))
    return list(zip(x.split(size), y.split(size)))


def solve_samples(
    task: Task, product: WhitenedGGN, recipe: Recipe, precision: Tensor, columns: int
) -> Tensor:
    """Return the samples in whitened coordinates, from the prior's."""
    b = task.noise.right_hand_side(precision)[:columns]
    return task.solver(recipe, precision.item()).solve(product, b).x


def descend_to_mode(
    solver: SGD, batches: Sequence[Problem], deviation: Tensor, x: Tensor
) -> Tensor:
    """Return the mode in whitened coordinates after all epochs from x, with a problem per batch."""
    velocity, count, last = torch.zeros_like(x), 0, max(1, solver.epochs * len(batches) - 1)
    losses = [WhitenedLoss(problem, deviation) for problem in batches]
    bound = 10 * sum(gradient_of(loss, 0 * x) for loss in losses).norm() + 1
    for _ in range(solver.epochs):
        for loss in losses:
            ahead = x + solver.momentum * velocity
            gradient = len(losses) * gradient_of(loss, ahead) + ahead
            if solver.clip is not None:
                gradient *= solver.clip / gradient.norm().clamp_min(solver.clip)
            fade = 1 - (1 - solver.decay) * count / last
            velocity = solver.momentum * velocity - solver.learning_rate * fade * gradient
            x, count = x + velocity, count + 1
        if not x.norm() <= bound:  # the objective is 1-strongly convex
            raise DivergenceError("Stochastic gradient descent for the mode diverged.")
    return x


def gradient_of(loss: WhitenedLoss, x: Tensor) -> Tensor:
    return loss.value_and_gradient(x)[1]


def expectation_maximisation(
    task: Task,
    stages: tuple[Recipe, Recipe],
    problems: tuple[Problem, Sequence[Problem]],
    precision: float,
) -> Iterator[tuple[float, float, float]]:
    """Yield (sample passes, single-column passes, λ) after each of ten EM steps.

    Stages and problems are of samples and mode, which starts at zero and has a problem for each
    batch. Passes are those of the epochs, and one for γ; checks that this implementation makes
    beside them are not counted.
    """
    prior, (samples, mode) = task.noise.prior, stages
    w, w_lin = None, task.problem.zeros(1)[0]
    for step in range(1, EM_STEPS + 1):
        here = torch.tensor(precision, dtype=torch.float64)
        deviation = prior.deviation(here)
        start, solver = prior.whitened(w_lin, here), task.solver(mode, precision)
        w_lin = deviation * descend_to_mode(solver, problems[1], deviation, start)
        b = task.noise.right_hand_side(here)
        start = None if w is None else prior.whitened(w, here)
        solution = task.solver(samples, precision).solve(
            WhitenedGGN(problems[0], deviation), b, start
        )
        w = deviation * solution.x
        gamma = solution.energy.mean().clamp(1, task.problem.size - 1)
        precision = (gamma / prior.squared_norm(w_lin)).item()
        yield step * (samples.epochs + 1), step * mode.epochs, precision


def with_rate(recipe: Recipe, rate: float, epochs: int | None = None) -> Recipe:
    """Return the recipe at another step size, relative to the largest eigenvalue, and no clip."""
    return replace(
        recipe, learning_rate=rate, relative=True, clip=None, epochs=epochs or recipe.epochs
    )
