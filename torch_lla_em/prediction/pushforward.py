"""From inputs to predictions: products with the vectors of the posterior, and mixture components."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import inputs_of, map_tensors, tensors_in, to_device
from torch_lla_em.jacobian import LinearModel, require_rows
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction.functions import MODE, SCALE
from torch_lla_em.prediction.mixture import FunctionMixture
from torch_lla_em.prediction.neighbours import TrainingExamples
from torch_lla_em.prediction.prediction import Prediction

Rows = list[list[Any]]
"""A table of components as numbers, or as tensors of one number each if it is differentiated."""

Table = Tensor | Rows
Tables = Table | tuple[Table, ...]
"""A table of components, the same for all members of an ensemble, or one for each."""

_LENGTHS = (
    "pad the inputs to one length, with targets of -100 there, or predict batch by batch: "
    "la.predictions(loader)."
)
_CLASSES = (
    "an ensemble needs networks with the same classes, or the same targets, in the same order."
)


def push_forward(linear_model: LinearModel, x: Any, *w: Tensor) -> tuple[Tensor, Tensor]:
    """Return f(x), shape (B, ..., C), and J(x) w, (K, B, ..., C); differentiable in x if required.

    The vectors may be given in several blocks, so that they need not be copied into one.
    """
    network, count = linear_model.network, sum(map(len, w))
    x = to_device(inputs_of(x) if isinstance(x, Mapping) else x, network.device)
    tensors = [x] if isinstance(x, Tensor) else tensors_in(x)
    differentiate = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    is_empty = bool(tensors) and tensors[0].dim() > 0 and not len(tensors[0])
    with torch.set_grad_enabled(differentiate):
        try:
            with network.guarded():
                if linear_model.report is None and not is_empty:
                    linear_model.probe(map_tensors(Tensor.detach, x))
                with torch.set_grad_enabled(differentiate):
                    if is_empty:
                        f = linear_model.outputs(x)
                        return f, f.new_zeros(count, *f.shape)
                    f, Jw = linear_model.push(x, *w)
        except RuntimeError:  # possibly because x is a single example
            with network.guarded():
                require_rows(linear_model.outputs(x), x)
            raise
        require_rows(f, x)
        return f, Jw


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

    def mixture(self, table: Tables, noise: Tensor | None = None) -> FunctionMixture:
        """Return the mixture by a table of components, for regression with σ times ``noise``.

        Predictions around the network alone have the σ of its own residuals.
        """
        tables = table if isinstance(table, tuple) else (table,) * len(self.outputs)
        likelihoods, centres, deviations, owners, shares = [], [], [], [], []
        members = zip(tables, self.likelihoods, self.outputs, self.Jw, self.training)
        for i, (own, likelihood, f, Jw, training) in enumerate(members):
            rows: Rows = own.tolist() if isinstance(own, Tensor) else own
            factor, h, apart = noise, Jw[0], Jw[1:]
            of_network = self.network_noise[i] if rows[0][MODE] == 0 else None
            if of_network is not None:
                factor = of_network if noise is None else noise * of_network.to(noise)
            if factor is not None and likelihood.observation_noise is not None:
                sigma = likelihood.observation_noise.to(factor)
                likelihood = likelihood.with_noise(sigma * factor)
            if training is not None and likelihood.gives_probabilities:
                # of counts, a mean of 0 would be a rate of 1
                kept = training.kept_share(apart).view(-1, *(1,) * (f.dim() - 1))
                f, h = kept * f, kept * h
            apart = rows[0][SCALE] ** 0.5 * apart
            for number, (weight, of_mode, of_f, _) in enumerate(rows):
                # a number that is fitted is a tensor, through which gradients pass
                terms = [
                    v if isinstance(n, float) and n == 1 else n * v
                    for n, v in ((of_mode, h), (of_f, f))
                    if isinstance(n, Tensor) or n
                ]
                centres.append(sum(terms[1:], terms[0]) if terms else torch.zeros_like(f))
                deviations.append(apart[:0] if number else apart)
                likelihoods.append(likelihood)
                owners.append(i)
                shares.append(weight / len(tables))
        is_fitted = any(isinstance(share, Tensor) for share in shares)
        weights = torch.stack(shares).to(f) if is_fitted else f.new_tensor(shares)
        parts = tuple(likelihoods), tuple(centres), tuple(deviations)
        return FunctionMixture(*parts, weights, tuple(owners))

    def prediction(self, table: Tables) -> Prediction:
        """Return the prediction of the examples."""
        return Prediction(self.mixture(table), self.class_dim, self)

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

    def double(self) -> Pushforward:
        """Return the examples in double precision."""
        outputs = tuple(f.double() for f in self.outputs)
        return self._replace(outputs=outputs, Jw=tuple(Jw.double() for Jw in self.Jw))

    def part(self, examples: slice | Tensor) -> Pushforward:
        """Return some of the examples."""
        outputs = tuple(f[examples] for f in self.outputs)
        Jw = tuple(Jw[:, examples] for Jw in self.Jw)
        return self._replace(y=self.y[examples], outputs=outputs, Jw=Jw)

    def split(self, size: int) -> Iterator[Pushforward]:
        """Yield ``size`` examples at a time."""
        for start in range(0, len(self.y), size):
            yield self.part(slice(start, start + size))


def require_one_shape(outputs: Iterable[Tensor], remedy: str) -> None:
    """Raise an error if outputs, (B, ...), have several shapes beside their first axis."""
    shapes = {tuple(f.shape[1:]) for f in outputs}
    if len(shapes) > 1:
        raise ValueError(f"There are outputs of the shapes {sorted(shapes)} per example: {remedy}")


def joined(parts: Iterable[Pushforward]) -> Pushforward:
    """Concatenate the examples of several batches."""
    parts = list(parts)
    if len(parts) == 1:
        return parts[0]
    require_one_shape([part.f for part in parts], _LENGTHS)
    outputs = tuple(map(torch.cat, zip(*(part.outputs for part in parts))))
    Jw = tuple(torch.cat(blocks, 1) for blocks in zip(*(part.Jw for part in parts)))
    return parts[0]._replace(y=torch.cat([part.y for part in parts]), outputs=outputs, Jw=Jw)


def stack_members(each: Sequence[Pushforward]) -> Pushforward:
    """Return the same examples under several posteriors, each given under one."""
    require_one_shape([pushed.f for pushed in each], _CLASSES)
    columns: list[Any] = [sum(c, ()) for c in zip(*(pushed[1:-1] for pushed in each))]
    return Pushforward(*[each[0].y, *columns, each[0].class_dim])
