"""Calibration: a few numbers of the predictions, fitted to examples whose outputs one pass has
stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.prediction.conformal import has_classes, mean_and_error
from torch_lla_em.prediction.mixture import MODE, NETWORK
from torch_lla_em.prediction.neighbours import output_variance
from torch_lla_em.prediction.numbers import (
    LabelProbs,
    Numbers,
    log_probs,
    most_probable,
    networks_alone,
    numbers_of,
    scaled,
    table_of,
    temperature,
)
from torch_lla_em.prediction.prediction import network_of, predicted_by
from torch_lla_em.prediction.pushforward import (
    Pushforward,
    Tables,
    posterior_alone,
)
from torch_lla_em.prediction.reference import (
    Reference,
    Stated,
    second_half,
)
from torch_lla_em.prediction.scores import count_labels

_UNLIKE, _SPREAD = 0.1, 3.0
"""Share of inputs that are more uncertain than all training examples, and relative spread of
targets, above which validation data count as unlike those of the fit."""


class Calibration(NamedTuple):
    """The result of ``calibrate``; ``print`` it for one sentence.

    Example:
        >>> improvement = la.calibration.before - la.calibration.after
    """

    num_rows: int
    """Number of validation examples with a label."""

    before: float
    """The mean negative log-likelihood (NLL) of a label before calibration."""

    after: float
    """The NLL after calibration, corrected for having been fitted to the same examples."""

    standard_error: float
    """Standard error of the difference over examples; NaN for a single example."""

    applied: bool
    """Whether predictions were changed; they are not if the NLL before was lower."""

    rmse: tuple[float, float] | None = None
    """The RMSE of the point predictions of a regression before and after; equal if these were
    kept."""

    network: float | None = None
    """The NLL of the network alone, or of the networks of an ensemble."""

    temperature: float | None = None
    """The NLL of the network with temperature scaling, fitted to the same examples and corrected as
    ``after``."""

    labels: float = 1.0
    """The mean number of labels of an example, such as pixels, tokens or outputs; NLLs are means
    over labels."""

    length: float | None = None
    """None for a validation set. For moved training examples, the length by which they were moved,
    relative to the distance to their nearest neighbours."""

    unlike: str = ""
    """A warning if the validation examples do not look like those of the fit, for example because
    of another unit; otherwise empty."""

    @property
    def is_measurable(self) -> bool:
        """Whether the NLL has improved by more than two standard errors."""
        return self.applied and self.before - self.after > 2 * self.standard_error

    @property
    def source(self) -> str:
        """The kind of the examples: "validation" or "moved training"."""
        return "validation" if self.length is None else "moved training"

    def __str__(self) -> str:
        before, after, error = self[1:4]
        if not self.applied:
            return (
                f"not applied, because it would not lower the {self.source} NLL ({before:.4g} as "
                f"fitted, {after:.4g} calibrated): predictions stay as they were"
            )
        what = "improvement" if self.is_measurable else "no measurable difference:"
        words = f"{before:.4g} → {after:.4g} ({what} {before - after:.2g} ± {error:.2g})"
        if self.rmse is None:
            return words
        first, second = self.rmse
        if first == second:
            return f"{words}; point predictions are unchanged"
        return f"{words}; point predictions have changed, RMSE {first:.4g} → {second:.4g}"


class Correction(NamedTuple):
    """The result of ``calibrate`` for one posterior, or for several together. All fields are empty
    before ``calibrate``."""

    table: Tensor | None = None
    """The components of predictions; None: as fitted."""

    noise: Tensor | None = None
    """A factor of σ; None: 1."""

    reference: Reference | None = None
    """The scores that inputs are compared with, from a split of the validation set."""

    calibration: Calibration | None = None

    room: float = 0.0
    """Relative difference up to which scores are ties: that of the dtype in which they were
    computed."""

    marks: tuple[str, ...] = ()
    """The marks of the several posteriors to which it belongs; empty in files of version 0.4."""


def calibrated(
    parts: Sequence[Pushforward], before: Sequence[Tables], length: float | None = None
) -> tuple[Correction, Numbers]:
    """Fit the numbers to held-out examples or, with a ``length``, to moved ones. ``before`` are the
    tables of each part as fitted."""
    likelihood = parts[0].likelihood
    parts = [part.part(likelihood.labelled(part.y)) for part in parts]
    count = sum(len(part.y) for part in parts)
    labels = sum(count_labels(likelihood, part.y) for part in parts)
    if not count:
        raise ValueError(
            "None of the validation examples has a label (all are ignored), so calibration is not "
            "possible. Pass labelled examples."
        )
    numbers, alone = numbers_of(likelihood), temperature(parts)
    probs = LabelProbs(numbers, parts)
    theta = most_probable(probs, alone, length is None)
    errors = _squared_errors(parts, before)
    kept = None if likelihood.observation_noise is None else _mean_of(before)
    if errors is not None and kept is not None:
        after = _squared_errors(parts, [numbers.at(theta)[0]] * len(parts))
        fall, error = (0.0, 0.0) if after is None else mean_and_error(errors - after)
        if not fall > 2 * error:
            numbers = numbers_of(likelihood, kept)
            probs = LabelProbs(numbers, parts)
            theta = most_probable(probs, alone)
    table, noise = numbers.at(theta)
    old = torch.cat([log_probs([part], own) for part, own in zip(parts, before, strict=True)])
    new, optimism = log_probs(parts, table, noise), probs.determined(theta) / labels
    nll, (gain, error) = -old.sum().item() / labels, mean_and_error((new - old) * count / labels)
    networks = [part.without_samples() for part in parts]
    network = -log_probs(networks, posterior_alone(scale=0.0)).sum().item() / labels
    with_scaling, applied, rmse = None, gain > optimism, None
    if len(alone):
        inside = -log_probs(networks, scaled(alone)).sum().item() / labels
        with_scaling = inside + networks_alone(parts).determined(alone) / labels
        applied = applied or (length is None and gain > 0 and inside + 1 / labels < nll)
    if errors is not None:
        after = _squared_errors(parts, [table] * len(parts)) if applied else errors
        if after is not None:
            rmse = errors.mean().sqrt().item(), after.mean().sqrt().item()
    calibration = Calibration(
        num_rows=count,
        before=nll,
        after=nll - gain + optimism,
        standard_error=error,
        applied=applied,
        rmse=rmse,
        network=network,
        temperature=with_scaling,
        labels=labels / count,
        length=length,
        unlike=unlike(parts) if length is None else "",
    )
    return Correction(table_of(table, theta), noise, None, calibration), numbers


def unlike(parts: Sequence[Pushforward]) -> str:
    """Return a warning if validation examples do not look like those of the fit, an empty string
    otherwise.

    If n training examples are stored, 89 or more, a tenth of other examples from the same
    distribution exceed all of them with probability .9^n. For 24 classifiers at most 4.5 % did;
    with inputs times 16 it was 88 % or more. The targets of 32 regressions spread .54 to 1.61 times
    as much as the predictions, also after overfitting; targets times ten 7.9 times or more, and
    targets divided by ten .32 times or less. NLLs do not distinguish wrong units from overfitting.
    """
    if parts[0].likelihood.real_valued:
        return _unlike_targets(parts)
    for part in parts:
        for member in part.members:
            training = member.training
            if training is None:
                continue
            variance = output_variance(training.likelihood, member.Jw[1:])
            share = (variance > training.largest_variance.to(variance)).double().mean().item()
            if share > _UNLIKE and len(variance) * _UNLIKE > 1:
                return (
                    f"At {share:.0%} of the validation inputs the network's outputs are more "
                    f"uncertain than at all {len(training.deviations)} training examples that are "
                    "compared: check that they are preprocessed as in the fit. Calibrated "
                    "predictions hold for inputs like these."
                )
    return ""


def _unlike_targets(parts: Sequence[Pushforward]) -> str:
    """Return the warning for continuous targets, whose spread is compared with that of the
    network's predictions."""
    for part in parts:
        prediction, y = network_of(part), part.y
        mean, variance = prediction.expectation, prediction.predictive_variance
        if mean.shape != y.shape or len(y) < 2:
            continue
        mean, variance, y = (v.double().reshape(len(y), -1) for v in (mean, variance, y))
        expected = mean.var(0) + variance.median(0).values
        ratio = ((y - mean.mean(0)).square().mean(0) / expected).sqrt()
        worst = ratio[ratio.log().abs().argmax()].item()
        if not 1 / _SPREAD < worst < _SPREAD:
            return (
                f"The validation targets vary {worst:.3g} times as much as the network predicts: "
                "check that targets and inputs have the units of the fit. Calibrated predictions "
                "hold for data like these."
            )
    return ""


def half_as_reference(data: Pushforward, numbers: Numbers, stated: Stated = Stated()) -> Reference:
    """Fit the numbers to every other labelled example of each group; return the scores of the
    others."""
    kept = data.likelihood.labelled(data.y)
    data, (groups, weights, by_class) = data.part(kept), stated.part(kept)
    if by_class and not has_classes(data.likelihood, data.f):
        raise TypeError(
            'groups="classes" needs one class label per example: pass integers instead.'
        )
    groups = data.y.long() if by_class else groups
    word = "" if groups is None else "class" if by_class else "group"
    labels = kept[kept].long() if groups is None else groups
    second = second_half(labels, weights, word)
    table, noise = numbers.at(most_probable(LabelProbs(numbers, [data.part(~second)])))
    own, weights = (each if each is None else each[second] for each in (groups, weights))
    found = reference_of([data.part(second)], table_of(table, data.f.double()), noise)
    classes, groups = (own, None) if by_class else (None, own)
    return found._replace(groups=groups, classes=classes, weights=weights)


def reference_of(
    parts: Sequence[Pushforward], table: Tensor, noise: Tensor | None, folds: bool = False
) -> Reference:
    """Return the scores of examples to which these numbers were not fitted. With ``folds``, each
    member has its own examples."""
    parts = [part.part(part.likelihood.labelled(part.y)) for part in parts]
    each = [(predicted_by(part, table, noise), part) for part in parts]
    return Reference(
        table,
        each[0][0].likelihood.observation_noise,
        torch.cat([judged._scored[0] for judged, _ in each]),
        torch.cat([judged._errors(part.y) for judged, part in each]),
        torch.tensor([len(part.y) for part in parts], device="cpu") if folds else None,
    )


def _squared_errors(parts: Sequence[Pushforward], tables: Sequence[Tables]) -> Tensor | None:
    """Return the squared error of the mean of every example, (N,); None if targets do not have the
    shape of the mean."""
    found: list[Tensor] = []
    for part, table in zip(parts, tables, strict=True):
        if not part.likelihood.real_valued:
            return None
        for piece in part.pieces():
            mean = predicted_by(piece, table).expectation
            if mean.shape != piece.y.shape:
                return None
            found.append((mean - piece.y).square().reshape(len(mean), -1).mean(1))
    return torch.cat(found)


def _mean_of(before: Sequence[Tables]) -> tuple[float, float] | None:
    """Return the shares of J w_lin and of f in the mean as fitted; None if they differ between
    members."""
    tables = [table for own in before for table in (own if isinstance(own, tuple) else (own,))]
    shares = {(float(table[0][MODE]), float(table[0][NETWORK])) for table in tables}
    return shares.pop() if len(shares) == 1 and all(len(table) == 1 for table in tables) else None
