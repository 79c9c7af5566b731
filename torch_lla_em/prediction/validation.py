"""Scores of predictions, tables that compare posteriors on held-out data, and warnings about fits
that have failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import Inputs, Loader, as_loader, paired
from torch_lla_em.prediction.arrays import NUMBERS, mean_and_error
from torch_lla_em.prediction.calibration import with_temperature
from torch_lla_em.prediction.passes import pushed, same_targets
from torch_lla_em.prediction.posterior import Fitted, Posterior, required
from torch_lla_em.prediction.prediction import Prediction
from torch_lla_em.prediction.predictor import predicted
from torch_lla_em.prediction.printed import CALL, Cells, Printed
from torch_lla_em.prediction.pushforward import Pushforward
from torch_lla_em.prediction.targets import count_labels, label_log_prob
from torch_lla_em.problem import Problem
from torch_lla_em.runtime import PRECISION_BOUNDS, report

_COLUMNS = (
    "NLL",
    "network NLL",
    "temperature scaling NLL",
    "accuracy",
    "ECE",
    "RMSE",
    "90 % coverage",
)

_DETERMINED = 0.3
"""γ per target above which training residuals do not determine the noise, chosen on seven
regressions with 200 and 800 examples: above it 90 % intervals covered 72 to 88 %, below it at least
80 %."""


def covered(prediction: Prediction, y: Tensor, level: float = 0.9) -> Tensor:
    """Return which targets lie in their prediction intervals, in the shape of the targets."""
    lower, upper = prediction.credible_interval(level)
    return (y >= lower) & (y <= upper)


def scores(prediction: Prediction, y: Tensor) -> dict[str, float]:
    """Return the scores that apply, by name, of a prediction and its targets, both with the classes
    last."""
    likelihood = prediction.likelihood
    values = {"NLL": -per_label(prediction, y).mean()}
    if likelihood.gives_probabilities:
        stated, right = stated_and_right(prediction, y)
        values["accuracy"] = right.double().mean()
        values["ECE"] = calibration_error(stated.double(), right)
        if likelihood.elementwise:
            p, label = prediction.probs.flatten(), y.flatten() > 0.5
            values["AUROC"] = auroc(p[label], p[~label])
    elif prediction.expectation.shape == y.shape:
        shape = (-1, 1) if y.dim() == 1 else (-1, y.shape[-1])
        targets, mean = (v.double().reshape(shape) for v in (y, prediction.expectation))
        squares, spread = (targets - mean).square(), (targets - targets.mean(0)).square()
        values["RMSE"], values["MAE"] = squares.mean().sqrt(), squares.sqrt().mean()
        values["R²"] = (1 - squares.sum(0) / spread.sum(0)).mean()
        if likelihood.real_valued:
            values["90 % coverage"] = covered(prediction, y).double().mean()
    return {name: value.item() for name, value in values.items()}


def per_label(prediction: Prediction, y: Tensor) -> Tensor:
    """Return the log-probability of each labelled example relative to the mean number of labels,
    (N,).

    It is the sum over its labels, each by itself, so that the mean is that of a label: a pixel, a
    token or an output.
    """
    likelihood = prediction.likelihood
    sums = label_log_prob(prediction, y).double().sum(1)[likelihood.labelled(y)]
    return sums * len(sums) / max(1, count_labels(likelihood, y))


def stated_and_right(prediction: Prediction, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the confidence in each predicted label, and whether it is right, (labels,)."""
    p = prediction.probs
    if prediction.likelihood.elementwise:
        return torch.maximum(p, 1 - p).flatten(), ((p > 0.5) == (y > 0.5)).flatten()
    best, mask = p.max(prediction._class_dim), prediction.likelihood.mask(y)
    kept = torch.ones_like(y, dtype=torch.bool) if mask is None else mask
    return best.values[kept], (best.indices == y)[kept]


def calibration_error(stated: Tensor, right: Tensor, bins: int = 15) -> Tensor:
    """Return the expected calibration error (ECE) of stated probabilities, shape ()."""
    _, confidence, correct = binned(stated, right, bins)
    return (correct - confidence).abs().sum() / len(stated)


def auroc(positive: Tensor, negative: Tensor) -> Tensor:
    """Return the probability that a positive score exceeds a negative one, ties counted half,
    ()."""
    ordered = negative.sort().values
    places = torch.stack([torch.searchsorted(ordered, positive, right=r) for r in (False, True)])
    return places.double().mean() / len(ordered)


def binned(stated: Tensor, right: Tensor, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the count of each bin, the sum of stated probabilities, and the number right."""
    place = (bins * stated).long().clamp_max(bins - 1)
    zeros = stated.new_zeros(bins)  # torch.bincount is not deterministic on a GPU
    each = torch.ones_like(stated), stated, right
    count, confidence, correct = (zeros.index_add(0, place, v.to(stated)) for v in each)
    return count, confidence, correct


class PredictedData(NamedTuple):
    """The examples of a loader and their predictions, classes last."""

    inputs: Any
    """One tensor if batches are tensors of one shape, else None."""

    targets: Tensor
    network: Prediction
    """That of the network alone, or of all networks of an ensemble."""

    posterior: Prediction
    """That of the posterior, as fitted or as calibrated."""

    def scaled_network(self) -> Prediction | None:
        """Return the network's prediction with temperature scaling; None for other targets than
        labels.

        Each half of the examples has the temperature that fits the other half.
        """
        origin = self.network._origin
        if not self.network.likelihood.gives_probabilities or not isinstance(origin, Pushforward):
            return None
        with torch.inference_mode(False), torch.no_grad():
            return replace(with_temperature(origin).network(), _class_dim=-1)

    def log_probs(self) -> tuple[Tensor, Tensor]:
        """Return ``per_label`` of the posterior and of the network alone."""
        return per_label(self.posterior, self.targets), per_label(self.network, self.targets)


def predicted_data(la: Fitted, loader: Loader) -> PredictedData:
    """Return all examples of a loader with their predictions, on this rank alone; one pass for each
    network."""
    known = required(la, surely=True)
    inputs, data = pushed(known.members, loader)
    with torch.no_grad():
        return PredictedData(inputs, data.y, data.network(), predicted(known, data))


@dataclass(frozen=True, repr=False)
class Comparison(Printed):
    """The result of ``compare``; print it for a table and what follows from it.

    Example:
        >>> best = compare([la, other], x, y).ranking[0]
    """

    records: dict[str, dict[str, float]]
    """The scores of each posterior by name, in the order given."""

    log_probs: dict[str, Tensor]
    """log p(y | x) of each validation example, (N,), by name; paired across posteriors. With
    several labels, such as pixels, it is the sum over labels, each by itself, divided by their mean
    number."""

    gains: dict[str, Tensor]
    """The difference from that under the networks alone, (N,), by name."""

    over_temperature: dict[str, Tensor] = field(default_factory=dict)
    """The difference from that under the networks with temperature scaling, (N,), by name; labels
    alone have it. Each half of the examples has the temperature that fits the other half."""

    @property
    def ranking(self) -> list[str]:
        """Names in the order of validation NLL, the best first."""
        return sorted(self.records, key=lambda name: self.records[name]["NLL"])

    def behind(self, name: str) -> tuple[float, float]:
        """Return by how much the NLL of a posterior exceeds the best, and the paired standard
        error.

        Args:
            name (str): One of ``ranking``.
        """
        return mean_and_error(self.log_probs[self.ranking[0]] - self.log_probs[name])

    @property
    def findings(self) -> list[str]:
        """What follows from the table, as sentences."""
        best, *others = self.ranking
        lines = [f"{best!r} has the lowest NLL."]
        for name in others:
            gap, error = self.behind(name)
            noise = "" if gap > 2 * error else " (no measurable difference)"
            lines.append(f"{name!r} is worse by {gap:.2g} ± {error:.1g}{noise}.")
        networks = ("alone", self.gains), ("with temperature scaling", self.over_temperature)
        for name in self.ranking:
            for how, gains in networks:
                gap, error = mean_and_error(-gains[name]) if name in gains else (0.0, 0.0)
                if gap > 2 * error:
                    lines.append(
                        f"{name!r} is worse than its network {how}, by {gap:.2g} ± {error:.1g}: "
                        "call calibrate with other held-out data, or predict by the network."
                    )
                    break
        return lines

    def _table(self) -> tuple[str, Cells]:
        count = len(self.log_probs[self.ranking[0]])
        known = [c for c in _COLUMNS if any(c in record for record in self.records.values())]
        rows = [("", *known, "parameters")]
        for name, record in self.records.items():
            cells = [f"{record[c]:.4f}" if c in record else "" for c in known]
            rows.append((name, *cells, f"{record['parameters']:,}"))
        several = "posteriors" if len(self.records) > 1 else "posterior"
        return f"{len(self.records)} {several} on {count:,} examples; NLL: lower is better", rows


def compare(
    posteriors: Sequence[Fitted] | Mapping[str, Fitted],
    validation: Inputs | Loader,
    targets: Tensor | None = None,
) -> Comparison:
    """Compare fitted posteriors on the same held-out data, each in one pass.

    All posteriors see the same batches, so differences in NLL have paired standard errors.

    Args:
        posteriors (sequence or mapping): Fitted posteriors and ensembles, or a mapping from names
            to them.
        validation (DataLoader, Dataset, list of batches, or inputs): Data that none was fitted to
            or calibrated on.
        targets (Tensor, optional): The targets, if ``validation`` are inputs.

    Returns:
        A ``Comparison``; print it.

    Raises:
        TypeError: If one of them is not a posterior. The networks alone have their own column.
        ValueError: If there are none, or if some predict continuous targets and others do not.

    Example:
        >>> print(compare({"wide prior": la, "narrow prior": other}, x, y))  # doctest: +SKIP
    """
    if not isinstance(posteriors, Mapping):
        names = (type(getattr(la, "model", la)).__name__ for la in posteriors)
        posteriors = {
            f"{i}: {name}": la for i, (name, la) in enumerate(zip(names, posteriors, strict=True))
        }
    if not posteriors:
        raise ValueError("compare takes one posterior or more.")
    every = {name: required(la) for name, la in posteriors.items()}
    likelihoods = [record.likelihood for record in every.values()]
    if len({(each.real_valued, each.gives_probabilities) for each in likelihoods}) > 1:
        raise ValueError(
            "Some of these posteriors predict continuous targets and others labels or counts: "
            "their NLLs are not on one scale. Compare posteriors of the same kind of targets."
        )
    loader = as_loader(paired(validation, targets))
    records: dict[str, dict[str, float]] = {}
    log_probs, gains, over_temperature, known = {}, {}, {}, None
    for name, record in every.items():
        rows = predicted_data(record, loader)
        known = rows.targets if known is None else known
        same_targets(rows.targets, known)
        own, alone = (each.cpu() for each in rows.log_probs())
        log_probs[name], gains[name], of_temperature = own, own - alone, {}
        if (scaled := rows.scaled_network()) is not None:
            by_temperature = per_label(scaled, rows.targets).cpu()
            over_temperature[name] = own - by_temperature
            of_temperature["temperature scaling NLL"] = -by_temperature.mean().item()
        records[name] = {
            **scores(rows.posterior, rows.targets),
            "network NLL": -alone.mean().item(),
            **of_temperature,
            "parameters": sum(p.setting.linear_model.layout.size for p in record.members),
        }
    return Comparison(records, log_probs, gains, over_temperature)


def warn_of_collapse(posterior: Posterior, problem: Problem) -> None:
    """Report a warning for each sign that a fit has failed, judged by some training examples."""
    facts, K = problem.data.facts, len(posterior.result.w_samples)
    most = NUMBERS // (K * max(facts.num_outputs // facts.num_rows, 1))
    if problem.data.group.rank > 0 or not most:
        return
    batch = next(problem.data.first().split(min(256, most)))
    if len(batch.rows) > most:  # a batch that cannot be split
        return
    data = posterior.at(batch.inputs)
    data = data._replace(targets=problem.sweep.aligned(batch).targets, class_dim=-1)
    for words in warnings_of(posterior, data):
        report("log", words)


def warnings_of(posterior: Posterior, data: Pushforward) -> Iterator[str]:
    """Yield a warning for each sign that a fit has failed, given some training examples."""
    result, likelihood, y = posterior.result, data.likelihood, data.y
    gamma, error = result.effective_dim.value.sum().item(), result.effective_dim[1].norm().item()
    collapsed = gamma < max(4 / len(result.w_samples), 2 * error)
    # where all λ are at their bound the fit has warned
    if collapsed and (result.prior_precision < PRECISION_BOUNDS[1]).any():
        scaling = 'prior="isotropic", ' if (result.scale != 1).any() else ""
        yield (
            f"The data determine hardly any parameters (γ = {gamma:.2g} ± {error:.1g}): the "
            f"posterior is close to the prior. Try {scaling}a smaller prior_precision, or "
            "parameters of later layers."
        )
    if likelihood.gives_probabilities:
        mask = likelihood.mask(y)
        count = y.numel() if mask is None else int(mask.sum())
        most = log(2 if likelihood.elementwise else data.f.shape[-1])
        nll = -likelihood.log_prob(data.f, y).double().sum().item() / max(count, 1)
        if count and nll >= most:
            yield (
                f"The network's NLL on training data, {nll:.3g}, is not below that of equal "
                f"probabilities, {most:.3g}. The posterior is that of a trained network: train it "
                "before fit."
            )
    if likelihood.observation_noise is None:
        return
    prediction = predicted(posterior, data)
    if y.shape != prediction.expectation.shape:
        return
    squares = ((y - prediction.expectation).square() / prediction.aleatoric).double()
    share = gamma / (posterior.num_data * y[0].numel())
    if share > _DETERMINED and not collapsed:
        yield (
            f"The network has overfitted (γ is {share:.0%} of the number of targets), so σ is "
            f"probably too small. {CALL} to learn it from other examples, or use more data."
        )
    count = y.shape[-1] if y.dim() > 1 else 1
    least, output = squares.reshape(-1, count).mean(0).min(0)
    if not result.sigma_noise.dim() and count > 1 and least < 0.01:
        yield (
            f"All outputs share sigma_noise, but residuals of output {output} are only "
            f"{least.sqrt():.1%} of it: its intervals are far too wide. Pass "
            f"Regression(torch.ones({count})) to learn one for each."
        )
