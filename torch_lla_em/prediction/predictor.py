"""Predictions of a posterior or of several: functions of their records, which are methods of the
objects that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from torch_lla_em.data import AnyInputs, Loader, Values, inputs_in_order, to_device, unlabelled
from torch_lla_em.prediction.posterior import Fitted, Posterior, Record, required
from torch_lla_em.prediction.prediction import Prediction
from torch_lla_em.prediction.pushforward import (
    Pushforward,
    joined,
    require_one_shape,
    stack_members,
)
from torch_lla_em.prediction.reference import Score, Stated

Mean = Literal["network", "linear"]
_LOADERS = DataLoader, Dataset
_BATCHES = "predict batch by batch, with la.predictions(loader)."


def forward(la: Fitted, x: AnyInputs) -> Tensor | tuple[Tensor, Tensor]:
    """Return predicted probabilities or rates; for continuous targets (mean, variance) of y."""
    if isinstance(x, _LOADERS):
        is_real = required(la).likelihood.real_valued
        each = (
            (p.expectation, p.predictive_variance if is_real else None) for p in predictions(la, x)
        )
        means, variances = zip(*each, strict=True)
        require_one_shape(means, _BATCHES)
        return (torch.cat(means), torch.cat(variances)) if is_real else torch.cat(means)
    found = predict(la, x)
    if found.likelihood.real_valued:
        return found.expectation, found.predictive_variance
    return found.expectation


def predict(
    la: Fitted,
    x: AnyInputs,
    mean: Mean | None = None,
    groups: Values | None = None,
    weights: Values | None = None,
) -> Prediction:
    """Return the predictive distribution at x, as ``LinearisedLaplace.predict``, of an object or a
    record."""
    known = _around(la, mean)
    is_stated = groups is not None or weights is not None
    if isinstance(x, _LOADERS):
        batches = _in_batches(known, inputs_in_order(x))
        found = predicted(known, joined(list(batches)))
    else:
        found = predicted(known, known.at(x))
    if is_stated:
        f = found._f
        found = replace(found, _stated=Stated.of(len(f), f.device, groups, weights))
    return found


def predictions(
    la: Fitted,
    loader: Loader,
    mean: Mean | None = None,
) -> Iterator[Prediction]:
    """Yield the predictive distribution at each batch of a loader, of an object or a record."""
    known = _around(la, mean)
    return (predicted(known, data) for data in _in_batches(known, inputs_in_order(loader)))


def _around(la: Fitted, mean: Mean | None) -> Record:
    """Return the record of a posterior, around one mean if it is given."""
    known = required(la)
    if mean is None:
        return known
    if not isinstance(mean, str):
        raise TypeError(
            "la.predict takes all inputs of the model as its first argument: pass several in one "
            "tuple, la.predict((a, b)), or in a dict by their names."
        )
    return known.around(mean)


def is_ood(
    la: Fitted, x: AnyInputs, rate: float = 0.05, groups: Values | None = None, score: Score = "all"
) -> Tensor:
    """Return which inputs are out-of-distribution, as a mask of shape (B,)."""
    if isinstance(x, _LOADERS) and groups is None:
        return torch.cat([each.is_ood(rate, score) for each in predictions(la, x)])
    return predict(la, x, groups=groups).is_ood(rate, score)


def functional_samples(la: Fitted, x: AnyInputs) -> Tensor:
    """Return samples of f at x, shape (K, B, ..., C), joint over inputs."""
    return predict(la, x).samples


def predicted(known: Record, data: Pushforward) -> Prediction:
    """Return the prediction at inputs with products, with what they are compared with."""
    found = known.correction
    noise = None if isinstance(known, Posterior) else found.noise  # which its likelihood has
    return data.prediction(known.tables, noise, found.reference, found.room)


def _in_batches(known: Record, loader: Iterable[Any]) -> Iterator[Pushforward]:
    """Yield the batches of a loader, which may have no targets, with their products."""
    is_empty = True
    for batch in loader:
        each, is_empty = [], False
        for member in known.members:
            setting, own = member.setting, batch
            if setting.target_fn is not None:
                own = to_device(batch, setting.linear_model.network.device)
            each.append(member.at(unlabelled(own, member.num_inputs, setting.target_fn)))
        yield stack_members(each)
    if is_empty:
        raise ValueError("The loader is empty: it yielded no examples.")
