"""Predictions of a posterior or of several, as functions of their records; the objects that hold
records have them as methods."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal

from torch.utils.data import DataLoader, Dataset

from torch_lla_em.data import AnyInputs, Loader, Values, inputs_in_order, to_device, unlabelled
from torch_lla_em.prediction.posterior import Fitted, Posterior, Record, required
from torch_lla_em.prediction.prediction import Prediction
from torch_lla_em.prediction.pushforward import Pushforward, joined, stack_members
from torch_lla_em.prediction.reference import Stated

Mean = Literal["network", "linear"]
LOADERS = DataLoader, Dataset


def predict(
    la: Fitted,
    x: AnyInputs,
    mean: Mean | None = None,
    groups: Values | None = None,
    weights: Values | None = None,
) -> Prediction:
    """Return the predictive distribution of an object or a record at x, as
    ``LinearisedLaplace.predict``."""
    known = required(la) if mean is None else required(la).around(mean)
    if isinstance(x, LOADERS):
        batches = _in_batches(known, inputs_in_order(x))
        found = predicted(known, joined(list(batches)))
    else:
        found = predicted(known, known.at(x))
    if groups is not None or weights is not None:
        f = found._f
        found = replace(found, _stated=Stated.of(len(f), f.device, groups, weights))
    return found


def predictions(
    la: Fitted,
    loader: Loader,
    mean: Mean | None = None,
) -> Iterator[Prediction]:
    """Yield the predictive distribution of an object or a record at each batch of a loader."""
    known = required(la) if mean is None else required(la).around(mean)
    return (predicted(known, data) for data in _in_batches(known, inputs_in_order(loader)))


def predicted(known: Record, data: Pushforward) -> Prediction:
    """Return the prediction at inputs with their products, together with the reference."""
    found = known.correction
    noise = None if isinstance(known, Posterior) else found.noise  # its likelihood includes it
    mixture = data.mixture(known.tables, noise)
    return Prediction(mixture, data.class_dim, data, found.reference, _room=found.room)


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
