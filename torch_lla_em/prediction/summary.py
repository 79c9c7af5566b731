"""The output of ``print(la)``: the result of a fit in words, an assessment, and recommendations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.jacobian import LinearModel
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction.calibration import Calibration
from torch_lla_em.prediction.posterior import Posterior, Posteriors, Record
from torch_lla_em.prediction.printed import Cells
from torch_lla_em.prediction.reference import Reference
from torch_lla_em.runtime import CALL
from torch_lla_em.solvers import is_accurate, relative_error

_FEW = 38
"""Number of validation examples below which a calibration is not called good; ``is_ood`` needs as
many for its default rate."""


class Accuracy(NamedTuple):
    """The numerical error of the samples and the mode of a posterior, in posterior standard
    deviations."""

    error: float
    """The larger one of two errors: the root mean square error of the samples over all directions
    that the data determine, and the error of the mode relative to its norm."""

    bound: float
    """An upper bound on the error of every output of every sample, at any input."""

    tolerance: float
    """The requested largest error of the fit."""

    @property
    def is_reached(self) -> bool:
        """Whether the error is within the tolerance."""
        return is_accurate(self.error, self.tolerance)

    def __str__(self) -> str:
        return (
            f"numerical error {self.error:.2g} posterior standard deviations (tolerance "
            f"{self.tolerance:.2g}), at most {self.bound:.2g} for any output"
        )


def usual_tolerance(num_samples: int) -> float:
    """Return a quarter of the Monte Carlo error of a standard deviation, 1/√(2K)."""
    return float(0.25 * (2 * num_samples) ** -0.5)


def accuracy(posterior: Posterior) -> Accuracy:
    """Return the numerical error of samples and mode, its bound and the tolerance."""
    result = posterior.result
    error = relative_error(result.certificate, result.effective_dim.value.sum())
    error = max(error, result.mode_error)
    tolerance = posterior.tolerance or usual_tolerance(len(result.w_samples))
    return Accuracy(error, result.certificate.max().item(), tolerance)


def numbers(record: Record) -> Cells:
    """Return all numbers of the fits in the terms of the method."""
    rows: Cells = []
    for i, member in enumerate(record.members):
        prefix = f"member {i}: " if isinstance(record, Posteriors) else ""
        rows += [(f"{prefix}{kind}", words) for kind, words in _numbers(member)]
    return rows


def _numbers(posterior: Posterior) -> Iterator[tuple[str, str]]:
    """Yield the numbers of a fit in the terms of the method."""
    result = posterior.result
    evidence, spread = (each.item() for each in result.log_evidence)
    gamma, error = result.effective_dim
    yield "prior precision λ", _several(result.prior_precision)
    yield "effective dimension γ", f"{gamma.sum():.4g} ± {error.norm():.2g}"
    if evidence == evidence:  # otherwise a solver has not computed it
        yield "log evidence", f"{evidence:.6g} ± {spread:.2g}"
    if posterior.history:
        last = posterior.history[-1]
        yield "EM", f"{last['step']} steps, {last['data_passes']} passes, {last['seconds']:.3g} s"
    yield from (("memory plan", plan) for plan in posterior.messages[:1])


def table_of(
    name: str, models: Sequence[LinearModel], likelihood: Likelihood, record: Record | str
) -> tuple[str, Cells]:
    """Return the title and the table of ``print(la)``. If there is no record, ``record`` is a text
    that states what has to be done first."""
    modules = [model.network.module for model in models]
    title = f"{name} of {', '.join(sorted({type(module).__name__ for module in modules}))}"
    rows = [("likelihood", type(likelihood).__name__)]
    chosen, total = models[0].layout.size, sum(p.numel() for p in modules[0].parameters())
    size = f"{f'all {total:,}' if chosen == total else f'{chosen:,} of {total:,}'} parameters"
    if isinstance(record, str):
        return title, [*rows, ("posterior", f"{record}; {size}")]
    several = isinstance(record, Posteriors)
    members = record.members
    samples = f"{len(members[0].result.w_samples)} samples of {size}{' each' if several else ''}"
    rows += [("posterior", samples), ("training data", _training_data(members))]
    noises = [member.likelihood.observation_noise for member in members]
    if known := [sigma for sigma in noises if sigma is not None]:
        sigma = torch.stack(known).squeeze(0)
        rows.append(("observation noise", f"{_several(sigma)} (standard deviation)"))
    if record.correction.reference is not None:
        rows.append(("reference", _of_reference(record.correction.reference)))
    return title, [*rows, *advice(record)]


def _training_data(members: Sequence[Posterior]) -> str:
    """Return a text with the number of training examples, the time of the fits, and why some ended
    early."""
    counts = sorted({member.num_data or 0 for member in members})
    seconds = [member.history[-1]["seconds"] for member in members if member.history]
    ends = sorted({member.result.why for member in members} - {"accurate"})
    words = " to ".join(f"{n:,}" for n in dict.fromkeys((counts[0], counts[-1]))) + " examples"
    words += f", fitted in {sum(seconds):.3g} s" if seconds else ""
    return words + (f" (ended by: {', '.join(ends)})" if ends else "")


def _of_reference(reference: Reference) -> str:
    """Return a text on the validation examples that inputs are compared with."""
    words = f"{len(reference.unusual):,} validation examples"
    if reference.classes is not None:
        words += ", separately for each class"
    elif reference.groups is not None:
        words += f" in {len(reference.groups.unique())} groups"
    words += " with weights" if reference.weights is not None else ""
    return f"{words}, for p-values, OOD flags, sets and intervals"


def advice(record: Record) -> Iterator[tuple[str, str]]:
    """Yield lines on what is good about a fit, what is not, and what to do."""
    members, several = record.members, isinstance(record, Posteriors)
    calibration = record.correction.calibration
    calibrated = calibration is not None and calibration.length is None
    every = [accuracy(member) for member in members]
    reached, worst = max(
        zip(every, members, strict=True), key=lambda pair: pair[0].error / pair[0].tolerance
    )
    kind, verdict = ("good", "") if reached.is_reached else ("accuracy", "not ")
    which = " of the worst" if several else ""
    yield kind, f"Samples and mode{which} are {verdict}accurate: {reached}."
    of_value, of_error = worst.result.effective_dim
    gamma, error = of_value.sum(), of_error.norm()
    if error > 0.1 * gamma:
        yield (
            "to do",
            "The samples are too few: the number of parameters that the data determine is only "
            f"known to {error / gamma:.0%}. Increase num_samples.",
        )
    if calibration is not None:
        yield from of_calibration(calibration)
    remaining = [
        [words for words in member.messages[1:] if not (calibrated and CALL in words)]
        for member in members
    ]
    warnings = [] if several else remaining[0]
    warned = [str(i) for i, words in enumerate(remaining) if several and words]
    if warned:
        warnings.append(f"Members {', '.join(warned)} have warnings: print(ensemble.members[i]).")
    yield from (("warning", words) for words in warnings)
    told = any(CALL in words for words in warnings)
    if not calibrated and not record.likelihood.is_quadratic and not told:
        name = "ensemble." if several else "la."
        yield "to do", f"{CALL.replace('la.', name)} to calibrate the predictions on held-out data."


def of_calibration(calibration: Calibration) -> Iterator[tuple[str, str]]:
    """Yield lines on the result of ``calibrate``."""
    per, words = "NLL per label" if calibration.labels > 1 else "NLL", str(calibration)
    count, source = calibration.num_rows, calibration.source
    if calibration.applied:
        words = f"calibrated on {count:,} examples: {source} {per} {calibration}"
        if count < _FEW:
            words += f". Fewer than {_FEW} examples are too few to measure this: use more"
    is_good = calibration.is_measurable and count >= _FEW and not calibration.unlike
    yield "good" if is_good else "calibration", words
    if calibration.unlike:
        yield "warning", calibration.unlike
    if calibration.network is not None:
        words = f"network alone {calibration.network:.4g}"
        if calibration.temperature is not None:
            words += f", with temperature scaling {calibration.temperature:.4g}"
        yield "compared", f"{source} {per}: {words}"


def _several(values: Tensor) -> str:
    if not values.dim():
        return f"{values:.4g}"
    return f"{values.min():.3g} to {values.max():.3g} ({values.numel()} values)"
