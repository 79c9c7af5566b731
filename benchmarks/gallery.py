"""The pictures of docs/gallery.md: python benchmarks/gallery.py --out docs/images/gallery."""

import argparse
import logging
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from methods.learning import descend
from sklearn.datasets import load_diabetes, load_digits, make_moons
from torch import Tensor, nn

from torch_lla_em import LinearisedLaplace, plot

Rows = tuple[Tensor, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/gallery"))
    parser.add_argument("--tiny", action="store_true", help="few steps, to see that it runs")
    given = parser.parse_args()
    logging.getLogger("torch_lla_em").setLevel(logging.ERROR)
    given.out.mkdir(parents=True, exist_ok=True)
    steps = 20 if given.tiny else 1500

    def keep(name: str, draw: Callable, *args, size: tuple[float, float] = (4.6, 3.4)) -> None:
        axes = plt.subplots(figsize=size, layout="constrained")[1]
        draw(*args, axes=axes)
        axes.figure.savefig(given.out / f"{name}.png", dpi=90)
        plt.close(axes.figure)
        print(given.out / f"{name}.png")

    la, rows, other = digits(steps)
    keep("reliability", plot.reliability, la, rows)
    keep("extremes", plot.extremes, la, rows, size=(6.4, 2.2))
    keep("unfamiliarity", plot.unfamiliarity, la, rows, other)
    la, rows = moons(steps)
    keep("confidence", plot.confidence, la, rows)
    la, rows = gap(steps)
    keep("bands", plot.bands, la, rows)
    keep("em_path", plot.em_path, la)
    la, rows = diabetes(steps)
    keep("predicted", plot.bands, la, rows)
    keep("coverage", plot.coverage, la, rows)


def digits(steps: int) -> tuple[LinearisedLaplace, Rows, Tensor]:
    """Digits calibrated by held-out rows; the test rows, and the same turned by 90°."""
    x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
    x = x.float().div(16).view(-1, 1, 8, 8)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    fit, held_out, test = (
        order[rows] for rows in (slice(900), slice(900, 1200), slice(1200, None))
    )
    network = trained(perceptron(64, 64, 10), x[fit], y[fit], nn.functional.cross_entropy, steps)
    la = LinearisedLaplace(network, "classification").fit(x[fit], y[fit], progress_bar=False)
    la.calibrate(x[held_out], y[held_out])
    return la, (x[test], y[test]), x[test].rot90(1, (2, 3))


def moons(steps: int) -> tuple[LinearisedLaplace, Rows]:
    """Two moons."""
    x, y = make_moons(200, noise=0.15, random_state=0)
    x, y = torch.tensor(x).float(), torch.tensor(y)
    network = trained(perceptron(2, 32, 2), x, y, nn.functional.cross_entropy, steps, 1e-2)
    return LinearisedLaplace(network, "classification").fit(x, y, progress_bar=False), (x, y)


def gap(steps: int) -> tuple[LinearisedLaplace, Rows]:
    """A wave with noise and a gap."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(120, 1, generator=generator) * 6 - 3
    x = x[(x[:, 0] < -0.5) | (x[:, 0] > 1)]
    y = (2 * x).sin() + 0.2 * torch.randn(len(x), 1, generator=generator)
    network = trained(perceptron(1, 50, 1), x, y, nn.functional.mse_loss, steps)
    return LinearisedLaplace(network, "regression").fit(x, y, progress_bar=False), (x, y)


def diabetes(steps: int) -> tuple[LinearisedLaplace, Rows]:
    """The progress of diabetes in a year, by ten measurements; rows that were not trained on."""
    x, y = (torch.tensor(part).float() for part in load_diabetes(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = 20 * x[order], (y[order, None] - y.mean()) / y.std()
    fit, held_out, test = slice(250), slice(250, 330), slice(330, None)
    network = trained(perceptron(10, 20, 1), x[fit], y[fit], nn.functional.mse_loss, steps // 15)
    la = LinearisedLaplace(network, "regression").fit(x[fit], y[fit], progress_bar=False)
    la.calibrate(x[held_out], y[held_out])
    return la, (x[test], y[test])


def perceptron(inputs: int, hidden: int, outputs: int) -> nn.Module:
    """Two hidden layers."""
    torch.manual_seed(0)
    layers = nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh()
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(hidden, outputs))


def trained(
    network: nn.Module, x: Tensor, y: Tensor, loss: Callable, steps: int, decay: float = 1e-3
) -> nn.Module:
    """Train on all rows at once."""
    optimiser = torch.optim.AdamW(network.parameters(), 5e-3, weight_decay=decay)
    return descend(network, (x, y), steps, optimiser, loss=loss)


if __name__ == "__main__":
    main()
