"""Passes over the data to a tolerance, by block CG, CG and the paper's SGD.

    python benchmarks/paper.py                       # a CNN on digits, K = 8: a minute of one core

K posterior samples solve (G + λ) w = λ w0 + Jᵀ S ε, at the λ of a default fit. G and J are computed by
``torch.func`` alone. A pass multiplies K columns by G. The error is that of the functions J w on the data,
√(Σ ‖J (w - w*)‖²_H / Σ ‖J w*‖²_H), against a solution w* to 1e-5. CG solves each system separately.
SGD is that of the paper, with Nesterov momentum and a step for each batch of 100; its step size is
the best of a grid for each number of epochs, and the search is not counted. Lines go to
results/paper.jsonl.

Expected: 1 % by block CG after about 5 passes, by CG after 10, by SGD after 20.
"""

import argparse
from collections.abc import Iterator
from functools import partial

import torch
from methods import markdown
from methods.learning import descend
from methods.networks import convolutional
from methods.provenance import begin, provenance, script_parser
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap

from torch_lla_em import SGD, BlockCG, LinearisedLaplace
from torch_lla_em.solvers import DivergenceError, Product

TARGETS = {"10 %": 0.1, "3 %": 0.03, "1 %": 0.01}
RATES = 0.05, 0.1, 0.2, 0.5, 1.0, 1.5
"""Step sizes of SGD times the largest eigenvalue."""


class System:
    """The product with G / λ, by torch.func, which counts its passes over the data."""

    rounding = 0.0

    def __init__(self, network: nn.Module, batches: list[tuple[Tensor, Tensor]], precision: float):
        self.network, self.batches, self.precision = network, batches, precision
        self.weights = {name: p.detach() for name, p in network.named_parameters()}
        self.columns = 0.0

    def minibatches(self) -> tuple[int, Iterator[Product]]:
        def product(x: Tensor, w: Tensor) -> Tensor:
            self.columns += len(w) / len(self.batches)
            return self._product_at(x, w)

        return len(self.batches), (partial(product, x) for x, _ in self.batches)

    def right_hand_side(self, num_samples: int) -> Tensor:
        """Return w0 + Jᵀ S ε / λ, whose w0 have the prior's covariance."""
        generator = torch.Generator().manual_seed(0)
        size = sum(p.numel() for p in self.weights.values())
        b = torch.randn(num_samples, size, generator=generator) / self.precision**0.5
        b = b.to(self.batches[0][0])
        for x, _ in self.batches:
            f, pull = vjp(lambda weights: self._outputs(weights, x), self.weights)
            p, noise = f.softmax(-1), torch.randn(num_samples, *f.shape, generator=generator).to(f)
            u = p.sqrt() * noise - p * (p.sqrt() * noise).sum(-1, keepdim=True)
            b += self._flat(vmap(pull)(u)[0]) / self.precision
        return b

    @torch.no_grad()
    def _product_at(self, x: Tensor, w: Tensor) -> Tensor:
        sizes = [p.numel() for p in self.weights.values()]
        pieces = zip(self.weights.items(), w.split(sizes, dim=1), strict=True)
        tangents = {name: part.view(len(w), *p.shape) for (name, p), part in pieces}
        outputs = lambda weights: self._outputs(weights, x)  # noqa: E731
        f, pull = vjp(outputs, self.weights)
        Jw = vmap(lambda tangent: jvp(outputs, (self.weights,), (tangent,))[1])(tangents)
        p = f.softmax(-1)
        u = p * Jw - p * (p * Jw).sum(-1, keepdim=True)
        return self._flat(vmap(pull)(u)[0]) / self.precision

    def __call__(self, w: Tensor) -> Tensor:
        self.columns += len(w)
        return sum(self._product_at(x, w) for x, _ in self.batches)

    def _outputs(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(self.network, weights, (x,))

    @staticmethod
    def _flat(gradients: dict[str, Tensor]) -> Tensor:
        return torch.cat([g.flatten(1) for g in gradients.values()], dim=1)


class Race:
    """One system, its solution, and each solver's error over passes."""

    def __init__(self, system: System, num_samples: int):
        self.system, self.b = system, system.right_hand_side(num_samples)
        self.truth = BlockCG(1e-5).solve(system, self.b).x
        self.size = self._squared(self.truth)

    def trace(self, solver: str) -> Iterator[tuple[float, float]]:
        """Yield passes and errors, up to the first error below 1 %."""
        for passes, x in {"block CG": self.block_cg, "CG": self.cg, "SGD": self.sgd}[solver]():
            error = self.error(x)
            yield passes, error
            if error < 0.01:
                return

    def error(self, x: Tensor) -> float:
        return (self._squared(x - self.truth) / self.size) ** 0.5

    def block_cg(self) -> Iterator[tuple[float, Tensor]]:
        """Solve again for ever smaller tolerances; the products of each solve alone are counted."""
        for tolerance in (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002):
            solution = BlockCG(tolerance).solve(self.system, self.b)
            yield solution.passes, solution.x

    def cg(self) -> Iterator[tuple[float, Tensor]]:
        """Solve each system by itself."""
        x, residual = torch.zeros_like(self.b), self.b.clone()
        direction, rho = residual, residual.square().sum(1, keepdim=True)
        for passes in range(1, 401):
            image = direction + self.system(direction)
            step = rho / (direction * image).sum(1, keepdim=True)
            x, residual = x + step * direction, residual - step * image
            rho, before = residual.square().sum(1, keepdim=True), rho
            direction = residual + rho / before * direction
            if passes % 5 == 0:
                yield passes, x

    def sgd(self) -> Iterator[tuple[float, Tensor]]:
        """The best step size for each number of epochs."""
        v = self.b[:1]
        for _ in range(6):
            v = self.system(v / v.norm())
        largest = v.norm().item() + 1
        for epochs in (5, 10, 20, 40, 80):
            found = [self.descended(epochs, rate / largest) for rate in RATES]
            yield epochs, min((x for x in found if x is not None), key=self.error)

    def descended(self, epochs: int, rate: float) -> Tensor | None:
        try:
            return SGD(epochs=epochs, learning_rate=rate).solve(self.system, self.b).x
        except DivergenceError:
            return None

    def _squared(self, x: Tensor) -> float:
        return (x * self.system(x)).double().sum().item()


def reached(points: list[tuple[float, float]], target: float) -> str:
    """Return the passes at the first error below the target, or a dash and the last error."""
    for passes, error in points:
        if error <= target:
            return f"{passes:.0f}"
    return f"– ({points[-1][1]:.2g} at {points[-1][0]:.0f})"


def measured(args: argparse.Namespace) -> Iterator[dict]:
    """Yield a line of each solver."""
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)[: args.rows, None] / 16
    y = torch.tensor(digits.target)[: args.rows]
    torch.manual_seed(0)
    network = convolutional([1, 12, 24], [96, 32, 10])
    optimiser = torch.optim.Adam(network.parameters(), 2e-3, weight_decay=1e-4)
    descend(network, (x, y), args.epochs, optimiser, 50)
    batches, K = list(zip(x.split(100), y.split(100), strict=True)), args.num_samples
    la = LinearisedLaplace(network, "classification", num_samples=K)
    precision = la.fit(batches, progress_bar=False).prior_precision.item()
    race = Race(System(network, batches, precision), K)
    for solver in ("block CG", "CG", "SGD"):
        points = list(race.trace(solver))
        line = {"solver": solver, "parameters": race.b.shape[1], "K": K}
        yield line | {name: reached(points, target) for name, target in TARGETS.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = script_parser(__doc__, "paper")
    parser.add_argument("--num-samples", type=int, default=8)
    parser.add_argument("--rows", type=int, default=1200)
    parser.add_argument("--epochs", type=int, default=40, help="of training")
    args = begin(parser, arguments)
    for line in () if args.report else measured(args):
        markdown.append(args.out, [line], provenance(("torch",)))
    print(markdown.table(markdown.read(args.out), ("solver",), (*TARGETS,)))


if __name__ == "__main__":
    main()
