"""Examples with f and the products J w of posteriors, and the predictions that are made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction.arrays import NUMBERS
from torch_lla_em.prediction.functions import MODE, SCALE
from torch_lla_em.prediction.neighbours import TrainingExamples, output_variance
from torch_lla_em.prediction.prediction import Prediction
from torch_lla_em.prediction.reference import Reference

Rows = list[list[Any]]
"""A table of components as numbers, or as tensors of one number each if it is differentiated."""

Table = Tensor | Rows
Tables = Table | tuple[Table, ...]
"""A table of components, the same for all members of an ensemble, or one for each."""

LENGTHS = (
    "pad the inputs to one length, with targets of -100 there, or predict batch by batch: "
    "la.predictions(loader)."
)
_CLASSES = (
    "an ensemble needs networks with the same classes, or the same targets, in the same order."
)


def posterior_alone(mean: str = "network", scale: float | Tensor = 1.0) -> Tensor:
    """Return the table of a single component: √τ J w_k around one mean."""
    row = [1.0, float(mean == "linear"), float(mean == "network"), float(scale)]
    return torch.tensor([row], dtype=torch.float64, device="cpu")


class Pushforward(NamedTuple):
    """Examples under one posterior, or under all members of an ensemble, each with an entry in every tuple."""

    y: Tensor
    likelihoods: tuple[Likelihood, ...]

    outputs: tuple[Tensor, ...]
    """The network's outputs f, (B, ..., C), classes last."""

    Jw: tuple[Tensor, ...]
    """J w of w_lin and of the samples, (1 + K, B, ..., C)."""

    training: tuple[TrainingExamples | None, ...] = (None,)
    """The stored training examples: logits of inputs with a larger variance are shrunk."""

    network_noise: tuple[Tensor | None, ...] = (None,)
    """σ of the network's residuals relative to that of the likelihood, which belongs to J w_lin; None: 1."""

    class_dim: int = -1
    """The axis of the classes in the predicted outputs."""

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood of the first member; they may differ in σ."""
        return self.likelihoods[0]

    @property
    def f(self) -> Tensor:
        """The outputs of the first member's network."""
        return self.outputs[0]

    def prediction(
        self,
        table: Tables,
        noise: Tensor | None = None,
        reference: Reference | None = None,
        room: float = 0.0,
    ) -> Prediction:
        """Return the prediction by a table of components, for regression with σ times ``noise``."""
        tables = table if isinstance(table, tuple) else (table,) * len(self.outputs)
        found = []
        for i, (own, likelihood, f, Jw, training, apart) in enumerate(zip(tables, *self[1:-1])):
            rows: Rows = own.tolist() if isinstance(own, Tensor) else own
            factor, h, deviations = noise, Jw[0], Jw[1:]
            if apart is not None and rows[0][MODE] == 0:  # the σ of the network's own residuals
                factor = apart if noise is None else noise * apart.to(noise)
            if factor is not None and likelihood.observation_noise is not None:
                likelihood = likelihood.with_noise(likelihood.observation_noise.to(factor) * factor)
            if training is not None and likelihood.gives_probabilities:
                # of counts, a mean of 0 would be a rate of 1
                variance = output_variance(training.likelihood, deviations)
                largest = training.largest_variance.to(variance)
                kept = torch.where(variance > largest, largest / variance, 1.0)
                f, h = (kept.view(-1, *(1,) * (f.dim() - 1)) * mean for mean in (f, h))
            deviations = rows[0][SCALE] ** 0.5 * deviations
            for weight, of_mode, of_f, _ in rows:
                # a number that is fitted is a tensor, through which gradients pass
                terms = [
                    v if isinstance(n, float) and n == 1 else n * v
                    for n, v in ((of_mode, h), (of_f, f))
                    if isinstance(n, Tensor) or n
                ]
                centre = sum(terms[1:], terms[0]) if terms else torch.zeros_like(f)
                found.append((likelihood, centre, deviations, weight / len(tables), i))
                deviations = deviations[:0]  # the first component alone has samples
        likelihoods, centres, each, shares, owners = zip(*found)
        is_fitted = any(isinstance(share, Tensor) for share in shares)
        weights = torch.stack(shares).to(f) if is_fitted else f.new_tensor(shares)
        parts = likelihoods, centres, each, weights, owners, self.class_dim, self
        return Prediction(*parts, reference, room=room)

    def network(self) -> Prediction:
        """Return the prediction of the network alone, which has no samples."""
        return self.without_samples().prediction(posterior_alone())

    def distances(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the distances to the nearest training example, (B, 2), and their unit, if some are kept."""
        found = [(t.distances(Jw[1:]), t.unit()) for t, Jw in zip(self.training, self.Jw) if t]
        if len(found) < len(self.training):
            return None, None
        distances, units = (torch.stack(values).mean(0) for values in zip(*found))
        return distances, units

    def member(self, i: int) -> Pushforward:
        """Return the examples under one of the posteriors."""
        one: list[Any] = [(values[i],) for values in self[1:-1]]
        return Pushforward(*[self.y, *one, self.class_dim])

    def without_samples(self) -> Pushforward:
        """Return the examples for predictions of the networks, without the samples."""
        none = (None,) * len(self.training)
        return self._replace(Jw=tuple(Jw[:1] for Jw in self.Jw), training=none)

    def part(self, examples: slice | Tensor) -> Pushforward:
        """Return some of the examples."""
        outputs = tuple(f[examples] for f in self.outputs)
        Jw = tuple(Jw[:, examples] for Jw in self.Jw)
        return self._replace(y=self.y[examples], outputs=outputs, Jw=Jw)

    def pieces(self) -> Iterator[Pushforward]:
        """Yield a few examples at a time, in double precision."""
        size = max(1, NUMBERS // max(1, 64 * self.f[:1].numel()))
        for start in range(0, len(self.y), size):
            part = self.part(slice(start, start + size))
            outputs, Jw = (tuple(map(Tensor.double, own)) for own in (part.outputs, part.Jw))
            yield part._replace(outputs=outputs, Jw=Jw)


def require_one_shape(outputs: Iterable[Tensor], remedy: str = LENGTHS) -> None:
    """Raise an error if outputs, (B, ...), have several shapes beside their first axis."""
    shapes = {tuple(f.shape[1:]) for f in outputs}
    if len(shapes) > 1:
        raise ValueError(f"There are outputs of the shapes {sorted(shapes)} per example: {remedy}")


def joined(parts: Sequence[Pushforward]) -> Pushforward:
    """Concatenate the examples of several batches."""
    if len(parts) == 1:
        return parts[0]
    require_one_shape([part.f for part in parts])
    outputs = tuple(map(torch.cat, zip(*(part.outputs for part in parts))))
    Jw = tuple(torch.cat(blocks, 1) for blocks in zip(*(part.Jw for part in parts)))
    return parts[0]._replace(y=torch.cat([part.y for part in parts]), outputs=outputs, Jw=Jw)


def stack_members(each: Sequence[Pushforward]) -> Pushforward:
    """Return the same examples under several posteriors, each given under one."""
    if len(each) == 1:
        return each[0]
    require_one_shape([pushed.f for pushed in each], _CLASSES)
    columns: list[Any] = [sum(c, ()) for c in zip(*(pushed[1:-1] for pushed in each))]
    return Pushforward(*[each[0].y, *columns, each[0].class_dim])
