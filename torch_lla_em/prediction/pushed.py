"""From inputs to predictions: products with the vectors of the posterior, and mixture components."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import inputs_of, map_tensors, tensors_in, to_device
from torch_lla_em.jacobian import LinearModel, explained, require_rows
from torch_lla_em.likelihoods import Likelihood, Regression
from torch_lla_em.prediction.functions import MODE, NETWORK, SCALE, WEIGHT
from torch_lla_em.prediction.prediction import Prediction
from torch_lla_em.prediction.training_examples import TrainingExamples

Tables = Tensor | tuple[Tensor, ...]
"""A table of components, the same for all members of an ensemble, or one for each."""


def push_forward(linear_model: LinearModel, x: Any, *w: Tensor) -> tuple[Tensor, Tensor]:
    """Return f(x), shape (B, ..., C), and J(x) w, (K, B, ..., C); differentiable in x if required.

    The vectors may be given in several blocks, so that they need not be copied into one.
    """
    network = linear_model.network
    x = to_device(inputs_of(x) if isinstance(x, Mapping) else x, network.device)
    tensors, count = tensors_in(x), sum(map(len, w))
    differentiate = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    is_empty = bool(tensors) and tensors[0].dim() > 0 and not len(tensors[0])
    with explained(network, x), torch.set_grad_enabled(differentiate):
        try:
            if linear_model.report is None and not is_empty:
                linear_model.probe(map_tensors(Tensor.detach, x))
            with network.guarded(), torch.set_grad_enabled(differentiate):
                if is_empty:
                    f = linear_model.outputs(x)
                    return f, f.new_zeros(count, *f.shape)
                rows = linear_model.at(x, count)
                Jw = torch.cat([rows.push(block) for block in w])
                f = rows.f
        except RuntimeError:  # possibly because x is a single example
            with network.guarded():
                require_rows(linear_model.outputs(x), x)
            raise
        require_rows(f, x)
        return f, Jw


def posterior_alone(
    mean: str = "network", factor: float | Tensor = 1.0, scale: float | Tensor = 1.0
) -> Tensor:
    """Return the table of a single component: √τ J w_k around one mean times a factor."""
    row = torch.zeros(1, 4, dtype=torch.float64, device="cpu")
    row[0, WEIGHT], row[0, SCALE] = 1.0, float(scale)
    row[0, MODE if mean == "linear" else NETWORK] = float(factor)
    return row


def mean_of(table: Tensor) -> str:
    """Return which mean the posterior's samples are mostly added to: "linear" or "network"."""
    return "linear" if table[0, MODE].abs() > table[0, NETWORK].abs() else "network"


def predicted(
    likelihood: Likelihood,
    f: Tensor,
    Jw: Tensor,
    table: Tensor,
    training: TrainingExamples | None = None,
    class_dim: int = -1,
) -> Prediction:
    """Return the prediction from f, (B, ..., C), and J w of w_lin and of the samples.

    If training examples are given, logits of inputs with a larger variance are shrunk.
    """
    table = table.to(f)
    columns = table.view(*table.shape, *(1,) * f.dim()).unbind(1)
    centres = columns[MODE] * Jw[0] + columns[NETWORK] * f
    deviations, nearest = table[0, SCALE].sqrt() * Jw[1:], None
    if training is not None:
        if likelihood.gives_probabilities:  # of counts, a mean of 0 would be a rate of 1
            kept = training.kept_share(likelihood, Jw[1:])
            centres = centres * kept.view(-1, *(1,) * (f.dim() - 1))
        nearest = partial(training.distance, likelihood, Jw[1:])
    prediction = Prediction(likelihood, centres[0], deviations, class_dim)
    if len(table) == 1:
        return replace(prediction, nearest=nearest)
    certain = (replace(prediction, centre=c, deviations=deviations[:0]) for c in centres[1:])
    return replace(
        prediction, members=(prediction, *certain), weights=table[:, WEIGHT], nearest=nearest
    )


class Pushed(NamedTuple):
    """Examples with their outputs and products, under one posterior or all members of an ensemble."""

    likelihoods: tuple[Likelihood, ...]
    """One for each member; they may differ in σ."""

    f: tuple[Tensor, ...]
    """The networks' outputs, (B, ..., C), classes last."""

    Jw: tuple[Tensor, ...]
    """J w of w_lin and of the samples, (1 + K, B, ..., C)."""

    y: Tensor

    training: tuple[TrainingExamples | None, ...]
    """The stored training examples of each member."""

    class_dim: int = -1
    """The axis of the classes in the predicted outputs."""

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood of the first member."""
        return self.likelihoods[0]

    def prediction(self, table: Tables, noise: Tensor | None = None) -> Prediction:
        """Return the prediction of the examples, for regression with σ times ``noise``."""
        tables = table if isinstance(table, tuple) else (table,) * len(self.f)
        likelihoods = [_at_noise(each, noise) for each in self.likelihoods]
        parts = zip(likelihoods, self.f, self.Jw, tables, self.training)
        members = [predicted(*each, self.class_dim) for each in parts]
        return members[0] if len(members) == 1 else Prediction.averaged(members, self.class_dim)

    def plain(self) -> Pushed:
        """Return the examples without training examples, whose means are not shrunk."""
        return self._replace(training=(None,) * len(self.f))

    def network(self) -> Prediction:
        """Return the prediction of the network alone."""
        return self.plain().prediction(posterior_alone(scale=0.0))

    def double(self) -> Pushed:
        """Return the examples in double precision."""
        return self._each(Tensor.double, Tensor.double)

    def part(self, examples: slice | Tensor) -> Pushed:
        """Return some of the examples."""
        some = self._each(lambda f: f[examples], lambda Jw: Jw[:, examples])
        return some._replace(y=self.y[examples])

    def split(self, size: int) -> Iterator[Pushed]:
        """Yield ``size`` examples at a time."""
        for start in range(0, len(self.y), size):
            yield self.part(slice(start, start + size))

    def _each(self, of_f: Any, of_Jw: Any) -> Pushed:
        return self._replace(f=tuple(map(of_f, self.f)), Jw=tuple(map(of_Jw, self.Jw)))


def joined(parts: Iterable[Pushed]) -> Pushed:
    """Concatenate the examples of several batches."""
    first, *more = parts
    if not more:
        return first
    _, f, Jw, y, *_ = zip(first, *more)
    outputs, products = map(torch.cat, zip(*f)), (torch.cat(each, 1) for each in zip(*Jw))
    return first._replace(f=tuple(outputs), Jw=tuple(products), y=torch.cat(y))


def together(members: Sequence[Pushed]) -> Pushed:
    """Return the same examples under several posteriors, each given under one."""
    likelihoods, f, Jw, y, training, class_dim = zip(*members)
    likelihoods, f, Jw, training = (sum(each, ()) for each in (likelihoods, f, Jw, training))
    return Pushed(likelihoods, f, Jw, y[0], training, class_dim[0])


def _at_noise(likelihood: Likelihood, noise: Tensor | None) -> Likelihood:
    if noise is None or not isinstance(likelihood, Regression):
        return likelihood
    return likelihood.at_noise(likelihood.sigma_noise.to(noise) * noise)
