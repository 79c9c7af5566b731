"""Predictions of a posterior or of several: functions of their records, which are methods of the objects that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from torch_lla_em.data import inputs_in_order, to_device, unlabelled
from torch_lla_em.prediction.posterior import Posterior, Posteriors, required
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
_ONE_TUPLE = "{0} takes all inputs of the model as its first argument: pass several in one tuple, {0}((a, b)), or by their names."
_BATCHES = "predict batch by batch, with la.predictions(loader)."


def forward(la: Any, x: Any = None, *more: Any, **inputs: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Return predicted probabilities or rates; for continuous targets (mean, variance) of y.

    Args:
        la (LinearisedLaplace, LaplaceEnsemble or record): The posterior; ``la(x)`` passes it.
        x (Tensor, tuple, dict, DataLoader or Dataset): Inputs, as the model takes them: several in one tuple,
            ``la((a, b))``, or by name, ``la(input_ids=...)``.
        *more: Refused.

    Returns:
        Tensor (B, ..., C) of probabilities or rates; for regression two tensors, the mean and
        the variance of y. The variance includes the observation noise σ².

    Raises:
        NotFittedError: Before ``fit``, or if the model has changed since.

    Example:
        >>> probabilities = la(x)
        >>> mean, variance = regression(x)
    """
    if more:
        raise TypeError(_ONE_TUPLE.format("la"))
    if not inputs and isinstance(x, _LOADERS):
        is_real = required(la).likelihood.real_valued
        each = (
            (p.expectation, p.predictive_variance if is_real else None) for p in predictions(la, x)
        )
        means, variances = zip(*each)
        require_one_shape(means, _BATCHES)
        return (torch.cat(means), torch.cat(variances)) if is_real else torch.cat(means)
    found = predict(la, x, **inputs)
    if found.likelihoods[0].real_valued:
        return found.expectation, found.predictive_variance
    return found.expectation


def predict(
    la: Any,
    x: Any = None,
    mean: Mean | None = None,
    groups: Any = None,
    weights: Any = None,
    **inputs: Any,
) -> Prediction:
    """Return the predictive distribution at x: as fitted, or as calibrated.

    Args:
        la (LinearisedLaplace, LaplaceEnsemble or record): The posterior; ``la.predict(x)`` passes it.
        x (Tensor, tuple, dict, DataLoader or Dataset): Inputs, as the model takes them; or pass
            them by name. Batches of a loader may have no targets. The samples of all its outputs have to fit into
            memory: see ``predictions``.
        mean (str, optional): Use the posterior alone, around f(x) ("network") or J(x) w_lin
            ("linear"). Default None: what the fit or ``calibrate`` has chosen. A fit chooses J(x) w_lin for
            a regression, with the σ that is learnt from it (f(x) has the σ of its own residuals); with
            variational curvature a mixture; with others f(x), to which the curvature belongs.
        groups (integers, optional): The group of each input, if ``calibrate`` had groups. A loader that shuffles
            is then read in the order of its dataset, as ``calibrate`` reads it, and so it is with weights.
        weights (sequence, optional): The weight of each input, if ``calibrate`` had weights. Default
            None: the largest of a reference example.

    Returns:
        A ``Prediction``. It is differentiable in x if x requires gradients. That of an ensemble
        has the predictions of its ``members``.

    Raises:
        NotFittedError: Before ``fit``, or if the model has changed since.
        TypeError: If inputs are passed both by position and by name.

    Example:
        >>> uncertainty = la.predict(x).epistemic
    """
    if inputs:
        if x is not None:
            raise TypeError(
                f"x was passed by position, and {', '.join(inputs)} by name, which are further inputs of the model: "
                "pass all inputs by name, or all in one tuple or dict. For fewer samples, fit with another num_samples."
            )
        x = inputs
    known = _around(la, mean)
    is_stated = groups is not None or weights is not None
    if isinstance(x, _LOADERS):
        batches = _in_batches(known, inputs_in_order(x))
        found = predicted(known, joined(list(batches)))
    else:
        found = predicted(known, known.at(x))
    if is_stated:
        f = found.f
        found = replace(found, stated=Stated(groups, weights).checked(len(f), f.device))
    return found


def predictions(
    la: Any,
    loader: Any,
    mean: Mean | None = None,
) -> Iterator[Prediction]:
    """Yield the predictive distribution at each batch of a loader, in the order of its dataset.

    Only one batch is held in memory at a time. All batches have the same functions: the k-th sample is the same
    function everywhere.

    Args:
        la (LinearisedLaplace, LaplaceEnsemble or record): The posterior; ``la.predictions(loader)`` passes it.
        loader (DataLoader, Dataset or list of batches): Batches may have no targets. A ``DataLoader`` that shuffles
            is read in the order of its dataset, as by ``fit`` and all other methods. Two tensors of one form in a list
            are two batches; in a tuple they are inputs and targets.
        mean (str, optional): As in ``predict``.

    Returns:
        An iterator of ``Prediction``.

    Raises:
        NotFittedError: Before ``fit``, or if the model has changed since.

    Example:
        >>> uncertainty = torch.cat([batch.epistemic for batch in la.predictions(loader)])
    """
    known = _around(la, mean)
    return (predicted(known, data) for data in _in_batches(known, inputs_in_order(loader)))


def _around(la: Any, mean: Mean | None) -> Posterior | Posteriors:
    """Return the record of a posterior, around one mean if it is given."""
    known = required(la)
    if mean is None:
        return known
    if not isinstance(mean, str):
        raise TypeError(_ONE_TUPLE.format("la.predict"))
    return known.around(mean)


def is_ood(
    la: Any,
    x: Any = None,
    rate: float = 0.05,
    groups: Any = None,
    score: Score = "all",
    **inputs: Any,
) -> Tensor:
    """Return which inputs are out-of-distribution (OOD), as a mask of shape (B,), after ``calibrate``.

    Args:
        la (LinearisedLaplace, LaplaceEnsemble or record): The posterior; ``la.is_ood(x)`` passes it.
        x (Tensor, tuple, dict, DataLoader or Dataset): Inputs, as the model takes them.
        rate (float): Largest share of false alarms among inputs from the validation set's
            distribution. Default 0.05.
        groups (integers, optional): The group of each input, if ``calibrate`` had groups.
        score (str): "all" (default), "epistemic" or "distance", as in ``predict(x).p_values(score)``.

    Raises:
        ValueError: Before ``calibrate``, or with too few validation examples for this rate.

    Example:
        >>> suspicious = la.is_ood(x, rate=0.1)
    """
    if isinstance(x, _LOADERS) and not inputs and groups is None:
        return torch.cat([each.is_ood(rate, score) for each in predictions(la, x)])
    return predict(la, x, groups=groups, **inputs).is_ood(rate, score)


def functional_samples(la: Any, x: Any) -> Tensor:
    """Return ``predict(x).samples``: samples of f at x, shape (K, B, ..., C), joint over inputs.

    Args:
        la (LinearisedLaplace, LaplaceEnsemble or record): The posterior.
        x (Tensor, tuple, dict, DataLoader or Dataset): Inputs, as the model takes them.

    Example:
        >>> spread = la.functional_samples(x).std(0)
    """
    return predict(la, x).samples


def predicted(known: Posterior | Posteriors, data: Pushforward) -> Prediction:
    """Return the prediction at inputs with products, with what they are compared with."""
    _, noise, reference, _, room, _ = known.correction
    noise = None if isinstance(known, Posterior) else noise  # which its likelihood has
    return data.prediction(known.tables, noise, reference, room)


def _in_batches(known: Posterior | Posteriors, loader: Iterable[Any]) -> Iterator[Pushforward]:
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
