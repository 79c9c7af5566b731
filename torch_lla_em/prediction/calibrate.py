"""Functions that use a validation set, which are methods of posteriors and of ensembles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from torch_lla_em.data import Data, Inputs, Loader, Values, Weights, paired, tensors_in
from torch_lla_em.jacobian import leaves_out
from torch_lla_em.prediction.calibration import (
    Correction,
    calibrated,
    half_as_reference,
    reference_of,
)
from torch_lla_em.prediction.level import at_level
from torch_lla_em.prediction.moved import MANY, Batches, NoSubstitute, moved, moves_of
from torch_lla_em.prediction.numbers import temperature_of
from torch_lla_em.prediction.passes import pushed
from torch_lla_em.prediction.posterior import Fitted, Posterior, Posteriors, Record, required
from torch_lla_em.prediction.reference import Stated
from torch_lla_em.runtime import CALL, Group, group_of, report
from torch_lla_em.runtime import first as first_of


def calibrate(
    la: Fitted,
    loader: Inputs | Loader | None = None,
    targets: Tensor | None = None,
    *,
    groups: Values | str | None = None,
    weights: Values | None = None,
) -> Record:
    """Return a record whose predictions are calibrated, as by ``LinearisedLaplace.calibrate``."""
    known = required(la, None).corrected(Correction())
    if loader is not None:  # all ranks check the network together
        correction = calibrated_on(known, paired(loader, targets), groups, weights)
        if correction.calibration is not None and correction.calibration.unlike:
            report("log", correction.calibration.unlike)
        return known.corrected(correction)
    data, of_data = getattr(la, "trained_with", (None, None))
    is_stated = groups is not None or weights is not None
    if data is None or is_stated or not isinstance(known, Posterior):
        raise NoSubstitute(
            "this needs the training data of fit, which files, copies and ensembles do not hold, "
            "and is possible only without groups and weights"
        )
    return calibrated_on_moved(known, data, of_data)


def calibrated_on(
    known: Record,
    loader: Loader,
    groups: Values | str | None = None,
    weights: Values | None = None,
) -> Correction:
    """Fit the correction of ``calibrate`` to a validation set, by one pass for each network, which
    the ranks share."""
    group = group_of(known.setting.shard if isinstance(known, Posterior) else None)
    with torch.inference_mode(False), torch.no_grad():
        _, data = pushed(known.members, loader, group)
        stated = Stated.of(len(data.y), data.f.device, groups, weights)
        found, numbers = calibrated([data], [known.tables])
        found = found._replace(reference=half_as_reference(data, numbers, stated))
        return _agreed(known, found, group)


def _agreed(known: Record, found: Correction, group: Group) -> Correction:
    """Return the correction of rank 0, because other ranks may round differently, with the marks of
    an ensemble's members."""
    table, noise = (each if each is None else group.from_first(each) for each in found[:2])
    calibration = group.meet(found.calibration, first_of)
    if calibration is None or not calibration.applied:
        table = noise = None
    room = max(member.room() for member in known.members)
    others = known.members if isinstance(known, Posteriors) else ()
    marks = tuple(member.mark for member in others)
    return Correction(table, noise, found.reference, calibration, room, marks)


def calibrated_on_moved(
    posterior: Posterior, loader: Loader, weights: Weights | None, asked: bool = True
) -> Posterior:
    """Return a posterior as fitted, calibrated on moved training examples.

    Raises:
        NoSubstitute: If training examples cannot be moved or have changed, or if the user has not
            ``asked`` for it and the inputs are not columns, or there are too many examples.
    """
    setting, likelihood = posterior.setting, posterior.likelihood
    network, group = setting.linear_model.network, group_of(setting.shard)
    with torch.inference_mode(False), torch.no_grad():
        group.agree(partial(required, posterior, surely=True))
        data = Data(loader, network.device, setting.target_fn, group, weights)
        first = group.agree(lambda: tensors_in(data.first().inputs))
        if not asked and any(t.dim() > 2 for t in first):
            raise NoSubstitute("this is done automatically only for columns of numbers")
        if not asked and likelihood.gives_probabilities and (posterior.num_data or 0) > MANY:
            raise NoSubstitute(f"there are more than {MANY:,}, and only a part is compared")
        moves = moves_of(data, likelihood, network.class_dim)
        share, compared = data.facts.shared_with(posterior.trained_on)
        if compared and posterior.trained_on and share < 1:
            raise NoSubstitute("they have changed since fit")

        def calibration() -> Correction | None:
            batches, length = moved(network, moves, likelihood)
            read = replace(posterior, setting=setting._replace(target_fn=None))
            _, part = pushed((read,), batches)
            # memorised labels make a network too confident; a temperature below 1 only means that
            # the simple model is better
            memorised = asked or not likelihood.gives_probabilities
            if not memorised and temperature_of(likelihood, part.f, part.y) < 1:
                return None
            return calibrated([part], [posterior.tables], length)[0]

        found = group.meet(group.agree(calibration), first_of)
        return posterior if found is None else posterior.corrected(_agreed(posterior, found, group))


def without_validation(
    posterior: Posterior,
    loader: Loader,
    weights: Weights | None,
    fit_all: Callable[[Batches], Posterior],
) -> Posterior:
    """Calibrate a posterior that leaves out parameters on moved training examples, or for classes
    by a temperature if they cannot be moved. If neither is possible, return the posterior with a
    message that explains why. Others, and those of unfinished fits, are returned unchanged."""
    model, likelihood = posterior.setting.linear_model, posterior.likelihood
    is_partial = leaves_out(model.network.module, model.layout.names)
    if not is_partial or posterior.result.why == "budget":
        return posterior
    try:
        try:
            return calibrated_on_moved(posterior, loader, weights, asked=False)
        except NoSubstitute:
            has_classes = likelihood.gives_probabilities and not likelihood.elementwise
            if weights is not None or not has_classes:
                raise
            return at_level(posterior, loader, fit_all)
    except Exception as error:  # this step is automatic, so its errors must not end the fit
        why = str(error)
        if not isinstance(error, NoSubstitute):
            why = f"{type(error).__name__}: {str(error)[:200]} {CALL}."
        words = f"Predictions are as fitted, and not calibrated on the training data. {why}"
        report("log", words)
        return replace(posterior, messages=(*posterior.messages, words))


def calibrated_by_folds(known: Posteriors, unseen: Sequence[Loader]) -> Posteriors:
    """Return the record of an ensemble, calibrated on a loader of unseen examples for each
    member."""
    with torch.inference_mode(False), torch.no_grad():
        parts = [pushed((own,), rows)[1] for own, rows in zip(known.members, unseen, strict=True)]
        found, _ = calibrated(parts, known.tables)
        if found.table is not None:
            reference = reference_of(parts, found.table, found.noise, folds=True)
            found = found._replace(reference=reference)
    return known.corrected(_agreed(known, found, Group()))
