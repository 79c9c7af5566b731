"""Pictures of docs/benchmarks.md: bands, confidence in the plane, scores over training lengths."""

from pathlib import Path
from statistics import mean, stdev

import matplotlib.pyplot as plt
import torch

from methods.compare_page import BEST, OURS, TEMPERATURE, Groups, Tables, title, values
from methods.tasks import make_task

_PLAIN = "ours: scalar, plain prior, K=32"
_LINEAR = "ours: scalar, g-prior, H at linear mode, K=32"


def bands(groups: Groups, path: Path) -> None:
    """Draw the gap regression: two standard deviations of y."""
    task = make_task("gap", 0)
    shown = {
        "dense posterior": "dense posterior, plain prior, λ of ours",
        "ours, plain prior": _PLAIN,
        "ours, g-prior": OURS,
        "laplace-torch, last layer": "laplace-torch: last layer, full",
        "deep ensemble of 5": "deep ensemble of 5",
        "mean-field variational": "mean-field variational",
    }
    exact = _picture(groups, shown["dense posterior"])
    x = task.grid[:, 0]
    figure, axes = plt.subplots(2, 3, figsize=(12, 6), sharex=True, sharey=True)
    for axis, (label, row) in zip(axes.flat, shown.items()):
        axis.set_title(label)
        axis.plot(task.train.x, task.train.y, ".", color="0.4", markersize=3)
        drawn = _picture(groups, row)
        if drawn is not None:
            m, sd = _moments(drawn)
            axis.plot(x, m, color="C0")
            axis.fill_between(x, m - 2 * sd, m + 2 * sd, color="C0", alpha=0.25, linewidth=0)
        if exact is not None:
            m, sd = _moments(exact)
            axis.plot(x, m - 2 * sd, "k--", x, m + 2 * sd, "k--", linewidth=0.8)
        axis.set_ylim(-5, 5)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def confidence(groups: Groups, path: Path) -> None:
    """Draw the confidence of two-dimensional classifiers, far from the data too."""
    task = make_task("moons", 0)
    shown = {
        "MAP": "MAP",
        "deep ensemble of 5": "deep ensemble of 5",
        "laplace-torch, last layer": "laplace-torch: last layer, full",
        "dense posterior": "dense posterior, g-prior, λ of ours",
        "ours": OURS,
        "ours, H at linear mode": _LINEAR,
    }
    side = int(len(task.grid) ** 0.5)
    corners = [*task.grid[:, 0].aminmax(), *task.grid[:, 1].aminmax()]
    figure, axes = plt.subplots(2, 3, figsize=(11, 7), sharex=True, sharey=True)
    for axis, (label, row) in zip(axes.flat, shown.items()):
        axis.set_title(label)
        drawn = _picture(groups, row)
        if drawn is not None:
            image = torch.tensor(drawn["confidence"]).view(side, side).T
            filled = axis.imshow(image, origin="lower", extent=corners, vmin=0.5, vmax=1)
            figure.colorbar(filled, ax=axis, shrink=0.8)
        axis.scatter(*task.train.x.T, c=task.train.y, s=3, cmap="coolwarm")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def scales(tables: Tables, path: Path) -> None:
    """Draw NLL, joint NLL and AUROC on digits over training lengths."""
    at = [key for key in tables if key[0] == "digits"]
    shown = ["MAP", TEMPERATURE, OURS, _LINEAR, f"{OURS}, calibrated, mean f", BEST]
    shown.append("ours: scalar, g-prior, K=128, calibrated")
    figure, axes = plt.subplots(1, 3, figsize=(13, 5), layout="constrained")
    for axis, key in zip(axes, ("nll", "joint_dyadic", "auroc_rotated")):
        for row in shown:
            points = [(k[1], values(tables[k].get(row, []), key)) for k in at]
            points = [(epochs, v) for epochs, v in points if len(v) > 1]
            errors = [stdev(v) / len(v) ** 0.5 for _, v in points]
            axis.errorbar([e for e, _ in points], [mean(v) for _, v in points], errors, label=row)
        axis.set_xscale("log")
        axis.set_xticks([epochs for _, epochs in at], [str(epochs) for _, epochs in at])
        axis.set_xticks([], minor=True)
        if key != "auroc_rotated":
            axis.set_yscale("log")
            low, high = axis.get_ylim()
            ticks = [tick for tick in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if low <= tick <= high]
            axis.set_yticks(ticks, [str(tick) for tick in ticks])
            axis.set_yticks([], minor=True)
        axis.set_xlabel("epochs")
        axis.set_title(title(key))
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", fontsize=7, ncols=2
    )
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _moments(drawn: dict) -> tuple[torch.Tensor, torch.Tensor]:
    m, sd = (torch.tensor(drawn[key]) for key in ("mean", "sd"))
    return m, (sd**2 + drawn["sigma"] ** 2).sqrt()


def _picture(groups: Groups, row: str) -> dict | None:
    drawn = [record["picture"] for record in groups.get(row, []) if "picture" in record]
    return drawn[0] if drawn else None
