"""``distil``: from a posterior to a student that is trained on its predictions."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from tqdm.auto import tqdm

from torch_lla_em.data import Inputs, Loader, merged, rows_of, tensors_in
from torch_lla_em.distil.inputs import (
    BATCH,
    Way,
    augmented,
    chosen_ways,
    gathered,
    number_of,
    pieces,
)
from torch_lla_em.distil.student import Form, Student, StudentError
from torch_lla_em.jacobian import Network, last_layers
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction import Fitted, Prediction, Record, predict, required
from torch_lla_em.runtime import Adapter, check_whole, refuse_former, report

_OF_HEAD = 0.3
"""Weight of the squared error of the head, whose targets have variance 1, relative to the KL. On
four tables, 1 makes the KL up to 2.5 times as large; .1 makes it up to 1.8 times as small, and
lowers the AUROC of p-values by up to .02."""

_STEP = 0.03
"""First step size relative to the mean size of the network's weights. Half or 1.5 times this value
changes the KL on four tables by 30 % at most; .1 makes it up to 3 times as large."""

_SAME = 0.01
"""An example whose OOD score is below this share of the median is taken for one of the stored
examples that it is compared with. .1 changes little; with 0, rank correlations of scores fall from
.81 to .31, and from .66 to .42."""


class Known(NamedTuple):
    """Inputs x with the predictions of a posterior, classes last: E[y] (B, *sites, C), and OOD
    scores (B, S).

    Uncertainties (B, *sites, n) are the epistemic part and, unless E[y] is a probability, the
    aleatoric part.
    """

    x: Any
    expectation: Tensor
    uncertainty: Tensor
    scores: Tensor

    @classmethod
    def of(cls, x: Inputs, prediction: Prediction) -> Known:
        """Return inputs with the parts of their prediction that a student learns."""
        expectation = prediction.expectation

        def last(values: Tensor) -> Tensor:
            has_classes = values.dim() == expectation.dim()
            return values.movedim(prediction._class_dim, -1) if has_classes else values[..., None]

        uncertainty = last(prediction.epistemic)
        if not prediction.likelihood.gives_probabilities:
            uncertainty = torch.cat([uncertainty, last(prediction.aleatoric)], -1)
        return cls(x, last(expectation), uncertainty, prediction._scored[0].to(expectation))

    def logarithms(self) -> tuple[Tensor, Tensor]:
        """Return the targets of the head: logarithms of uncertainties and of scores, NaN where they
        are not finite.

        The logarithms of scores are also NaN for examples that are compared with themselves.
        """
        finite, scores = (v.where(v.isfinite(), torch.nan) for v in (self.uncertainty, self.scores))
        least = torch.finfo(torch.float32).eps * finite.flatten(0, -2).nanmean(0)
        known = scores > _SAME * scores.nanmedian(0).values
        return (finite + least).log(), scores.log().where(known, torch.nan)

    def divergence(self, likelihood: Likelihood, f: Tensor, log_uncertainty: Tensor) -> Tensor:
        """Return KL(posterior's prediction ‖ student's) of each example, (B,), averaged over its
        sites.

        For targets other than labels, it is the KL of Gaussians whose variance is the sum of both
        parts of the uncertainty.
        """
        p = self.expectation
        if likelihood.gives_probabilities:
            log_q = likelihood.log_mean(f)
            terms = torch.xlogy(p, p) - p * log_q
            if likelihood.elementwise:
                q = log_q.exp().clamp(max=1 - torch.finfo(f.dtype).eps)
                terms = terms + torch.xlogy(1 - p, 1 - p) - (1 - p) * (-q).log1p()
            else:
                terms = terms.sum(-1)
        else:
            parts = self.uncertainty, log_uncertainty.exp()
            known, variance = (part.unflatten(-1, (2, -1)).sum(-2) for part in parts)
            ratio = (known + (p - likelihood.mean(f)).square()) / variance
            terms = 0.5 * (ratio - 1 - (known / variance).log())
        return terms.flatten(1).mean(1) if terms.dim() > 1 else terms


def distil(
    posterior: Fitted,
    inputs: Inputs | Loader,
    *,
    student: nn.Module | None = None,
    augment: Way | Sequence[Way] | None = None,
    num_inputs: int = 12_000,
    steps: int = 3000,
    seed: int = 0,
    progress_bar: bool = True,
    **former: Any,
) -> Student:
    """Train a network that predicts what a posterior predicts, as ``LinearisedLaplace.distil``."""
    refuse_former("distil", former, dict.fromkeys(("targets", "lr"), "leave it out"))
    check_whole(1, steps=steps, num_inputs=num_inputs)
    record = required(posterior, surely=True)
    first = record.members[0]
    network = first.setting.linear_model.network
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.inference_mode(False), torch.no_grad():
        x = gathered(inputs, network.device, first.num_inputs)
        total, ways = number_of(x), chosen_ways(x, augment)
        found = _untrained(record, network, student, rows_of(x, slice(2)))
        order, few = torch.randperm(total, generator=generator, device="cpu"), max(2, total // 10)
        held, used = (rows_of(x, rows.sort().values) for rows in order.tensor_split([few]))
        made, made_too = (
            [*augmented(part, -(-num_inputs * number_of(part) // total), ways, generator)]
            for part in (used, held)
        )
        parts = [used, *made], [held], made_too
        learnt, *others = (_known(record, trees, progress_bar) for trees in parts)
    # half of the inputs of each step are drawn from those that were given, which are the first
    shares = torch.rand(steps, BATCH, generator=generator, device="cpu")
    shares[:, : BATCH // 2] *= total - few
    shares[:, BATCH // 2 :] *= len(learnt.scores)
    with torch.inference_mode(False), torch.enable_grad():
        _train(found, learnt, shares.long(), progress_bar)
    with torch.no_grad():
        (kl, epistemic, _), (kl_made, _, ood_made) = (_error(found, known) for known in others)
    error = StudentError(few, kl, epistemic, kl_made, ood_made)
    found.note(error)
    if words := error.warning:
        report("log", words)
    return found


def _untrained(posterior: Record, network: Network, own: nn.Module | None, some: Inputs) -> Student:
    """Return a copy of the model or of a user's network, with an untrained head."""
    prediction = predict(posterior, some)
    due = Known.of(some, prediction)
    own = deepcopy(network.module if own is None else own).eval()
    *_, last = last_layers(Network(own, network.forward_fn, network.class_dim), some)
    target_fn = posterior.members[0].setting.target_fn
    adapter = Adapter(network.forward_fn, target_fn)
    form = Form(
        likelihood=posterior.likelihood,
        adapter=adapter,
        class_dim=network.class_dim,
        last=last,
        uncertainties=due.uncertainty.shape[-1],
        scores=due.scores.shape[-1],
    )
    student = Student(own, form, some)
    shape, expected = (tuple(p.expectation.shape) for p in (student.predict(some), prediction))
    if shape != expected:
        found = f"The student predicts shape {shape} for two inputs, and the posterior {expected}"
        raise ValueError(f"{found}: pass a network with the outputs of the model.")
    return student


def _known(posterior: Record, inputs: list[Any], progress_bar: bool) -> Known:
    """Return inputs with their predictions."""
    parts = [some for tree in inputs for some in pieces(tree)]
    found = []
    for x in tqdm(parts, "predicting", disable=not progress_bar or len(parts) < 2):
        due = Known.of(x, predict(posterior, x))
        bad = ~due.expectation.flatten(1).isfinite().all(1)
        if bad.any():
            shown = str(tensors_in(rows_of(x, bad)))[:200]
            raise ValueError(
                f"Predictions are NaN or infinite at some inputs, such as {shown}: replace missing "
                "values as in training."
            )
        found.append(due)
    known: Known = merged(found)
    return known


def _train(student: Student, known: Known, order: Tensor, progress_bar: bool) -> None:
    """Train a student on the examples of each step. Its head learns standardised logarithms, and
    returns logarithms at the end."""
    likelihood, head, n = student.likelihood, student.head, student.form.uncertainties
    logs = known.logarithms()
    moments = [_moments(each) for each in logs]
    mean, size = (torch.cat(each) for each in zip(*moments, strict=True))
    goals = [(values - m) / s for values, (m, s) in zip(logs, moments, strict=True)]
    weights: list[Tensor] = [p for p in student.network.parameters() if p.requires_grad]
    if not weights:  # a user has frozen the network because its own training is over
        weights = [p.requires_grad_() for p in student.network.parameters()]
    matrices = [w.detach() for w in weights if w.dim() > 1] or weights
    first = _STEP * float(torch.stack([w.square().mean().sqrt() for w in matrices]).median())
    weights += head.parameters()
    optimiser = torch.optim.Adam(weights, first, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, len(order))
    for rows in tqdm(order.to(mean.device), "distilling", disable=not progress_bar):
        some = rows_of(known, rows)
        own = student.predict(some.x)
        uncertainty = own.log_uncertainty * size[:n] + mean[:n]
        loss = some.divergence(likelihood, own._f, uncertainty).mean()
        for z, goal in zip((own.log_uncertainty, own.log_scores), goals, strict=True):
            due = goal[rows]
            loss = loss + _OF_HEAD * (z - due).where(due.isfinite(), 0).square().mean()
        optimiser.zero_grad()
        loss.backward()
        clip_grad_norm_(weights, 1.0)
        optimiser.step()
        schedule.step()
    with torch.no_grad():
        weight, bias = head[-1].parameters()
        weight.mul_(size[:, None])
        bias.mul_(size).add_(mean)
    student.requires_grad_(False)
    optimiser.zero_grad()


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each column, without NaN."""
    values = values.flatten(0, -2)
    mean = values.nanmean(0).nan_to_num()
    size = (values - mean).square().nanmean(0).sqrt().nan_to_num()
    return mean, size.clamp_min(torch.finfo(size.dtype).eps)


def _error(student: Student, known: Known) -> tuple[float, float, float]:
    """Return the mean KL from the posterior, and the rank correlations of epistemic uncertainties
    and of OOD scores."""
    columns, parts = [], 1 if student.likelihood.gives_probabilities else 2
    for due in pieces(known):
        found = student.predict(due.x)
        kl = due.divergence(student.likelihood, found._f, found.log_uncertainty)
        columns.append((kl.double(), found.log_uncertainty, found.log_scores))
    kl, *own = map(torch.cat, zip(*columns, strict=True))
    uncertainty, scores = zip(own, known.logarithms(), strict=True)
    epistemic = _rank_correlation(*(each.chunk(parts, -1)[0].flatten() for each in uncertainty))
    least = min(_rank_correlation(*pair) for pair in zip(*(each.T for each in scores), strict=True))
    return kl.mean().item(), epistemic, least


def _rank_correlation(a: Tensor, b: Tensor) -> float:
    """Return Spearman's correlation of two vectors, over entries where both are finite."""
    known = a.isfinite() & b.isfinite()
    a, b = (v[known].argsort().argsort().double() for v in (a, b))
    return torch.corrcoef(torch.stack([a, b]))[0, 1].item() if len(a) > 1 else nan
