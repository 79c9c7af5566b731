"""Time and memory of a K-column product with G, against (1 + 4 K) forward passes.

    python benchmarks/speed.py                             # LeNet and ResNet-18, on the CPU
    python benchmarks/speed.py --networks resnet50 vit_s --batch 4 --columns 1 8
    python benchmarks/speed.py --device cuda --means eager tf32 bfloat16 channels_last compiled
    python benchmarks/speed.py --report                    # docs/speed.md from the results

takes some minutes for the first. J w of one column costs what two forward passes do, Jᵀ u
as much again, and one forward pass serves all columns: hence 1 + 4 K. The forward pass is
the network's own in eval mode without gradients, in the same precision and layout as the
product, and both are timed in turns in one process. Every network and means gets a process
of its own, so that its peak memory is its own. Expect ratios of 1.0 to 1.25 for residual
networks and transformers on the CPU, and below 1 where elementwise functions take the time.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from methods.large_networks import resnet18, resnet50, vit_s
from methods.plain_pass import plain_product
from methods.provenance import provenance, source
from torch import Tensor, nn

from torch_lla_em import Compute, LinearisedLaplace
from torch_lla_em.data.loader import Data
from torch_lla_em.likelihoods import Classification
from torch_lla_em.problem.problem import Problem

HERE = Path(__file__).parent
MEANS = {
    "torch.func": None,  # alone, as a measure of what ours adds or saves
    "eager": Compute(),
    "tf32": Compute(precision="tf32"),
    "bfloat16": Compute(precision="bfloat16"),
    "channels_last": Compute(),
}


# any such setting keeps ours away, and this one changes nothing for few threads
_ENVIRONMENT = {"ordinary_heap": {"MALLOC_ARENA_MAX": "64"}}


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


def measure(args: argparse.Namespace, name: str, means: str) -> dict:
    """Return times and memory of one network by one means, for every number of columns."""
    torch.manual_seed(0)
    make, shape, rows = NETWORKS[name]
    device = torch.device(args.device)
    model, x = make().eval().to(device), torch.randn(args.batch or rows, *shape, device=device)
    if means == "channels_last":
        model = model.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    f = model(x)
    y = torch.randint(0, f.shape[-1], (len(x),), device=device)
    record = {"network": name, "means": means, "rows": len(x), "columns": {}}
    for count in args.columns:
        la = LinearisedLaplace(model, "classification")
        problem = Problem(la._linear_model, Classification(), Data([(x, y)], device))
        problem.prepare(count, MEANS[means] or Compute())
        names = problem.linear_model.layout.names
        product = problem.ggn_product if MEANS[means] else plain_product(model, names, x)
        w = torch.randn(count, problem.size, device=device)
        forward = lambda: _forward(la._linear_model.network, model, x)  # noqa: E731
        product(w)  # what is probed or cached happens here
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds = _least([forward, lambda: product(w)], args.repeats, device)
        record["columns"][str(count)] = {
            "forward": seconds[0],
            "product": seconds[1],
            "ratio": seconds[1] / ((1 + 4 * count) * seconds[0]),
            "peak_bytes": _peak(device),
            "at_once": problem.linear_model.path.jvp_columns or count,
        }
    record["weights"] = problem.size
    record["precision_error"] = problem.linear_model.precision_error
    return record


def _forward(network: object, model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad(), network.computing(network.precision):
        return model(x)


def _least(runs: list[Callable[[], object]], repeats: int, device: torch.device) -> list[float]:
    """Return the least time of each, taken in turns."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, taken in zip(runs, times):
            _wait(device)
            began = time.perf_counter()
            run()
            _wait(device)
            taken.append(time.perf_counter() - began)
    return [min(taken) for taken in times]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def alone(args: argparse.Namespace, name: str, means: str) -> dict:
    """Measure in a process of its own; a failure is a result too."""
    command = [sys.executable, __file__, "--networks", name, "--means", means, "--child"]
    command += ["--device", args.device, "--repeats", str(args.repeats)]
    command += ["--threads", str(args.threads), "--columns", *map(str, args.columns)]
    command += ["--batch", str(args.batch)] if args.batch else []
    environment = os.environ | _ENVIRONMENT.get(means, {})
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    if ended.returncode == 0:
        return json.loads(ended.stdout.splitlines()[-1])
    last = (ended.stderr.strip() or f"exit {ended.returncode}").splitlines()[-1]
    return {"network": name, "means": means, "error": last[:200]}


def report(out: Path, page: Path) -> None:
    """Write the page from all results."""
    from methods import passes_page  # and matplotlib, which no measurement is to hold

    files = sorted(out.glob("speed*.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    text = [f"# Speed\n\n{__doc__.splitlines()[0]}", "", _INTRODUCTION, ""]
    machines: dict[str, list[dict]] = {}
    for run in lines:
        machines.setdefault(run["machine"] if run["device"] == "cpu" else run["card"], []).append(
            run
        )
    for where, runs in machines.items():
        text += [f"## {where}", "", _HEAD, "|" + "---|" * _HEAD.count(" | ") + "---|"]
        text += [row for run in runs for record in run["records"] for row in _rows(record)]
        text += ["", _above_aim(runs)]
        for run in runs:
            text += ["", source(run | {"commands": [run["command"]], "commits": [run["commit"]]})]
        text.append("")
    raced = [record for record in passes_page.load(out) if record["traces"]]
    if raced:
        text += [
            "## Solvers to the same error",
            "",
            _SOLVERS,
            "",
            passes_page.reaching(raced, 0.03),
            "",
        ]
    page.write_text("\n".join(text))


_INTRODUCTION = """\
Generated by `python benchmarks/speed.py --report` from `benchmarks/results/speed*.jsonl`.
The ratio is the time of one K-column product with G over that of 1 + 4 K forward passes of
the same network, in the same run: J w and Jᵀ u cost two forward passes each a column, and one
forward pass serves all. K = 1 takes J w and Jᵀ u from one forward pass. Peak memory is that of
the whole process on a CPU and of the allocator on CUDA. The means "torch.func" are one vmapped
jvp and one vmapped vjp with nothing of ours, and "ordinary heap" is ours where the C library's
heap is left as it is (see [long runs](long_runs.md)); all others keep it during a product. The
forward pass of vit_s takes torch's fused attention, which has no derivative."""

_SOLVERS = """\
Passes over the data (seconds) until the functions J w_k are known to 3 %, by
`benchmarks/passes.py`; [passes](passes.md) says more."""

_HEAD = "| network | P | rows | means | K | forward, s | product, s | ratio | peak, GB |"


_AIM = 1.2


def _above_aim(runs: list[dict]) -> str:
    """Say which networks take longer by eager means than they should."""
    eager = [r for run in runs for r in run["records"] if r["means"] == "eager" and "columns" in r]
    above = [
        f"{record['network']} with {record['rows']} rows, K = {count} ({took['ratio']:.2f})"
        for record in eager
        for count, took in record["columns"].items()
        if round(took["ratio"], 2) > _AIM
    ]
    return f"The aim is a ratio of {_AIM}. Above it, by eager means: {'; '.join(above) or 'none'}."


def _rows(record: dict) -> list[str]:
    means = record["means"].replace("_", " ")
    if "error" in record:
        return [f"| {record['network']} | | | {means} | failed: {record['error']} | | | | |"]
    if record["precision_error"]:
        means += f" (J w off by {record['precision_error']:.1e})"
    if not record.get("kept", True):
        means += " (left: eager was faster)"
    return [
        f"| {record['network']} | {record['weights']:,} | {record['rows']} | {means} | {count} | "
        f"{took['forward']:.4f} | {took['product']:.3f} | {took['ratio']:.2f} | "
        f"{took['peak_bytes'] / 1e9:.2f} |"
        for count, took in record["columns"].items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=["lenet", "resnet18"])
    parser.add_argument("--means", nargs="+", choices=MEANS, default=["eager"])
    parser.add_argument("--columns", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--batch", type=int)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--name", default="speed", help="of the results' file")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.child:
        print(json.dumps(measure(args, args.networks[0], args.means[0])))
        return
    if not args.report:
        run = {"device": args.device, "records": [], **provenance(("torch", "torchvision"))}
        if args.device != "cpu":
            run["card"] = torch.cuda.get_device_name()
        args.out.mkdir(parents=True, exist_ok=True)
        for name in args.networks:
            for means in args.means:
                run["records"].append(alone(args, name, means))
                print("\n".join(_rows(run["records"][-1])), flush=True)
                (args.out / f"{args.name}.jsonl").write_text(json.dumps(run) + "\n")
    if args.out == HERE / "results":
        report(args.out, HERE.parent / "docs" / "speed.md")


if __name__ == "__main__":
    main()
