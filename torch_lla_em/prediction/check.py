"""Coverage of sets and intervals within groups of held-out examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction.passes import under_all
from torch_lla_em.prediction.posterior import Posterior
from torch_lla_em.prediction.prediction import Prediction
from torch_lla_em.prediction.pushforward import Pushforward, joined
from torch_lla_em.prediction.reference import Stated
from torch_lla_em.prediction.summary import Cells, Printed

_PARTS, _LARGEST, _FEWEST = 4, 3, 10
"""Groups by a quantity, features by which examples are grouped, and the fewest examples of a group."""

_CLEAR = 3.0
"""Standard errors below the level at which the coverage of a group is too low; there are many groups."""


class GroupCoverage(NamedTuple):
    """Coverage within one group of examples."""

    name: str
    number: int
    coverage: float
    size: float
    """Mean number of classes in a set, or mean width of an interval."""

    def is_low(self, level: float) -> bool:
        """Whether the coverage is below the level, beyond chance."""
        error = (level * (1 - level) / max(1, self.number)) ** 0.5
        return self.number >= _FEWEST and self.coverage < level - _CLEAR * error


class Check(Printed):
    """The result of ``la.check``: coverage by group; print it for a table and what to do.

    Attributes:
        level (float): The level that was requested.
        groups (list of GroupCoverage): ``name``, ``number``, ``coverage`` and ``size`` of each group; the first
            holds all examples.

    Example:
        >>> print(la.check(x, y))  # doctest: +SKIP
    """

    def __init__(self, level: float, groups: Sequence[GroupCoverage], likelihood: Likelihood):
        self.level, self.groups, self._likelihood = level, list(groups), likelihood

    @property
    def findings(self) -> list[str]:
        """What follows, as sentences."""
        low = [group.name for group in self.groups if group.is_low(self.level)]
        if not low:
            return ["No group has a coverage that is clearly below the level."]
        words = f"The coverage is clearly below {self.level:g} for: {', '.join(low)}."
        if self._likelihood.real_valued:
            advice = (
                "The guarantee holds on average over inputs only. If the noise depends on the inputs, train a "
                'network that predicts it, and fit it with likelihood="heteroscedastic".'
            )
        else:
            advice = (
                "The guarantee holds on average over classes only. For one that holds for each class, call "
                'la.calibrate(validation_loader, groups="classes"), with 18 examples of each class or more for '
                "a level of 0.9."
            )
        if any(name.startswith("group ") for name in low):
            advice = (
                "The guarantee holds on average over groups only. For one that holds for each, call "
                "la.calibrate(validation_loader, groups=labels), and la.predict(x, groups=labels)."
            )
        return [words, advice]

    def _table(self) -> tuple[str, Cells]:
        size = "width" if self._likelihood.real_valued else "set size"
        rows: Cells = [("examples", "count", "coverage", f"mean {size}")]
        for group in self.groups:
            mark = " (low)" if group.is_low(self.level) else ""
            rows.append(
                (
                    group.name,
                    f"{group.number:,}",
                    f"{group.coverage:.3f}{mark}",
                    f"{group.size:.3g}",
                )
            )
        return f"Coverage at a level of {self.level:g}", rows

    def __repr__(self) -> str:
        return "\n".join([super().__repr__(), *self.findings])


def checked(
    posteriors: Sequence[Posterior],
    predict: Callable[[Pushforward], Any],
    loader: Any,
    level: float,
    groups: Any = None,
) -> Check:
    """Return the coverage by group, class, predicted noise and the inputs' largest features."""
    parts, products = zip(*under_all(posteriors, loader))
    data = joined(products)
    flat = all(isinstance(x, Tensor) and x.dim() == 2 for x in parts)
    inputs = torch.cat(parts) if flat else None
    known = data.likelihood.labelled(data.y)
    stated = Stated(groups).checked(len(data.y), data.f.device).part(known)
    data, inputs = data.part(known), None if inputs is None else inputs[known.to(inputs.device)]
    with torch.no_grad():
        prediction = predict(data)
        if prediction.judge is not None and prediction.judge()[0].groups is not None:
            prediction = replace(prediction, stated=stated)
        return _by_group(prediction, data.y, inputs, stated.groups, level)


def _by_group(
    prediction: Prediction, y: Tensor, inputs: Tensor | None, labels: Tensor | None, level: float
) -> Check:
    likelihood = prediction.likelihood
    if likelihood.real_valued:
        lower, upper = prediction.interval(level)
        inside, size = (lower <= y) & (y <= upper), upper - lower
        inside, size = (v.double().reshape(len(y), -1).mean(1) for v in (inside, size))
        noise = prediction.aleatoric
    else:
        sets = prediction.prediction_set(level)
        inside = sets.gather(1, y.long()[:, None])[:, 0].double()
        size, noise = sets.double().sum(1), prediction.entropy
    groups = [_group("all", torch.ones_like(inside, dtype=torch.bool), inside, size)]
    if labels is not None:
        for label in labels.unique().tolist():
            groups.append(_group(f"group {label}", labels == label, inside, size))
    if not likelihood.real_valued:
        for label in y.unique().tolist():
            groups.append(_group(f"class {int(label)}", y == label, inside, size))
    words = "predicted noise" if likelihood.real_valued else "entropy"
    groups += _parts(words, noise.double().reshape(len(y), -1).mean(1), inside, size)
    if inputs is not None and inputs.is_floating_point():
        spread = inputs.double().std(0)
        scaled = (inputs.double() - inputs.double().mean(0)) / spread.clamp_min(1e-30)
        extreme = scaled.abs().amax(0).topk(min(_LARGEST, inputs.shape[1])).indices
        for feature in extreme.tolist():
            groups += _parts(f"feature {feature}", inputs[:, feature].double(), inside, size)
    return Check(level, groups, likelihood)


def _parts(name: str, values: Tensor, inside: Tensor, size: Tensor) -> Iterator[GroupCoverage]:
    """Yield groups of equal numbers of examples by a value, if there are several values."""
    order = values.argsort(stable=True)
    if values[order[0]] == values[order[-1]]:
        return
    for number, rows in enumerate(order.tensor_split(_PARTS)):
        part = "lowest" if number == 0 else "highest" if number == _PARTS - 1 else f"{number + 1}."
        mask = torch.zeros_like(inside, dtype=torch.bool)
        mask[rows] = True
        yield _group(f"{name}, {part} quarter", mask, inside, size)


def _group(name: str, mask: Tensor, inside: Tensor, size: Tensor) -> GroupCoverage:
    mask = mask.to(inside.device)
    return GroupCoverage(
        name, int(mask.sum()), inside[mask].mean().item(), size[mask].mean().item()
    )
