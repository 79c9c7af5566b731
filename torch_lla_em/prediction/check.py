"""Checks on held-out examples: coverage within groups, OOD flags of shifted images, and the size of
residuals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_lla_em.data import Inputs, Loader, Values, paired
from torch_lla_em.prediction.conformal import has_classes, has_values
from torch_lla_em.prediction.passes import pushed
from torch_lla_em.prediction.posterior import Fitted, Record, required
from torch_lla_em.prediction.predict import predict, predicted
from torch_lla_em.prediction.prediction import Prediction
from torch_lla_em.prediction.printed import Cells, Printed
from torch_lla_em.prediction.reference import Stated
from torch_lla_em.prediction.residuals import ResidualSize, residual_size
from torch_lla_em.prediction.scores import auroc

_FEWEST, _CLEAR = 10, 3.0
"""Smallest number of examples of a group, and number of standard errors by which its coverage has
to be below the level to count as low; it is large because there are many groups."""

_COPIES, _AT_ONCE = 200, 50
"""Largest number of images of which shifted copies are made, and the number of images at once."""

_RATE = 0.05
"""The rate of false alarms at which copies are flagged, and the p-value up to which a regression
with one noise is said to need another likelihood. At most this share of tests has a smaller one if
neither the noise nor the network's errors depend on x."""

_BLIND, _UNFLAGGED = 0.7, 0.2
"""The AUROC, and the share of flagged copies, below which OOD flags count as missing a shift.
Normal scores with this AUROC have a share of 0.18."""

_WITHOUT_SETS = (
    "No coverage was measured: sets and intervals are for one label, or one row of values, per "
    "example. RiskControl(la, validation_loader) makes sets of classes for pixels and tokens."
)


class GroupCoverage(NamedTuple):
    """Coverage within one group of examples."""

    name: str
    number: int
    coverage: float
    size: float
    """Mean number of classes in a set, or mean width of an interval."""

    references: float = inf
    """Number of calibration examples that determine its sets or intervals."""

    def is_low(self, level: float) -> bool:
        """Whether the coverage is below the level by more than the sampling error of these and of
        the calibration examples."""
        error = sqrt(level * (1 - level) * (1 / max(1, self.number) + 1 / (2 + self.references)))
        return self.number >= _FEWEST and self.coverage < level - _CLEAR * error


@dataclass(frozen=True, repr=False)
class Check(Printed):
    """The result of ``la.check``; print it for a table and recommendations.

    Example:
        >>> print(la.check(x, y))  # doctest: +SKIP
    """

    level: float
    """The level that was requested."""

    groups: list[GroupCoverage]
    """``name``, ``number``, ``coverage`` and ``size`` of each group; the first holds all examples.
    Empty for targets without sets and intervals, such as the labels of pixels."""

    shifted: dict[str, float]
    """The AUROC with which p-values separate shifted copies of images from the images, by the name
    of the shift."""

    flagged: dict[str, float]
    """The share of these copies that ``is_ood(0.05)`` flags; empty with fewer than 19 reference
    examples."""

    prediction: Prediction
    """The prediction of the examples."""

    residuals: ResidualSize | None = None
    """Whether the size of residuals depends on the inputs; None unless the posterior is that of a
    regression with one observation noise."""

    @property
    def problems(self) -> list[str]:
        """The problems that were found and their remedies, as sentences."""
        low, lines = [group.name for group in self.groups if group.is_low(self.level)], []
        if low:
            names = f"{self.level:g} for: {', '.join(low)}"
            lines.append(f"The coverage is clearly below {names}. {self._remedy(low)}")
        blind = [
            f"{name} ({self._of_flags(name)})"
            for name, area in self.shifted.items()
            if area < _BLIND or self.flagged.get(name, 1.0) < _UNFLAGGED
        ]
        if blind:
            lines.append(
                f"OOD flags miss many shifted copies of these images: {', '.join(blind)}. Do not "
                "rely on is_ood for such shifts."
            )
        found = self.residuals
        if found is not None and found.p_value <= _RATE:
            lines.append(
                "The size of residuals depends on the inputs (permutation test, p = "
                f"{found.p_value:.3f}; correlation {found.correlation:.2f} with "
                f"{found.most}), but this likelihood has the same noise everywhere. Train a "
                "network that returns means, then log variances, with torch.nn.GaussianNLLLoss, "
                'fit it with likelihood="heteroscedastic", and keep it if its NLL on held-out '
                "data is lower: errors of a network can depend on the inputs as noise does."
            )
        return lines

    def _of_flags(self, name: str) -> str:
        """Return a text on how well the flags detect a shift."""
        share = f", {self.flagged[name]:.0%} flagged" if name in self.flagged else ""
        return f"AUROC {self.shifted[name]:.2f}{share}"

    @property
    def findings(self) -> list[str]:
        """The problems, or a sentence that there are none."""
        if self.groups:
            return self.problems or ["No group has a coverage that is clearly below the level."]
        return [_WITHOUT_SETS, *self.problems]

    def _remedy(self, low: list[str]) -> str:
        """Return a remedy for the coverage of these groups that has not been applied yet."""
        kinds, by = {name.split(" ")[0] for name in low}, self.prediction._judged("check")[0]
        own = {"all": True, "group": by.groups is not None, "class": by.classes is not None}
        if any(own.get(kind) for kind in kinds):
            return (
                "Calibrate with data from the same distribution as these, also within each group."
            )
        average = "The guarantee is an average over all inputs"
        if kinds <= {"entropy,", "predicted"}:
            return (
                f"{average}, and calibrate has none for inputs of similar uncertainty: expect this "
                "coverage."
            )
        call = "la.calibrate(validation_loader, groups=labels) and la.predict(x, groups=labels)"
        if "class" in kinds and "group" not in kinds and by.groups is None:
            call = 'la.calibrate(validation_loader, groups="classes")'
        return f"{average}. For a guarantee in each part, call {call}."

    def _table(self) -> tuple[str, Cells]:
        size = "width" if self.prediction.likelihood.real_valued else "set size"
        rows: Cells = [("examples", "count", "coverage", f"mean {size}")]
        rows = rows if self.groups else []
        for group in self.groups:
            mark = " (low)" if group.is_low(self.level) else ""
            numbers = f"{group.number:,}", f"{group.coverage:.3f}{mark}", f"{group.size:.3g}"
            rows.append((group.name, *numbers))
        for name in self.shifted:
            rows.append((name, "", f"OOD flags: {self._of_flags(name)}", ""))
        if self.residuals is not None:
            rows.append(("size of residuals", "", f"p = {self.residuals.p_value:.3f}", ""))
        title = f"Coverage at a level of {self.level:g}" if self.groups else "Held-out examples"
        return title, rows


def check(
    la: Fitted,
    loader: Inputs | Loader,
    targets: Tensor | None = None,
    level: float = 0.9,
    groups: Values | None = None,
) -> Check:
    """Return the coverage of sets or intervals within groups of held-out examples."""
    record = required(la, surely=True)
    x, data = pushed(record.members, paired(loader, targets))
    known = data.likelihood.labelled(data.y)
    if not known.any():
        raise ValueError("No example has a label, so no coverage can be measured.")
    stated = Stated.of(len(data.y), data.f.device, groups).part(known)
    data, x = data.part(known), None if x is None else x[known.to(x.device)]
    with torch.no_grad():
        prediction, shifted, flagged = predicted(record, data), {}, {}
        reference = record.correction.reference
        if reference is not None and reference.groups is not None:
            prediction = replace(prediction, _stated=stated)
        known_by, _ = prediction._judged("check")
        likelihood, f, found = prediction.likelihood, prediction._f, []
        if has_classes(likelihood, f) or has_values(likelihood, f):
            found = list(_groups(prediction, data.y, stated.groups, level))
        if x is not None and x.is_floating_point() and x.dim() == 4:
            for name, p in _shifted(record, prediction, x[:_COPIES]):
                shifted[name] = auroc(-p, -prediction.p_value).item()
                if len(known_by.unusual) >= 1 / _RATE - 1:
                    flagged[name] = (p <= _RATE).double().mean().item()
    return Check(level, found, shifted, flagged, prediction, _residuals(prediction, data.y, x))


def _residuals(prediction: Prediction, y: Tensor, x: Tensor | None) -> ResidualSize | None:
    """Test whether sizes of residuals depend on predicted means or on columns of the inputs."""
    likelihood = prediction.likelihood
    if likelihood.observation_noise is None or not has_values(likelihood, prediction._f):
        return None
    mean, variance = prediction.expectation, prediction.predictive_variance
    sizes = ((y - mean).abs() / variance.sqrt()).reshape(len(y), -1)
    means = mean.reshape(len(y), -1).T
    predicted_means = {f"the predicted mean of output {k}": m for k, m in enumerate(means)}
    if len(means) == 1:
        predicted_means = {"the predicted mean": means[0]}
    inputs = {}
    if x is not None and x.is_floating_point() and x.dim() == 2:
        inputs = {f"x[:, {k}]": column.to(mean) for k, column in enumerate(x.T)}
    return residual_size(sizes, [predicted_means, inputs])


def _groups(
    prediction: Prediction, y: Tensor, labels: Tensor | None, level: float
) -> Iterator[GroupCoverage]:
    """Yield the coverage within each group."""
    reference, is_real = prediction._judged("check")[0], prediction.likelihood.real_valued
    if is_real:
        lower, upper = prediction.interval(level)
        values = (lower <= y) & (y <= upper), upper - lower, prediction.aleatoric
    else:
        sets = prediction.prediction_set(level)
        values = sets.gather(1, y.long()[:, None]), sets.sum(1), prediction.entropy
    inside, size, noise, mean = (
        v.double().reshape(len(y), -1).mean(1) for v in (*values, prediction.expectation)
    )
    rows: dict[str, tuple[Any, Any]] = {"all": (slice(None), slice(None))}
    kinds = ("group", labels, reference.groups), ("class", y, reference.classes)
    for kind, given, known in kinds[: 1 if is_real else 2]:
        for label in [] if given is None else given.unique().tolist():
            own = slice(None) if known is None else known == label
            rows[f"{kind} {int(label)}"] = given == label, own
    columns = {"predicted mean": mean, "predicted noise": noise} if is_real else {"entropy": noise}
    for name, values_of in columns.items():
        parts = values_of.argsort(stable=True).tensor_split(4)
        if values_of.min() < values_of.max():
            for part, some in zip(("lowest", "second", "third", "highest"), parts, strict=True):
                rows[f"{name}, {part} quarter"] = some, slice(None)
    every = torch.ones_like(inside[:1]).expand(len(reference.unusual))
    every = every if reference.weights is None else reference.weights.double()
    for name, (some, own) in rows.items():
        references = every[own].sum() ** 2 / every[own].square().sum().clamp_min(1e-30)
        coverage, width = inside[some].mean().item(), size[some].mean().item()
        yield GroupCoverage(name, len(inside[some]), coverage, width, references.item())


def _shifted(record: Record, prediction: Prediction, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield p-values of shifted copies of images (B, channels, H, W), after the name of the
    shift."""
    generator = torch.Generator("cpu").manual_seed(0)
    noise = torch.randn(x.shape, generator=generator, device="cpu").to(x)
    turns, width = 1 if x.shape[2] == x.shape[3] else 2, 2 * (min(x.shape[2:]) // 8) + 1
    darkest = x.amin((0, 2, 3), keepdim=True)
    copies = {
        "blank image": darkest.expand_as(x),
        "faint contrast": darkest + 0.1 * (x - darkest),
        f"rotation by {90 * turns}°": x.rot90(turns, (2, 3)),
        "blur": F.avg_pool2d(x, width, 1, width // 2, count_include_pad=False),
        "noise": x + x.std(correction=0) * noise,
        "inverted values": x.amin((2, 3), keepdim=True) + x.amax((2, 3), keepdim=True) - x,
    }
    for name, other in copies.items():
        if not torch.equal(other, x):  # such as a blur of small images
            parts = torch.arange(len(x), device=x.device).split(_AT_ONCE)
            stated = (prediction._stated.part(rows).groups for rows in parts)
            each = [
                predict(record, other[i], groups=g).p_value
                for i, g in zip(parts, stated, strict=True)
            ]
            yield name, torch.cat(each)
