"""Checks on held-out examples: coverage of sets and intervals within groups, and OOD flags of shifted images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_lla_em.data import paired
from torch_lla_em.prediction.metrics import auroc
from torch_lla_em.prediction.passes import under_all
from torch_lla_em.prediction.posterior import required
from torch_lla_em.prediction.prediction import Prediction
from torch_lla_em.prediction.predictor import predict, predicted
from torch_lla_em.prediction.reference import Reference, Stated
from torch_lla_em.prediction.summary import Cells, Printed

_QUARTERS = "lowest", "second", "third", "highest"
_LARGEST, _FEWEST = 3, 10
"""Features by which examples are grouped, and the fewest examples of a group."""

_CLEAR = 3.0
"""Standard errors below the level at which the coverage of a group is too low; there are many groups."""

_COPIES, _AT_ONCE, _BLIND = 200, 50, 0.7
"""Most examples of which shifted copies are made, at once, and the AUROC below which OOD flags miss them."""


class GroupCoverage(NamedTuple):
    """Coverage within one group of examples."""

    name: str
    number: int
    coverage: float
    size: float
    """Mean number of classes in a set, or mean width of an interval."""

    references: float = float("inf")
    """Number of calibration examples that its sets or intervals are from."""

    def is_low(self, level: float) -> bool:
        """Whether the coverage is below the level, beyond chance of these and of the calibration examples."""
        error = sqrt(level * (1 - level) * (1 / max(1, self.number) + 1 / (2 + self.references)))
        return self.number >= _FEWEST and self.coverage < level - _CLEAR * error


@dataclass(frozen=True, repr=False)
class Check(Printed):
    """The result of ``la.check``; print it for a table and what to do.

    Example:
        >>> print(la.check(x, y))  # doctest: +SKIP
    """

    level: float
    """The level that was requested."""

    groups: list[GroupCoverage]
    """``name``, ``number``, ``coverage`` and ``size`` of each group; the first holds all examples."""

    shifted: dict[str, float]
    """The AUROC with which p-values separate shifted copies of images from the images, by the name of the shift."""

    prediction: Prediction
    """The prediction of the examples."""

    @property
    def findings(self) -> list[str]:
        """What follows, as sentences."""
        low = [group.name for group in self.groups if group.is_low(self.level)]
        lines = ["No group has a coverage that is clearly below the level."]
        if low:
            names = ", ".join(low)
            lines = [
                f"The coverage is clearly below {self.level:g} for: {names}. {self._remedy(low)}"
            ]
        blind = [f"{name} ({area:.2f})" for name, area in self.shifted.items() if area < _BLIND]
        if blind:
            lines.append(
                f"OOD flags miss many inputs with {', '.join(blind)}: AUROC of shifted copies of these examples. "
                "Do not rely on is_ood for such shifts."
            )
        return lines

    def _remedy(self, low: list[str]) -> str:
        """Return what can raise the coverage of these groups and has not been done."""
        kinds, by = {name.split(" ")[0] for name in low}, _reference_of(self.prediction)
        own = {"group": by.groups is not None, "class": by.classes is not None}
        if "all" in low or any(own[kind] for kind in kinds & own.keys()):
            return (
                "Calibrate with data from the same distribution as these, also within each group."
            )
        if "group" not in kinds and self.prediction.likelihood.observation_noise is not None:
            return (
                "If the noise depends on the inputs, train a network that predicts it, and fit it with "
                'likelihood="heteroscedastic".'
            )
        words = (
            "call la.calibrate(validation_loader, groups=labels) and la.predict(x, groups=labels)"
        )
        if "class" in kinds and "group" not in kinds and by.groups is None:
            words = 'call la.calibrate(validation_loader, groups="classes")'
        return f"The guarantee is an average over all inputs. For one in each part, {words}."

    def _table(self) -> tuple[str, Cells]:
        size = "width" if self.prediction.likelihood.real_valued else "set size"
        rows: Cells = [("examples", "count", "coverage", f"mean {size}")]
        for group in self.groups:
            mark = " (low)" if group.is_low(self.level) else ""
            numbers = f"{group.number:,}", f"{group.coverage:.3f}{mark}", f"{group.size:.3g}"
            rows.append((group.name, *numbers))
        for name, area in self.shifted.items():
            rows.append((name, "", f"AUROC of OOD flags {area:.2f}", ""))
        return f"Coverage at a level of {self.level:g}", rows


def check(
    la: Any,
    loader: Any,
    targets: Tensor | None = None,
    level: float = 0.9,
    groups: Any = None,
) -> Check:
    """Return the coverage of sets or intervals within groups of held-out examples; print it.

    Conformal guarantees hold on average. Groups are those passed, classes, quarters by the predicted
    noise or entropy, and quarters by the features with the most extreme values. For images it
    also says how well ``is_ood`` detects shifted copies of up to 200 of the examples.

    Args:
        la (LinearisedLaplace, LaplaceEnsemble or record): The posterior; ``la.check(...)`` passes it.
        loader (DataLoader, Dataset, list of batches, or inputs): Data that was used neither for
            ``fit`` nor for ``calibrate``.
        targets (Tensor, optional): The targets, if ``loader`` are inputs.
        level (float): Level of the sets or intervals. Default 0.9.
        groups (integers, optional): The group of each example, in the order of the dataset. Default
            None: no groups of yours.

    Raises:
        ValueError: Before ``calibrate``, or with too few validation examples for the level.

    Example:
        >>> low = [group.name for group in la.check(x, y).groups if group.is_low(0.9)]
    """
    record = required(la, surely=True)
    x, data = under_all(record.members, paired(loader, targets))
    known = data.likelihood.labelled(data.y)
    if not known.any():
        raise ValueError("No example has a label, so no coverage can be measured.")
    stated = Stated(groups).checked(len(data.y), data.f.device).part(known)
    data, x = data.part(known), None if x is None else x[known.to(x.device)]
    with torch.no_grad():
        prediction, shifted = predicted(record, data), {}
        by_group = prediction.reference is not None and prediction.reference.groups is not None
        if by_group:
            prediction = replace(prediction, stated=stated)
        found = list(_groups(prediction, data.y, x, stated.groups, level))
        if x is not None and x.is_floating_point() and x.dim() == 4:
            own, x = prediction.p_value, x[:_COPIES]
            stated = stated.part(slice(len(x))) if by_group else Stated()
            for name, copies in _copies(x):
                if torch.equal(copies, x):  # such as a blur of small images
                    continue
                parts = [slice(start, start + _AT_ONCE) for start in range(0, len(x), _AT_ONCE)]
                each = [predict(record, copies[i], groups=stated.part(i).groups) for i in parts]
                shifted[name] = auroc(-torch.cat([p.p_value for p in each]), -own).item()
        return Check(level, found, shifted, prediction)


def _groups(
    prediction: Prediction, y: Tensor, x: Tensor | None, labels: Tensor | None, level: float
) -> Iterator[GroupCoverage]:
    """Yield the coverage within each group."""
    likelihood, reference = prediction.likelihood, _reference_of(prediction)
    if likelihood.real_valued:
        lower, upper = prediction.interval(level)
        inside, size = (lower <= y) & (y <= upper), upper - lower
        inside, size = (v.double().reshape(len(y), -1).mean(1) for v in (inside, size))
        noise = prediction.aleatoric
    else:
        sets = prediction.prediction_set(level)
        inside = sets.gather(1, y.long()[:, None])[:, 0].double()
        size, noise = sets.double().sum(1), prediction.entropy

    rows: dict[str, Any] = {"all": slice(None)}
    own = {}
    kinds = ("group", labels, reference.groups), ("class", y, reference.classes)
    for kind, given, known in kinds[: 1 if likelihood.real_valued else 2]:
        for label in [] if given is None else given.unique().tolist():
            rows[f"{kind} {int(label)}"] = given == label
            if known is not None:
                own[f"{kind} {int(label)}"] = known == label
    words = "predicted noise" if likelihood.real_valued else "entropy"
    columns = {words: noise.double().reshape(len(y), -1).mean(1)}
    if x is not None and x.dim() == 2 and x.is_floating_point():
        scaled = (x.double() - x.double().mean(0)) / x.double().std(0).clamp_min(1e-30)
        for feature in scaled.abs().amax(0).topk(min(_LARGEST, x.shape[1])).indices.tolist():
            columns[f"feature {feature}"] = x[:, feature].to(inside)
    for name, values in columns.items():
        order = values.argsort(stable=True)
        if values[order[0]] != values[order[-1]]:
            parts = order.tensor_split(len(_QUARTERS))
            rows |= {f"{name}, {part} quarter": some for part, some in zip(_QUARTERS, parts)}
    every = torch.ones_like(inside[:1]).expand(len(reference.unusual))
    every = every if reference.weights is None else reference.weights.double()
    for name, some in rows.items():
        weights = every[own.get(name, slice(None))]
        references = float(weights.sum() ** 2 / weights.square().sum().clamp_min(1e-30))
        shares = inside[some].mean().item(), size[some].mean().item()
        yield GroupCoverage(name, len(inside[some]), *shares, references)


def _reference_of(prediction: Prediction) -> Reference:
    return prediction.judged("check", by_labels=True)[0]


def _copies(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield shifted copies of images (B, channels, H, W)."""
    generator = torch.Generator("cpu").manual_seed(0)
    noise = torch.randn(x.shape, generator=generator, device="cpu").to(x)
    turns = 1 if x.shape[2] == x.shape[3] else 2
    yield f"rotation by {90 * turns}°", x.rot90(turns, (2, 3))
    width = 2 * (min(x.shape[2:]) // 8) + 1
    yield "blur", F.avg_pool2d(x, width, 1, width // 2, count_include_pad=False)
    yield "noise", x + x.std(correction=0) * noise
    lowest, highest = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    yield "inverted values", lowest + highest - x
