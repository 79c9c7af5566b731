"""Time and memory of a K-column product with G, against (1 + 4 K) forward passes.

    python benchmarks/speed.py                             # LeNet and ResNet-18, on the CPU
    python benchmarks/speed.py --networks resnet50 vit_s --batch 4 --columns 1 8
    python benchmarks/speed.py --device cuda --means eager tf32 bfloat16 channels_last

takes some minutes for the first. J w of one column costs what two forward passes do, Jᵀ u
as much again, and one forward pass serves all columns: hence 1 + 4 K. The forward pass is
the network's own in eval mode without gradients, in the same precision and layout as the
product, and both are timed in turns in one process. Every network and means gets a process
of its own, so that its peak memory is its own. Expect ratios of 1.0 to 1.25 for residual
networks and transformers on the CPU, and below 1 where elementwise functions take the time.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from methods import markdown
from methods.networks import resnet18, resnet50, vit_s
from methods.plain_pass import plain_product
from methods.provenance import provenance
from torch import Tensor, nn

from torch_lla_em import Compute, LinearisedLaplace
from torch_lla_em.data.loader import Data
from torch_lla_em.likelihoods import Classification
from torch_lla_em.problem import prepare
from torch_lla_em.problem.problem import Problem

MEANS = {
    "torch.func": None,  # alone, as a measure of what ours adds or saves
    "eager": Compute(),
    "tf32": Compute(precision="tf32"),
    "bfloat16": Compute(precision="bfloat16"),
    "channels_last": Compute(),
}


def lenet() -> nn.Module:
    convolutions = [nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2)]
    convolutions += [nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten()]
    head = [nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10)]
    return nn.Sequential(*convolutions, *head)


NETWORKS = {
    "lenet": (lenet, (1, 28, 28), 256),
    "resnet18": (resnet18, (3, 32, 32), 16),
    "resnet50": (resnet50, (3, 224, 224), 4),
    "vit_s": (vit_s, (3, 224, 224), 4),
}
"""The network, the shape of its input, and how many rows a batch has on a CPU."""


def measure(args: argparse.Namespace, name: str, means: str) -> list[dict]:
    """Return times and memory of one network by one means, a line for every number of columns."""
    torch.manual_seed(0)
    make, shape, rows = NETWORKS[name]
    device = torch.device(args.device)
    model, x = make().eval().to(device), torch.randn(args.batch or rows, *shape, device=device)
    if means == "channels_last":
        model = model.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    f = model(x)
    y = torch.randint(0, f.shape[-1], (len(x),), device=device)
    lines = []
    for count in args.columns:
        la = LinearisedLaplace(model, "classification")
        problem = Problem(la._linear_model, Classification(), Data([(x, y)], device))
        prepare(problem, count, MEANS[means] or Compute())
        names = problem.linear_model.layout.names
        product = problem.ggn_product if MEANS[means] else plain_product(model, names, x)
        w = torch.randn(count, problem.size, device=device)
        forward = lambda: _forward(la._linear_model.network, model, x)  # noqa: E731
        product(w)  # what is probed or cached happens here
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds = _least([forward, lambda: product(w)], args.repeats, device)
        line = {"network": name, "weights": problem.size, "rows": len(x), "means": means}
        line |= {"columns": count, "forward": seconds[0], "product": seconds[1]}
        line["ratio"] = seconds[1] / ((1 + 4 * count) * seconds[0])
        line["peak_gb"] = _peak(device) / 1e9
        lines.append(line | {"precision_error": problem.linear_model.precision_error})
    return lines


def _forward(network: object, model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad(), network.computing(network.precision):
        return model(x)


def _least(runs: list[Callable[[], object]], repeats: int, device: torch.device) -> list[float]:
    """Return the least time of each, taken in turns; on a CPU, of one thread, processor time."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, taken in zip(runs, times):
            _wait(device)
            began = clock()
            run()
            _wait(device)
            taken.append(clock() - began)
    return [min(taken) for taken in times]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def alone(args: argparse.Namespace, name: str, means: str) -> list[dict]:
    """Measure in a process of its own; a failure is a result too."""
    command = [sys.executable, __file__, "--networks", name, "--means", means, "--child"]
    command += ["--device", args.device, "--repeats", str(args.repeats)]
    command += ["--threads", str(args.threads), "--columns", *map(str, args.columns)]
    command += ["--batch", str(args.batch)] if args.batch else []
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode == 0:
        return json.loads(ended.stdout.splitlines()[-1])
    last = (ended.stderr.strip() or f"exit {ended.returncode}").splitlines()[-1]
    return [{"network": name, "means": means, "error": last[:200]}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=["lenet", "resnet18"])
    parser.add_argument("--means", nargs="+", choices=MEANS, default=["eager"])
    parser.add_argument("--columns", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--batch", type=int)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.child:
        print(json.dumps(measure(args, args.networks[0], args.means[0])))
        return
    origin = provenance(("torch", "torchvision"))
    origin |= {"machine": torch.cuda.get_device_name()} if args.device != "cpu" else {}
    lines = []
    for name in args.networks:
        for means in args.means:
            found = alone(args, name, means)
            lines += found
            markdown.append(args.out / "speed.jsonl", found, origin)
    keys = ("forward", "product", "ratio", "peak_gb", "error")
    print(markdown.table(lines, ("network", "rows", "means", "columns"), keys))


if __name__ == "__main__":
    main()
