"""Measures the library on one CUDA GPU, in less than half an hour.

    python benchmarks/gpu.py                              # needs a GPU
    python benchmarks/gpu.py --steps "fit resnet18" cost  # steps whose names begin with these
    python benchmarks/gpu.py --tiny --device cpu          # every step at a tiny size, as a test

runs whole fits of LeNet, ResNet-18, ResNet-50 and ViT-S in float32 to an error of 1e-3; products with G, against (1 + 4 K)
forward passes, in float32, TF32 and bfloat16 with their errors, for K = 1, 8, 32, with batches that fill the GPU; the cost of
fits of small networks (cost.py); and 1,000 classes with twice the draws of H. Every step adds its
lines to results/gpu.jsonl, also if it has failed. ``report.py results/gpu.jsonl`` writes the tables
of the documentation.
"""

import argparse
import time
import traceback
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import cost
import torch
from methods import markdown, networks
from methods.provenance import begin, provenance, script_parser
from torch import nn
from torch.nn import functional as F

from torch_lla_em import Compute, LinearisedLaplace
from torch_lla_em.data.loader import Data
from torch_lla_em.likelihoods import Classification
from torch_lla_em.problem import hessian, prepare
from torch_lla_em.problem.problem import Problem

NETWORKS = {
    "lenet": (partial(networks.lenet, nn.Tanh, nn.AvgPool2d), (1, 28, 28), 8192, 8192),
    "resnet18": (networks.resnet18, (3, 32, 32), 1024, 2000),
    "resnet50": (networks.resnet50, (3, 224, 224), 128, 64),
    "vit_s": (networks.vit_s, (3, 224, 224), 128, 64),
}
"""The network, the shape of its input, the batch size of a product on a GPU with 80 GB (in proportion on others),
and the examples of a whole fit."""

PRECISIONS = "float32", "tf32", "bfloat16"
SMALL = "mlp", "cnn", "bert", "many rows", *list(cost.PROBLEMS)[-4:-1]
Lines = list[dict]


def products(name: str, precision: str, args: argparse.Namespace) -> Lines:
    """Return time, memory and error of products with G for every K."""
    torch.manual_seed(0)
    make, shape, batch, _ = NETWORKS[name]
    share = torch.cuda.mem_get_info()[1] / 80e9 if args.device == "cuda" else 1.0
    device, batch = torch.device(args.device), 4 if args.tiny else max(1, int(batch * share))
    model, x = make().eval().to(device), torch.randn(batch, *shape, device=device)
    y = torch.randint(0, model(x).shape[-1], (len(x),), device=device)
    lines = []
    for count in (1, 2) if args.tiny else (1, 8, 32):
        la = LinearisedLaplace(model, "classification")
        problem = Problem(la._linear_model, Classification(), Data([(x, y)], device))
        prepare(problem, count, Compute(precision=precision))
        network, w = problem.linear_model.network, torch.randn(count, problem.size, device=device)

        def forward() -> None:
            with torch.no_grad(), network.computing(network.precision):
                model(x)

        problem.ggn_product(w)  # what is probed or cached happens here
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        once, taken = (cost.seconds(run, 3) for run in (forward, lambda: problem.ggn_product(w)))
        peak = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None
        line = {"network": name, "weights": problem.size, "rows": len(x), "means": precision}
        line |= {"columns": count, "forward": once, "product": taken, "peak_gb": peak}
        line |= {"ratio": taken / ((1 + 4 * count) * once)}
        lines.append(line)
    return lines


def fit(name: str, args: argparse.Namespace) -> Lines:
    """Return what a whole fit of a trained network costs, to an error of 1e-3."""
    torch.manual_seed(0)
    make, (channels, size, _), _, rows = NETWORKS[name]
    rows = 24 if args.tiny else rows
    x, y = cost.images(rows, channels, size)
    options = {"compute": Compute(tolerance=1e-3), "curvature": "network"}
    problem = cost.Problem(make(), x, y, 1 + 4000 * (not args.tiny) // rows, options)
    problem = problem.on(args.device)
    return [{"network": name} | cost.line(problem, cost.train(problem), 2 if args.tiny else 8, 64)]


def costs(name: str, args: argparse.Namespace) -> Lines:
    """Return what fits of a small network cost, in training epochs and forward passes."""
    K = 2 if args.tiny else 16
    return [*cost.fits(argparse.Namespace(problems=[name], num_samples=K, device=args.device))]


def draws(args: argparse.Namespace) -> Lines:
    """Return the results of fits of 1,000 classes after 150 s, with the usual draws of H and twice as many."""
    rows, test, classes = (60, 20, 40) if args.tiny else (10_000, 4_000, 1_000)
    every = cost.made(partial(cost.head, rows + test, 64, classes), args.device)
    problem = every._replace(x=every.x[:rows], y=every.y[:rows])
    cost.train(problem)
    x, y, found = every.x[rows:], every.y[rows:], []
    compute = Compute(budget=150, span_memory=1e6 if args.tiny else None)  # no room for blocks
    for times in (1, 2):
        la = LinearisedLaplace(problem.network, "classification", compute=compute, **cost.LAST)
        with patch.object(hessian, "DRAWS", 4 * times * rows):
            la.fit(problem.x, problem.y, progress_bar=False)
        probs = torch.cat([la(some) for some in x.split(500)])
        with torch.no_grad():
            line = {"times": times, "network_nll": F.cross_entropy(problem.network(x), y).item()}
        line["nll"] = F.nll_loss(probs.clamp_min(1e-38).log(), y).item()
        kept = "log_evidence", "prior_precision", "seconds", "why"
        line |= {key: la.history[-1][key] for key in kept}
        line["best_evidence"] = max(step["log_evidence"] for step in la.history)
        found.append(line | {"error": la.accuracy.error, "rows": rows, "classes": classes})
    return found


def steps(args: argparse.Namespace) -> dict[str, Callable[[argparse.Namespace], Lines]]:
    """Return the steps in order: the cheap and informative ones come first."""
    names = ["lenet"] if args.tiny else list(NETWORKS)
    found: dict[str, Callable[[argparse.Namespace], Lines]] = {}
    found |= {f"fit {name}": partial(fit, name) for name in names}
    for name in names:
        for precision in PRECISIONS[:1] if args.tiny else PRECISIONS:
            found[f"product {name}, {precision}"] = partial(products, name, precision)
    for name in SMALL[:1] if args.tiny else SMALL:
        found[f"cost {name}"] = partial(costs, name)
    return found | {"draws": draws}


def main(arguments: list[str] | None = None) -> None:
    parser = script_parser(__doc__, "gpu")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to test the script")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--steps", nargs="*", default=[""], help="beginnings of the names of steps")
    parser.add_argument("--minutes", type=float, default=28.0, help="after which no step begins")
    args = begin(parser, arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("No CUDA device is available. Use --device cpu --tiny to test the script.")
    origin = provenance(("torch", "torchvision"))
    if args.device == "cuda":
        origin["machine"] = torch.cuda.get_device_name()
    began = time.monotonic()
    for name, step in steps(args).items():
        late = time.monotonic() - began > 60 * args.minutes
        if late or not name.startswith(tuple(args.steps)):
            continue
        try:
            lines = step(args)
        except Exception as error:  # the other steps still run
            traceback.print_exc()
            lines = [{"failed": f"{type(error).__name__}: {error}"[:300]}]
        lines = [line | {"step": name, "part": name.split()[0]} for line in lines]
        markdown.append(args.out, lines, origin)


if __name__ == "__main__":
    main()
