"""Plots of a fitted posterior. All functions return matplotlib's axes, and most take a loader.

Needs matplotlib: ``pip install torch_lla_em[plot]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_lla_em.data import as_loader, inputs_of
from torch_lla_em.inference import Curve
from torch_lla_em.prediction import (
    Fitted,
    PredictedData,
    Prediction,
    auroc,
    binned,
    calibration_error,
    predicted_data,
    stated_and_right,
)

Axes = Any
"""Matplotlib's axes; matplotlib is optional."""

Examples = Iterable[Any] | PredictedData
"""A loader, or what ``predicted_data`` returns for it."""

_NETWORK, _POSTERIOR = "0.6", "C0"
_DIAGONAL = {"color": "black", "linewidth": 0.8, "linestyle": ":"}
_GRID = 80
# 90 % of a normal distribution lie within so many standard deviations
_NINETY = 1.6449


def reliability(la: Fitted, loader: Examples, axes: Axes | None = None, bins: int = 10) -> Axes:
    """Plot accuracy over confidence, with the expected calibration error (ECE).

    The network's predictions are compared with the posterior's.
    """
    rows, axes = _rows(la, loader), _axes(axes)
    if not la.likelihood.gives_probabilities:
        raise TypeError(
            "reliability needs a likelihood with probabilities. For regression, use coverage."
        )
    axes.plot([0, 1], [0, 1], **_DIAGONAL)
    lowest = 1.0
    for name, colour, prediction in _both(rows):
        stated, right = stated_and_right(prediction, rows.targets)
        count, said, true = binned(stated, right, bins)
        ece, kept = calibration_error(stated, right, bins), count > 0
        x, y, share = (_array(v[kept]) for v in (said / count, true / count, count / len(stated)))
        lowest = min(lowest, x.min(), y.min())
        axes.plot(x, y, color=colour, alpha=0.6, linewidth=1)
        axes.scatter(x, y, 8 + 150 * share, color=colour, label=f"{name}: ECE {ece:.3f}")
    axes.set(xlim=(lowest - 0.05, 1.05), ylim=(lowest - 0.05, 1.05))
    return _finished(axes, "confidence", "accuracy")


def em_path(la: Fitted, axes: Axes | None = None) -> Axes:
    """Plot the prior precision at each EM step, on the curve of the log evidence if it is known."""
    path = np.array([record["prior_precision"] for record in la.history])
    chosen = _array(la.prior_precision.double())
    low, high = min(path.min(), 0.32 * chosen.min()), max(path.max(), 3.2 * chosen.max())
    try:
        return plot_curve(la.curve(torch.from_numpy(np.geomspace(low, high, _GRID))), axes)
    except ValueError:  # it is not known for several precisions, and after other solvers
        axes = _axes(axes)
    axes.plot(range(1, len(path) + 1), path, marker=".")
    axes.set_yscale("log")
    return _finished(axes, "EM step", "prior precision λ")


def bands(la: Fitted, loader: Examples, axes: Axes | None = None, output: int = 0) -> Axes:
    """Plot a regression with 90 % prediction intervals over an input of one number.

    For other inputs, targets are plotted over predictions.
    """
    rows, axes = _regression_rows(la, loader), _axes(axes)
    x, y = rows.inputs, _array(rows.targets.flatten(1)[:, output])
    if x is None or x[0].numel() != 1:
        mean, inner, outer = _intervals(rows.posterior, output)
        axes.errorbar(mean, y, xerr=outer, fmt=".", color=_POSTERIOR, alpha=0.4, label="90 %")
        line = min(mean.min(), y.min()), max(mean.max(), y.max())
        axes.plot(line, line, **_DIAGONAL)
        return _finished(axes, "prediction", "target")
    ends = x.min(), x.max()
    margin = 0.3 * (ends[1] - ends[0])
    grid = torch.linspace(ends[0] - margin, ends[1] + margin, 4 * _GRID, device="cpu").to(x)
    mean, inner, outer = _intervals(la.predict(grid.view(-1, *x.shape[1:])), output)
    places = _array(grid)
    for half, alpha, label in ((outer, 0.2, "90 % of targets"), (inner, 0.35, "90 % of means")):
        band = {"color": _POSTERIOR, "alpha": alpha, "linewidth": 0, "label": label}
        axes.fill_between(places, mean - half, mean + half, **band)
    axes.plot(places, mean, color=_POSTERIOR)
    axes.scatter(_array(x.flatten()), y, 6, color="black", label="data", zorder=3)
    return _finished(axes, "input", "target")


def confidence(la: Fitted, loader: Examples, axes: Axes | None = None) -> Axes:
    """Plot the confidence of predictions, or their standard deviation, over two inputs."""
    rows, axes = _rows(la, loader), _axes(axes)
    x, y = rows.inputs, rows.targets
    if x is None or x.dim() != 2 or x.shape[1] != 2:
        raise ValueError("confidence needs inputs of two numbers, shape (N, 2).")
    ends = torch.stack([x.amin(0), x.amax(0)])
    margin = 0.4 * (ends[1] - ends[0])
    limits = zip(ends[0] - margin, ends[1] + margin)
    sides = [torch.linspace(low, high, _GRID, device="cpu") for low, high in limits]
    grid = torch.cartesian_prod(*sides).to(x)
    prediction = la.predict(grid)
    if prediction.likelihood.gives_probabilities:
        p, label = prediction.probs, "confidence"
        values = torch.maximum(p, 1 - p)[:, 0] if p.shape[1] == 1 else p.amax(1)
    else:
        values, label = prediction.moments().variance[:, 0].sqrt(), "standard deviation"
    plane = *map(_array, sides), _array(values.view(_GRID, _GRID).T)
    shades = axes.contourf(*plane, levels=20, cmap="Blues")
    axes.figure.colorbar(shades, ax=axes, label=label)
    shown = {"c": _array(y.view(len(y), -1)[:, 0]), "cmap": "autumn", "edgecolors": "black"}
    axes.scatter(*_array(x.T), 14, linewidths=0.4, **shown)
    return _finished(axes, "first input", "second input")


def extremes(la: Fitted, loader: Examples, axes: Axes | None = None, count: int = 8) -> Axes:
    """Show the inputs with the most and the least certain predictions, as images or columns.

    Captions of wrong predictions are red.
    """
    rows, axes = _rows(la, loader), _axes(axes)
    if rows.inputs is None:
        raise ValueError("extremes needs inputs that are tensors of one shape.")
    doubt = rows.posterior.aleatoric + rows.posterior.epistemic
    order = doubt.reshape(len(rows.targets), -1).mean(1).argsort()
    chosen = order[:count].tolist(), order[-count:].flip(0).tolist()
    images, captions = _array(_images(rows.inputs)), _captions(rows)
    for low, places in zip((1.25, 0.0), chosen):
        for i, row in enumerate(places):
            extent = (i + 0.04, i + 0.96, low, low + 0.92)
            axes.imshow(images[row], extent=extent, cmap="gray_r", vmin=0, vmax=1)
            text, wrong = captions[row]
            words = {"ha": "center", "va": "top", "fontsize": 7, "color": "C3" if wrong else "0"}
            axes.text(i + 0.5, low - 0.02, text, **words)
    axes.set_yticks([1.71, 0.46], ["most certain", "least certain"])
    axes.set(xlim=(0, len(chosen[0])), ylim=(-0.3, 2.2), xticks=[], aspect="equal")
    axes.set_frame_on(False)
    axes.tick_params(length=0)
    return axes


def coverage(la: Fitted, loader: Examples, axes: Axes | None = None) -> Axes:
    """Plot the coverage of prediction intervals over their nominal level, for regression."""
    rows, axes = _regression_rows(la, loader), _axes(axes)
    levels = torch.linspace(0.02, 0.98, 49, device="cpu").tolist()
    axes.plot([0, 1], [0, 1], **_DIAGONAL)
    for name, colour, prediction in _both(rows):
        shares = []
        for level in levels:
            lower, upper = prediction.credible_interval(level)
            inside = (rows.targets >= lower) & (rows.targets <= upper)
            shares.append(inside.double().mean().item())
        name = "noise alone" if prediction is rows.network else name
        axes.plot(levels, shares, color=colour, label=name)
    return _finished(axes, "level of the interval", "coverage")


def unfamiliarity(la: Fitted, loader: Examples, other: Any, axes: Axes | None = None) -> Axes:
    """Plot the epistemic uncertainty of two data sets, and the AUROC with which it separates them.

    ``other`` needs no targets: it may be a loader, a Dataset, or inputs.
    """
    axes = _axes(axes)
    own = [loader.posterior] if isinstance(loader, PredictedData) else _predictions(la, loader)
    sets = [_epistemic(own), _epistemic(_predictions(la, other))]
    area = auroc(*map(torch.from_numpy, reversed(sets)))
    both = np.log10(np.concatenate(sets))
    edges = np.logspace(np.quantile(both, 0.002), both.max() + 1e-3, 31)
    for values, name, colour in zip(sets, ("data", "other data"), (_POSTERIOR, "C1")):
        weights = np.full(len(values), 1 / len(values))
        axes.hist(values, edges, weights=weights, color=colour, alpha=0.6, label=name)
    axes.set(xscale="log", title=f"AUROC {area:.3f}")
    return _finished(axes, "epistemic uncertainty", "share of examples")


def plot_curve(curve: Curve, axes: Axes | None = None) -> Axes:
    """Plot the effective dimension γ and the log evidence over the prior precision λ.

    Vertical lines mark λ at each EM step and the chosen λ*.
    """
    axes = _axes(axes)
    x, (evidence, error) = _array(curve.precisions), map(_array, curve.log_evidence)
    axes.plot(x, evidence, color="C0", label="log evidence")
    axes.fill_between(x, evidence - error, evidence + error, color="C0", alpha=0.25, linewidth=0)
    axes.axvline(curve.best, color="black", linestyle=":", label=f"λ* = {curve.best:.3g}")
    for i, precision in enumerate(curve.path.tolist()):
        axes.axvline(precision, color="C3", alpha=0.4, linewidth=1, label="EM" if i == 0 else None)
    axes.set(xscale="log", xlabel="prior precision λ", ylabel="log evidence")
    other = axes.twinx()
    other.plot(x, _array(curve.effective_dim.value), color="C1", label="effective dimension γ")
    other.set_ylabel("effective dimension γ")
    lines = [*axes.get_lines(), *other.get_lines()]
    axes.legend(handles=[line for line in lines if not line.get_label().startswith("_")])
    return axes


def _rows(la: Fitted, loader: Examples) -> PredictedData:
    return loader if isinstance(loader, PredictedData) else predicted_data(la, loader)


def _regression_rows(la: Fitted, loader: Examples) -> PredictedData:
    if not la.likelihood.real_valued:
        raise TypeError("Intervals need continuous targets. For probabilities, use reliability.")
    return _rows(la, loader)


def _axes(axes: Axes | None) -> Axes:
    import matplotlib.pyplot as plt

    return plt.subplots(layout="constrained")[1] if axes is None else axes


def _finished(axes: Axes, x: str, y: str) -> Axes:
    axes.set(xlabel=x, ylabel=y)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    return axes


def _both(rows: PredictedData) -> list[tuple[str, str, Prediction]]:
    return [("network", _NETWORK, rows.network), ("posterior", _POSTERIOR, rows.posterior)]


def _intervals(prediction: Prediction, output: int) -> list[np.ndarray]:
    """Return the mean of one output, and half the 90 % intervals of the mean and of y, (B,)."""
    mean, variance = prediction.moments()
    halves = (_NINETY * v.sqrt() for v in (prediction.epistemic, variance))
    return [_array(values.flatten(1)[:, output]) for values in (mean, *halves)]


def _images(x: Tensor) -> Tensor:
    """Return inputs as images with values from 0 to 1, (B, H, W) or (B, H, W, 3)."""
    if x.dim() == 4 and x.shape[1] in (1, 3):
        x = x[:, 0] if x.shape[1] == 1 else x.movedim(1, -1)
    elif x.dim() != 3:
        x = x.flatten(1)
        side = round(x.shape[1] ** 0.5)
        square = side > 3 and side**2 == x.shape[1]
        if not square:
            x = (x - x.mean(0)) / x.std(0).clamp_min(1e-12)
        x = x.view(len(x), side, side) if square else x[:, :, None]
    low, high = x.min(), x.max()
    return (x - low) / (high - low).clamp_min(1e-12)


def _captions(rows: PredictedData) -> list[tuple[str, bool]]:
    """Return the prediction for each example as text, and whether it is wrong."""
    prediction, y = rows.posterior, rows.targets
    if prediction.likelihood.real_valued:
        mean, _, outer = _intervals(prediction, 0)
        wrong = abs(_array(y.flatten(1)[:, 0]) - mean) > outer
        texts = [f"{m:.3g} ± {h:.2g}" for m, h in zip(mean, outer)]
    elif y.dim() == 1 and prediction.likelihood.gives_probabilities:
        p, best = prediction.probs.max(1)
        wrong = _array(best != y)
        texts = [f"{c}: {q:.2f}" for c, q in zip(best.tolist(), p.tolist())]
    else:
        wrong, texts = np.zeros(len(y), bool), [""] * len(y)
    return [*zip(texts, wrong.tolist())]


def _predictions(la: Fitted, data: Any) -> Iterator[Prediction]:
    """Yield the predictions for a loader's batches, or for inputs."""
    for batch in [data] if isinstance(data, Tensor) else as_loader(data):
        yield la.predict(inputs_of(batch))


def _epistemic(predictions: Iterable[Prediction]) -> np.ndarray:
    values = [p.epistemic.reshape(len(p.centre), -1).mean(1) for p in predictions]
    return _array(torch.cat(values).double().clamp_min(1e-12))


def _array(values: Tensor) -> np.ndarray:
    return values.detach().cpu().numpy()
