"""Training examples that are moved, in place of a validation set.

An example is moved by the difference between another one and its nearest neighbour, scaled to its own distance d
from its nearest neighbour, and keeps its target: x_i + s (x_near(k) - x_k) d_i / d_k. A network that has memorised its
training set is as wrong there as at new inputs if the length s is right, and that is where its error is the one of a
simple model without the example: kernel ridge regression, whose leave-one-out error has a closed form. With s = 1
everywhere, temperatures were up to 2.5 times too large where neighbours are far, and 3 times too small where
many labels are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import exp, log, log2
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_lla_em.data import Data, TargetFn, map_tensors, paired, tensors_in
from torch_lla_em.jacobian import ForwardFn, Network
from torch_lla_em.likelihoods import Classification, Likelihood
from torch_lla_em.prediction.scores import aligned

_MOST, _BYTES, _LEAST = 2_000, 2**28, 20
"""Most examples and bytes of inputs among which neighbours are looked for, and fewest different examples."""

_LONGEST = 2.0
"""Largest length s: with 4, temperatures of networks with many wrong labels doubled, for NLLs that rose by 4 %."""

_AT_ONCE, _SITES, _SEARCHED = 250, 64, 500
"""Examples that the network predicts at once, outputs of an example that are judged, and examples by which the
simple model is chosen."""


class NoDistance(ValueError):
    """Training examples cannot be moved; the text is a reason without a remedy."""


class Moves(NamedTuple):
    """Training examples, and the ways that they can be moved."""

    inputs: Any
    """A tree of tensors with one row for each example, (n, ...)."""

    targets: Tensor

    rows: Tensor
    """The example of each move, (m,)."""

    source: Tensor
    """The examples whose difference to their nearest neighbour is the direction of each move, (m,)."""

    near: Tensor
    """Their nearest neighbours, (m,)."""

    scale: Tensor
    """The length of a move relative to that difference, (m,)."""

    unseen: Callable[[Tensor], Tensor]
    """Maps a table of targets of the first examples to what a simple model predicts for each without it."""

    growth: float
    """The number of all training examples, relative to those that were taken."""

    def batches(self, length: float) -> Iterator[tuple[Any, Tensor]]:
        """Yield moved inputs and their targets, a few at a time."""
        every = self.rows, self.source, self.near, self.scale
        for row, source, near, scale in zip(*(part.split(_AT_ONCE) for part in every)):

            def moved(t: Tensor) -> Tensor:
                if not t.is_floating_point():
                    return t[row]
                share = (length * scale).to(t).view(-1, *(1,) * (t.dim() - 1))
                return t[row] + share * (t[near] - t[source])

            yield map_tensors(moved, self.inputs), self.targets[row]


def moves_of(data: Data) -> Moves:
    """Return how the examples of a loader can be moved; one pass.

    Raises:
        NoDistance: If they have no distances.
    """
    inputs, targets = _examples(data)
    growth = data.facts.num_rows / len(targets)
    squares = _squared_distances([t for t in tensors_in(inputs) if t.is_floating_point()])
    targets = targets.to(squares.device)
    # equal examples count once: of these every one has a neighbour without it
    zero = squares <= 1e-12 * squares.mean()
    labels = targets.flatten(1) if targets.dim() > 1 else targets
    same = labels.unique(dim=0, return_inverse=True)[1]
    kept = ~(zero & (same[:, None] == same)).tril(-1).any(1)
    # in an order that neither that of the data nor a rotation of the inputs changes
    order = kept.nonzero()[:, 0]
    order = order[squares[order].mean(1).argsort()]
    if len(order) < _LEAST:
        raise NoDistance(f"only {len(order)} examples differ")
    generator = torch.Generator("cpu").manual_seed(0)

    def shuffled() -> Tensor:
        return torch.randperm(len(order), generator=generator, device="cpu").to(squares.device)

    order = order[shuffled()]
    inputs, targets = map_tensors(lambda t: t[order.to(t.device)], inputs), targets[order]
    squares, zero = squares[order][:, order], zero[order][:, order]
    distance, near = squares.masked_fill(zero, torch.inf).min(1)
    distance = distance.sqrt()
    if not distance.isfinite().all():
        raise NoDistance("all inputs are equal")
    rows = torch.arange(len(order), device=squares.device)
    copies = max(1, min(2, _MOST // len(order)))
    source, rows = torch.cat([shuffled() for _ in range(copies)]), rows.repeat(copies)
    scale = (distance[rows] / distance[source]).clamp_max(10)
    return Moves(inputs, targets, rows, source, near[source], scale, _Simple(squares), growth)


class _Simple:
    """Kernel ridge regression of a table of targets on the inputs, by their squared distances."""

    def __init__(self, squares: Tensor):
        self._squares = squares / squares.median()

    def __call__(self, table: Tensor) -> Tensor:
        """Return what it predicts for each example without it and later ones, the shape of the table."""
        few, best = slice(min(len(table), _SEARCHED)), (torch.inf, 1.0, 1.0)
        some = table[few] - table[few].mean(0)
        # squared widths of the kernel in median squared distances
        widths, ridges = (
            torch.logspace(low, high, count, device="cpu").tolist()
            for low, high, count in ((-1.3, 0.5, 5), (-3, 1, 7))
        )
        for width in widths:
            values, vectors = torch.linalg.eigh(self._kernel(width, few))
            turned, values = vectors.T @ some, values.clamp_min(0)
            for ridge in ridges:
                weights = 1 / (values + ridge)
                errors = vectors @ (weights[:, None] * turned)
                errors /= (vectors.square() @ weights)[:, None]
                best = min(best, (errors.square().mean().item(), width, ridge))
        _, width, ridge = best
        kernel = self._kernel(width, slice(len(table)))
        kernel.diagonal().add_(ridge)
        inverse = torch.linalg.inv(kernel)
        return table - inverse @ (table - table.mean(0)) / inverse.diagonal()[:, None]

    def _kernel(self, width: float, some: slice) -> Tensor:
        return (-self._squares[some, some] / (2 * width)).exp()


class Judge(NamedTuple):
    """Errors of predictions, comparable between a network and a simple model."""

    likelihood: Likelihood
    class_dim: int = -1

    def of_network(self, network: Network, batches: Iterator[tuple[Any, Tensor]]) -> float:
        """Return the error of a network: the share of wrong labels, or the mean squared error."""
        total = count = 0.0
        for x, y in batches:
            wrong, known = self._of_batch(network, x, y)
            total, count = total + (wrong * known).sum().item(), count + known.sum().item()
        return total / max(1.0, count)

    def thinned(
        self, network: Network, batches: Iterator[tuple[Any, Tensor]], due: float
    ) -> list[tuple[Any, Tensor]]:
        """Return the batches with all labels that the network predicts, and as many others as give this error."""
        found = [(x, y, *self._of_batch(network, x, y)) for x, y in batches]
        right = sum(((1 - wrong) * known).sum().item() for _, _, wrong, known in found)
        most, kept = due / (1 - due) * right if due < 1 else torch.inf, []
        for x, y, wrong, known in found:
            errors = (wrong * known).cumsum(0)
            rows = ((wrong == 0) | (errors <= most)).nonzero()[:, 0]
            most -= errors[-1].item()
            kept.append((map_tensors(lambda t: t[rows.to(t.device)], x), y[rows.to(y.device)]))
        return [(x, y) for x, y in kept if len(y)]

    def has_labels(self, moves: Moves) -> bool:
        """Return whether each example has one label."""
        return self._has_classes and moves.targets.dim() == 1

    def _of_batch(self, network: Network, x: Any, y: Tensor) -> tuple[Tensor, Tensor]:
        with network.guarded():
            f = network.function(x)({})
        if not f.isfinite().all():
            raise NoDistance("outputs at moved inputs are not finite")
        return self._errors(self.likelihood.mean(f), aligned(self.likelihood, y, f, self.class_dim))

    def unseen(self, network: Network, moves: Moves) -> float:
        """Return the error of the simple model, each example without itself; raise if all targets are equal."""
        x = map_tensors(lambda t: t[:2], moves.inputs)
        with network.guarded():
            f = network.function(x)({})
        y = self.likelihood.align(moves.targets.to(f.device), self.class_dim)
        self.likelihood.check(f, y[: len(f)])
        f = self.likelihood.mean(f)
        if self._has_classes:
            y = self._sites(y[..., None])[..., 0]
            table = torch.nn.functional.one_hot(y.clamp_min(0), f.shape[-1])
        elif y.shape[1:] == f.shape[1:]:
            y = table = self._sites(y)
        else:
            raise NoDistance("their targets do not have the form of the predictions")
        table = table.double()

        def error(found: Tensor) -> float:
            wrong, known = self._errors(found.view(-1, *table.shape[1:]), y[: len(found)])
            return ((wrong * known).sum() / known.sum().clamp_min(1)).item()

        if not error(table.mean(0).expand(table.shape)) > 0:
            raise NoDistance("all targets are equal")
        due = error(moves.unseen(table.flatten(1)))
        if moves.growth == 1:
            return due
        # it falls on with more examples, as it has from half of these: from 500 to 2,000 examples of four sets of
        # digits and tables, with and without wrong labels, this was nearer than no change for seven of eight
        half = error(moves.unseen(table.flatten(1)[: len(table) // 2]))
        return due * min(1.0, due / max(half, 1e-12)) ** log2(moves.growth)

    @property
    def _has_classes(self) -> bool:
        return self.likelihood.gives_probabilities and not self.likelihood.elementwise

    @staticmethod
    def _sites(y: Tensor) -> Tensor:
        """Return a few of the outputs of each example, (n, sites, C)."""
        y = y.reshape(len(y), -1, y.shape[-1] if y.dim() > 1 else 1)
        return y[:, :: -(-y.shape[1] // _SITES)]

    def _errors(self, mean: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the error of each target, and the weights with which they count."""
        mask = self.likelihood.mask(y)
        if self._has_classes:
            wrong = (mean.argmax(-1) != y).double()
        elif self.likelihood.gives_probabilities:
            wrong = ((mean > 0.5) != (y > 0.5)).double()
        else:
            wrong = (mean - y).double().square()
        return wrong, torch.ones_like(wrong) if mask is None else mask.double().expand(wrong.shape)


def moved(
    network: Network, data: Data, likelihood: Likelihood
) -> tuple[list[tuple[Any, Tensor]], float]:
    """Return batches of moved training examples, and the length at which the network's error is the simple model's.

    Of single labels it is at least 1: moves of images and of many columns that are shorter hide wrong labels. If the
    network is wrong too often there, since a label changes on the way, only some of its errors are kept.
    """
    moves, judge = moves_of(data), Judge(likelihood, network.class_dim)
    due, low, high = judge.unseen(network, moves), float(judge.has_labels(moves)), _LONGEST

    def error(length: float) -> float:
        return judge.of_network(network, moves.batches(length))

    if low and error(low) > due:
        return judge.thinned(network, moves.batches(low), due), low
    if error(high) <= due:
        return list(moves.batches(high)), high
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (middle, high) if error(middle) <= due else (low, middle)
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
    where a network that has memorised its training set is as wrong as at new inputs. Divide logits by
    it. ``LinearisedLaplace.fit`` and ``calibrate()`` use the same examples. It cannot see a shift of the
    inputs, nor labels that are wrong for an example and its neighbours alike.

    Args:
        model (nn.Module): The trained network. It is called in eval mode, and not changed.
        loader (DataLoader, Dataset, list of batches, or inputs): The training data, without augmentation.
        targets (Tensor, optional): The labels, if ``loader`` are inputs.
        class_dim (int): Axis of the classes in the outputs. Default -1.
        forward_fn (callable, optional): (model, inputs) -> logits, if model(inputs) does not work.
        target_fn (callable, optional): batch -> labels, as in ``LinearisedLaplace``.

    Returns:
        The temperature, between 0.05 and 100.

    Raises:
        ValueError: If inputs have no distances, as texts and graphs.

    Example:
        >>> temperature = temperature_of_neighbours(model, x, y)
        >>> probabilities = (model(x) / temperature).softmax(-1)
    """
    network, likelihood = Network(model, forward_fn, class_dim), Classification()
    try:
        batches, _ = moved(
            network, Data(paired(loader, targets), network.device, target_fn), likelihood
        )
    except NoDistance as error:
        raise ValueError(
            f"These training examples cannot be moved towards neighbours: {error}. Fit a temperature to a "
            "validation set instead."
        ) from error
    with network.guarded():
        outputs = [network.function(x)({}).double() for x, _ in batches]
        y = [aligned(likelihood, y, f, class_dim) for f, (_, y) in zip(outputs, batches)]

        def nll(log_temperature: float) -> float:
            scale = exp(-log_temperature)
            return -sum(likelihood.log_prob(scale * f, t).sum().item() for f, t in zip(outputs, y))

        low, high = log(0.05), log(100.0)
        for _ in range(40):  # the NLL has one minimum in 1 / T
            first, second = low + (high - low) * 0.382, low + (high - low) * 0.618
            low, high = (low, second) if nll(first) <= nll(second) else (first, high)
    return exp((low + high) / 2)


def _examples(data: Data) -> tuple[Any, Tensor]:
    """Return the inputs and targets of a pass, or of some of its examples, spread over it evenly."""
    parts: list[Any] = []
    kept = torch.zeros(0, dtype=torch.double, device="cpu")
    with torch.no_grad():
        for batch in data:
            tensors = tensors_in(batch.inputs)
            if not any(t.is_floating_point() for t in tensors):
                raise NoDistance("inputs hold no real numbers, which distances need")
            if any(t.layout != torch.strided or t.is_nested or t.is_complex() for t in tensors):
                raise NoDistance("inputs are not plain tensors")
            if any(not t.dim() or len(t) != len(batch.rows) for t in tensors):
                raise NoDistance("inputs do not have one row for each example")
            size = max(1, sum(t[:1].nbytes for t in tensors))
            most = max(_LEAST, min(_MOST, _BYTES // size))
            # multiples of the golden ratio are spread evenly
            kept = torch.cat([kept, (batch.rows + 1).double() * 0.6180339887498949 % 1])
            parts.append((batch.inputs, batch.targets))
            if sum(len(y) for _, y in parts) > 2 * most:
                parts, kept = _least(parts, kept, most)
    parts, _ = _least(parts, kept, most)
    return parts[0]


def _least(parts: list[Any], keys: Tensor, most: int) -> tuple[list[Any], Tensor]:
    """Return the examples with the smallest keys as one part, with their keys."""
    every = zip(*map(tensors_in, parts))
    chosen = keys.argsort()[:most]
    try:
        whole = map_tensors(lambda t: torch.cat(next(every))[chosen.to(t.device)], parts[0])
    except RuntimeError as error:
        raise NoDistance("inputs differ in shape") from error
    return [whole], keys[chosen]


def _squared_distances(tensors: list[Tensor]) -> Tensor:
    """Return the squared distances between examples, (n, n), a few columns at a time."""
    n = len(tensors[0])
    products = torch.zeros(n, n, dtype=torch.float64, device=tensors[0].device)
    for t in tensors:
        for part in t.reshape(n, -1).split(4096, dim=1):
            part = part.double() - part.double().mean(0)
            products += part @ part.T
    squares = products.diagonal()
    return (squares[:, None] + squares - 2 * products).clamp_min(0).fill_diagonal_(0)
