"""Whether large variational fits keep to a limit of memory, and what they give up for it.

    python benchmarks/memory.py                    # all sizes divided by eight, ten minutes
    python benchmarks/memory.py --divide 1         # the sizes below; hours without a GPU

Each case is fitted in a process of its own, which may allocate so much and no more (RLIMIT_DATA,
beyond what it holds after the imports). "resnet18": all 11 million parameters of torchvision's
ResNet-18, K = 32, 2,000 images of 32 × 32, in 16 GB. "wide": the same for a perceptron with as many
parameters, which takes less time. "many examples": 100,000 parameters on 100,000
examples of ten classes, K = 16, in 8 GB. ``--divide 8`` divides parameters, examples and the limit.
Lines go to results/memory.jsonl.

Expected, divided by eight: all are variational with all samples and below the limit, "resnet18" with
a warning that it continues without stored Jacobian factors; "many examples" takes 0.5 of 1 GB.
"many examples" in full: variational with all 16 samples, a peak of 6.9 GB, 533 CPU seconds.
"resnet18" in full: all 32 samples, a peak of 15.4 GB, 5,792 CPU seconds beside other programs; with
``--examples 250``: 12.1 GB, 506 CPU seconds.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from methods import markdown
from methods.learning import descend
from methods.provenance import provenance
from torch import nn
from torchvision.models.resnet import BasicBlock

from torch_lla_em import LinearisedLaplace


class Case(NamedTuple):
    """A fit and the memory that it may take."""

    network: Callable[[float], nn.Module]
    """Maps the number by which parameters are divided to a network."""

    shape: tuple[int, ...]
    """Of one input."""

    examples: int
    num_samples: int
    gigabytes: float


def resnet18(divide: float) -> nn.Module:
    """Torchvision's ResNet-18 for ten classes, with channels divided by √``divide``."""
    widths = [round(width / divide**0.5) for width in (64, 64, 128, 256, 512)]
    layers = [nn.Conv2d(3, widths[0], 7, 2, 3, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    for number, (inputs, outputs) in enumerate(zip(widths, widths[1:])):
        stride = 1 if number == 0 else 2
        skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        layers += [BasicBlock(inputs, outputs, stride, skip), BasicBlock(outputs, outputs)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


def perceptron(divide: float, inputs: int = 32, width: int = 295) -> nn.Module:
    """Two hidden layers, 100,000 parameters, and as many as ResNet-18 for inputs of 32 × 32 images."""
    width = round(((inputs**2 + 4 * width * (inputs + width) / divide) ** 0.5 - inputs) / 2)
    hidden = nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, 10))


WIDE = partial(perceptron, inputs=3072, width=2150)


CASES = {
    "resnet18": Case(resnet18, (3, 32, 32), 2_000, 32, 16.0),
    "wide": Case(WIDE, (3, 32, 32), 2_000, 32, 16.0),
    "many examples": Case(perceptron, (32,), 100_000, 16, 8.0),
}


def measured(name: str, args: argparse.Namespace) -> dict:
    """Fit below the limit, and return how it went."""
    case, divide = CASES[name], args.divide
    torch.manual_seed(0)
    torch.set_num_threads(1)
    N, K = args.examples or round(case.examples / divide), args.num_samples or case.num_samples
    limit = (args.gigabytes or case.gigabytes / divide) * 1e9
    y = torch.arange(N) % 10
    x = torch.randn(10, *case.shape)[y] + torch.randn(N, *case.shape)
    network = case.network(divide)
    descend(network, (x, y), 2, torch.optim.Adam(network.parameters(), 1e-3), 100)
    fit = {"progress_bar": False, "em_steps": 0, "prior_precision": 1.0}
    small = case.network(64 * divide).eval()  # a first fit loads parts of torch that stay
    LinearisedLaplace(small, "classification", num_samples=2).fit(x[:40], y[:40], **fit)
    held = held_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (int(held["VmData"] + limit),) * 2)
    la, began = LinearisedLaplace(network, "classification", num_samples=K), time.process_time()
    found = {"parameters": sum(p.numel() for p in network.parameters()), "examples": N}
    found |= {"case": name, "K": K, "limit, GB": limit / 1e9, "divided by": divide}
    try:
        la.fit(x, y, progress_bar=False)
    except (MemoryError, RuntimeError) as error:
        return found | {"ended": str(error).partition("\n")[0][:200]}
    return found | {
        "curvature": "variational" if la.training_deviations is not None else "network",
        "samples": len(la.w_samples),
        "columns": la.history[-1]["columns"],
        "peak, GB": (held_bytes()["VmHWM"] - held["VmRSS"]) / 1e9,
        "seconds": time.process_time() - began,
        "certificate": la.certificate.square().mean().sqrt().item(),
        "gamma": la.effective_dim.sum().item(),
        "messages": la.messages[1:],
    }


def held_bytes() -> dict[str, float]:
    """Return what Linux says of this process's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {k: 1024 * float(fields[k].split()[0]) for k in ("VmData", "VmRSS", "VmHWM")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--divide", type=float, default=8.0)
    parser.add_argument("--num-samples", type=int, help="K, where it is not the case's")
    parser.add_argument("--examples", type=int, help="N, where it is not the case's")
    parser.add_argument("--gigabytes", type=float, help="the limit, where it is not the case's")
    parser.add_argument("--alone", action="store_true", help="run one case in this process")
    parser.add_argument("--out", type=Path, default=Path("results/memory.jsonl"))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.alone:
        print(json.dumps(measured(args.cases[0], args)))
        return
    records = []
    for name in args.cases:
        options = [f"--divide={args.divide}", "--alone", "--cases", name]
        for option in ("num_samples", "examples", "gigabytes"):
            value = getattr(args, option)
            options += [f"--{option.replace('_', '-')}={value}"] * (value is not None)
        command = [sys.executable, __file__, *options]
        # as of large vectors, memory of those divided is to go back to the system when it is freed
        own = {"MALLOC_MMAP_THRESHOLD_": str(int(2**25 / args.divide))}
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | own)
        records.append(json.loads(run.stdout.splitlines()[-1]) if run.stdout else {"case": name})
        records[-1].setdefault("ended", "killed" if run.returncode else "")
        print(records[-1], flush=True)
    markdown.append(args.out, records, provenance(("torch",)))
    shown = ("parameters", "examples", "K", "limit, GB", "curvature", "samples", "peak, GB")
    print(markdown.table(records, ("case",), (*shown, "columns", "seconds", "ended")))


if __name__ == "__main__":
    main()
