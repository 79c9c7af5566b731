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

from torch_lla_em.prediction import (
    PredictedData,
    Prediction,
    Predictor,
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
_GRID = 320
_NINETY = 1.6449  # standard deviations that contain 90 % of a normal distribution
# largest numbers of points and of error bars in a plot; more are thinned evenly
_POINTS, _BARS = 2000, 200
# number of examples from which the accuracy of a bin is shown as known
_SURE = 10


def reliability(la: Predictor, loader: Examples, axes: Axes | None = None, bins: int = 10) -> Axes:
    """Plot accuracy over confidence for the network and the posterior, with their ECE.

    Bins with fewer than ten examples are hollow circles beside the line, since their accuracy is not known.

    Args:
        la (LinearisedLaplace or LaplaceEnsemble): A fitted posterior.
        loader (DataLoader, Dataset or list of batches): Held-out data.
        axes (matplotlib Axes, optional): Where to plot. Default None: a new figure.
        bins (int): Number of bins of equal width. Default 10; fewer for small data sets.

    Raises:
        TypeError: If the likelihood has no probabilities; use ``coverage`` for regression.

    Example:
        >>> axes = plot.reliability(la, loader)
    """
    rows, axes = _rows(la, loader), _axes(axes)
    if not la.likelihood.gives_probabilities:
        raise TypeError("reliability needs probabilities. For regression, use coverage.")
    axes.plot([0, 1], [0, 1], **_DIAGONAL)
    lowest, unsure = 1.0, 0
    for name, colour, prediction in _both(rows):
        stated, right = stated_and_right(prediction, rows.targets)
        count, said, true = binned(stated, right, bins)
        ece, kept = calibration_error(stated, right, bins), count > 0
        x, y, share = (_array(v[kept]) for v in (said / count, true / count, count / len(stated)))
        lowest = min(lowest, x.min(), y.min())
        sure, sizes = _array(count[kept] >= _SURE), 8 + 150 * share
        axes.plot(x[sure], y[sure], color=colour, alpha=0.6, linewidth=1)
        axes.scatter(x[sure], y[sure], sizes[sure], color=colour, label=f"{name}: ECE {ece:.3f}")
        few = ~sure
        axes.scatter(x[few], y[few], sizes[few], facecolors="none", edgecolors=colour, alpha=0.6)
        unsure += few.sum()
    if unsure:
        words = f"hollow: fewer than {_SURE} examples"
        axes.scatter([], [], facecolors="none", edgecolors="black", label=words)
    axes.set(xlim=(lowest - 0.05, 1.05), ylim=(lowest - 0.05, 1.05))
    return _finished(axes, "confidence", "accuracy")


def em_path(la: Predictor, axes: Axes | None = None) -> Axes:
    """Plot the prior precision at each EM step, of an ensemble that of each member.

    Args:
        la (LinearisedLaplace or LaplaceEnsemble): A fitted posterior.
        axes (matplotlib Axes, optional): Where to plot. Default None: a new figure.

    Example:
        >>> axes = plot.em_path(la)
    """
    axes = _axes(axes)
    for posterior in _posterior(la)._members():
        path = [record["prior_precision"] for record in posterior.history]
        axes.plot(range(1, len(path) + 1), path, marker=".")
    axes.set_yscale("log")
    axes.xaxis.get_major_locator().set_params(integer=True)
    return _finished(axes, "EM step", "prior precision λ")


def bands(la: Predictor, loader: Examples, axes: Axes | None = None, output: int = 0) -> Axes:
    """Plot a regression with 90 % prediction intervals.

    Inputs of one number are the horizontal axis. For other inputs targets are plotted over
    predictions, in the order of the predictions and thinned to 200 error bars.

    Args:
        la (LinearisedLaplace or LaplaceEnsemble): A fitted posterior.
        loader (DataLoader, Dataset or list of batches): Held-out data.
        axes (matplotlib Axes, optional): Where to plot. Default None: a new figure.
        output (int): The output to plot. Default 0.

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
    grid = torch.linspace(ends[0] - margin, ends[1] + margin, _GRID, device="cpu").to(x)
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


def coverage(la: Predictor, loader: Examples, axes: Axes | None = None) -> Axes:
    """Plot the coverage of prediction intervals over their nominal level, for regression.

    Args:
        la (LinearisedLaplace or LaplaceEnsemble): A fitted posterior.
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


def out_of_distribution(
    la: Predictor, loader: Examples, other: Any, axes: Axes | None = None
) -> Axes:
    """Plot the epistemic uncertainty of two data sets, and the AUROC with which it separates them.

    Args:
        la (LinearisedLaplace or LaplaceEnsemble): A fitted posterior.
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


def _posterior(la: Predictor) -> Predictor:
    """Return a posterior; raise an error if it is something else."""
    if isinstance(la, Predictor):
        return la
    raise TypeError(
        f"Plots are of a LinearisedLaplace or a LaplaceEnsemble, not of a {type(la).__name__}. For a student, "
        "pass the posterior that it was distilled from."
    )


def _rows(la: Predictor, loader: Examples) -> PredictedData:
    la = _posterior(la)
    return loader if isinstance(loader, PredictedData) else predicted_data(la, loader)


def _regression_rows(la: Predictor, loader: Examples) -> PredictedData:
    if not _posterior(la).likelihood.real_valued:
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
    variances = prediction.epistemic, prediction.predictive_variance
    halves = (_NINETY * variance.sqrt() for variance in variances)
    return [_columns(values)[:, output] for values in (prediction.expectation, *halves)]


def _thinned(order: np.ndarray, most: int) -> np.ndarray:
    """Return at most so many entries of an order, evenly spaced, both ends included."""
    places = np.linspace(0, len(order) - 1, min(len(order), most)).round().astype(int)
    return np.asarray(order[places])


def _epistemic(la: Predictor, data: Any) -> np.ndarray:
    """Return the epistemic uncertainty of a loader's examples, or of inputs, (N,)."""
    if isinstance(data, PredictedData):
        predictions = iter([data.posterior])
    else:
        predictions = _posterior(la).predictions([data] if isinstance(data, Tensor) else data)
    values = [p.epistemic.reshape(len(p.centre), -1).mean(1) for p in predictions]
    return _array(torch.cat(values).double().clamp_min(1e-12))


def _columns(values: Tensor) -> np.ndarray:
    """Return values (N, ...) as columns, (N, outputs)."""
    return _array(values.reshape(len(values), -1))


def _array(values: Tensor) -> np.ndarray:
    return values.detach().cpu().numpy()
