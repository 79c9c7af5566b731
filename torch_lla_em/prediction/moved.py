"""Training examples, moved to x_i + s (x_near(k) - x_k) d_i / d_k with distances d to neighbours,
in place of a validation set.

A network should err there as often as kernel ridge regression without the example: s is 1, or up to
2 if it errs less often. If it errs more often, some wrong labels are left out, or s is reduced for
targets other than single labels. (With s below 1 for labels, NLLs of networks with wrong labels are
up to 10 % higher; with 1 alone, up to 60 %.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_lla_em.data import (
    Batch,
    Data,
    Inputs,
    Loader,
    leaves_of,
    map_tensors,
    merged,
    paired,
    tensors_in,
    to_device,
)
from torch_lla_em.jacobian import Network
from torch_lla_em.likelihoods import Classification, Likelihood
from torch_lla_em.prediction.conformal import aligned
from torch_lla_em.prediction.numbers import temperature_of
from torch_lla_em.runtime import CALL

_MOST, _BYTES, LEAST = 2_000, 250_000_000, 20
"""Most examples and bytes of inputs among which neighbours are looked for, and fewest different
examples."""

MANY = 5 * _MOST
"""Number of examples above which neighbours in a part of them are uninformative: moving raised the
NLL of a last layer from 1.45 to 1.49 (30,000 examples, 10 classes) and from 2.60 to 3.07 (20,000,
100 classes)."""

_AT_ONCE, _COLUMNS, _SEARCHED = 250, 64, 500
"""Numbers of examples that the network predicts at once, of targets of an example that the simple
model predicts, and of examples by which that model is chosen."""

Batches = list[tuple[Any, Tensor]]


class NoSubstitute(ValueError):
    """Training examples do not show how certain predictions should be."""

    def __init__(self, why: str):
        super().__init__(f"Training examples cannot replace a validation set: {why}. {CALL}.")


class Moves(NamedTuple):
    """Different training examples, and how they are moved."""

    inputs: Any
    """A tree of tensors with one row for each example, (n, ...)."""

    targets: Tensor
    source: Tensor
    near: Tensor
    """For each example another one k, and the nearest neighbour of that, (n,)."""

    scale: Tensor
    """The factor of their difference, d_i / d_k, (n,)."""

    squares: Tensor
    """The squared distances of all examples, (n, n), relative to their median."""

    def batches(self, length: float, kept: Tensor | None = None) -> Iterator[tuple[Any, Tensor]]:
        """Yield moved inputs and their targets, a few at a time, of all examples or of those that
        are kept."""
        factors = length * self.scale
        every = torch.arange(len(factors), device=factors.device) if kept is None else kept
        for rows in every.split(_AT_ONCE):

            def changed(t: Tensor) -> Tensor:
                if not t.is_floating_point():
                    return t[rows.to(t.device)]
                places = rows, self.source[rows], self.near[rows]
                own, source, near = (t[each.to(t.device)] for each in places)
                factor = factors[rows].to(t).view(-1, *(1,) * (t.dim() - 1))
                return torch.addcmul(own, factor, near - source)

            yield map_tensors(changed, self.inputs), self.targets[rows]


def moves_of(data: Data, likelihood: Likelihood, class_dim: int = -1) -> Moves:
    """Return how the labelled examples of all ranks can be moved, in one pass."""

    inputs, targets = labelled_examples(data, likelihood, class_dim)
    numbers = (t.reshape(len(t), -1).double() for t in tensors_in(inputs) if t.is_floating_point())
    x = torch.cat(list(numbers), 1)
    if not len(x):
        raise NoSubstitute("none of them has a label")
    x -= x.median(0).values  # which a missing value, coded as -99999999, hardly changes
    norms = x.square().sum(1)
    squares = torch.cdist(x, x).square().fill_diagonal_(0)
    targets = targets.to(squares.device)
    # equal examples, up to rounding, count once: predictions without one would use the other
    zero = squares <= 1e-12 * (norms[:, None] + norms)
    same = targets.reshape(len(targets), -1).unique(dim=0, return_inverse=True)[1]
    order = (~(zero & (same[:, None] == same)).tril(-1).any(1)).nonzero()[:, 0]
    if len(order) < LEAST:
        raise NoSubstitute(f"only {len(order)} examples differ")
    generator = torch.Generator("cpu").manual_seed(0)
    shuffled = [torch.randperm(len(order), generator=generator, device="cpu") for _ in range(2)]
    mixed, source = (one.to(squares.device) for one in shuffled)
    # this order does not depend on that of the data or on rotations of the inputs
    order = order[squares[order].mean(1).argsort()][mixed]
    squares = squares[order][:, order]
    distance, near = squares.masked_fill(zero[order][:, order], torch.inf).min(1)
    if distance.isinf().any():
        raise NoSubstitute("all inputs are equal")
    scale = (distance / distance[source]).sqrt().clamp_max(10)
    inputs = map_tensors(lambda t: t[order.to(t.device)], inputs)
    return Moves(inputs, targets[order], source, near[source], scale, squares / squares.median())


def without_itself(squares: Tensor, table: Tensor) -> Tensor:
    """Return the leave-one-out predictions of kernel ridge regression for the columns of a table,
    (n, columns)."""
    few, best = slice(_SEARCHED), (torch.inf, 1.0, 1.0)
    some = (table[few] - table[few].mean(0)).float()

    def kernel(width: float, rows: slice) -> Tensor:
        return (-squares[rows, rows] / (2 * width)).exp()

    for width in torch.logspace(-1.3, 0.5, 5, device="cpu").tolist():
        values, vectors = torch.linalg.eigh(kernel(width, few).float())
        for ridge in torch.logspace(-3, 1, 7, device="cpu").tolist():
            weights = 1 / (values.clamp_min(0) + ridge)
            errors = vectors @ (weights[:, None] * (vectors.T @ some))
            errors /= (vectors.square() @ weights)[:, None]
            best = min(best, (errors.square().mean().item(), width, ridge))
    whole = kernel(best[1], slice(None))
    whole.diagonal().add_(best[2])
    inverse, centred = torch.cholesky_inverse(torch.linalg.cholesky(whole)), table - table.mean(0)
    found: Tensor = table - inverse @ centred / inverse.diagonal()[:, None]
    return found


def _outputs(
    network: Network, likelihood: Likelihood, batches: Iterable[tuple[Any, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return f(x) and y, classes last; raise if outputs are not finite."""
    each = []
    for x, y in batches:
        with network.guarded():
            f = network.outputs(x)
        if not f.isfinite().all():
            raise NoSubstitute("outputs at moved inputs are not finite")
        each.append((f, aligned(likelihood, y, f, network.class_dim)))
    f, y = map(torch.cat, zip(*each, strict=True))
    return f, y


def _known(likelihood: Likelihood, y: Tensor) -> Tensor:
    """Return which targets are known, in the shape of the targets."""
    mask = likelihood.mask(y)
    if mask is None:
        return torch.ones_like(y, dtype=torch.bool)
    return (mask > 0).view(*mask.shape, *(1,) * (y.dim() - mask.dim())).expand_as(y)


def _errors(likelihood: Likelihood, mean: Tensor, y: Tensor) -> Tensor:
    """Return whether each label is wrong, or squared errors, NaN where targets are not known."""
    wrong = (mean - y).square() if mean.shape == y.shape else mean.argmax(-1) != y
    if likelihood.gives_probabilities and likelihood.elementwise:
        wrong = (mean > 0.5) != (y > 0.5)
    return wrong.double().where(_known(likelihood, y), nan)


def _due(likelihood: Likelihood, moves: Moves, mean: Tensor, y: Tensor) -> Tensor:
    """Return the mean error of the simple model, each example without itself; raise if all targets
    are equal."""
    has_classes = likelihood.gives_probabilities and not likelihood.elementwise
    if not has_classes and y.shape != mean.shape:
        raise NoSubstitute("their targets do not have the form of the predictions")
    y = y.reshape(len(y), -1)
    y = y[:, :: -(-y.shape[1] // _COLUMNS)]
    known, table = _known(likelihood, y), y
    if has_classes:
        table = nn.functional.one_hot(y.where(known, 0), mean.shape[-1])
        known = known[..., None]
    # targets that are not known are replaced by the mean of the others
    table = table.double().where(known, 0)
    average = table.sum(0) / known.sum(0).clamp_min(1)
    table = table.where(known, average)
    if not _errors(likelihood, average.expand(table.shape), y).nanmean() > 0:
        raise NoSubstitute("all targets are equal")
    found = without_itself(moves.squares, table.flatten(1).to(moves.squares.device))
    return _errors(likelihood, found.view(table.shape).to(y.device), y).nanmean()


def moved(network: Network, moves: Moves, likelihood: Likelihood) -> tuple[Batches, float]:
    """Return batches of moved training examples, and the length by which they are moved."""
    if not (likelihood.gives_probabilities or likelihood.real_valued):
        # of four overfitted networks for counts, moved examples made the test NLL of three worse
        raise NoSubstitute("the targets are counts, whose rates, exp(f), explode between examples")
    f, y = _outputs(network, likelihood, moves.batches(0.0))
    still = _errors(likelihood, likelihood.mean(f), y).nanmean()
    # no network errs less often at new inputs than in training
    due = max(still, _due(likelihood, moves, likelihood.mean(f), y))
    for length in torch.linspace(1, 2, 5, device="cpu").tolist():
        f, y = _outputs(network, likelihood, moves.batches(length))
        errors = _errors(likelihood, likelihood.mean(f), y)
        if errors.nanmean() >= due:
            break
    if errors.nanmean() <= due:
        return list(moves.batches(length)), length
    if errors.dim() > 1 or not likelihood.gives_probabilities:
        # squared errors grow with the square
        length *= ((due - still) / (errors.nanmean() - still)).sqrt().item()
        return list(moves.batches(length)), length
    most = (due / (1 - due) * (errors == 0).sum()).clamp_min(1)
    kept = (errors == 0) | (errors.nan_to_num().cumsum(0) <= most)
    return list(moves.batches(length, kept.nonzero()[:, 0].to(moves.scale.device))), length


def temperature_of_neighbours(
    model: nn.Module,
    loader: Inputs | Loader,
    targets: Tensor | None = None,
    *,
    class_dim: int = -1,
) -> float:
    """Return a temperature for the logits of a classifier, from its training data alone.

    It has the least NLL on training examples that are moved, so that a network that has memorised
    its training set is as wrong there as at new inputs. Divide logits by it.

    Args:
        model (nn.Module): The trained network. It is called in eval mode, and not changed.
        loader (DataLoader, Dataset, list of batches, or inputs): The training data, without
            augmentation.
        targets (Tensor, optional): The labels, if ``loader`` are inputs.
        class_dim (int): Axis of the classes in the outputs. Default -1.

    Raises:
        ValueError: If inputs have no distances, such as texts and graphs.

    Example:
        >>> temperature = temperature_of_neighbours(model, x, y)
        >>> probabilities = (model(x) / temperature).softmax(-1)
    """
    network, likelihood = Network(model, None, class_dim), Classification()
    data = Data(paired(loader, targets), network.device)
    batches, _ = moved(network, moves_of(data, likelihood, class_dim), likelihood)
    return temperature_of(likelihood, *_outputs(network, likelihood, batches))


def labelled_examples(
    data: Data, likelihood: Likelihood, class_dim: int, most: int = _MOST, real: bool = True
) -> tuple[Any, Tensor]:
    """Return the inputs and targets of the labelled examples of all ranks, or of some, spread
    evenly, in their order. If ``real``, inputs must have real numbers, which are compared."""
    parts: list[Any] = []
    share, limit = 1.0, most

    def labelled(batch: Batch) -> Tensor:
        kept = likelihood.labelled(likelihood.align(batch.targets, class_dim))
        if batch.weights is not None:
            kept &= (batch.weights.to(kept.device) != 0).reshape(len(kept), -1).any(1)
        return kept

    def some(part: Any) -> Any:
        chosen = part[-1] < share
        return map_tensors(lambda t: t[chosen.to(t.device)], part)

    def count(parts: Iterable[Any]) -> int:
        return sum(len(part[-1]) for part in parts)

    try:
        for batch in data:
            _require_rows(batch, real)
            size = sum(t[:1].nbytes for t in tensors_in(batch.inputs))
            most = max(LEAST, min(limit, _BYTES // max(1, size)))
            keys = (batch.rows + 1).double() * 0.6180339887498949 % 1  # even among any first rows
            kept = labelled(batch).to(keys.device)
            keys = keys.where(kept, torch.inf)
            parts.append(some((batch.inputs, batch.targets, batch.rows, keys)))
            while count(parts) > most:
                share /= 2
                parts = list(map(some, parts))
    except NoSubstitute as error:
        data.fail(error)  # the other ranks wait for this one
        raise
    if data.group.size > 1:
        cpu, device = torch.device("cpu"), data.first().targets.device
        share, most = data.group.meet(
            (share, most), lambda each: tuple(map(min, zip(*each, strict=True)))
        )
        every = data.group.meet([to_device(part, cpu) for part in parts], list)
        parts = [some(to_device(part, device)) for own in every for part in own]
        while count(parts) > most:
            share /= 2
            parts = list(map(some, parts))
    try:
        inputs, targets, rows, _ = merged(parts)
    except (RuntimeError, ValueError) as error:
        raise NoSubstitute("inputs differ in shape") from error
    order = rows.argsort()
    inputs, targets = map_tensors(lambda t: t[order.to(t.device)], (inputs, targets))
    return inputs, targets


def _require_rows(batch: Batch, real: bool) -> None:
    """Raise an error if inputs are not tensors with a row for each example, or none is ``real``
    although one should be."""
    tensors, numbers = tensors_in(batch.inputs), (Tensor, bool, int, float, type(None))
    if real and not any(t.is_floating_point() for t in tensors):
        raise NoSubstitute("inputs hold no real numbers, which distances need")
    is_plain = all(isinstance(leaf, numbers) for leaf in leaves_of(batch.inputs))
    count = len(batch.rows)
    if any(t.layout != torch.strided or t.shape[:1] != (count,) for t in tensors) or not is_plain:
        raise NoSubstitute("inputs are not plain tensors with one row for each example")
