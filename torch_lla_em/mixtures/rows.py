"""Passes over rows of data: a tensor, or the batches of any loader."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

IGNORED = -100
"""The label that PyTorch's losses ignore."""

PIECE = 1 << 20
"""Numbers per piece when a whole tensor is surveyed."""


class Batch(NamedTuple):
    """Some rows, and their labels where the fit is by label."""

    x: Tensor
    """Shape (n, D)."""

    labels: Tensor | None
    """Shape (n,)."""

    def chunks(self, size: int) -> Iterator["Batch"]:
        """Yield the same rows in batches of at most ``size``."""
        for first in range(0, len(self.x), size):
            rows = slice(first, first + size)
            yield Batch(self.x[rows], None if self.labels is None else self.labels[rows])


class Rows:
    """The batches of a tensor (N, D), or of a re-iterable of tensors or of tuples (x, ...)."""

    def __init__(self, source: Tensor | Iterable, by_label: bool = False):
        if isinstance(source, Iterator):
            raise TypeError(
                "The data are an iterator, which ends after one pass, and EM needs several. "
                "Pass a tensor, a list of batches or a DataLoader."
            )
        if by_label and isinstance(source, Tensor):
            raise TypeError("A fit by label needs labels: pass [(x, labels)] or a loader.")
        self.source = source
        self.by_label = by_label

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of one pass."""
        if isinstance(self.source, Tensor):
            yield Batch(self.source, None)
            return
        for batch in self.source:
            parts = batch if isinstance(batch, (tuple, list)) else (batch,)
            if self.by_label and len(parts) < 2:
                raise TypeError(
                    "A fit by label needs batches (x, labels); of a network, also dicts with 'labels'."
                )
            x, labels = parts[0], parts[1] if self.by_label else None
            if labels is not None and not isinstance(labels, Tensor):
                labels = torch.as_tensor(labels, device="cpu")
            if labels is not None and labels.shape == x.shape[:1]:
                kept = labels != IGNORED
                if not kept.any():
                    continue
                x, labels = x[kept.to(x.device)], labels[kept]
            yield Batch(x, labels)


class Survey(NamedTuple):
    """What one pass learns of the data before EM begins."""

    count: int  # type: ignore[assignment]
    """Rows seen."""

    mean: Tensor
    """Column means, shape (D,)."""

    variance: Tensor
    """Column variances, shape (D,)."""

    sample: Batch
    """A uniform sample of rows, or all of them where they fit."""

    class_counts: dict[int, int]
    """Rows of each label; empty without labels."""

    @property
    def complete(self) -> bool:
        """Whether the sample holds all rows."""
        return len(self.sample.x) == self.count


def survey(
    rows: Rows, sample_size: int, generator: torch.Generator, check: Callable[[Tensor], None]
) -> Survey:
    """Count, average and sample the rows in one pass; refuse what no mixture can fit."""
    count, mean, squares = 0, torch.zeros((), device="cpu"), torch.zeros((), device="cpu")
    class_counts: dict[int, int] = {}
    reservoir = _Reservoir(sample_size, generator)
    for number, batch in enumerate(rows):
        _check_batch(batch, number, expected=mean.shape if count else None)
        check(batch.x)
        for piece in batch.chunks(max(1, PIECE // batch.x.shape[1])):
            x = piece.x.detach().double()
            variance, centre = torch.var_mean(x, 0, correction=0)
            if not torch.isfinite(variance).all():
                bad = int((~torch.isfinite(x)).any(1).sum())
                raise ValueError(
                    f"Batch {number} has {bad} rows with NaN or infinity, or values too large "
                    "to square. Remove, impute or rescale them."
                )
            delta = centre - mean.to(x)
            total = count + len(x)
            squares = squares.to(x) + variance * len(x) + delta.square() * (count * len(x) / total)
            mean = mean.to(x) + delta * (len(x) / total)
            count = total
            if piece.labels is not None:
                for label, n in zip(*piece.labels.unique(return_counts=True), strict=True):
                    class_counts[int(label)] = class_counts.get(int(label), 0) + int(n)
            reservoir.add(piece)
    if count == 0:
        ignored = f", or are all labels {IGNORED}, which are left out" if rows.by_label else ""
        raise ValueError(f"The data hold no rows. Is the loader empty or used up{ignored}?")
    return Survey(count, mean, squares / count, reservoir.sample(), class_counts)


def _check_batch(batch: Batch, number: int, expected: torch.Size | None) -> None:
    x, labels = batch
    if not isinstance(x, Tensor):
        raise TypeError(f"Batch {number} holds a {type(x).__name__}. Pass tensors (n, D).")
    if x.ndim != 2 or x.shape[1] == 0:
        raise ValueError(
            f"Batch {number} has shape {tuple(x.shape)}. Pass rows, shape (n, D); "
            "a single column is x[:, None]."
        )
    if expected is not None and x.shape[1:] != expected:
        raise ValueError(f"Batch {number} has {x.shape[1]} columns, those before {expected[0]}.")
    if labels is not None and (labels.shape != x.shape[:1] or labels.is_floating_point()):
        raise ValueError(
            f"The labels of batch {number} have shape {tuple(labels.shape)} and type "
            f"{labels.dtype}. Pass one integer per row."
        )


class _Reservoir:
    """A uniform sample without replacement from a stream: the rows with the largest keys."""

    def __init__(self, size: int, generator: torch.Generator):
        self.size, self.generator = size, generator
        self.kept: list[tuple[Tensor, Batch]] = []
        self.count, self.threshold = 0, -1.0

    def add(self, batch: Batch) -> None:
        """Offer rows; those with too small a key pass by."""
        device = self.generator.device
        keys = torch.rand(len(batch.x), generator=self.generator, device=device).cpu()
        chosen = (keys > self.threshold).nonzero()[:, 0]
        self.kept.append((keys[chosen], _take(batch, chosen)))
        self.count += len(chosen)
        if self.count > 2 * self.size:
            self._shrink()

    def sample(self) -> Batch:
        """Return the rows kept, in the order of the stream."""
        self._shrink()
        return self.kept[0][1]

    def _shrink(self) -> None:
        keys = torch.cat([keys for keys, _ in self.kept])
        labels = [batch.labels for _, batch in self.kept]
        rows = Batch(
            torch.cat([batch.x for _, batch in self.kept]),
            None if labels[0] is None else torch.cat(labels),
        )
        if len(keys) > self.size:
            largest, chosen = keys.topk(self.size)
            self.threshold = float(largest[-1])
            chosen = chosen.sort().values
            keys, rows = keys[chosen], _take(rows, chosen)
        self.kept, self.count = [(keys, rows)], len(keys)


def _take(batch: Batch, chosen: Tensor) -> Batch:
    x, labels = batch
    return Batch(
        x[chosen.to(x.device)].detach(),
        None if labels is None else labels[chosen.to(labels.device)],
    )
