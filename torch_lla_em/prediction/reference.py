"""Reference scores of a validation set, and what inputs have among them: p-values and thresholds.

Guarantees hold on average over all examples, or within each part of them: each group that users state,
or each class. A part has its own reference examples (Mondrian conformal prediction). Weights of the
examples correct for inputs whose distribution has shifted since (Tibshirani et al., 2019).
"""

from __future__ import annotations

from collections.abc import Callable
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

_ALL = slice(None)
# reference examples that a level of 0.9 needs, and the most labels that a warning names
_FEWEST, _NAMED = 9, 10
_NO_GROUPS = (
    "calibrate was called with groups, so every input needs its group: la.predict(x, groups=labels). "
    'Exported programs take no groups: for them calibrate without groups, or with groups="classes".'
)


class Stated(NamedTuple):
    """What users state of examples beside inputs and targets."""

    groups: Any = None
    """An integer for each example, or "classes"; None: no groups."""

    weights: Any = None
    """A weight for each example; None: all are equal."""

    def checked(self, count: int, device: torch.device) -> Stated:
        """Return groups and weights of so many examples as tensors; raise an error if they are not."""
        groups, weights = self.groups, self.weights
        if isinstance(groups, str):
            if groups != CLASSES:
                raise ValueError(f'groups={groups!r}, but it must be "classes" or integers.')
        elif groups is not None:
            groups = _integers(groups, device)
        if weights is not None:
            try:
                weights = torch.as_tensor(weights, dtype=torch.float64, device=device)
            except (TypeError, ValueError, RuntimeError) as error:
                raise TypeError(
                    f"weights must be numbers, one for each example ({error})."
                ) from error
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
    """Errors of the second half, shape (n, outputs); sorted, unless they have groups, classes or weights.
    None for training examples."""

    folds: Tensor | None = None
    """How many of the scores are of examples that the first, second, ... member of an ensemble was
    not trained on, if it was trained by folds."""

    joint: Tensor | None = None
    """Errors of all outputs together, (n, 2), sorted like ``errors``: of a box and of an ellipsoid. None for
    a single output."""

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
                raise ValueError(_NO_GROUPS)
            unknown = set(inputs.groups.tolist()) - rows_of(self.groups).keys()
            if unknown:
                raise ValueError(
                    f"There are inputs of the groups {sorted(unknown)}, of which the validation set had no "
                    f"examples; it had {sorted(rows_of(self.groups))}."
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
        if self.classes is not None:
            sizes = {f" of class {label}": rows for label, rows in rows_of(self.classes).items()}
        elif self.groups is not None:
            own = set(inputs.groups.tolist())
            every = rows_of(self.groups).items()
            sizes = {f" of group {label}": rows for label, rows in every if label in own}
        else:
            sizes = {"": self.unusual}
        for of, rows in sizes.items():
            require(len(rows), needed, asked, of)

    def p_values(self, scores: Tensor, inputs: Stated, room: float, unit: Tensor) -> Tensor:
        """Return the p-values, (B,), of inputs with these scores, (B, S), and with ties as in ``ranks``.

        With a reference for every class, an input is compared with each class and has the largest p-value.
        """

        def among(rows: Any, own: Any, _: str = "") -> Tensor:
            masses = self._masses(rows, own, inputs)
            return p_values(self.unusual[rows], scores[own], room, unit, masses)

        if self.classes is not None:
            each = [among(rows, _ALL) for rows in rows_of(self.classes).values()]
            return torch.stack(each).amax(0)
        return self._in_groups(among, inputs)

    def quantiles(self, errors: Tensor, level: float, inputs: Stated) -> Tensor:
        """Return the conformal quantiles of errors, (n, outputs), for inputs: (1 or B, outputs)."""

        def among(rows: Any, own: Any, name: str) -> Tensor:
            return self._quantiles(errors[rows], level, self._masses(rows, own, inputs), name)

        return self._in_groups(among, inputs)

    def quantiles_by_class(self, level: float, inputs: Stated, count: int) -> Tensor:
        """Return the conformal quantile for each of so many classes, (1 or B, C)."""
        errors: Any = self.errors
        if self.classes is None:
            return self.quantiles(errors, level, inputs)
        every, none = rows_of(self.classes), slice(0, 0)
        each = []
        for label in range(count):
            rows = every.get(label, none)
            masses = self._masses(rows, _ALL, inputs)
            each.append(self._quantiles(errors[rows], level, masses, f" of class {label}"))
        return torch.cat(each, 1)

    def _quantiles(self, errors: Tensor, level: float, masses: Masses | None, name: str) -> Tensor:
        if masses is not None:
            return weighted_quantiles(errors, level, masses, name)
        in_order = errors if self._is_sorted else errors.sort(0).values
        return quantiles(in_order, level, name)[None]

    @property
    def _is_sorted(self) -> bool:
        return self.groups is None and self.classes is None and self.weights is None

    def _masses(self, rows: Any, own: Any, inputs: Stated) -> Masses | None:
        """Return the weights of some examples and inputs; inputs without weights have the largest."""
        if self.weights is None:
            return None
        weights = self.weights.double()
        given = weights.max()[None] if inputs.weights is None else inputs.weights[own]
        return Masses(weights[rows], given)

    def _in_groups(self, of: Callable[[Any, Any, str], Tensor], inputs: Stated) -> Tensor:
        """Return the values for inputs by the reference of their groups."""
        if self.groups is None:
            return of(_ALL, _ALL, "")
        found: Tensor | None = None
        every = rows_of(self.groups)
        for label in inputs.groups.unique().tolist() or [*every][:1]:  # without inputs any will do
            own = inputs.groups == label
            values = of(every[label], own, f" of group {label}")
            if found is None:
                found = values.new_empty(len(own), *values.shape[1:])
            found[own] = values
        assert found is not None
        return found


def _integers(groups: Any, device: torch.device) -> Tensor:
    """Return the groups of examples as a tensor; raise an error if they are no integers."""
    wrong: Any = f"those of this {type(groups).__name__}"
    try:
        found = torch.as_tensor(groups, device=device)
        if not (found.is_floating_point() or found.is_complex()):
            return found.long()
        wrong = found.dtype
    except (TypeError, ValueError, RuntimeError):  # names, or None among them
        pass
    raise TypeError(
        f"groups must be integers, not {wrong}: pass the number of each example's group, "
        "for example numpy.unique(names, return_inverse=True)[1]."
    )


REFERENCE = tuple(f"conformal_{name}" for name in Reference._fields)
"""The names of these fields as buffers of a posterior."""


def rows_of(labels: Tensor) -> dict[int, Tensor]:
    """Return the numbers of the examples with each label, in the order of the labels."""
    return {int(label): (labels == label).nonzero()[:, 0] for label in labels.unique().tolist()}


def require_two(labels: Tensor, word: str, weights: Tensor | None) -> None:
    """Raise an error if one example of a group or class, or none, has a weight: half are the reference."""
    for label, rows in rows_of(labels).items():
        count = len(rows) if weights is None else int(weights[rows].count_nonzero())
        if count < 2:
            few, positive = "only one" if count else "no", " with a positive weight"
            raise ValueError(
                f"There is {few} validation example of {word} {label}{positive * (not count)}. Every {word} needs examples of its "
                "own: 18 for a level of 0.9, 38 for a rate of 0.05. Add some, or join groups."
            )


def warn_of_few(labels: Tensor, classes: int | None) -> None:
    """Warn if groups, or some of so many classes, have too few reference examples for a level of 0.9."""
    sizes = dict(zip(*(part.tolist() for part in labels.unique(return_counts=True))))
    if classes is not None:
        sizes = {label: sizes.get(label, 0) for label in range(classes)}
    few = [str(label) for label, count in sizes.items() if count < _FEWEST]
    if few:
        word, least = "group" if classes is None else "class", min(sizes.values())
        some = ", ".join(few[:_NAMED]) + (f" and {len(few) - _NAMED} more" * (len(few) > _NAMED))
        highest = int(1000 * least / (least + 1)) / 1000  # rounded down, so that it is possible
        report(
            "show",
            f"A level of 0.9 needs {_FEWEST} reference examples of each {word}, half of its validation "
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
