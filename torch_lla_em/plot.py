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

_COLOURS = {"network": "0.6", "posterior": "C0"}
_DIAGONAL = {"color": "black", "linewidth": 0.8, "linestyle": ":"}
_NINETY = 1.6449  # standard deviations that contain 90 % of a normal distribution
_MOST = 500  # points of a plot; more are thinned evenly
_SURE = 10  # examples from which the accuracy of a bin is shown as known


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
    for name, colour in _COLOURS.items():
        stated, right = stated_and_right(getattr(rows, name), rows.targets)
        count, confidence, true = (_array(v) for v in binned(stated, right, bins))
        label = f"{name}: ECE {calibration_error(stated, right, bins):.3f}"
        sure, few = count >= _SURE, (count > 0) & (count < _SURE)
        x, y, sizes = (
            confidence / count.clip(1),
            true / count.clip(1),
            8 + 150 * count / len(stated),
        )
        axes.plot(x[sure], y[sure], color=colour, alpha=0.6, linewidth=1)
        axes.scatter(x[sure], y[sure], sizes[sure], color=colour, label=label)
        hollow = {"facecolors": "none", "edgecolors": colour, "alpha": 0.6}
        note = name == "posterior" and few.any()
        label = f"hollow: fewer than {_SURE} examples" if note else "_"
        axes.scatter(x[few], y[few], sizes[few], label=label, **hollow)
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
    predictions, in the order of the predictions.

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
    y, x = _columns(rows.targets)[:, output], rows.inputs
    over = x is not None and x[0].numel() == 1
    predicted = rows.posterior
    if over:
        margin = 0.3 * (x.max() - x.min())
        grid = torch.linspace(x.min() - margin, x.max() + margin, 320, device="cpu").to(x)
        predicted = la.predict(grid.view(-1, *x.shape[1:]))
    mean = _columns(predicted.expectation)[:, output]
    variances = predicted.epistemic, predicted.predictive_variance
    inner, outer = (_NINETY * _columns(variance)[:, output] ** 0.5 for variance in variances)
    places = _array(x.flatten()) if over else mean
    order = np.linspace(0, len(y) - 1, min(len(y), _MOST)).round().astype(int)
    kept = places.argsort()[order]
    if not over:
        bars = {"fmt": ".", "color": "C0", "alpha": 0.4, "label": "90 %"}
        axes.errorbar(mean[kept], y[kept], xerr=outer[kept], **bars)
        line = min(mean.min(), y.min()), max(mean.max(), y.max())
        axes.plot(line, line, **_DIAGONAL)
        return _finished(axes, "prediction", "target")
    at = _array(grid)
    for half, alpha, label in ((outer, 0.2, "90 % of targets"), (inner, 0.35, "90 % of means")):
        band = {"color": "C0", "alpha": alpha, "linewidth": 0, "label": label}
        axes.fill_between(at, mean - half, mean + half, **band)
    axes.plot(at, mean, color="C0")
    axes.scatter(places[kept], y[kept], 4, color="black", label="data", zorder=3)
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
    for name, colour in _COLOURS.items():
        inside = [covered(getattr(rows, name), rows.targets, level) for level in levels]
        shares = [each.double().mean().item() for each in inside]
        label = "noise alone" if name == "network" else name
        axes.plot(levels, shares, color=colour, label=label)
    return _finished(axes, "level of the interval", "coverage")


def out_of_distribution(
    la: Predictor, loader: Examples, other: Any, axes: Axes | None = None
) -> Axes:
    """Plot the p-values of two data sets, and the AUROC with which they separate them, as ``is_ood`` does.

    Before ``calibrate``, and with groups, it is the epistemic uncertainty.

    Args:
        la (LinearisedLaplace or LaplaceEnsemble): A fitted posterior.
        loader (DataLoader, Dataset or list of batches): Held-out data.
        other (DataLoader, Dataset or inputs): Out-of-distribution (OOD) inputs, without targets.
        axes (matplotlib Axes, optional): Where to plot. Default None: a new figure.

    Example:
        >>> axes = plot.out_of_distribution(la, loader, 10 * x)
    """
    axes, (sets, by_rank) = _axes(axes), _unusual(_posterior(la), (loader, other))
    sign = -1 if by_rank else 1  # small p-values are unusual
    area = auroc(*(sign * torch.from_numpy(values) for values in reversed(sets)))
    both = np.log10(np.concatenate(sets))
    edges = np.logspace(np.quantile(both, 0.002), both.max() + 1e-3, 31)
    for values, name, colour in zip(sets, ("data", "other data"), ("C0", "C1")):
        weights = np.full(len(values), 1 / len(values))
        axes.hist(values, edges, weights=weights, color=colour, alpha=0.6, label=name)
    axes.set(xscale="log", title=f"AUROC {area:.3f}")
    return _finished(axes, "p-value" if by_rank else "epistemic uncertainty", "share of examples")


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


def _unusual(la: Predictor, sets: Iterable[Any]) -> tuple[list[np.ndarray], bool]:
    """Return the p-values of loaders' examples or of inputs, (N,), or else the epistemic uncertainty."""
    known = la._components.reference
    by_rank = known is not None and known.errors is not None and known.groups is None
    found = []
    for data in sets:
        if isinstance(data, PredictedData):
            predictions = iter([data.posterior])
        else:
            predictions = la.predictions([data] if isinstance(data, Tensor) else data)
        values = [
            p.p_value if by_rank else p.epistemic.reshape(len(p.centre), -1).mean(1)
            for p in predictions
        ]
        found.append(_array(torch.cat(values).double().clamp_min(1e-12)))
    return found, by_rank


def _columns(values: Tensor) -> np.ndarray:
    """Return values (N, ...) as columns, (N, outputs)."""
    return _array(values.reshape(len(values), -1))


def _array(values: Tensor) -> np.ndarray:
    return values.detach().cpu().numpy()
