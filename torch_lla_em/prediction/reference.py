"""The reference that inputs are compared with: scores of examples that nothing was fitted to, and
the p-values and quantiles that follow from them.

Guarantees hold on average, or within groups or classes (Mondrian conformal prediction); weights
correct for shifts (Tibshirani et al., 2019).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import Values
from torch_lla_em.prediction.conformal import p_values, quantiles, require
from torch_lla_em.runtime import check_choice

Score = Literal["all", "epistemic", "distance"]

_KINDS = {
    "groups": "groups must be integers: pass the number of each example's group, for example "
    "numpy.unique(names, return_inverse=True)[1].",
    "weights": "weights must be numbers, one for each example.",
}


class Stated(NamedTuple):
    """The groups and weights of examples, which users pass beside inputs and targets."""

    groups: Tensor | None = None
    """An integer for each example; None: no groups."""

    weights: Tensor | None = None
    """A weight for each example; None: all are equal."""

    by_class: bool = False
    """Whether each class is a group."""

    @classmethod
    def of(
        cls,
        count: int,
        device: torch.device,
        groups: Values | str | None = None,
        weights: Values | None = None,
    ) -> Stated:
        """Return groups and weights of ``count`` examples as tensors; raise an error if they do not
        fit."""
        by_class = isinstance(groups, str)
        if by_class and groups != "classes":
            raise ValueError(f'groups={groups!r}, but it must be "classes" or integers.')
        integers = None if by_class else _tensor("groups", groups, count, device)
        numbers = _tensor("weights", weights, count, device)
        if numbers is not None and not (numbers.isfinite() & (numbers >= 0)).all():
            raise ValueError("weights must be finite and not negative.")
        return cls(integers, numbers, by_class)

    def part(self, examples: slice | Tensor) -> Stated:
        """Return the groups and weights of some examples."""
        return self._replace(
            groups=None if self.groups is None else self.groups[examples],
            weights=None if self.weights is None else self.weights[examples],
        )


def _tensor(
    name: str, values: Values | str | None, count: int, device: torch.device
) -> Tensor | None:
    """Return groups or weights as a tensor with one value for each example."""
    if values is None:
        return None
    try:
        found = torch.as_tensor(values, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(_KINDS[name]) from None
    if found.is_complex() or (name == "groups" and found.is_floating_point()):
        raise TypeError(_KINDS[name])
    if found.shape != (count,):
        raise ValueError(
            f"{name} has the shape {tuple(found.shape)}, but there are {count} examples: pass one "
            "value for each."
        )
    return found.long() if name == "groups" else found.double()


class Reference(NamedTuple):
    """Scores of examples to which the predictions were not fitted, and the numbers of these
    predictions.

    For ensembles that were trained by folds these are all examples, each scored by the member that
    has not seen it.
    """

    table: Tensor | None
    """The components of predictions, fitted to the first half; None for a student."""

    sigma: Tensor | None
    """The observation noise of a regression, fitted to the first half."""

    unusual: Tensor
    """Out-of-distribution scores of the second half, shape (n, scores)."""

    errors: Tensor
    """Errors of the second half, shape (n, outputs)."""

    folds: Tensor | None = None
    """For an ensemble by folds, the number of examples that each member has not seen, in order."""

    groups: Tensor | None = None
    """The group of each example, (n,)."""

    classes: Tensor | None = None
    """The class of each example, (n,), if every class has its own reference."""

    weights: Tensor | None = None
    """The weight of each example, (n,)."""

    def agree(self, inputs: Stated) -> None:
        """Raise an error if groups or weights were passed for inputs but not for the reference, or
        if groups are missing."""
        stated = {"groups": (self.groups, inputs.groups), "weights": (self.weights, inputs.weights)}
        for name, (own, given) in stated.items():
            if own is None and given is not None:
                raise ValueError(
                    f"predict was called with {name}, but calibrate was not: call "
                    f"la.calibrate(validation_loader, {name}=...) first."
                )
        if self.groups is not None and inputs.groups is None:
            raise ValueError(
                "calibrate was called with groups, so every input needs its group: la.predict(x, "
                "groups=labels). Exported programs take no groups: for them calibrate without "
                'groups, or with groups="classes".'
            )
        known, asked = (
            set() if each is None else set(each.tolist()) for each in (self.groups, inputs.groups)
        )
        if asked - known:
            raise ValueError(
                f"There are inputs of the groups {sorted(asked - known)}, but the validation set "
                f"has no examples of these; it has {sorted(known)}."
            )

    def require(self, needed: int, asked: str, inputs: Stated) -> None:
        """Raise an error if there are too few examples in a part to which inputs can belong."""
        for of, rows in self._parts(inputs):
            require(len(self.unusual[rows]), needed, asked, of)

    def p_values(self, scores: Tensor, inputs: Stated, room: float, unit: Tensor) -> Tensor:
        """Return the p-values, (B,), of scores (B, S), with ties as in ``conformal.p_values``. If
        each class has its own reference, the largest p-value is returned."""
        each = [
            p_values(self.unusual[rows], scores, room, unit, *self._weights(rows, inputs))
            for _, rows in self._parts(inputs)
        ]
        if self.groups is None or inputs.groups is None:
            return torch.stack(each).amax(0)
        return _of_groups(each, inputs.groups)

    def quantiles(self, errors: Tensor, level: float, inputs: Stated, classes: int = 0) -> Tensor:
        """Return the quantiles of errors (n, outputs): for each input, (1 or B, outputs), or for
        each class, (1 or B, C)."""
        each = [
            quantiles(errors[rows], level, of, *self._weights(rows, inputs))
            for of, rows in self._parts(inputs, classes)
        ]
        groups = inputs.groups
        if self.groups is None or groups is None:
            return torch.cat(each, 1)
        return _of_groups([found.expand(len(groups), -1) for found in each], groups)

    def _parts(self, inputs: Stated, classes: int = 0) -> list[tuple[str, Any]]:
        """Return the examples of each part to which inputs can belong, and its name in errors."""
        own, word, labels = self.groups, "group", inputs.groups
        if own is None:
            own, word = self.classes, "class"
            labels = torch.arange(classes, device="cpu") if classes else own
        if own is None or labels is None:
            return [("", slice(None))]
        if not len(labels):  # without inputs any part is sufficient
            labels = own[:1]
        return [(f" of {word} {label}", own == label) for label in labels.unique().tolist()]

    def _weights(self, rows: Any, inputs: Stated) -> tuple[Tensor | None, Tensor | None]:
        """Return the weights of some examples and of inputs; inputs without weights are given the
        largest weight."""
        if self.weights is None:
            return None, None
        own = self.weights.max()[None] if inputs.weights is None else inputs.weights
        return self.weights[rows], own


def _of_groups(each: list[Tensor], groups: Tensor) -> Tensor:
    """Select for each input the value of its group, from values (B, ...) for each group."""
    if not len(groups):
        return each[0]
    places = groups.unique(return_inverse=True)[1]
    return torch.stack(each)[places, torch.arange(len(places), device=places.device)]


REFERENCE = tuple(f"conformal_{name}" for name in Reference._fields)
"""The names of the fields of ``Reference`` in files."""


def second_half(labels: Tensor, weights: Tensor | None = None, word: str = "") -> Tensor:
    """Split the examples into two halves, alternating within each label and within zero or positive
    weight.

    Return a mask of the second half, (N,).

    Raise an error if a label has fewer than two examples with a positive weight.
    """
    counts = torch.ones_like(labels) if weights is None else (weights > 0).long()
    for label in labels.unique().tolist():
        if counts[labels == label].sum() < 2:
            of = f" of {word} {label}" if word else ""
            raise ValueError(
                f"There are fewer than two labelled validation examples{of} with a positive "
                "weight. Half of them are the reference: 18 are needed for a level of 0.9, 38 for "
                "a rate of 0.05. Add some, or join groups."
            )
    labels = 2 * labels + counts
    in_order, order = labels.sort(stable=True)
    starts = torch.searchsorted(in_order, in_order)  # the first of each label
    places = torch.arange(len(labels), device=labels.device) - starts
    return torch.zeros_like(labels, dtype=torch.bool).scatter(0, order, places % 2 == 1)


def chosen(score: Score, computed: int, known: int) -> list[int]:
    """Return the columns of the computed scores that are compared; the reference contains the last
    ``known`` of them."""
    check_choice("score", score, ("all", "epistemic", "distance"))
    if score == "distance" and computed < 3:
        raise ValueError(
            'score="distance" needs distances to training examples, which regressions do not have, '
            "and other fits only with variational curvature: leave score out."
        )
    if known < computed and (computed == 3 or score == "epistemic"):
        raise ValueError(
            "The reference is of version 0.4, which had other scores: call "
            "la.calibrate(validation_loader) again."
        )
    columns = range(computed - known, computed)
    return [0] if score == "epistemic" else [i for i in columns if i or score == "all"]
