"""Calibration: a few numbers of the predictions, fitted to examples whose outputs one pass has
stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction.arrays import has_classes, mean_and_error
from torch_lla_em.prediction.mixture import MODE, NETWORK
from torch_lla_em.prediction.neighbours import output_variance
from torch_lla_em.prediction.pushforward import (
    Member,
    Pushforward,
    Rows,
    Tables,
    posterior_alone,
)
from torch_lla_em.prediction.reference import (
    Reference,
    Stated,
    second_half,
)
from torch_lla_em.prediction.targets import count_labels, label_log_prob

_OF_FACTOR = 0.5
"""Prior standard deviation of log factors of logits; that of log scales and of the logits of
weights is 1. Of 1, test NLLs on ten tables are .5 % higher in the mean, and up to 3 %."""


_UNLIKE, _SPREAD = 0.1, 3.0
"""Share of inputs beyond all training examples, and relative spread of targets, from which
validation data are unlike those of the fit."""


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
    """The NLL after it, corrected for having been fitted to the same examples."""

    standard_error: float
    """Standard error of the difference over examples; NaN for a single example."""

    applied: bool
    """Whether predictions were changed: not if the NLL before was lower."""

    rmse: tuple[float, float] | None = None
    """The RMSE of the point predictions of a regression before and after; equal if they were
    kept."""

    network: float | None = None
    """The NLL of the network alone, or of the networks of an ensemble."""

    temperature: float | None = None
    """The NLL of the network with temperature scaling, fitted to the same examples and corrected as
    ``after``."""

    labels: float = 1.0
    """The mean number of labels of an example, such as pixels, tokens or outputs, of which NLLs are
    means."""

    length: float | None = None
    """None for a validation set; for training examples the length by which they were moved,
    relative to the distance to their nearest neighbours."""

    unlike: str = ""
    """A warning if the validation examples do not look like those of the fit, for example in
    another unit; else empty."""

    @property
    def is_measurable(self) -> bool:
        """Whether the NLL has improved by more than two standard errors."""
        return self.applied and self.before - self.after > 2 * self.standard_error

    @property
    def source(self) -> str:
        """What the examples are: "validation", or "moved training"."""
        return "validation" if self.length is None else "moved training"

    def __str__(self) -> str:
        before, after, error = self[1:4]
        if not self.applied:
            return (
                f"not applied, because it would not lower the {self.source} NLL ({before:.4g} as "
                f"fitted, {after:.4g} calibrated): probabilities stay as they were"
            )
        what = "improvement" if self.is_measurable else "no measurable difference:"
        words = f"{before:.4g} → {after:.4g} ({what} {before - after:.2g} ± {error:.2g})"
        if self.rmse is None:
            return words
        first, second = self.rmse
        if first == second:
            return f"{words}; point predictions are unchanged"
        return f"{words}; point predictions have changed, RMSE {first:.4g} → {second:.4g}"


class Numbers(NamedTuple):
    """The numbers that are fitted."""

    at: Callable[[Tensor], tuple[Rows, Tensor | None]]
    """From θ, which is 0 at the start, to a table of components and a factor of σ."""

    deviations: tuple[float, ...]
    """Prior standard deviations of θ."""


class Correction(NamedTuple):
    """The result of ``calibrate`` for one posterior, or for several together; before it all fields
    are empty."""

    table: Tensor | None = None
    """The components of predictions; None: as fitted."""

    noise: Tensor | None = None
    """A factor of σ; None: 1."""

    reference: Reference | None = None
    """What inputs are compared with, by splitting the validation set."""

    calibration: Calibration | None = None

    room: float = 0.0
    """Relative difference up to which scores are ties: that of the dtype in which they were
    computed."""

    marks: tuple[str, ...] = ()
    """Those of the several posteriors that it belongs to; empty in files of 0.4."""


def calibrated(
    parts: Sequence[Pushforward], before: Sequence[Tables], length: float | None = None
) -> tuple[Correction, Numbers]:
    """Fit the numbers to held-out or, with a ``length``, moved examples; ``before`` are the parts'
    tables as fitted."""
    likelihood = parts[0].likelihood
    parts = [part.part(likelihood.labelled(part.y)) for part in parts]
    count = sum(len(part.y) for part in parts)
    labels = sum(count_labels(likelihood, part.y) for part in parts)
    if not count:
        raise ValueError(
            "None of the validation examples has a label (all are ignored), so calibration is not "
            "possible. Pass labelled examples."
        )
    numbers, alone = numbers_of(likelihood), _temperature(parts)
    theta = most_probable(numbers, parts, alone, length is None)
    errors = _squared_errors(parts, before)
    kept = None if likelihood.observation_noise is None else _mean_of(before)
    if errors is not None and kept is not None:
        after = _squared_errors(parts, [numbers.at(theta)[0]] * len(parts))
        fall, error = mean_and_error(errors - after)
        if not fall > 2 * error:
            numbers = numbers_of(likelihood, kept)
            theta = most_probable(numbers, parts, alone)
    table, noise = numbers.at(theta)
    old = torch.cat([_log_probs([part], own) for part, own in zip(parts, before, strict=True)])
    new, optimism = _log_probs(parts, table, noise), _determined(numbers, theta, parts) / labels
    nll, (gain, error) = -old.sum().item() / labels, mean_and_error((new - old) * count / labels)
    networks = [part.without_samples() for part in parts]
    network = -_log_probs(networks, posterior_alone(scale=0.0)).sum().item() / labels
    temperature, applied, rmse = None, gain > optimism, None
    if len(alone):
        inside = -_log_probs(networks, _scaled(alone)).sum().item() / labels
        temperature = inside + _determined(_of_temperature(parts), alone, networks) / labels
        applied = applied or (length is None and gain > 0 and inside + 1 / labels < nll)
    if errors is not None:
        after = _squared_errors(parts, [table] * len(parts)) if applied else errors
        rmse = errors.mean().sqrt().item(), after.mean().sqrt().item()
    warning = unlike(parts) if length is None else ""
    compared = rmse, network, temperature, labels / count, length, warning
    calibration = Calibration(count, nll, nll - gain + optimism, error, applied, *compared)
    return Correction(_table(table, theta), noise, None, calibration), numbers


def unlike(parts: Sequence[Pushforward]) -> str:
    """Return a warning if validation examples do not look like those of the fit, an empty string
    otherwise.

    Training examples are exceeded by a tenth of others from their distribution with probability
    .9^n: n are kept, 89 or more below. For 24 classifiers of three tables, half of them overfitted,
    at most 4.5 % exceed them; with inputs times 16, 88 % or more. For regressions the spread of
    targets is compared with that of the network's predictions, which overfitting keeps: for 32
    networks, half of them overfitted, it was .54 to 1.61 times as large; with targets times ten 7.9
    or more, with a tenth of them .32 or less. (With Cauchy noise it was .4 to 7.) The NLL on
    training examples is no measure: on overfitted networks the NLL of others exceeds it as much as
    in wrong units.
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
        prediction, y = part.network(), part.y
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


def temperature_of(likelihood: Likelihood, f: Tensor, y: Tensor) -> float:
    """Return the temperature that fits outputs, classes last, best."""
    part = Pushforward((Member(likelihood, f, f.new_zeros(1, *f.shape)),), y)
    return (-_temperature([part]).sum()).exp().item()


def half_as_reference(data: Pushforward, numbers: Numbers, stated: Stated = Stated()) -> Reference:
    """Fit the numbers to every other labelled example, of each group, and return scores of the
    remaining ones."""
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
    table, noise = numbers.at(most_probable(numbers, [data.part(~second)]))
    own, weights = (each if each is None else each[second] for each in (groups, weights))
    found = reference_of([data.part(second)], _table(table, data.f.double()), noise)
    classes, groups = (own, None) if by_class else (None, own)
    return found._replace(groups=groups, classes=classes, weights=weights)


def reference_of(
    parts: Sequence[Pushforward], table: Tensor, noise: Tensor | None, folds: bool = False
) -> Reference:
    """Return the scores of examples to which these numbers were not fitted, ``folds`` if each
    member has its own."""
    parts = [part.part(part.likelihood.labelled(part.y)) for part in parts]
    each = [(part.prediction(table, noise), part) for part in parts]
    return Reference(
        table,
        each[0][0].likelihood.observation_noise,
        torch.cat([judged._scored[0] for judged, _ in each]),
        torch.cat([judged._errors(part.y) for judged, part in each]),
        torch.tensor([len(part.y) for part in parts], device="cpu") if folds else None,
    )


def numbers_of(likelihood: Likelihood, kept: tuple[float, float] | None = None) -> Numbers:
    """Return the numbers of a likelihood's predictions; ``kept`` are the shares of J w_lin and f in
    a mean to keep."""
    if likelihood.observation_noise is not None:

        def mixed_mean(theta: Tensor) -> tuple[Rows, Tensor]:
            mean = kept or (theta[2].sigmoid(), (-theta[2]).sigmoid())
            return [[1.0, *mean, (2 * theta[0]).exp()]], theta[1].exp()

        return Numbers(mixed_mean, (1.0, 1.0, 2.0)[: 2 if kept else 3])
    has_factors = likelihood.gives_probabilities

    def mixture(theta: Tensor) -> tuple[Rows, None]:
        w, (t, c) = theta[-3:].softmax(0), theta[1:3].exp() if has_factors else (1.0, 1.0)
        posterior = [w[0], 1.0, 0.0, (2 * theta[0]).exp()]
        return [posterior, [w[1], c, 0.0, 0.0], [w[2], 0.0, t, 0.0]], None

    of_factors = (_OF_FACTOR, _OF_FACTOR) if has_factors else ()
    return Numbers(mixture, (1.0, *of_factors, 1.0, 1.0, 1.0))


def _scaled(theta: Tensor) -> Rows:
    """Return the table of the network alone, its logits times exp θ if they have a factor."""
    return [[1.0, 0.0, theta.sum().exp(), 0.0]]


def _temperature(parts: Sequence[Pushforward]) -> Tensor:
    """Fit the temperature of the networks alone; θ is empty for likelihoods without one."""
    return _searched(_of_temperature(parts), [part.without_samples() for part in parts])


def _of_temperature(parts: Sequence[Pushforward]) -> Numbers:
    """Return the numbers of temperature scaling."""
    deviations = (1.0,) if parts[0].likelihood.gives_probabilities else ()
    return Numbers(lambda theta: (_scaled(theta), None), deviations)


def with_temperature(data: Pushforward) -> Pushforward:
    """Return the networks' logits times a factor, which for each half of the examples is fitted to
    the other half."""
    labelled, factors = data.likelihood.labelled(data.y), torch.ones_like(data.f[:, 0])
    factors = factors.flatten(1)[:, 0] if factors.dim() > 1 else factors
    is_second = torch.arange(len(labelled), device=labelled.device) % 2 == 1
    for half in (is_second, ~is_second):
        factors[half] = _temperature([data.part(~half & labelled)]).sum().exp().to(factors)
    factors = factors.view(-1, *(1,) * (data.f.dim() - 1))
    members = (member._replace(f=factors * member.f) for member in data.members)
    return data._replace(members=tuple(members))


def _table(rows: Rows, like: Tensor) -> Tensor:
    """Return a table as a tensor."""
    return like.new_tensor([[float(number) for number in row] for row in rows])


def _log_probs(parts: Sequence[Pushforward], table: Tables, noise: Tensor | None = None) -> Tensor:
    """Return the sum of log p(label | x) over the labels of every example, (N,)."""
    pieces = (piece for part in parts for piece in part.pieces())
    return torch.cat([label_log_prob(p.prediction(table, noise), p.y).sum(1) for p in pieces])


def _squared_errors(parts: Sequence[Pushforward], tables: Sequence[Tables]) -> Tensor | None:
    """Return the squared error of the mean of every example, (N,); None if targets have another
    form."""
    found: list[Tensor] = []
    for part, table in zip(parts, tables, strict=True):
        for piece in part.pieces():
            mean = piece.prediction(table).expectation
            if not part.likelihood.real_valued or mean.shape != piece.y.shape:
                return None
            found.append((mean - piece.y).square().reshape(len(mean), -1).mean(1))
    return torch.cat(found)


def _mean_of(before: Sequence[Tables]) -> tuple[float, float] | None:
    """Return the shares of J w_lin and of f in the mean as fitted; None if they differ between
    members."""
    tables = [table for own in before for table in (own if isinstance(own, tuple) else (own,))]
    shares = {(float(table[0][MODE]), float(table[0][NETWORK])) for table in tables}
    return shares.pop() if len(shares) == 1 and all(len(table) == 1 for table in tables) else None


def most_probable(
    numbers: Numbers,
    parts: Sequence[Pushforward],
    alone: Tensor | None = None,
    held_out: bool = True,
) -> Tensor:
    """Return θ at a maximum of log p(y | x, θ) + log p(θ); ``alone`` is that of the networks, if
    known.

    If ``held_out`` examples show that the network is too sure, and with a temperature it is more
    likely by more than a number is worth, the search goes on with the prior of that temperature: a
    last layer after 400 epochs had 1.3 times the NLL without, and on ten tables test NLLs fall by
    up to 8 %. Of other networks they would rise by up to 3 %.
    """
    theta = _searched(numbers, parts)
    if not held_out or parts[0].likelihood.observation_noise is not None:
        return theta
    own = _temperature(parts) if alone is None else alone
    networks = [part.without_samples() for part in parts]
    least = _log_probs(networks, _scaled(own)).sum() - 1
    if own.sum() >= 0 or _log_probs(parts, *numbers.at(theta)).sum() >= least:
        return theta
    return _searched(numbers._replace(deviations=(1.0,) * len(theta)), parts, theta)


def _searched(
    numbers: Numbers, parts: Sequence[Pushforward], start: Tensor | None = None
) -> Tensor:
    """Return θ at a local maximum, by L-BFGS from ``start`` or from 0."""
    deviations = torch.tensor(numbers.deviations, dtype=torch.float64, device=parts[0].f.device)
    theta = torch.zeros_like(deviations) if start is None else start.clone()
    if not len(theta):
        return theta
    theta.requires_grad_()
    search = torch.optim.LBFGS([theta], max_iter=100, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        apart = theta.detach() / deviations
        total, theta.grad = 0.5 * apart.square().sum(), apart / deviations
        for piece in (piece for part in parts for piece in part.pieces()):
            with torch.enable_grad():
                loss = -label_log_prob(piece.prediction(*numbers.at(theta)), piece.y).sum()
            total += loss.detach()
            theta.grad += torch.autograd.grad(loss, theta)[0]
        return total

    search.step(objective)
    return theta.detach()


def _determined(numbers: Numbers, theta: Tensor, parts: Sequence[Pushforward]) -> float:
    """Return by how much the fitted log-likelihood exceeds that of new examples: tr((I + H)⁻¹ J).

    H is the sum of squared gradients over labels, J that over examples, whose labels may depend on
    each other. With one label each it is the number of parameters that the data determine.
    """
    deviations = theta.new_tensor(numbers.deviations)
    of_labels = theta.new_zeros(len(theta), len(theta))
    of_examples = of_labels.clone()
    for piece in (piece for part in parts for piece in part.pieces()):
        slopes = []
        for step in 0.01 * torch.eye(len(theta), dtype=theta.dtype, device=theta.device):
            above, below = (
                label_log_prob(piece.prediction(*numbers.at(theta + h)), piece.y)
                for h in (step, -step)
            )
            slopes.append((above - below) / 0.02)
        scaled = torch.stack(slopes) * deviations[:, None, None]
        for total, gradients in ((of_labels, scaled.flatten(1)), (of_examples, scaled.sum(2))):
            total += gradients @ gradients.T
    of_labels.diagonal().add_(1)
    return float(torch.linalg.solve(of_labels, of_examples).trace())
