"""Plots of a fitted posterior, by matplotlib (``pip install torch_lla_em[plot]``). They return the
axes.

``la`` is a fitted ``LinearisedLaplace`` or ``LaplaceEnsemble``. ``loader`` is a DataLoader, Dataset
or list of batches of held-out data, or the result of ``predicted_data(la, loader)``, which several
plots can share. ``axes`` are axes of matplotlib; by default a new figure is made.

    Example:
        >>> axes = plot.reliability(la, loader)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_lla_em.data import Loader
from torch_lla_em.prediction import (
    Fitted,
    Monitor,
    PredictedData,
    Prediction,
    auroc,
    binned,
    calibration_error,
    covered,
    predict,
    predicted_data,
    predictions,
    required,
    stated_and_right,
    suspicious_among,
)

Axes = Any  # matplotlib's, an optional dependency
Examples = Loader | PredictedData

_COLOURS = {"network": "0.6", "posterior": "C0"}


def reliability(la: Fitted, loader: Examples, axes: Axes | None = None, bins: int = 15) -> Axes:
    """Plot accuracy over confidence for the network and the posterior, with their ECE.

    Bins with fewer than ten examples are hollow circles that the line leaves out, since their
    accuracy is uncertain.

    Args:
        loader: Held-out data, as above.
        axes: Axes of matplotlib. Default None: those of a new figure.
        bins (int): Number of bins of equal width. Default 15, as in ``report``; fewer for small
            data sets.

    Example:
        >>> axes = plot.reliability(la, loader)
    """
    rows, axes = _rows(la, loader, real=False), _axes(axes, "confidence", "accuracy", True)
    for name, colour in _COLOURS.items():
        stated, right = stated_and_right(getattr(rows, name), rows.targets)
        count, *sums = (_array(v) for v in binned(stated, right, bins))
        x, y = (each[count > 0] / count[count > 0] for each in sums)
        sure = count[count > 0] >= 10
        label = f"{name}: ECE {calibration_error(stated, right, bins):.3f}"
        axes.plot(x[sure], y[sure], color=colour, linewidth=1, marker="o", label=label)
        axes.plot(x[~sure], y[~sure], "o", color=colour, markerfacecolor="none")
    axes.plot([], [], "o", color="0.5", markerfacecolor="none", label="under 10 examples")
    axes.legend(frameon=False)
    return axes


def bands(la: Fitted, loader: Examples, axes: Axes | None = None, output: int = 0) -> Axes:
    """Plot a regression with 90 % prediction intervals over its single input variable.

    Args:
        loader: Held-out data, as above.
        axes: Axes of matplotlib. Default None: those of a new figure.
        output (int): The output to plot. Default 0.

    Example:
        >>> axes = plot.bands(curve, [(t, t.sin())])
    """
    rows, axes = _rows(la, loader, real=True), _axes(axes, "input", "target")
    x = rows.inputs
    if x is None or x[0].numel() != 1:
        raise ValueError("bands needs inputs with a single variable. For others, use coverage.")
    margin = 0.3 * (x.max() - x.min())
    grid = torch.linspace(x.min() - margin, x.max() + margin, 320, device="cpu").to(x)
    predicted = predict(la, grid.view(-1, *x.shape[1:]))
    values = predicted.expectation, *predicted.credible_interval(0.9), rows.targets
    mean, low, high, y = (_array(v.reshape(len(v), -1)[:, output]) for v in values)
    places, at = _array(x.flatten()), _array(grid)
    some = places.argsort()[:: -(-len(y) // 500)]  # more points are thinned evenly
    axes.fill_between(at, low, high, color="C0", alpha=0.25, linewidth=0, label="90 %")
    axes.plot(at, mean, color="C0")
    ink = axes.xaxis.label.get_color()  # which suits dark styles too
    axes.scatter(places[some], y[some], 4, color=ink, label="data", zorder=3)
    axes.legend(frameon=False)
    return axes


def coverage(la: Fitted, loader: Examples, axes: Axes | None = None) -> Axes:
    """Plot the coverage of prediction intervals over their nominal level, for regression.

    Args:
        loader: Held-out data, as above.
        axes: Axes of matplotlib. Default None: those of a new figure.

    Example:
        >>> axes = plot.coverage(regression, [(regression_x, regression_y)])
    """
    rows = _rows(la, loader, real=True)
    axes = _axes(axes, "level of the interval", "coverage", True)
    levels = np.linspace(0.02, 0.98, 49).tolist()
    for name, label in {"network": "noise alone", "posterior": "posterior"}.items():
        inside = (covered(getattr(rows, name), rows.targets, level) for level in levels)
        shares = [each.double().mean().item() for each in inside]
        axes.plot(levels, shares, color=_COLOURS[name], label=label)
    axes.legend(frameon=False)
    return axes


def out_of_distribution(
    la: Fitted, loader: Examples, other: Tensor | Loader, axes: Axes | None = None
) -> Axes:
    """Plot the p-values of two data sets, and the AUROC with which they separate them, as
    ``is_ood`` does.

    Before ``calibrate``, and with groups, the epistemic uncertainty is plotted instead.

    Args:
        loader: Held-out data, as above.
        axes: Axes of matplotlib. Default None: those of a new figure.
        other (DataLoader, Dataset or inputs): Out-of-distribution (OOD) inputs, without targets.

    Example:
        >>> axes = plot.out_of_distribution(la, loader, 10 * x)
    """
    known = required(la).correction.reference
    by_rank = known is not None and known.groups is None
    axes = _axes(axes, "p-value" if by_rank else "epistemic uncertainty", "share of examples")

    def unusual(data: Tensor | Examples) -> Tensor:
        several: Iterable[Prediction]
        if isinstance(data, PredictedData):
            several = [data.posterior]
        else:
            several = predictions(la, [data] if isinstance(data, Tensor) else data)
        each = (p.p_value if by_rank else p.epistemic for p in several)
        found = torch.cat([v.detach().reshape(len(v), -1).mean(1) for v in each])
        return found.double().cpu().clamp_min(1e-12)

    sets = {"data": unusual(loader), "other data": unusual(other)}
    sign = -1 if by_rank else 1  # small p-values are unusual
    area = auroc(sign * sets["other data"], sign * sets["data"])
    both = torch.cat([*sets.values()]).log10().numpy()
    edges = np.logspace(np.quantile(both, 0.002), both.max() + 1e-3, 31)
    for name, values in sets.items():
        weights = np.full(len(values), 1 / len(values))
        axes.hist(values.numpy(), edges, weights=weights, alpha=0.6, label=name)
    axes.set(xscale="log", title=f"AUROC {area:.3f}")
    axes.legend(frameon=False)
    return axes


def suspicious(la: Fitted, loader: Examples, axes: Axes | None = None) -> Axes:
    """Plot the twelve images with the most suspicious labels, each with its given label and the
    label that the posterior would give.

    Args:
        loader: Data with labels, as above. Inputs are images (B, channels, H, W).
        axes: Axes of matplotlib. Default None: those of a new figure.

    Example:
        >>> axes = plot.suspicious(la, train_loader)  # doctest: +SKIP
    """
    rows = loader if isinstance(loader, PredictedData) else predicted_data(la, loader)
    if rows.inputs is None or rows.inputs.dim() != 4 or rows.targets.dim() != 1:
        raise ValueError(
            "This plot needs images (B, channels, H, W) of one size, with one label each."
        )
    record, axes = suspicious_among(rows), _axes(axes, "", "")
    chosen = record.order[:12]
    images = rows.inputs[chosen].double()
    images = images if images.shape[1] in (1, 3) else images.mean(1, keepdim=True)
    images = images - images.amin((1, 2, 3), keepdim=True)
    images = images / images.amax((1, 2, 3), keepdim=True).clamp_min(1e-12)
    for place, (i, image) in enumerate(zip(chosen.tolist(), images, strict=True)):
        left, top = place % 4, place // 4
        extent = left + 0.05, left + 0.95, top + 0.95, top + 0.3
        axes.imshow(_array(image.movedim(0, -1)), "gray", extent=extent, aspect="auto")
        words = f"{i}: {record.given[i]}, or {record.label[i]}?"
        axes.text(left + 0.05, top + 0.22, words, fontsize=7)
    title = "Number: given label, or that of the posterior?"
    axes.set(xlim=(0, 4), ylim=(3, 0), xticks=[], yticks=[], frame_on=False, title=title)
    return axes


def evidence(monitor: Monitor, axes: Axes | None = None) -> Axes:
    """Plot the evidence of a monitor over the number of inputs, with the threshold of its alarm.

    Args:
        monitor (Monitor): The monitor, as returned by ``la.monitor``.
        axes: Axes of matplotlib. Default None: those of a new figure.

    Example:
        >>> axes = plot.evidence(la.calibrate(x, y).monitor())
    """
    axes = _axes(axes, "inputs", "log10 of the evidence")
    seen, values = np.array(monitor.state["history"]).T
    axes.plot(seen, values / np.log(10), color="C0")
    limit = -np.log10(monitor.rate)
    axes.axhline(limit, color="0.5", linestyle=":", label=f"alarm, rate {monitor.rate:g}")
    if monitor.alarm:
        since = monitor.state["since"]
        axes.axvline(since, color="C3", linewidth=0.8, label=f"alarm since input {since:,}")
    axes.set(title="Evidence of a change")
    axes.legend(frameon=False)
    return axes


def _rows(la: Fitted, loader: Examples, real: bool) -> PredictedData:
    """Return the examples with their predictions, if their likelihood fits the plot."""
    likelihood = required(la).likelihood
    if real and not likelihood.real_valued:
        raise TypeError("Intervals need continuous targets. For probabilities, use reliability.")
    if not real and not likelihood.gives_probabilities:
        raise TypeError("reliability needs probabilities. For regression, use coverage.")
    return loader if isinstance(loader, PredictedData) else predicted_data(la, loader)


def _axes(axes: Axes | None, x: str, y: str, diagonal: bool = False) -> Axes:
    """Return the axes, or those of a new figure, with these labels."""
    import matplotlib.pyplot as plt

    axes = plt.subplots(layout="constrained")[1] if axes is None else axes
    axes.set(xlabel=x, ylabel=y)
    if diagonal:
        axes.plot([0, 1], [0, 1], color="0.5", linewidth=0.8, linestyle=":")
    return axes


def _array(values: Tensor) -> np.ndarray:
    return values.detach().cpu().numpy()
