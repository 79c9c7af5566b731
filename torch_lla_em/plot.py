"""Plots of a fitted posterior. Every function returns matplotlib's axes.

They need matplotlib: ``pip install torch_lla_em[plot]``. A loader may also be what
``torch_lla_em.prediction.predicted_data(la, loader)`` returns, which several plots can share.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_lla_em.data import as_loader, inputs_of
from torch_lla_em.prediction import (
    Fitted,
    PredictedData,
    Prediction,
    auroc,
    binned,
    calibration_error,
    covered,
    predicted_data,
    stated_and_right,
)

Axes = Any
"""Matplotlib's axes, an optional dependency."""

Examples = Iterable[Any] | PredictedData
"""A loader, or the result of ``predicted_data`` for it."""

_NETWORK, _POSTERIOR = "0.6", "C0"
_DIAGONAL = {"color": "black", "linewidth": 0.8, "linestyle": ":"}
_GRID = 80
_NINETY = 1.6449  # standard deviations that contain 90 % of a normal distribution
# largest numbers of points and of error bars in a plot; more are thinned evenly
_POINTS, _BARS = 2000, 200


def reliability(la: Fitted, loader: Examples, axes: Axes | None = None, bins: int = 10) -> Axes:
    """Plot accuracy over confidence for the network and the posterior, with their ECE.

    Args:
        la (LinearisedLaplace): A fitted posterior.
        loader (DataLoader, Dataset or list of batches): Held-out data.
        bins (int): Number of bins of equal width. Default 10; fewer for small data sets.
        axes (matplotlib Axes, optional): Where to plot. Default None: a new figure.

    Raises:
        TypeError: If the likelihood has no probabilities; use ``coverage`` for regression.

    Example:
        >>> axes = plot.reliability(la, loader)
    """
    rows, axes = _rows(la, loader), _axes(axes)
    if not la.likelihood.gives_probabilities:
        raise TypeError("reliability needs probabilities. For regression, use coverage.")
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
    """Plot the prior precision at each EM step.

    Args:
        la (LinearisedLaplace): A fitted posterior.
        axes (matplotlib Axes, optional): Where to plot. Default None: a new figure.

    Example:
        >>> axes = plot.em_path(la)
    """
    axes, path = _axes(axes), [record["prior_precision"] for record in la.history]
    axes.plot(range(1, len(path) + 1), path, marker=".")
    axes.set_yscale("log")
    axes.xaxis.get_major_locator().set_params(integer=True)
    return _finished(axes, "EM step", "prior precision λ")


def bands(la: Fitted, loader: Examples, axes: Axes | None = None, output: int = 0) -> Axes:
    """Plot a regression with 90 % prediction intervals.

    Inputs of one number are the horizontal axis. For other inputs targets are plotted over
    predictions, in the order of the predictions and thinned to 200 error bars.

    Args:
        la (LinearisedLaplace): A fitted posterior.
        loader (DataLoader, Dataset or list of batches): Held-out data.
        output (int): The output to plot. Default 0.
        axes (matplotlib Axes, optional): Where to plot. Default None: a new figure.

    Raises:
        TypeError: If the targets are not continuous.

    Example:
        >>> axes = plot.bands(regression, [(x, model(x).detach())])
    """
    rows, axes = _regression_rows(la, loader), _axes(axes)
    x, y = rows.inputs, _columns(rows.targets)[:, output]
    if x is None or x[0].numel() != 1:
        mean, _, outer = _intervals(rows.posterior, output)
        kept = _thinned(mean.argsort(), _BARS)
        label = "90 %" if len(kept) == len(y) else f"90 %, {len(kept)} of {len(y):,} examples"
        bars = {"fmt": ".", "color": _POSTERIOR, "alpha": 0.4, "label": label}
        axes.errorbar(mean[kept], y[kept], xerr=outer[kept], **bars)
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
    kept = _thinned(_array(x.flatten().argsort()), _POINTS)
    dots = {"s": 6, "alpha": 1.0} if len(kept) <= _BARS else {"s": 2, "alpha": 0.4}
    axes.scatter(_array(x.flatten())[kept], y[kept], color="black", label="data", zorder=3, **dots)
    return _finished(axes, "input", "target")


def confidence(la: Fitted, loader: Examples, axes: Axes | None = None) -> Axes:
    """Plot the confidence of predictions, or their standard deviation, over two inputs.

    Args:
        la (LinearisedLaplace): A fitted posterior.
        loader (DataLoader, Dataset or list of batches): Held-out data.
        axes (matplotlib Axes, optional): Where to plot. Default None: a new figure.

    Raises:
        ValueError: If inputs have not the shape (N, 2).

    Example:
        >>> axes = plot.confidence(la, loader)
    """
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
        p, label = prediction.probs.reshape(len(grid), -1), "confidence"
        values = torch.maximum(p, 1 - p)[:, 0] if p.shape[1] == 1 else p.amax(1)
    else:
        variance, label = prediction.predictive_variance, "standard deviation"
        values = variance.reshape(len(grid), -1)[:, 0].sqrt()
    plane = *map(_array, sides), _array(values.view(_GRID, _GRID).T)
    shades = axes.contourf(*plane, levels=20, cmap="Blues")
    axes.figure.colorbar(shades, ax=axes, label=label)
    shown = {"c": _columns(y)[:, 0], "cmap": "autumn", "edgecolors": "black"}
    axes.scatter(*_array(x.T), 14, linewidths=0.4, **shown)
    return _finished(axes, "first input", "second input")


def extremes(la: Fitted, loader: Examples, axes: Axes | None = None, count: int = 8) -> Axes:
    """Show the inputs with the most and the least certain predictions.

    Images are shown as images. Rows of a table are shown as a column of standardised features, and
    the caption names the two features that are furthest from their mean. Captions of wrong
    predictions are red.

    Args:
        la (LinearisedLaplace): A fitted posterior.
        loader (DataLoader, Dataset or list of batches): Held-out data.
        count (int): Number of inputs of each kind. Default 8.
        axes (matplotlib Axes, optional): Where to plot. Default None: a new figure.

    Raises:
        ValueError: If inputs are not tensors of one shape.

    Example:
        >>> axes = plot.extremes(la, loader, count=4)
    """
    rows, axes = _rows(la, loader), _axes(axes)
    if rows.inputs is None:
        raise ValueError("extremes needs inputs that are tensors of one shape.")
    doubt = rows.posterior.aleatoric + rows.posterior.epistemic
    order = doubt.reshape(len(rows.targets), -1).mean(1).argsort()
    chosen = order[:count].tolist(), order[-count:].flip(0).tolist()
    images = _array(_images(rows.inputs))
    captions = _captions(rows, is_table=images.shape[2] == 1)
    below = 0.15 + 0.15 * max(text.count("\n") + 1 for text, _ in captions)
    for low, places in zip((0.92 + below, 0.0), chosen):
        for i, row in enumerate(places):
            extent = (i + 0.04, i + 0.96, low, low + 0.92)
            axes.imshow(images[row], extent=extent, cmap="gray_r", vmin=0, vmax=1)
            text, wrong = captions[row]
            words = {"ha": "center", "va": "top", "fontsize": 7, "color": "C3" if wrong else "0"}
            axes.text(i + 0.5, low - 0.02, text, **words)
    axes.set_yticks([1.38 + below, 0.46], ["most certain", "least certain"])
    axes.set(xlim=(0, len(chosen[0])), ylim=(-below, 1.9 + below), xticks=[], aspect="equal")
    axes.set_frame_on(False)
    axes.tick_params(length=0)
    return axes


def coverage(la: Fitted, loader: Examples, axes: Axes | None = None) -> Axes:
    """Plot the coverage of prediction intervals over their nominal level, for regression.

    Args:
        la (LinearisedLaplace): A fitted posterior.
        loader (DataLoader, Dataset or list of batches): Held-out data.
        axes (matplotlib Axes, optional): Where to plot. Default None: a new figure.

    Raises:
        TypeError: If the targets are not continuous; use ``reliability`` for probabilities.

    Example:
        >>> axes = plot.coverage(regression, [(x, model(x).detach())])
    """
    rows, axes = _regression_rows(la, loader), _axes(axes)
    levels = torch.linspace(0.02, 0.98, 49, device="cpu").tolist()
    axes.plot([0, 1], [0, 1], **_DIAGONAL)
    for name, colour, prediction in _both(rows):
        inside = [covered(prediction, rows.targets, level) for level in levels]
        shares = [each.double().mean().item() for each in inside]
        name = "noise alone" if prediction is rows.network else name
        axes.plot(levels, shares, color=colour, label=name)
    return _finished(axes, "level of the interval", "coverage")


def out_of_distribution(la: Fitted, loader: Examples, other: Any, axes: Axes | None = None) -> Axes:
    """Plot the epistemic uncertainty of two data sets, and the AUROC with which it separates them.

    Args:
        la (LinearisedLaplace): A fitted posterior.
        loader (DataLoader, Dataset or list of batches): Held-out data.
        other (DataLoader, Dataset or inputs): Out-of-distribution (OOD) inputs, without targets.
        axes (matplotlib Axes, optional): Where to plot. Default None: a new figure.

    Example:
        >>> axes = plot.out_of_distribution(la, loader, 10 * x)
    """
    axes, sets = _axes(axes), [_epistemic(la, data) for data in (loader, other)]
    area = auroc(*map(torch.from_numpy, reversed(sets)))
    both = np.log10(np.concatenate(sets))
    edges = np.logspace(np.quantile(both, 0.002), both.max() + 1e-3, 31)
    for values, name, colour in zip(sets, ("data", "other data"), (_POSTERIOR, "C1")):
        weights = np.full(len(values), 1 / len(values))
        axes.hist(values, edges, weights=weights, color=colour, alpha=0.6, label=name)
    axes.set(xscale="log", title=f"AUROC {area:.3f}")
    return _finished(axes, "epistemic uncertainty", "share of examples")


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
    return [_columns(values)[:, output] for values in (mean, *halves)]


def _images(x: Tensor) -> Tensor:
    """Return inputs as images with values from 0 to 1, (B, H, W) or (B, H, W, 3).

    Inputs that have no shape of images and are not square are rows of a table, (B, D, 1).
    """
    side = round(x[0].numel() ** 0.5)
    if x.dim() == 4 and x.shape[1] in (1, 3):
        x = x[:, 0] if x.shape[1] == 1 else x.movedim(1, -1)
    elif x.dim() != 3 and side >= 4 and side**2 == x[0].numel():
        x = x.reshape(len(x), side, side)
    elif x.dim() != 3:
        x = _standardised(x)[:, :, None]
    return (x - x.min()) / (x.max() - x.min()).clamp_min(1e-12)


def _standardised(x: Tensor) -> Tensor:
    return ((x - x.mean(0)) / x.std(0).clamp_min(1e-12)).flatten(1)


def _captions(rows: PredictedData, is_table: bool) -> list[tuple[str, bool]]:
    """Return the prediction for each example as text, and whether it is wrong."""
    prediction, y = rows.posterior, rows.targets
    texts, wrong = [""] * len(y), [False] * len(y)
    if prediction.likelihood.real_valued:
        mean, _, outer = _intervals(prediction, 0)
        wrong = (abs(_columns(y)[:, 0] - mean) > outer).tolist()
        texts = [f"{m:.3g}\n± {h:.2g}" for m, h in zip(mean, outer)]
    elif prediction.likelihood.gives_probabilities and prediction.probs.dim() == y.dim() + 1 == 2:
        p, best = prediction.probs.max(1)
        texts = [f"{c}: {q:.2f}" for c, q in zip(best.tolist(), p.tolist())]
        wrong = (best != y).tolist()
    if is_table:
        z = _standardised(rows.inputs)
        furthest = z.abs().topk(min(2, z.shape[1]), 1).indices
        for i, features in enumerate(furthest.tolist()):
            texts[i] += "".join(f"\nx{j}: {z[i, j]:+.1f} sd" for j in features)
    return [*zip(texts, wrong)]


def _thinned(order: np.ndarray, most: int) -> np.ndarray:
    """Return at most so many entries of an order, evenly spaced, both ends included."""
    places = np.linspace(0, len(order) - 1, min(len(order), most)).round().astype(int)
    return np.asarray(order[places])


def _epistemic(la: Fitted, data: Any) -> np.ndarray:
    """Return the epistemic uncertainty of a loader's examples, or of inputs, (N,)."""
    if isinstance(data, PredictedData):
        predictions = [data.posterior]
    else:
        batches = [data] if isinstance(data, Tensor) else as_loader(data)
        predictions = [la.predict(inputs_of(batch)) for batch in batches]
    values = [p.epistemic.reshape(len(p.centre), -1).mean(1) for p in predictions]
    return _array(torch.cat(values).double().clamp_min(1e-12))


def _columns(values: Tensor) -> np.ndarray:
    """Return values (N, ...) as columns, (N, outputs)."""
    return _array(values.reshape(len(values), -1))


def _array(values: Tensor) -> np.ndarray:
    return values.detach().cpu().numpy()
