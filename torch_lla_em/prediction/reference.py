"""Reference scores of a validation set, and what inputs have among them: p-values and thresholds.

Guarantees hold on average over all examples, or within each part of them: each group that users state,
or each class. A part has its own reference examples (Mondrian conformal prediction). Weights of the
examples correct for inputs whose distribution has shifted since (Tibshirani et al., 2019).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.prediction.ranks import (
    Masses,
    p_values,
    quantiles,
    require,
    weighted_quantiles,
)
from torch_lla_em.runtime import report

CLASSES = "classes"
"""Stands for a group for each class."""


class Stated(NamedTuple):
    """What users state of examples beside inputs and targets."""

    groups: Any = None
    """An integer for each example, or "classes"; None: no groups."""

    weights: Any = None
    """A weight for each example; None: all are equal."""

    def checked(self, count: int, device: torch.device) -> Stated:
        """Return groups and weights of so many examples as tensors; raise an error if they are not."""
        groups, weights = self
        if isinstance(groups, str):
            if groups != CLASSES:
                raise ValueError(f'groups={groups!r}, but it must be "classes" or integers.')
        elif groups is not None:
            groups = _tensor(groups, device)
            if groups is None or groups.is_floating_point() or groups.is_complex():
                raise TypeError(
                    f"groups must be integers, not those of this {type(self.groups).__name__}: pass the number of "
                    "each example's group, for example numpy.unique(names, return_inverse=True)[1]."
                )
            groups = groups.long()
        if weights is not None:
            weights = _tensor(weights, device)
            if weights is None or weights.is_complex():
                raise TypeError("weights must be numbers, one for each example.")
            weights = weights.double()
            if not (weights.isfinite() & (weights >= 0)).all():
                raise ValueError("weights must be finite and not negative.")
        for name, given in (("groups", groups), ("weights", weights)):
            if isinstance(given, Tensor) and given.shape != (count,):
                raise ValueError(
                    f"{name} has the shape {tuple(given.shape)}, but there are {count} examples: pass one "
                    "value for each."
                )
        return Stated(groups, weights)

    def part(self, examples: slice | Tensor) -> Stated:
        """Return what is stated of some examples."""
        return Stated(*(v[examples] if isinstance(v, Tensor) else v for v in self))


class Reference(NamedTuple):
    """Numbers of predictions, and scores of examples to which they were not fitted.

    ``calibrate`` splits the validation set into two halves. Ensembles that were trained by folds have
    the scores of all examples, each by the member that has not seen it.
    """

    table: Tensor
    """The components of predictions, fitted to the first half."""

    sigma: Tensor | None
    """The observation noise of a regression, fitted to the first half."""

    unusual: Tensor
    """Out-of-distribution scores of the second half, shape (n, scores)."""

    errors: Tensor | None
    """Errors of the second half, shape (n, outputs). None for training examples."""

    folds: Tensor | None = None
    """How many of the scores are of examples that the first, second, ... member of an ensemble was
    not trained on, if it was trained by folds."""

    joint: Tensor | None = None
    """Errors of all outputs together, (n, 2): of a box and of an ellipsoid. None for a single output."""

    groups: Tensor | None = None
    """The group of each example, (n,)."""

    classes: Tensor | None = None
    """The class of each example, (n,), if every class has its own reference."""

    weights: Tensor | None = None
    """The weight of each example, (n,)."""

    def agree(self, inputs: Stated) -> None:
        """Raise an error if what is stated of inputs was not stated of the reference, or groups are missing."""
        for name, own, given in zip(Stated._fields, (self.groups, self.weights), inputs):
            if own is None and given is not None:
                raise ValueError(
                    f"predict was called with {name}, but calibrate was not: call "
                    f"la.calibrate(validation_loader, {name}=...) first."
                )
        if self.groups is not None:
            if inputs.groups is None:
                raise ValueError(
                    "calibrate was called with groups, so every input needs its group: la.predict(x, groups=labels). "
                    'Exported programs take no groups: for them calibrate without groups, or with groups="classes".'
                )
            known, asked = (set(labels.tolist()) for labels in (self.groups, inputs.groups))
            if asked - known:
                raise ValueError(
                    f"There are inputs of the groups {sorted(asked - known)}, of which the validation set had no "
                    f"examples; it had {sorted(known)}."
                )

    def joint_errors(self) -> Tensor:
        """Return the errors of all outputs together; raise an error if there are none."""
        if self.joint is None:
            raise ValueError(
                "There are no errors of several outputs together: they need la.calibrate(validation_loader) "
                "of a posterior with several outputs, by this version. Students have none."
            )
        return self.joint

    def require(self, needed: int, asked: str, inputs: Stated) -> None:
        """Raise an error if a part to which inputs can belong has too few examples."""
        for of, rows in self._parts(inputs):
            require(len(self.unusual[rows]), needed, asked, of)

    def p_values(self, scores: Tensor, inputs: Stated, room: float, unit: Tensor) -> Tensor:
        """Return the p-values, (B,), of inputs with these scores, (B, S), and with ties as in ``ranks``.

        With a reference for every class, an input is compared with each class and has the largest p-value.
        """
        each = [
            p_values(self.unusual[rows], scores, room, unit, self._masses(rows, inputs))
            for _, rows in self._parts(inputs)
        ]
        found = torch.stack(each)
        return found.amax(0) if self.groups is None else self._of_groups(found, inputs)

    def quantiles(self, errors: Tensor, level: float, inputs: Stated) -> Tensor:
        """Return the conformal quantiles of errors, (n, outputs), for inputs: (1 or B, outputs)."""
        rows: Any = slice(None)
        parts = [("", rows)] if self.groups is None else self._parts(inputs)
        found = [self._quantiles(errors, rows, level, inputs, of) for of, rows in parts]
        if self.groups is None:
            return found[0]
        count = len(inputs.groups)
        return self._of_groups(torch.stack([each.expand(count, -1) for each in found]), inputs)

    def quantiles_by_class(self, level: float, inputs: Stated, count: int) -> Tensor:
        """Return the conformal quantile for each of so many classes, (1 or B, C)."""
        errors: Any = self.errors
        if self.classes is None:
            return self.quantiles(errors, level, inputs)
        every = {label: self.classes == label for label in range(count)}
        each = [
            self._quantiles(errors, rows, level, inputs, f" of class {label}")
            for label, rows in every.items()
        ]
        return torch.cat(each, 1)

    def _parts(self, inputs: Stated) -> list[tuple[str, Any]]:
        """Return the examples of each part to which inputs can belong, and its name in errors."""
        labels, word = (self.classes, "class") if self.groups is None else (inputs.groups, "group")
        if labels is None:
            return [("", slice(None))]
        own = self.classes if self.groups is None else self.groups
        if not len(labels):  # without inputs any will do
            labels = own[:1]
        return [(f" of {word} {label}", own == label) for label in labels.unique().tolist()]

    def _of_groups(self, each: Tensor, inputs: Stated) -> Tensor:
        """Return the values (parts, B, ...) of the group of each input."""
        if not len(inputs.groups):
            return each[0]
        places = inputs.groups.unique(return_inverse=True)[1]
        return each[places, torch.arange(len(places), device=places.device)]

    def _quantiles(
        self, errors: Tensor, rows: Any, level: float, inputs: Stated, of: str
    ) -> Tensor:
        masses = self._masses(rows, inputs)
        if masses is not None:
            return weighted_quantiles(errors[rows], level, masses, of)
        return quantiles(errors[rows].sort(0).values, level, of)[None]

    def _masses(self, rows: Any, inputs: Stated) -> Masses | None:
        """Return the weights of some examples and of inputs; inputs without weights have the largest."""
        if self.weights is None:
            return None
        weights = self.weights.double()
        return Masses(
            weights[rows], weights.max()[None] if inputs.weights is None else inputs.weights
        )


def _tensor(values: Any, device: torch.device) -> Tensor | None:
    try:
        return torch.as_tensor(values, device=device)
    except (TypeError, ValueError, RuntimeError):  # names, or None among them
        return None


REFERENCE = tuple(f"conformal_{name}" for name in Reference._fields)
"""The names of these fields in files."""


def require_two(labels: Tensor, word: str, weights: Tensor | None) -> None:
    """Raise an error if one example of a group or class, or none, has a weight: half are the reference."""
    for label in labels.unique().tolist():
        own = labels == label
        count = int(own.sum() if weights is None else weights[own].count_nonzero())
        if count < 2:
            few, positive = "only one" if count else "no", " with a positive weight"
            raise ValueError(
                f"There is {few} validation example of {word} {label}{positive * (not count)}. Every {word} needs "
                "examples of its own: 18 for a level of 0.9, 38 for a rate of 0.05. Add some, or join groups."
            )


def warn_of_few(labels: Tensor, classes: int | None) -> None:
    """Warn if groups, or some of so many classes, have too few reference examples for a level of 0.9."""
    sizes = dict.fromkeys(range(classes or 0), 0)
    sizes |= dict(zip(*(part.tolist() for part in labels.unique(return_counts=True))))
    few = [str(label) for label, count in sizes.items() if count < 9]  # that a level of 0.9 needs
    if few:
        word, least = "group" if classes is None else "class", min(sizes.values())
        some = ", ".join(few[:10]) + (f" and {len(few) - 10} more" * (len(few) > 10))
        highest = int(1000 * least / (least + 1)) / 1000  # rounded down, so that it is possible
        report(
            "show",
            f"A level of 0.9 needs 9 reference examples of each {word}, half of its validation "
            f"examples. There are fewer of {word} {some}: the smallest has {least}, for levels up to "
            f"{highest:g}. Add examples, or calibrate without groups.",
        )


def is_second(labels: Tensor) -> Tensor:
    """Return which examples are every other one among those with their label, (N,), from the second on."""
    order = labels.argsort(stable=True)
    in_order = labels[order]
    starts = torch.searchsorted(in_order, in_order)  # the first of each label
    places = torch.arange(len(labels), device=labels.device) - starts
    return torch.zeros_like(labels, dtype=torch.bool).scatter(0, order, places % 2 == 1)
