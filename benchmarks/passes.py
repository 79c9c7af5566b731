"""How many passes over the data each solver takes to a given error, and the whole EM.

    python benchmarks/passes.py                          # digits
    python benchmarks/passes.py --parts dense            # and its dense fixed point
    python benchmarks/passes.py --problems lenet resnet20 --synthetic
    python benchmarks/passes.py --report                 # docs/passes.md from the results

A pass pushes K columns through the network, forwards and back; a pass of block Krylov
carries 2 K, and counts as two. Errors are those of the functions J w_k on the data against
a tightly solved reference. On the digits expect block Krylov and block CG at 1 % in about
6 passes, and the whole fit by block Krylov in about 12 passes and 72 single columns. Every
part is written as soon as it is there; --parts takes those that are wanted.
"""

import argparse
import json
import platform
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from torch_lla_em.data import Data
from torch_lla_em.fitting import FitOptions, fit_posterior
from torch_lla_em.likelihoods import Classification
from torch_lla_em.linear_mode import optimise_MAP
from torch_lla_em.linear_model import LinearModel
from torch_lla_em.network import Network
from torch_lla_em.operators import WhitenedGGN
from torch_lla_em.parameters import ParameterLayout, select_parameters
from torch_lla_em.problem import Problem
from torch_lla_em.solvers import SGD, BlockCG, BlockKrylov, DivergenceError, Newton
from torch_lla_em.solvers.block_krylov import Shift
from torch_lla_em.solvers.blocks import dots
from torch_lla_em.stochastic_prior import get_sto_samples

ROOT = Path(__file__).parent.parent
TARGETS = 0.1, 0.03, 0.01
SOLVERS = "block_krylov", "block_cg", "plain_cg", "sgd"
RATES = 0.03, 0.1, 0.2


class Counted(Problem):
    """A problem that counts single columns apart from passes of K."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.spent = {"columns": 0.0, "single": 0}

    def _sweep(self, cotangent, w):
        self.spent["single" if len(w) == 1 else "columns"] += len(w)
        return super()._sweep(cotangent, w)

    def noise_features(self, num_samples, *rest, **options):
        self.spent["columns"] += num_samples
        return super().noise_features(num_samples, *rest, **options)

    def minibatch_products(self):
        for rows, product in super().minibatch_products():
            yield rows, self._counting(rows, product, single=False)

    def minibatch_gradients(self):
        for rows, product in super().minibatch_gradients():
            yield rows, self._counting(rows, product, single=True)

    def _counting(self, rows, product, single):
        def counted(w):
            self.spent["single" if single else "columns"] += len(w) * rows / self.data.num_rows
            return product(w)

        return counted


class Residual(nn.Module):
    """A basic block of a CIFAR ResNet, with the parameter-free shortcut."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.stride = 2 if outputs > inputs else 1
        self.a = nn.Conv2d(inputs, outputs, 3, self.stride, 1, bias=False)
        self.b = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)])
        self.extra = outputs - inputs

    def forward(self, x):
        h = self.norms[1](self.b(self.norms[0](self.a(x)).relu()))
        x = functional.pad(x[..., :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))
        return (x + h).relu()


def resnet20():
    blocks = [Residual(16, 16) for _ in range(3)]
    blocks += [Residual(16, 32), *(Residual(32, 32) for _ in range(2))]
    blocks += [Residual(32, 64), *(Residual(64, 64) for _ in range(2))]
    stem = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def convolutional(channels, sizes):
    layers, width = [], channels[0]
    for outputs in channels[1:]:
        layers += [nn.Conv2d(width, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        width = outputs
    layers.append(nn.Flatten())
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def digits(args):
    from sklearn.datasets import load_digits

    x = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(load_digits().target)
    order = torch.randperm(len(x))[:1200]
    return convolutional([1, 12, 24], [96, 32, 10]), x[order], y[order]


def synthetic(shape, rows):
    """Noisy, shifted copies of one smooth picture per class."""
    pictures = functional.interpolate(torch.randn(10, shape[0], 5, 5), shape[1:], mode="bicubic")
    y = torch.randint(10, (rows,))
    shifts = torch.randint(-3, 4, (rows, 2)).tolist()
    x = torch.stack([pictures[c].roll(s, (1, 2)) for c, s in zip(y, shifts)])
    return x + 0.7 * torch.randn_like(x), y


def real(name, shape, rows, folder):
    import torchvision

    data = getattr(torchvision.datasets, name)(folder, train=True, download=True)
    order = torch.randperm(len(data.data))[:rows]
    x = torch.as_tensor(data.data)[order].float().view(rows, *shape[1:], shape[0])
    return x.movedim(-1, 1) / 255 - 0.5, torch.as_tensor(data.targets)[order]


def lenet(args):
    shape = 1, 28, 28
    data = synthetic(shape, 1000) if args.synthetic else real("MNIST", shape, 1000, args.data)
    return convolutional([1, 6, 16], [784, 60, 10]), *data


def cifar(args):
    shape = 3, 32, 32
    data = synthetic(shape, 200) if args.synthetic else real("CIFAR10", shape, 200, args.data)
    return resnet20(), *data


PROBLEMS = {"digits": digits, "lenet": lenet, "resnet20": cifar}


def trained(args, name):
    """Return a trained network and its data in batches."""
    torch.manual_seed(0)
    model, x, y = PROBLEMS[name](args)
    optimiser = torch.optim.Adam(model.parameters(), 2e-3, weight_decay=1e-4)
    for _ in range(8 if name == "resnet20" else 40):
        for rows in torch.randperm(len(x)).split(50):
            optimiser.zero_grad()
            functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimiser.step()
    return model.eval(), list(zip(x.split(100), y.split(100)))


def problem_of(model, batches):
    network = Network(model)
    layout = ParameterLayout.of(network.module, select_parameters(network.module))
    data = Data(batches, network.device)
    return Counted(LinearModel(network, layout), Classification(), data)


class Race:
    """One system (A + I) X = B, its reference solution, and the error of any other."""

    def __init__(self, problem, noise, precision):
        self.problem, self.noise, self.precision = problem, noise, precision
        self.product = WhitenedGGN(problem, noise.prior.deviation(precision))
        self.b = noise.right_hand_side(precision)
        self.truth = BlockCG(1e-4).solve(self.product, self.b)

    def error(self, x):
        columns = len(x)
        e = x - self.truth.x[:columns]
        square = dots(e, self.product(e)).clamp_min(0).sum()
        return (square / self.truth.energy[:columns].sum()).sqrt().item()

    def block_krylov(self):
        """Yield (passes, seconds, error) after every product with 2 K columns."""
        scale, K = self.noise.prior.scale, len(self.b)
        start = torch.cat([self.noise.xi, scale * self.noise.eta])
        seconds, shift = 0.0, Shift(self.precision.item())
        krylov = BlockKrylov().factorise(WhitenedGGN(self.problem, scale), start, K)
        for passes in range(2, 40, 2):
            begin = time.monotonic()
            krylov.lanczos.extend()
            x = shift.precision**0.5 * krylov.samples(shift)
            seconds += time.monotonic() - begin
            yield passes, seconds, self.error(x)

    def block_cg(self):
        for tolerance in (1.0, 0.5, 0.3, 0.2, 0.1, 0.06, 0.03, 0.02, 0.01):
            begin = time.monotonic()
            solution = BlockCG(tolerance).solve(self.product, self.b)
            yield solution.passes, time.monotonic() - begin, self.error(solution.x)

    def plain_cg(self):
        x, residual = torch.zeros_like(self.b), self.b.clone()
        direction, rho, seconds = residual.clone(), dots(residual, residual), 0.0
        for passes in range(1, 81):
            begin = time.monotonic()
            image = direction + self.product(direction)
            step = (rho / dots(direction, image))[:, None].to(x)
            x, residual = x + step * direction, residual - step * image
            rho, old = dots(residual, residual), rho
            direction = residual + (rho / old)[:, None].to(x) * direction
            seconds += time.monotonic() - begin
            if passes % 4 == 0:
                yield passes, seconds, self.error(x)

    def sgd(self):
        """The best step size for every number of epochs; on the first four samples."""
        b, v = self.b[:4], self.b[:1]
        for _ in range(6):
            v = self.product(v / v.norm())
        for epochs in (10, 40):
            best = float("inf"), 0.0
            for rate in RATES:
                solver = SGD(epochs=epochs, learning_rate=rate / v.norm().item())
                begin = time.monotonic()
                try:
                    x = solver.solve(self.product, b).x
                except DivergenceError:
                    continue
                seconds = (time.monotonic() - begin) * len(self.b) / len(b)
                best = min(best, (self.error(x), seconds))
            yield epochs, best[1], best[0]


def trace(race, name):
    """Return the points of one solver, up to the smallest target."""
    points = []
    for point in getattr(race, name)():
        points.append(point)
        if point[2] < TARGETS[-1]:
            break
    print(f"  {name:13}", *(f"{p}:{e:.2g}" for p, _, e in points), flush=True)
    return points


def dense_fixed_point(problem, noise, precision):
    """Return MacKay's λ with the same noise, by Cholesky factors of G + λ."""
    rows = problem.rows() * noise.prior.scale
    G = sum(part.double().T @ part.double() for part in rows.split(2000))
    del rows
    xi, eta, w = noise.xi.double(), (noise.prior.scale * noise.eta).double(), None
    for _ in range(10):
        shifted = G.clone()
        shifted.diagonal().add_(precision)
        b = precision.sqrt() * xi + eta
        x = torch.cholesky_solve(b.T, torch.linalg.cholesky(shifted)).T
        shrunk = (xi - precision.sqrt() * x).square().sum(1)
        energy = (x * b).sum(1) - precision * x.square().sum(1)
        w = optimise_MAP(problem, noise.prior, precision, Newton(2e-3, 3000), start=w).w
        new = 0.5 * (energy + shrunk).mean() / noise.prior.squared_norm(w)
        settled, precision = abs(new / precision - 1) < 1e-3, new
        if settled:
            break
    return precision.item()


def whole_fit(model, batches, args, solver):
    """Return λ's path and what the whole fit spends."""
    problem, path = problem_of(model, batches), []
    steps = 4 if isinstance(solver, SGD) else 20
    options = FitOptions(
        args.num_samples, 0, True, False, solver, 0.05, "network", "mackay", steps, None
    )
    begin = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        posterior = fit_posterior(problem, options, lambda s: path.append(s.hyper.precision.item()))
    return {
        "path": [*path, posterior.hyper.precision.item()],
        "passes": problem.spent["columns"] / args.num_samples,
        "single": problem.spent["single"],
        "seconds": time.monotonic() - begin,
        "gamma": posterior.effective_dim.value.item(),
        "error": posterior.sample_error,
        "warnings": sorted({str(w.message).split(".")[0] for w in caught}),
    }


FITS = {"block_krylov": BlockKrylov(), "block_cg": BlockCG(), "sgd": SGD(epochs=20)}


def save(record, path):
    command = "python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    record["commands"] = sorted({*record.get("commands", []), command})
    path.write_text(json.dumps(record) + "\n")


def measure(args, name, path):
    """Update the record of one problem, part by part."""
    record = json.loads(path.read_text()) if path.exists() else {"fits": {}, "traces": {}}
    model, batches = trained(args, name)
    problem = problem_of(model, batches)
    noise = get_sto_samples(problem, args.num_samples)
    record |= {
        "problem": name + (" (synthetic)" if args.synthetic and name != "digits" else ""),
        "weights": problem.size,
        "rows": problem.data.num_rows,
        "num_samples": args.num_samples,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, shared",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
    }
    for part in args.parts:
        if part in FITS:
            try:
                record["fits"][part] = whole_fit(model, batches, args, FITS[part])
            except DivergenceError as error:
                record["fits"][part] = {"failed": str(error).split(":")[0]}
            print(f"  fit by {part}: {record['fits'][part]}", flush=True)
        precision = torch.tensor(record["fits"]["block_krylov"]["path"][-1]).double()
        if part == "traces":
            system = Race(problem, noise, precision)
            for solver in args.solvers:
                record["traces"][solver] = trace(system, solver)
                save(record, path)
        if part == "dense":
            record["dense"] = dense_fixed_point(problem, noise, precision)
            print(f"  dense λ {record['dense']:.6g} against {precision:.6g}", flush=True)
        save(record, path)


def reached(trace, target):
    """Return "passes (seconds)" at the first error below the target, or a dash."""
    for passes, seconds, error in trace:
        if error <= target:
            return f"{passes} ({seconds:.1f} s)"
    return f"– ({trace[-1][2]:.2g} at {trace[-1][0]})"


def report(records):
    """Write docs/passes.md and docs/passes.png."""
    lines = [
        "# Passes over the data",
        "",
        "Generated by `python benchmarks/passes.py --report` from `benchmarks/results/passes*.jsonl`.",
        "A pass pushes K columns through the network and back; the 2 K columns of block Krylov",
        "count as two passes. The error is that of the functions J w_k on the data, at the λ that",
        "EM found, with the g-prior, against a solution known to 1e-4. Seconds are for K columns,",
        "on a machine that did other work at the time: compare passes. SGD has the best of "
        + f"{len(RATES)} step",
        "sizes, for each number of epochs anew, on four of the samples.",
        "",
    ]
    for record in records:
        lines += [
            f"## {record['problem']}: P = {record['weights']}, N = {record['rows']}, "
            f"K = {record['num_samples']}",
            "",
            "| solver | 10 % | 3 % | 1 % |",
            "|---|---|---|---|",
        ]
        for solver, trace in record["traces"].items():
            cells = " | ".join(reached(trace, target) for target in TARGETS)
            lines.append(f"| {solver.replace('_', ' ')} | {cells} |")
        lines += ["", "The whole fit: EM, the mode, samples at tolerance 0.05.", ""]
        lines += ["| EM by | sample passes | single columns | seconds | λ path |", "|---|---|---|---|---|"]
        for solver, fit in record["fits"].items():
            if "failed" in fit:
                lines.append(f"| {solver.replace('_', ' ')} | {fit['failed']} | | | |")
                continue
            path = ", ".join(f"{value:.4g}" for value in fit["path"])
            lines.append(
                f"| {solver.replace('_', ' ')} | {fit['passes']:.0f} | {fit['single']:.0f} | "
                f"{fit['seconds']:.0f} | {path} |"
            )
        if record.get("dense"):
            off = 100 * abs(record["fits"]["block_krylov"]["path"][-1] / record["dense"] - 1)
            lines += ["", f"Dense fixed point with the same noise: λ = {record['dense']:.5g}; "
                      f"block Krylov is {off:.2f} % off."]
        commands = ", ".join(f"`{command}`" for command in record["commands"])
        lines += ["", f"{commands}; {record['machine']}; {record['versions']}.", ""]
    lines += ["![error over passes](passes.png)", ""]
    (ROOT / "docs/passes.md").write_text("\n".join(lines))
    draw(records)


def draw(records):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = 4.5 * len(records), 3.6
    figure, all_axes = plt.subplots(1, len(records), figsize=size, squeeze=False, sharey=True)
    for axes, record in zip(all_axes[0], records):
        for solver, trace in record["traces"].items():
            passes, _, errors = zip(*trace)
            axes.plot(passes, errors, marker="o", markersize=3, label=solver.replace("_", " "))
        axes.set(xscale="log", yscale="log", xlabel="passes", title=record["problem"])
        axes.set_ylim(2e-3, 2)
        axes.set_xticks([2, 4, 6, 10, 20, 40], ["2", "4", "6", "10", "20", "40"], minor=False)
        axes.set_xticks([], minor=True)
    all_axes[0][0].set_ylabel("error of J w")
    all_axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(ROOT / "docs/passes.png", dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=["digits"])
    parts = [*FITS, "traces", "dense"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts[:-1])
    parser.add_argument("--solvers", nargs="+", choices=SOLVERS, default=SOLVERS)
    parser.add_argument("--num-samples", type=int, default=32)
    parser.add_argument("--synthetic", action="store_true", help="data of the right shape")
    parser.add_argument("--data", default="data", help="where MNIST and CIFAR-10 are kept")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--report", action="store_true", help="only write the page")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = ROOT / "benchmarks/results"
    if not args.report:
        for name in args.problems:
            print(name, flush=True)
            measure(args, name, results / f"passes_{name}.jsonl")
    files = sorted(results.glob("passes_*.jsonl"))
    report([json.loads(line) for file in files for line in file.read_text().splitlines()])


if __name__ == "__main__":
    main()
