"""Measures the library on one CUDA GPU, in less than half an hour.

    python benchmarks/gpu.py                              # needs a GPU
    python benchmarks/gpu.py --steps "fit resnet18" cost  # those whose names begin so
    python benchmarks/gpu.py --tiny --device cpu          # every step at a tiny size, as a test

runs the tests marked cuda; whole fits of LeNet, ResNet-18, ResNet-50 and ViT-S in float32 to an
error of 1e-3, with the memory used beside the logged plan; products with G (speed.py) in float32,
TF32 and bfloat16 with their errors, for K = 1, 8, 32, with batches that fill the GPU and with small
ones; a fit that runs out of memory on the way; the forward pass with torch.compile; and the cost of
fits of small networks (cost.py). Every step adds its lines to results/gpu.jsonl; one that failed says
so there. ``report.py results/gpu.jsonl`` writes the tables of docs/gpu.md.
"""

import argparse
import logging
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import cost
import speed
import torch
from methods import markdown
from methods.provenance import provenance

ROOT = Path(__file__).parents[1]
BATCHES = {"lenet": 8192, "resnet18": 1024, "resnet50": 128, "vit_s": 128}
"""Batch size of a product on a GPU with 80 GB; in proportion on others."""

ROWS = {"lenet": 8192, "resnet18": 2000, "resnet50": 64, "vit_s": 64}
"""Examples of a whole fit."""

MEANS = "torch.func", "eager", "tf32", "bfloat16"
SMALL = "mlp", "cnn", "bert", "last layer, 50000 x 512 x 10"
Lines = list[dict]


class Said(logging.Handler):
    """Stores the log messages of the library, such as its memory plan."""

    def __init__(self):
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def tests(args: argparse.Namespace) -> Lines:
    """Run the tests marked cuda, and return how they ended."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, "tests"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    failed = [line for line in ended.stdout.splitlines() if line.startswith("FAILED")]
    return [{"ended": ended.stdout.strip().splitlines()[-1:], "rc": ended.returncode}] + [
        {"failed": line} for line in failed
    ]


def products(name: str, means: str, args: argparse.Namespace) -> Lines:
    """Return time, memory and error of products with G for every K."""
    share = torch.cuda.mem_get_info()[1] / 80e9 if args.device == "cuda" else 1.0
    batch = 4 if args.tiny else max(1, int(BATCHES[name] * share))
    columns = [1, 2] if args.tiny else [1, 8, 32]
    return speed.measure(_asked(args, batch, columns, 3), name, means)


def launches(name: str, args: argparse.Namespace) -> Lines:
    """Return what a small batch takes."""
    asked = _asked(args, 4 if args.tiny else 32, [1], 8)
    return speed.measure(asked, name, "eager")


def _asked(
    args: argparse.Namespace, batch: int, columns: list[int], repeats: int
) -> argparse.Namespace:
    return argparse.Namespace(device=args.device, batch=batch, columns=columns, repeats=repeats)


def trained(name: str, args: argparse.Namespace) -> tuple[cost.Problem, float]:
    """Return a trained network with its data, and the seconds of an epoch."""
    torch.manual_seed(0)
    make, (channels, size, _), _ = speed.NETWORKS[name]
    rows = 24 if args.tiny else ROWS[name]
    x, y = cost.images(rows, channels, size)
    options = {"tolerance": 1e-3, "curvature": "network"}
    problem = cost.Problem(make(), x, y, 1 + 4000 * (not args.tiny) // rows, options)
    problem = problem.on(args.device)
    return problem, cost.train(problem)


def fit(name: str, args: argparse.Namespace) -> Lines:
    """Return what a whole fit costs, to a certificate of 1e-3, and what its plan said."""
    return fit_of(name, args, *trained(name, args))


def fit_of(name: str, args: argparse.Namespace, problem: cost.Problem, epoch: float) -> Lines:
    said = Said()
    logger = logging.getLogger("torch_lla_em")
    logger.addHandler(said)
    try:
        line = cost.line(problem, epoch, 2 if args.tiny else 8, 64)
    finally:
        logger.removeHandler(said)
    return [{"network": name, "means": "eager"} | line | {"said": said.lines}]


def compiled(name: str, args: argparse.Namespace) -> Lines:
    """Return what torch.compile gives to the forward pass; products have no use for it."""
    torch.manual_seed(0)
    make, shape, _ = speed.NETWORKS[name]
    x = torch.randn(4 if args.tiny else 32, *shape, device=args.device)
    model = make().eval().to(args.device)
    faster = torch.compile(model, backend="eager" if args.tiny else "inductor")
    with torch.no_grad():
        error = ((faster(x) - model(x)).norm() / model(x).norm()).item()
        seconds = [cost.seconds(lambda run=run: run(x), 5) for run in (model, faster)]
    line = {"network": name, "rows": len(x), "forward": seconds[0], "compiled": seconds[1]}
    return [line | {"difference": error}]


def recovery(args: argparse.Namespace) -> Lines:
    """Fit where a third of the memory that a fit took is left; λ has to come out the same."""
    of = "lenet", args, *trained("lenet", args)
    (free,) = fit_of(*of)
    if args.device != "cuda":
        return [free | {"of": "as it is"}]
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    # the network, its data and the allocator's own grain come on top
    left = torch.cuda.memory_allocated() + free["peak_gb"] * 1e9 / 3 + 128e6
    torch.cuda.set_per_process_memory_fraction(left / total)
    try:
        (short,) = fit_of(*of)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    short["off"] = abs(short["precision"] / free["precision"] - 1)
    return [free | {"of": "as it is"}, short | {"of": "a third of its memory"}]


def costs(name: str, args: argparse.Namespace) -> Lines:
    """Return what fits of a small network cost, in training epochs and forward passes."""
    K = 2 if args.tiny else 16
    return [*cost.fits(argparse.Namespace(problems=[name], num_samples=K, device=args.device))]


def steps(args: argparse.Namespace) -> dict[str, Callable[[argparse.Namespace], Lines]]:
    """Return what is run, in order: what is cheap and tells most comes first."""
    names = ["lenet"] if args.tiny else list(speed.NETWORKS)
    found: dict[str, Callable[[argparse.Namespace], Lines]] = {}
    found |= {f"fit {name}": partial(fit, name) for name in names}
    for name in names:
        for means in MEANS[1:2] if args.tiny else MEANS:
            found[f"product {name}, {means}"] = partial(products, name, means)
    found["recovery"] = recovery
    for name in names:
        found[f"launches {name}"] = partial(launches, name)
        found[f"compile {name}"] = partial(compiled, name)
    for name in SMALL[:1] if args.tiny else SMALL:
        found[f"cost {name}"] = partial(costs, name)
    return found if args.tiny else {"tests": tests} | found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to test the script")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--steps", nargs="*", default=[""], help="beginnings of the names of steps")
    parser.add_argument("--minutes", type=float, default=28.0, help="after which no step begins")
    parser.add_argument("--out", type=Path, default=Path("results/gpu.jsonl"))
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("No CUDA device is available. Use --device cpu --tiny to test the script.")
    logging.getLogger("torch_lla_em").setLevel(logging.INFO)
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
        print(*lines, sep="\n", flush=True)


if __name__ == "__main__":
    main()
