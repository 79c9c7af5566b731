"""Training examples that are moved, in place of a validation set.

An example is moved by the difference between another one and its nearest neighbour, scaled to its own distance d
from its nearest neighbour, and keeps its target: x_i + s (x_near(k) - x_k) d_i / d_k. A network that has memorised its
training set is as wrong there as at new inputs if the length s is right, and that is where its error is the one of a
simple model without the example: kernel ridge regression, whose leave-one-out error has a closed form. With s = 1
everywhere, temperatures were up to 2.5 times too large where neighbours are far, and 3 times too small where
many labels are wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log2
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_lla_em.data import Data, TargetFn, map_tensors, paired, tensors_in
from torch_lla_em.jacobian import ForwardFn, Network
from torch_lla_em.likelihoods import Classification, Likelihood
from torch_lla_em.prediction.calibration import temperature_of
from torch_lla_em.prediction.scores import aligned

_MOST, _BYTES, _LEAST = 2_000, 2**28, 20
"""Most examples and bytes of inputs among which neighbours are looked for, and fewest different examples."""

_LONGEST = 2.0
"""Largest length s: with 4, temperatures of networks with many wrong labels doubled, for NLLs that rose by 4 %."""

_AT_ONCE, _SITES, _SEARCHED = 250, 64, 500
"""Examples that the network predicts at once, outputs of an example that are judged, and examples by which the
simple model is chosen."""

Batches = list[tuple[Any, Tensor]]


class NoDistance(ValueError):
    """Training examples cannot be moved; the text is a reason without a remedy."""


class Moves(NamedTuple):
    """Training examples, and the ways that they can be moved."""

    inputs: Any
    """A tree of tensors with one row for each example, (n, ...)."""

    targets: Tensor
    ways: Tensor
    """The example of each move, the one that gives its direction, and the nearest neighbour of that, (m, 3)."""

    scale: Tensor
    """The length of a move relative to that direction, (m,)."""

    squares: Tensor
    """The squared distances of all examples, (n, n)."""

    growth: float
    """The number of all training examples, relative to these."""

    def batches(self, length: float) -> Iterator[tuple[Any, Tensor]]:
        """Yield moved inputs and their targets, a few at a time."""
        for ways, scale in zip(self.ways.split(_AT_ONCE), self.scale.split(_AT_ONCE)):

            def moved(t: Tensor) -> Tensor:
                own, source, near = (t[rows.to(t.device)] for rows in ways.T)
                if not t.is_floating_point():
                    return own
                changed: Tensor = own + (length * scale).to(t).view(-1, *(1,) * (t.dim() - 1)) * (
                    near - source
                )
                return changed

            yield map_tensors(moved, self.inputs), self.targets[ways[:, 0]]


def moves_of(data: Data) -> Moves:
    """Return how the examples of a loader can be moved; one pass."""
    inputs, targets = _examples(data)
    growth = data.facts.num_rows / len(targets)
    squares = _squared_distances([t for t in tensors_in(inputs) if t.is_floating_point()])
    targets = targets.to(squares.device)
    # equal examples count once: of these every one has a neighbour without it
    zero = squares <= 1e-12 * squares.mean()
    same = targets.view(len(targets), -1).unique(dim=0, return_inverse=True)[1]
    order = (~(zero & (same[:, None] == same)).tril(-1).any(1)).nonzero()[:, 0]
    if len(order) < _LEAST:
        raise NoDistance(f"only {len(order)} examples differ")
    generator, count = torch.Generator("cpu").manual_seed(0), len(order)

    def shuffled() -> Tensor:
        return torch.randperm(count, generator=generator, device="cpu").to(squares.device)

    # an order that neither that of the data nor a rotation of the inputs changes
    order = order[squares[order].mean(1).argsort()][shuffled()]
    squares = squares[order][:, order]
    distance, near = squares.masked_fill(zero[order][:, order], torch.inf).min(1)
    if distance.isinf().any():
        raise NoDistance("all inputs are equal")
    copies = max(1, min(2, _MOST // count))
    rows = torch.arange(count, device=squares.device).repeat(copies)
    source = torch.cat([shuffled() for _ in range(copies)])
    scale = (distance[rows] / distance[source]).sqrt().clamp_max(10)
    inputs = map_tensors(lambda t: t[order.to(t.device)], inputs)
    ways = torch.stack([rows, source, near[source]], 1)
    return Moves(inputs, targets[order], ways, scale, squares / squares.median(), growth)


def without_itself(squares: Tensor, table: Tensor) -> Tensor:
    """Return what kernel ridge regression of a table (n, columns) predicts for each example without it."""
    few, best = slice(min(len(table), _SEARCHED)), (torch.inf, 1.0, 1.0)
    some = table[few] - table[few].mean(0)

    def kernel(width: float, rows: slice) -> Tensor:
        return (-squares[rows, rows] / (2 * width)).exp()

    for width in torch.logspace(-1.3, 0.5, 5, device="cpu").tolist():
        values, vectors = torch.linalg.eigh(kernel(width, few))
        for ridge in torch.logspace(-3, 1, 7, device="cpu").tolist():
            weights = 1 / (values.clamp_min(0) + ridge)
            errors = vectors @ (weights[:, None] * (vectors.T @ some))
            errors /= (vectors.square() @ weights)[:, None]
            best = min(best, (errors.square().mean().item(), width, ridge))
    whole = kernel(best[1], slice(len(table)))
    whole.diagonal().add_(best[2])
    inverse = torch.linalg.inv(whole)
    found: Tensor = table - inverse @ (table - table.mean(0)) / inverse.diagonal()[:, None]
    return found


class _Judge:
    """Errors of a network at moved examples, and of a simple model: shares of wrong labels, or squared errors."""

    def __init__(self, network: Network, likelihood: Likelihood):
        self._network, self.likelihood = network, likelihood
        self._has_classes = likelihood.gives_probabilities and not likelihood.elementwise

    def outputs(self, x: Any) -> Tensor:
        """Return f(x), classes last; raise if it is not finite."""
        with self._network.guarded():
            f = self._network.function(x)({})
        if not f.isfinite().all():
            raise NoDistance("outputs at moved inputs are not finite")
        return f

    def at(self, batches: Iterator[tuple[Any, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return the errors of the network, (m, ...), and the weights with which they count."""
        each = []
        for x, y in batches:
            f = self.outputs(x)
            if len(f) != len(y):
                raise NoDistance("outputs do not have one row for each example")
            y = aligned(self.likelihood, y, f, self._network.class_dim)
            each.append(self._errors(self.likelihood.mean(f), y))
        wrong, known = map(torch.cat, zip(*each))
        return wrong, known

    def slopes(self, x: Any, y: Tensor) -> Tensor:
        """Return the slope of log p(y | x) in the logarithm of a factor of the logits, (B,)."""
        f = self.outputs(x)
        y = aligned(self.likelihood, y, f, self._network.class_dim).clamp_min(0)
        return f.gather(-1, y[:, None])[:, 0] - (self.likelihood.mean(f) * f).sum(-1)

    def due(self, moves: Moves) -> float:
        """Return the error of the simple model, each example without itself; raise if all targets are equal."""
        f = self.outputs(map_tensors(lambda t: t[:2], moves.inputs))
        y = self.likelihood.align(moves.targets.to(f.device), self._network.class_dim)
        self.likelihood.check(f, y[: len(f)])
        f = self.likelihood.mean(f)
        if self._has_classes:
            y = _sites(y[..., None])[..., 0]
            table = nn.functional.one_hot(y.clamp_min(0), f.shape[-1]).double()
        elif y.shape[1:] == f.shape[1:]:
            y = _sites(y)
            table = y.double()
        else:
            raise NoDistance("their targets do not have the form of the predictions")

        def error(found: Tensor) -> float:
            return mean(*self._errors(found.view(-1, *table.shape[1:]), y[: len(found)]))

        if not error(table.mean(0).expand(table.shape)) > 0:
            raise NoDistance("all targets are equal")
        found = error(without_itself(moves.squares, table.flatten(1)))
        if moves.growth == 1:
            return found
        # it falls on with more examples, as it has from half of these: from 500 to 2,000 examples of four sets of
        # digits and tables, with and without wrong labels, this was nearer than no change for seven of eight
        half = error(without_itself(moves.squares, table.flatten(1)[: len(table) // 2]))
        return float(found * min(1.0, found / max(half, 1e-12)) ** log2(moves.growth))

    def _errors(self, mean: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        mask = self.likelihood.mask(y)
        if self._has_classes:
            wrong = (mean.argmax(-1) != y).double()
        elif self.likelihood.gives_probabilities:
            wrong = ((mean > 0.5) != (y > 0.5)).double()
        else:
            wrong = (mean - y).double().square()
        return wrong, torch.ones_like(wrong) if mask is None else mask.double().expand(wrong.shape)


def mean(wrong: Tensor, known: Tensor) -> float:
    """Return the mean of errors with these weights."""
    return ((wrong * known).sum() / known.sum().clamp_min(1)).item()


def _sites(y: Tensor) -> Tensor:
    """Return a few of the outputs of each example, (n, sites, C)."""
    y = y.reshape(len(y), -1, y.shape[-1] if y.dim() > 1 else 1)
    return y[:, :: -(-y.shape[1] // _SITES)]


def moved(network: Network, data: Data, likelihood: Likelihood) -> tuple[Batches, float]:
    """Return batches of moved training examples, and the length at which the network's error is the simple model's.

    Of single labels it is at least 1: moves of images and of many columns that are shorter hide wrong labels. If the
    network is wrong too often there, since labels change on the way, only some of its errors are kept.
    """
    moves, judge = moves_of(data), _Judge(network, likelihood)
    due, low, high = judge.due(moves), 0.0, _LONGEST
    wrong, known = judge.at(moves.batches(1.0))
    if wrong.dim() == 1 and likelihood.gives_probabilities:
        low, errors = 1.0, (wrong * known).cumsum(0)
        if mean(wrong, known) > due:
            # no fewer than make the network as confident as it should be: it would become more so
            slopes = torch.cat([judge.slopes(x, y) for x, y in moves.batches(low)]) * known
            right, falls = (wrong == 0).double(), -(wrong * slopes).sum() / (wrong * known).sum()
            least = (right * slopes).sum() / falls.clamp_min(1e-12)
            most = least if due == 1 else least.maximum(due / (1 - due) * (right * known).sum())
            kept = ((wrong == 0) | (errors <= most)).to(moves.ways.device)
            moves = moves._replace(ways=moves.ways[kept], scale=moves.scale[kept])
            return list(moves.batches(low)), low
    if mean(*judge.at(moves.batches(high))) <= due:
        return list(moves.batches(high)), high
    for _ in range(8):
        middle = (low + high) / 2
        is_less = mean(*judge.at(moves.batches(middle))) <= due
        low, high = (middle, high) if is_less else (low, middle)
    return list(moves.batches((low + high) / 2)), (low + high) / 2


def temperature_of_neighbours(
    model: nn.Module,
    loader: Any,
    targets: Tensor | None = None,
    *,
    class_dim: int = -1,
    forward_fn: ForwardFn | None = None,
    target_fn: TargetFn | None = None,
) -> float:
    """Return a temperature for the logits of a classifier, from its training data alone.

    It has the least negative log-likelihood (NLL) on training examples that are moved towards their neighbours,
    where a network that has memorised its training set is as wrong as at new inputs. Divide logits by it.

    Args:
        model (nn.Module): The trained network. It is called in eval mode, and not changed.
        loader (DataLoader, Dataset, list of batches, or inputs): The training data, without augmentation.
        targets (Tensor, optional): The labels, if ``loader`` are inputs.
        class_dim (int): Axis of the classes in the outputs. Default -1.
        forward_fn (callable, optional): (model, inputs) -> logits, if model(inputs) does not work.
        target_fn (callable, optional): batch -> labels, as in ``LinearisedLaplace``.

    Returns:
        The temperature, a float.

    Raises:
        ValueError: If inputs have no distances, as texts and graphs.

    Example:
        >>> temperature = temperature_of_neighbours(model, x, y)
        >>> probabilities = (model(x) / temperature).softmax(-1)
    """
    network, likelihood = Network(model, forward_fn, class_dim), Classification()
    data = Data(paired(loader, targets), network.device, target_fn)
    try:
        batches, _ = moved(network, data, likelihood)
    except NoDistance as error:
        raise ValueError(
            f"These training examples cannot be moved towards neighbours: {error}. Fit a temperature to a "
            "validation set instead."
        ) from error
    judge = _Judge(network, likelihood)
    f = torch.cat([judge.outputs(x) for x, _ in batches])
    return temperature_of(
        likelihood, f, aligned(likelihood, torch.cat([y for _, y in batches]), f, class_dim)
    )


def _examples(data: Data) -> tuple[Any, Tensor]:
    """Return the inputs and targets of a pass, or of some of its examples, spread over it evenly."""
    parts, keys, most = [], torch.zeros(0, dtype=torch.double, device="cpu"), _LEAST
    with torch.no_grad():
        for batch in data:
            tensors, count = tensors_in(batch.inputs), len(batch.rows)
            if not any(t.is_floating_point() for t in tensors):
                raise NoDistance("inputs hold no real numbers, which distances need")
            for t in tensors:
                if t.layout != torch.strided or t.is_nested or not t.dim() or len(t) != count:
                    raise NoDistance("inputs are not plain tensors with one row for each example")
            size = sum(t[:1].nbytes for t in tensors)
            most = max(_LEAST, min(_MOST, _BYTES // max(1, size)))
            # multiples of the golden ratio are spread evenly
            keys = torch.cat([keys, (batch.rows + 1).double() * 0.6180339887498949 % 1])
            parts.append((batch.inputs, batch.targets))
            if len(keys) > 2 * most:
                parts, keys = _least(parts, keys, most)
    whole: tuple[Any, Tensor] = _least(parts, keys, most)[0][0]
    return whole


def _least(parts: list[Any], keys: Tensor, most: int) -> tuple[list[Any], Tensor]:
    """Return the examples with the smallest keys as one part, with their keys."""
    every, chosen = zip(*map(tensors_in, parts)), keys.argsort()[:most]
    try:
        whole = map_tensors(lambda t: torch.cat(next(every))[chosen.to(t.device)], parts[0])
    except RuntimeError as error:
        raise NoDistance("inputs differ in shape") from error
    return [whole], keys[chosen]


def _squared_distances(tensors: list[Tensor]) -> Tensor:
    """Return the squared distances between examples, (n, n), a few columns at a time."""
    products: Any = 0
    unit = max(t.abs().max().item() for t in tensors if t.numel()) or 1.0  # its square may be 0
    for t in tensors:
        for part in t.flatten(1).double().div(unit).split(4096, dim=1):
            part = part - part.mean(0)
            products = products + part @ part.T
    squares = products.diagonal()
    apart: Tensor = (squares[:, None] + squares - 2 * products).clamp_min(0).fill_diagonal_(0)
    return apart
