"""What the library does on one CUDA card, in under half an hour.

    python benchmarks/card.py                              # needs a card
    python benchmarks/card.py --tiny --device cpu          # every step at a toy's size, to try it

runs the tests marked cuda; products with G in float32, TF32 and bfloat16 with their errors, for
K = 1, 8, 32, on LeNet, ResNet-18, ResNet-50 and ViT-S with batches that fill the card; whole
fits in float32 to a certificate of 1e-3, with seconds, forward passes, and the memory they took
beside the plan that was logged; a fit where memory ends on the way. It writes results/card.json
after every step, and the page results/card.md. What fails, or comes after --minutes, is told there.
"""

import argparse
import json
import logging
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import speed
import torch
from methods import markdown
from methods.provenance import provenance
from torch import Tensor, nn
from torch.nn import functional as F

from torch_lla_em import LinearisedLaplace

ROOT = Path(__file__).parents[1]
BATCHES = {"lenet": 8192, "resnet18": 1024, "resnet50": 128, "vit_s": 128}
"""Rows of a product on a card of 80 GB; in proportion on others."""

ROWS = {"lenet": 8192, "resnet18": 1024, "resnet50": 64, "vit_s": 64}
"""Rows of a whole fit."""

MEANS = "torch.func", "eager", "tf32", "bfloat16"
Lines = list[dict]


class Said(logging.Handler):
    """Keeps what the library logs, its plan of memory among it."""

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
    asked = argparse.Namespace(
        device=args.device, batch=batch, columns=[1, 2] if args.tiny else [1, 8, 32], repeats=3
    )
    return speed.measure(asked, name, means)


def trained(name: str, args: argparse.Namespace) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network after some steps on noisy pictures, one a class, and these."""
    torch.manual_seed(0)
    make, shape, _ = speed.NETWORKS[name]
    model = make().to(args.device)
    rows = 24 if args.tiny else ROWS[name]
    y = torch.randint(10, (rows,), device=args.device)
    pictures = F.interpolate(torch.randn(10, shape[0], 5, 5, device=args.device), shape[1:])
    x = pictures[y] + torch.randn(rows, *shape, device=args.device)
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(3 if args.tiny else 40):
        part = torch.randint(rows, (min(rows, 64),), device=args.device)
        optimiser.zero_grad()
        F.cross_entropy(model(x[part]), y[part], label_smoothing=0.1).backward()
        optimiser.step()
    return model.eval(), x, y


def fit(name: str, args: argparse.Namespace, **options: object) -> Lines:
    """Return seconds, forward passes, certificate and memory of a whole fit."""
    model, x, y = trained(name, args)
    batches = list(zip(x.split(64), y.split(64)))
    once = min(
        _seconds(lambda: [_forward(model, part) for part, _ in batches], args) for _ in "123"
    )
    K = 2 if args.tiny else 8
    options = {"tolerance": 1e-3, "curvature": "network", **options}
    la = LinearisedLaplace(model, "classification", num_samples=K, **options)
    said = Said()
    logging.getLogger("torch_lla_em").addHandler(said)
    before = torch.cuda.memory_allocated() if args.device == "cuda" else 0
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        taken = _seconds(lambda: la.fit(batches, progress_bar=False), args)
    finally:
        logging.getLogger("torch_lla_em").removeHandler(said)
    peak = torch.cuda.max_memory_allocated() if args.device == "cuda" else 0
    last, gamma = la.history[-1], la.effective_dim.sum().item()
    line = {"network": name, "weights": la.w_lin.numel(), "rows": len(x), "K": K, "seconds": taken}
    line |= {"F": taken / once, "columns": last["columns"], "em_steps": len(la.history)}
    line |= {"precision": la.prior_precision.item(), "gamma": gamma}
    line["certificate"] = la.certificate.square().mean().sqrt().item() / max(gamma, 1e-9) ** 0.5
    line |= {"peak_gb": (peak - before) / 1e9, "said": said.lines}
    return [line | {"predict_seconds": _seconds(lambda: la(x[:64]), args)}]


def recovery(args: argparse.Namespace) -> Lines:
    """Fit where a third of the memory that a fit took is left; λ has to come out the same."""
    (free,) = fit("lenet", args)
    if args.device != "cuda":
        return [free | {"of": "as it is"}]
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    # the network, its data and the allocator's own grain come on top
    left = torch.cuda.memory_allocated() + free["peak_gb"] * 1e9 / 3 + 128e6
    torch.cuda.set_per_process_memory_fraction(left / total)
    try:
        (short,) = fit("lenet", args)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    short["off"] = abs(short["precision"] / free["precision"] - 1)
    return [free | {"of": "as it is"}, short | {"of": "a third of its memory"}]


def _forward(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)


def _seconds(run: Callable[[], object], args: argparse.Namespace) -> float:
    if args.device == "cuda":
        torch.cuda.synchronize()
    clock = time.perf_counter()
    run()
    if args.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - clock


def steps(args: argparse.Namespace) -> dict[str, Callable[[argparse.Namespace], Lines]]:
    """Return what is run, in order: what is cheap and tells most comes first."""
    names = ["lenet"] if args.tiny else list(speed.NETWORKS)
    found: dict[str, Callable[[argparse.Namespace], Lines]] = {}
    found |= {f"fit {name}": partial(fit, name) for name in names}
    for name in names:
        for means in MEANS[1:2] if args.tiny else MEANS:
            found[f"product {name}, {means}"] = partial(products, name, means)
    found["recovery"] = recovery
    return found if args.tiny else {"tests": tests} | found


def page(record: dict) -> str:
    """Return the page of a record."""
    found = record["steps"]

    def lines(beginning: str) -> Lines:
        return [line for name, part in found.items() if name.startswith(beginning) for line in part]

    fits = "rows", "K", "seconds", "F", "columns", "precision", "certificate", "peak_gb", "off"
    product = "forward", "product", "ratio", "peak_gb", "precision_error"
    told = [f"- {name}: {part[0]['error']}" for name, part in found.items() if "error" in part[0]]
    plans = [
        f"- {line['network']}: {said}" for line in lines("fit") for said in line.get("said", ())
    ]
    ended = [str(value) for line in lines("tests") for value in line.values()]
    parts = [f"# One card\n\n{record['machine']}; {record['versions']}; commit {record['commit']}."]
    parts += ["Tests marked cuda: " + "; ".join(ended)] if ended else []
    good = [line for line in lines("fit") if "seconds" in line]
    parts += ["## Whole fits\n", markdown.table(good, ["network"], fits), *plans]
    shown = ("network", "rows", "means", "columns")
    measured = [line for line in lines("product") if "ratio" in line]
    parts += ["## Products with G\n", markdown.table(measured, shown, product)]
    short = [line for line in lines("recovery") if "seconds" in line]
    parts += ["## Where memory ends\n", markdown.table(short, ["of"], fits)]
    parts += ["## Failed or left out\n", *told] if told else []
    return "\n\n".join(parts) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the script")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--minutes", type=float, default=28.0)
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("There is no CUDA card here; --device cpu --tiny tries the script.")
    logging.getLogger("torch_lla_em").setLevel(logging.INFO)
    args.out.mkdir(parents=True, exist_ok=True)
    record = provenance(("torch", "torchvision")) | {"steps": {}}
    if args.device == "cuda":
        record["machine"] = torch.cuda.get_device_name()
    began = time.monotonic()
    for name, step in steps(args).items():
        if time.monotonic() - began > 60 * args.minutes:
            lines = [{"error": f"left out after {args.minutes:g} minutes"}]
        else:
            try:
                lines = step(args)
            except Exception as error:  # the other steps are still to be seen
                traceback.print_exc()
                lines = [{"error": f"{type(error).__name__}: {error}"[:300]}]
        record["steps"][name] = lines
        print(name, *lines, sep="\n  ", flush=True)
        (args.out / "card.json").write_text(json.dumps(record, indent=1) + "\n")
        (args.out / "card.md").write_text(page(record))


if __name__ == "__main__":
    main()
