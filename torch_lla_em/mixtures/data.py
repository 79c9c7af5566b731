"""The data of a mixture: examples with labels, which can be read several times."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

_IGNORED = -100
"""The label that PyTorch's losses ignore."""

_NUMBERS = {"cpu": 1 << 18, "cuda": 1 << 26}
"""How many numbers to compute with at once: on a CPU they should stay in the cache."""

Piece = tuple[Tensor, Tensor]
"""Examples (n, D) and their labels (n,)."""


class Examples:
    """The checked examples of batches; without labels, all have the label 0."""

    def __init__(self, data: Tensor | Iterable[Any], by_label: bool = False):
        if isinstance(data, Iterator):
            raise TypeError(
                f"The data are an iterator ({type(data).__name__}), which ends after one pass, but "
                "EM needs several. Pass tensors, a list of batches or a DataLoader."
            )
        self.batches = [data] if isinstance(data, Tensor) else data
        self.by_label = by_label

    def pieces(self, width: int | None = None) -> Iterator[Piece]:
        """Yield a few examples at a time, for computations with ``width`` (or D) numbers for each."""
        for batch in self.batches:
            x, *others = batch if isinstance(batch, (tuple, list)) else (batch,)
            if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] == 0:
                shape = tuple(x.shape) if isinstance(x, Tensor) else None
                raise ValueError(
                    f"A batch holds a {type(x).__name__} of shape {shape}. Pass tensors with one "
                    "row per example, shape (n, D); a single column is x[:, None]."
                )
            labels = self._labels(x, others)
            kept = labels != _IGNORED
            x, labels = (x.detach(), labels) if kept.all() else (x.detach()[kept], labels[kept])
            numbers = _NUMBERS.get(x.device.type, _NUMBERS["cpu"])
            size = max(256, numbers // (width or x.shape[1]))
            yield from zip(x.split(size), labels.split(size))

    def _labels(self, x: Tensor, others: list[Any]) -> Tensor:
        if not self.by_label:
            return torch.zeros(len(x), dtype=torch.long, device=x.device)
        labels = torch.as_tensor(others[0], device=x.device) if others else None
        if labels is None or labels.shape != x.shape[:1] or labels.is_floating_point():
            found = "none" if labels is None else f"{labels.dtype} {tuple(labels.shape)}"
            raise ValueError(
                "A fit by label needs batches (x, labels) with one integer per example, but "
                f"the labels are {found}. Pass [(x, labels)] or a loader."
            )
        return labels


class Survey(NamedTuple):
    """Statistics of the data, from the first pass."""

    counts: Counter[int]
    """The number of examples with each label."""

    mean: Tensor
    """Column means, shape (D,)."""

    variance: Tensor
    """Column variances, shape (D,)."""

    x: Tensor
    """A uniform sample of the examples, or all of them if they are few enough, shape (n, D)."""

    labels: Tensor
    """The labels of the sample, shape (n,)."""

    @property
    def num_examples(self) -> int:
        """N."""
        return sum(self.counts.values())


def survey(examples: Examples, sample_size: int, generator: torch.Generator) -> Survey:
    """Count, average and sample the examples in one pass; refuse what no mixture can fit."""
    count, mean, squares = 0, torch.zeros((), device="cpu"), torch.zeros((), device="cpu")
    counts: Counter[int] = Counter()
    sample: list[tuple[Tensor, ...]] = []
    for x, labels in examples.pieces():
        n = len(x)
        if n == 0:
            continue
        variance, centre = torch.var_mean(x.double(), 0, correction=0)
        if not torch.isfinite(variance).all():
            bad = int((~torch.isfinite(x)).any(1).sum())
            raise ValueError(
                f"A batch has {bad} examples with NaN or infinity, or values too large "
                "to square. Remove, impute or rescale them."
            )
        delta, count = centre - mean.to(centre), count + n
        squares = squares.to(centre) + n * variance + delta.square() * (n * (count - n) / count)
        mean = mean.to(centre) + delta * (n / count)
        counts.update(dict(zip(*(t.tolist() for t in labels.unique(return_counts=True)))))
        keys = torch.rand(n, generator=generator, device=generator.device).to(centre.device)
        sample.append((keys, x, labels))
        if sum(len(keys) for keys, *_ in sample) > 2 * sample_size:
            sample = [_with_largest_keys(sample, sample_size)]
    if count == 0:
        raise ValueError(
            "The data hold no examples. Is the loader empty or used up, or are all labels "
            f"{_IGNORED}, which are left out?"
        )
    _, x, labels = _with_largest_keys(sample, sample_size)
    return Survey(counts, mean, squares / count, x, labels)


def _with_largest_keys(sample: list[tuple[Tensor, ...]], size: int) -> tuple[Tensor, ...]:
    """Return a uniform sample: the examples with the largest random keys, in their order."""
    keys, *others = (torch.cat(parts) for parts in zip(*sample))
    chosen = keys.topk(min(size, len(keys))).indices.sort().values
    return tuple(tensor[chosen] for tensor in (keys, *others))
