"""The figures of the home page and of docs/reading_results.md, from fits to small data sets.

    python benchmarks/gallery.py --out docs/images/gallery

takes half a minute.
"""

import argparse
import logging
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from methods.learning import descend
from sklearn.datasets import load_digits
from torch import Tensor, nn

from torch_lla_em import LinearisedLaplace, plot

Rows = tuple[Tensor, Tensor]


def main() -> None:
    plt.switch_backend("Agg")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results/gallery"))
    parser.add_argument("--tiny", action="store_true", help="train for a few steps only")
    given = parser.parse_args()
    logging.getLogger("torch_lla_em").setLevel(logging.ERROR)
    given.out.mkdir(parents=True, exist_ok=True)
    steps = 20 if given.tiny else 1500

    def save(name: str, draw: Callable, *args) -> None:
        axes = plt.subplots(figsize=(4.6, 3.4), layout="constrained")[1]
        draw(*args, axes=axes)
        axes.figure.savefig(given.out / f"{name}.png", dpi=90)
        plt.close(axes.figure)

    la, rows, other = digits(steps)
    figure = overview(*gap(steps), (la, rows[0], other))
    figure.savefig(given.out / "overview.png", dpi=110)
    plt.close(figure)
    save("reliability", plot.reliability, la, rows)
    save("out_of_distribution", plot.out_of_distribution, la, rows, other)


def overview(
    curve: LinearisedLaplace, points: Rows, digits: tuple[LinearisedLaplace, Tensor, Tensor]
) -> plt.Figure:
    """Return a regression with its intervals, and digits with their OOD flags, in one figure."""
    (la, x, other), count = digits, 6
    figure = plt.figure(figsize=(9, 2.9), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(4, 5))
    axes = plot.bands(curve, points, axes=left.subplots())
    axes.set_title("Regression: 90 % intervals", fontsize=10)
    axes.legend(loc="lower right", fontsize=7)
    right.suptitle("Classification: prediction, and OOD flag at a rate of 0.05", fontsize=10)
    for line, images in zip(right.subplots(2, count), (x, other), strict=True):
        prediction = la.predict(images[:count])
        flags, probs = prediction.is_ood(0.05), prediction.probs
        for cell, image, flag, prob in zip(line, images, flags, probs, strict=False):
            cell.imshow(image[0], cmap="gray_r")
            cell.set(xticks=[], yticks=[])
            text = f"{prob.argmax()}: {prob.max():.2f}" + ("\nOOD" if flag else "\n")
            cell.set_xlabel(text, color="C3" if flag else "black", fontsize=8)
        line[0].set_ylabel("test digits" if images is x else "rotated", fontsize=8)
    return figure


def digits(steps: int) -> tuple[LinearisedLaplace, Rows, Tensor]:
    """Return a calibrated classifier of digits, test digits, and the same rotated by 90°."""
    x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
    x = x.float().div(16).view(-1, 1, 8, 8)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    fit, held_out, test = order.tensor_split([900, 1200])
    torch.manual_seed(0)
    layers = nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)
    network = nn.Sequential(nn.Flatten(), *layers)
    network = trained(network, x[fit], y[fit], nn.functional.cross_entropy, steps)
    la = LinearisedLaplace(network, "classification").fit(x[fit], y[fit], progress_bar=False)
    la.calibrate(x[held_out], y[held_out])
    return la, (x[test], y[test]), x[test].rot90(1, (2, 3))


def gap(steps: int) -> tuple[LinearisedLaplace, Rows]:
    """Return a regression on a noisy sine wave with a gap in the data, and its data."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(120, 1, generator=generator) * 6 - 3
    x = x[(x[:, 0] < -0.5) | (x[:, 0] > 1)]
    y = (2 * x).sin() + 0.2 * torch.randn(len(x), 1, generator=generator)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
    network = trained(network, x, y, nn.functional.mse_loss, 2 * steps)
    return LinearisedLaplace(network, "regression").fit(x, y, progress_bar=False), (x, y)


def trained(network: nn.Module, x: Tensor, y: Tensor, loss: Callable, steps: int) -> nn.Module:
    optimiser = torch.optim.AdamW(network.parameters(), 5e-3, weight_decay=1e-3)
    return descend(network, (x, y), steps, optimiser, loss=loss)


if __name__ == "__main__":
    main()
