"""The data of a mixture: batches of examples that can be read several times."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

IGNORED = -100
"""The label that PyTorch's losses ignore."""

PIECE = 1 << 20
"""How many numbers are converted to double precision at once."""


class Examples(NamedTuple):
    """Some examples, and their labels if the fit is by label."""

    x: Tensor
    """Shape (n, D)."""

    labels: Tensor | None = None
    """Shape (n,)."""

    def each(self, function: Callable[[Tensor], Tensor]) -> "Examples":
        """Return the examples with a function applied to x and to the labels."""
        return Examples(*(None if part is None else function(part) for part in self))

    def split(self, size: int) -> Iterator["Examples"]:
        """Yield the examples in pieces of at most ``size``."""
        for first in range(0, len(self.x), size):
            yield self.each(lambda part: part[first : first + size])


class ExampleBatches:
    """The checked batches of data that hold tensors, or tuples (x, labels, ...)."""

    def __init__(self, data: Tensor | Iterable[Any], by_label: bool = False):
        if isinstance(data, Iterator):
            raise TypeError(
                f"The data are an iterator ({type(data).__name__}), which ends after one pass, but "
                "EM needs several. Pass tensors, a list of batches or a DataLoader."
            )
        self.batches = [data] if isinstance(data, Tensor) else data
        self.by_label = by_label

    def __iter__(self) -> Iterator[Examples]:
        """Yield the batches of one pass; examples whose label is ``IGNORED`` are left out."""
        for batch in self.batches:
            x, *others = batch if isinstance(batch, (tuple, list)) else (batch,)
            if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] == 0:
                shape = tuple(x.shape) if isinstance(x, Tensor) else None
                raise ValueError(
                    f"A batch holds a {type(x).__name__} of shape {shape}. Pass tensors with one "
                    "row per example, shape (n, D); a single column is x[:, None]."
                )
            if not self.by_label:
                yield Examples(x.detach())
                continue
            labels = torch.as_tensor(others[0], device=x.device) if others else None
            if labels is None or labels.shape != x.shape[:1] or labels.is_floating_point():
                found = "none" if labels is None else f"{labels.dtype} {tuple(labels.shape)}"
                raise ValueError(
                    "A fit by label needs batches (x, labels) with one integer per example, but "
                    f"the labels are {found}. Pass [(x, labels)] or a loader."
                )
            kept = labels != IGNORED
            if kept.any():
                yield Examples(x.detach()[kept], labels[kept])


class Survey(NamedTuple):
    """Statistics of the data, from the first pass."""

    num_examples: int
    """N."""

    mean: Tensor
    """Column means, shape (D,)."""

    variance: Tensor
    """Column variances, shape (D,)."""

    sample: Examples
    """A uniform sample of the examples, or all of them if they are few enough."""

    class_counts: Counter[int]
    """The number of examples with each label; empty without labels."""


def survey(batches: Iterable[Examples], sample_size: int, generator: torch.Generator) -> Survey:
    """Count, average and sample the examples in one pass; refuse what no mixture can fit."""
    count, mean, squares = 0, torch.zeros((), device="cpu"), torch.zeros((), device="cpu")
    class_counts: Counter[int] = Counter()
    kept: list[tuple[Tensor, Examples]] = []
    for batch in batches:
        for piece in batch.split(max(1, PIECE // batch.x.shape[1])):
            variance, centre = torch.var_mean(piece.x.double(), 0, correction=0)
            if not torch.isfinite(variance).all():
                bad = int((~torch.isfinite(piece.x)).any(1).sum())
                raise ValueError(
                    f"A batch has {bad} examples with NaN or infinity, or values too large "
                    "to square. Remove, impute or rescale them."
                )
            n = len(piece.x)
            delta, count = centre - mean.to(centre), count + n
            squares = squares.to(centre) + n * variance + delta.square() * (n * (count - n) / count)
            mean = mean.to(centre) + delta * (n / count)
            if piece.labels is not None:
                class_counts.update(piece.labels.tolist())
            keys = torch.rand(n, generator=generator, device=generator.device).to(centre.device)
            kept.append((keys, piece))
            if sum(len(keys) for keys, _ in kept) > 2 * sample_size:
                kept = [_with_largest_keys(kept, sample_size)]
    if count == 0:
        raise ValueError(
            "The data hold no examples. Is the loader empty or used up, or are all labels "
            f"{IGNORED}, which are left out?"
        )
    sample = _with_largest_keys(kept, sample_size)[1]
    return Survey(count, mean, squares / count, sample, class_counts)


def _with_largest_keys(kept: list[tuple[Tensor, Examples]], size: int) -> tuple[Tensor, Examples]:
    """Return a uniform sample: the examples with the largest random keys, in their order."""
    keys, x, labels = zip(*((keys, *examples) for keys, examples in kept))
    chosen = torch.cat(keys).topk(min(size, sum(map(len, keys)))).indices.sort().values
    everything = Examples(torch.cat(x), None if labels[0] is None else torch.cat(labels))
    return torch.cat(keys)[chosen], everything.each(lambda part: part[chosen])
