"""How long a fit takes: three networks, 1,000 to 50,000 images of 32 × 32, and one layer to all of them.

    python benchmarks/durations.py                                     # half an hour
    python benchmarks/durations.py --networks "ResNet-18" --layers "last layer" --limit 600
    python benchmarks/durations.py --report                            # the table of results/durations.jsonl

Ten classes, 32 samples, default options, one thread, processor seconds. The networks are trained for two epochs on
1,000 images, since a fit takes longer the better the data determine the parameters. A fit runs if the middle of its
forecast (``la.plan``) is at most --limit seconds; of the others the table has the forecast, marked by ≈. Cases that
are in the file are skipped.

Expected: see docs/speed.md.
"""

import argparse
import logging
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from cost import images
from methods import markdown
from methods.measure import Meter
from methods.provenance import provenance
from methods.resume import resume
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torch_lla_em import LinearisedLaplace
from torch_lla_em.problem import Duration

EXAMPLES = 1_000, 10_000, 50_000
LAYERS = "last layer", "last block", "all layers"
BATCH, TRAINED = 100, 1_000


def convolutional(*sizes: int) -> nn.Module:
    """Return three convolutions and two linear layers."""
    layers: list[nn.Module] = []
    for inputs, outputs in zip((3, *sizes), sizes[:3]):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(
        *layers,
        nn.Flatten(),
        nn.Linear(16 * sizes[2], sizes[3]),
        nn.ReLU(),
        nn.Linear(sizes[3], 10),
    )


def resnet() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=10)


NETWORKS = {
    "CNN, 0.1 M": (partial(convolutional, 32, 64, 64, 48), ["10.*", "12.*"]),
    "CNN, 1 M": (partial(convolutional, 32, 64, 128, 450), ["10.*", "12.*"]),
    "ResNet-18, 11 M": (resnet, ["layer4.1.*", "fc.*"]),
}
"""What makes each network, and the names of its last block: two linear layers, or two convolutions and one."""


def batches(examples: int, fresh: bool) -> list[tuple[Tensor, Tensor]]:
    """Return batches of images; if they need not be ``fresh``, those of 1,000 again and again."""
    torch.manual_seed(1)
    known = images(examples if fresh else TRAINED, 3, 32)
    of_known = list(zip(*(part.split(BATCH) for part in known)))
    return of_known if fresh else of_known * (examples // TRAINED)


def trained(make: partial) -> nn.Module:
    """Return a network after two epochs of Adam."""
    torch.manual_seed(0)
    network = make()
    optimiser = torch.optim.Adam(network.parameters(), 1e-3)
    for _ in range(2):
        for x, y in batches(TRAINED, True):
            optimiser.zero_grad()
            cross_entropy(network(x), y).backward()
            optimiser.step()
    return network.eval()


def measured(network: str, layers: str, examples: int, args: argparse.Namespace) -> Iterator[dict]:
    """Yield the forecast of a fit, and its time if the forecast is below the limit."""
    make, block = NETWORKS[network]
    model = trained(make)
    parameters = {"last layer": "last_layer", "last block": block, "all layers": None}[layers]
    la = LinearisedLaplace(model, "classification", parameters=parameters)
    plan = la.plan(batches(examples, False))
    found = {"low": plan.time.low, "high": plan.time.high, "weights": plan.size}
    found |= {"parameters": sum(p.numel() for p in model.parameters())}
    if plan.time.middle > args.limit:
        yield found | {"expected GB": plan.memory.expected / 1e9}
        return
    data, clock = batches(examples, True), time.process_time()
    with Meter() as meter:
        la.fit(data, progress_bar=False)
    found |= {"seconds": time.process_time() - clock, "error": la.accuracy.error}
    yield found | {"GB": None if meter.megabytes is None else meter.megabytes / 1000}


def cell(record: dict) -> str:
    """Return the time of a fit in words, measured or forecast."""
    if "seconds" in record:
        return str(Duration(record["seconds"], record["seconds"])).removeprefix("about ")
    return f"≈ {Duration(record['low'], record['high'])}"


def summary(records: list[dict]) -> str:
    """Return a table with the layers of a network in columns."""
    lines: dict[tuple, dict] = {}
    for record in sorted(records, key=lambda r: (r["parameters"], r["examples"])):
        key = record["network"], record["examples"]
        line = lines.setdefault(key, {name: record[name] for name in ("network", "examples")})
        line[record["layers"]] = cell(record)
    titles = {name: name for name in ("network", "examples")}
    return markdown.table(lines.values(), titles, {name: name for name in LAYERS})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=LAYERS)
    parser.add_argument("--examples", nargs="+", type=int, default=EXAMPLES)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that a fit may take")
    parser.add_argument("--report", action="store_true", help="only print the table")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "durations.jsonl"
    )
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("torch_lla_em").setLevel(logging.ERROR)
    cases = [
        {"network": network, "layers": layers, "examples": examples}
        for network in args.networks
        for layers in args.layers
        for examples in args.examples
    ]
    with patch("torch_lla_em.problem.trial.perf_counter", time.process_time):
        small = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
        x, y = torch.randn(20, 2), torch.arange(20) % 2  # a first fit loads parts of torch
        LinearisedLaplace(small, "classification").fit(x, y, progress_bar=False)
        cases = [] if args.report else cases
        found = resume(args.out, cases, partial(measured, args=args), provenance(("torch",)))
    print("\n" + summary(found))


if __name__ == "__main__":
    main()
