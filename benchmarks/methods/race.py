"""One system (A + I) X = B, its reference solution, and the error of every solver over passes."""

import time
from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import Tensor

from methods.plain_cg import iterates
from torch_lla_em.inference.stochastic_prior import StochasticPrior
from torch_lla_em.problem.operators import WhitenedGGN
from torch_lla_em.problem.problem import Problem
from torch_lla_em.solvers import (
    SGD,
    BlockCG,
    DivergenceError,
    Operator,
    combine,
    dots,
    gram,
    norm,
    orthonormalise,
)

SOLVERS = "block_krylov", "block_cg", "plain_cg", "sgd"
RATES = 0.03, 0.1, 0.2, 0.5
TARGETS = {"10 %": 0.1, "3 %": 0.03, "1 %": 0.01}
LEVELS = 1.0, 0.5, 0.3, 0.2, 0.1, 0.06, 0.03, 0.02, 0.01
EPOCHS = 10, 20, 40

Point = tuple[float, float, float]
"""Passes of K columns, seconds, error."""

State = tuple[float, float, Tensor]
"""Passes of K columns, seconds, x."""


def reached(points: list[Point], target: float) -> str:
    """Return "passes (seconds)" at the first error below the target, or a dash and the last one."""
    for passes, seconds, error in points:
        if error <= target:
            return f"{passes:g} ({seconds:.3g} s)"
    passes, _, error = points[-1]
    return f"– ({error:.2g} at {passes:g})"


class Remembered(Operator):
    """A product that knows what it answered, for solvers that ask the same again."""

    def __init__(self, product: Callable[[Tensor], Tensor]):
        super().__init__(product)
        self._answers: list[tuple[Tensor, Tensor, float]] = []
        self.begin()

    def begin(self) -> None:
        """Start a solve that repeats the last one's beginning."""
        self._next, self.saved = 0, 0.0

    def __call__(self, x: Tensor) -> Tensor:
        known = self._answers[self._next : self._next + 1]
        self._next += 1
        if known and known[0][0].shape == x.shape and torch.equal(known[0][0], x):
            self.saved += known[0][2]
            return known[0][1].clone()
        clock = time.monotonic()
        image = self._product(x)
        answer = x.clone(), image.clone(), time.monotonic() - clock
        self._answers[self._next - 1 :] = [answer]
        return image


class Race:
    """One system in whitened coordinates; errors are those of J w_k on the data."""

    def __init__(
        self,
        problem: Problem,
        noise: StochasticPrior,
        precision: Tensor,
        reference: float = 1e-4,
    ):
        self.problem, self.noise, self.precision = problem, noise, precision
        self.product = WhitenedGGN(problem, noise.prior.deviation(precision))
        self.b = noise.right_hand_side(precision)
        self.truth = BlockCG(reference).solve(self.product, self.b)

    def error(self, x: Tensor) -> float:
        """Return √(Σ_k ‖J (w_k - w_k*)‖²_H / Σ_k ‖J w_k*‖²_H) of the first samples."""
        columns = len(x)
        e = x - self.truth.x[:columns]
        square = dots(e, self.product(e)).clamp_min(0).sum()
        return (square / self.truth.energy[:columns].sum()).sqrt().item()

    def dims_error(self, x: Tensor, averaged: bool = True) -> float:
        """Return the relative error of γ with the same noise, by either estimator.

        The average of ⟨w, G w⟩ and ‖w0 - w‖²_Λ; or the first alone, as in the paper.
        """
        truth = self.truth.x[: len(x)]
        found, true = (self._dims(rows, averaged) for rows in (x, truth))
        return abs(found / true - 1)

    def _dims(self, x: Tensor, averaged: bool) -> float:
        energy = dots(x, self.product(x)).mean()
        if not averaged:
            return energy.item()
        shrunk = (self.noise.xi[: len(x)] - x).double().square().sum(1).mean()
        return 0.5 * (energy + shrunk).item()

    def trace(self, solver: str, until: float = 0.01) -> list[Point]:
        """Return the points of one solver, up to the first error below ``until``."""
        points = []
        for passes, seconds, x in getattr(self, solver)():
            points.append((passes, seconds, self.error(x)))
            if points[-1][2] < until:
                break
        return points

    def block_krylov(self) -> Iterator[State]:
        """Yield x after every product, over a span that the residuals widen."""
        b, seconds = self.b, 0.0
        basis = images = b[:0]
        residual = b
        for passes in range(1, 40):
            begin = time.monotonic()
            for _ in range(2):
                residual = residual - combine(gram(residual, basis), basis)
            new, _ = orthonormalise(residual, 1e-4 * norm(residual))
            basis, images = torch.cat([basis, new]), torch.cat([images, self.product(new)])
            shifted = gram(basis, images) + torch.eye(len(basis)).to(basis).double()
            coefficients = torch.linalg.solve(shifted, gram(basis, b)).T
            x = combine(coefficients, basis)
            residual = b - x - combine(coefficients, images)
            seconds += time.monotonic() - begin
            yield passes, seconds, x

    def block_cg(self) -> Iterator[State]:
        """Yield x at ever smaller tolerances, the last product of each counted."""
        product = Remembered(self.product)
        for tolerance in LEVELS:
            begin = time.monotonic()
            product.begin()
            solution = BlockCG(tolerance).solve(product, self.b)
            seconds = time.monotonic() - begin + product.saved
            yield solution.passes, seconds, solution.x

    def plain_cg(self) -> Iterator[State]:
        """Yield x after every fourth product with K systems of their own."""
        seconds, begin = 0.0, time.monotonic()
        for passes, x, _ in islice(iterates(self.product, self.b), 80):
            if passes % 4 == 0:
                seconds += time.monotonic() - begin
                yield passes, seconds, x
                begin = time.monotonic()

    def sgd(self) -> Iterator[State]:
        """Yield the best step size for every number of epochs, on the first four samples."""
        b, largest = self.b[:4], self.largest_eigenvalue()
        for epochs in EPOCHS:
            best = float("inf"), 0.0, b
            for rate in RATES:
                solver = SGD(epochs=epochs, learning_rate=rate / largest)
                begin = time.monotonic()
                try:
                    x = solver.solve(self.product, b).x
                except DivergenceError:
                    continue
                seconds = (time.monotonic() - begin) * len(self.b) / len(b)
                best = min(best, (self.error(x), seconds, x), key=lambda found: found[0])
            yield epochs, *best[1:]

    def largest_eigenvalue(self) -> float:
        """Return that of A, from six power iterations."""
        v = self.b[:1]
        for _ in range(6):
            v = self.product(v / v.norm())
        return v.norm().item()
