"""Posteriors compared on held-out data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import Inputs, Loader, as_loader, paired
from torch_lla_em.prediction.conformal import mean_and_error
from torch_lla_em.prediction.numbers import with_temperature
from torch_lla_em.prediction.passes import pushed, same_targets
from torch_lla_em.prediction.posterior import Fitted, required
from torch_lla_em.prediction.predict import predicted
from torch_lla_em.prediction.prediction import Prediction, network_of
from torch_lla_em.prediction.printed import Cells, Printed
from torch_lla_em.prediction.scores import per_label, scores

_COLUMNS = (
    "NLL",
    "network NLL",
    "temperature scaling NLL",
    "accuracy",
    "ECE",
    "RMSE",
    "90 % coverage",
)


class PredictedData(NamedTuple):
    """The examples of a loader and their predictions, classes last."""

    inputs: Any
    """One tensor if batches are tensors of one shape; otherwise None."""

    targets: Tensor
    network: Prediction
    """The prediction of the network alone, or of all networks of an ensemble."""

    posterior: Prediction
    """The prediction of the posterior, as fitted or as calibrated."""

    def every(self) -> dict[str, Prediction]:
        """Return the predictions by name: of the network, for labels also with temperature scaling,
        and of the posterior.

        Each half of the examples has the temperature that fits the other half.
        """
        found, origin = {"network": self.network}, self.network._origin
        if self.network.likelihood.gives_probabilities and origin is not None:
            with torch.inference_mode(False), torch.no_grad():
                scaled = network_of(with_temperature(origin))
            found["temperature scaling"] = replace(scaled, _class_dim=-1)
        return found | {"posterior": self.posterior}

    def log_probs(self) -> tuple[Tensor, Tensor]:
        """Return ``per_label`` of the posterior and of the network alone."""
        return per_label(self.posterior, self.targets), per_label(self.network, self.targets)


def predicted_data(la: Fitted, loader: Loader) -> PredictedData:
    """Return all examples of a loader with their predictions, on this rank alone; one pass for each
    network."""
    known = required(la, surely=True)
    inputs, data = pushed(known.members, loader)
    with torch.no_grad():
        return PredictedData(inputs, data.y, network_of(data), predicted(known, data))


@dataclass(frozen=True, repr=False)
class Comparison(Printed):
    """The result of ``compare``; print it for a table and its conclusions.

    Example:
        >>> best = compare([la, other], x, y).ranking[0]
    """

    records: dict[str, dict[str, float]]
    """The scores of each posterior by name, in the order given."""

    log_probs: dict[str, Tensor]
    """log p(y | x) of each validation example, (N,), by name; paired across posteriors. For
    examples with several labels, such as pixels, it is the sum over single labels, divided by their
    mean number."""

    gains: dict[str, Tensor]
    """The difference of ``log_probs`` from those of the networks alone, (N,), by name."""

    over_temperature: dict[str, Tensor] = field(default_factory=dict)
    """The difference of ``log_probs`` from those of the networks with temperature scaling, (N,), by
    name; only for labels. Each half of the examples has the temperature that fits the other
    half."""

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
        """The conclusions from the table, as sentences."""
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
                        "call calibrate with other held-out data, or predict with the network."
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
        validation (DataLoader, Dataset, list of batches, or inputs): Data that no posterior was
            fitted to or calibrated on.
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
        each = {kind: per_label(p, rows.targets).cpu() for kind, p in rows.every().items()}
        log_probs[name] = own = each.pop("posterior")
        gains[name] = own - each["network"]
        if "temperature scaling" in each:
            over_temperature[name] = own - each["temperature scaling"]
        records[name] = {
            **scores(rows.posterior, rows.targets),
            **{f"{kind} NLL": -values.mean().item() for kind, values in each.items()},
            "parameters": sum(p.setting.linear_model.layout.size for p in record.members),
        }
    return Comparison(records, log_probs, gains, over_temperature)
