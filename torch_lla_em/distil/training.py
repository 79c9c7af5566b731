"""``distil``: from a posterior to a student that is trained on its predictions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from math import cos, nan, pi
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from tqdm.auto import tqdm

from torch_lla_em.data import tensors_in
from torch_lla_em.distil.inputs import (
    Way,
    augmented,
    chosen_ways,
    gathered,
    joined,
    number_of,
    pieces,
    rows_of,
)
from torch_lla_em.distil.student import Form, Student, StudentError
from torch_lla_em.jacobian import Network, called_last
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction import Prediction, predict, required
from torch_lla_em.runtime import Adapter, check_whole, refuse_former, report

# inputs that measure the error of a student: a tenth, but at most so many
_HELD_OUT = 1000
# bounds on the number of inputs that are made by default, one for each given input
_FEWEST, _MOST = 12_000, 40_000
# number of inputs in each step
_BATCH = 256
# weight of the squared error of the head, whose targets have variance 1, next to the KL
_OF_HEAD = 0.3
# largest step as a part of the mean size of the network's weights, and the share of all steps over
# which it grows
_STEP, _WARM_UP = 0.03, 0.05
# part of the mean that is added to an uncertainty before the logarithm is taken
_FLOOR = 1e-4
# part of the median distance below which an example counts as one of those it is compared with
_SAME = 1e-2


class Known(NamedTuple):
    """Inputs with the predictions of a posterior, classes last."""

    x: Any
    """B inputs."""

    expectation: Tensor
    """E[y], (B, *sites, C)."""

    uncertainty: Tensor
    """The epistemic part and, unless E[y] is a probability, the aleatoric part: (B, *sites, n)."""

    scores: Tensor
    """Out-of-distribution scores, (B, S)."""

    @classmethod
    def of(cls, x: Any, prediction: Prediction) -> Known:
        """Return inputs with what a student learns of their prediction."""
        expectation = prediction.expectation

        def last(values: Tensor) -> Tensor:
            if values.dim() < expectation.dim():
                return values.unsqueeze(-1)
            return values.movedim(prediction.class_dim, -1)

        parts = [last(prediction.epistemic)]
        if not prediction.likelihood.gives_probabilities:
            parts.append(last(prediction.aleatoric))
        scores = prediction.scored.values.to(expectation)
        return cls(x, last(expectation), torch.cat(parts, -1), scores)

    def logarithms(self) -> tuple[Tensor, Tensor]:
        """Return what the head learns: the logarithms of uncertainties and of scores."""
        finite = self.uncertainty.where(self.uncertainty.isfinite(), 0)
        floor = (_FLOOR * finite.flatten(0, -2).mean(0)).clamp_min(torch.finfo(finite.dtype).tiny)
        return (self.uncertainty + floor).log(), self.log_scores()

    def log_scores(self) -> Tensor:
        """Return the logarithms of scores; NaN for examples that are compared with themselves."""
        finite = self.scores.where(self.scores.isfinite(), torch.nan)
        known = finite > _SAME * finite.nanmedian(0).values
        return finite.log().where(known, torch.nan)

    def divergence(self, likelihood: Likelihood, f: Tensor, log_uncertainty: Tensor) -> Tensor:
        """Return KL(posterior's prediction ‖ student's) of each example, (B,), a mean over its sites.

        For labels it is that of distributions over classes, for others that of Gaussians with the same mean
        and variance, which is the sum of both parts of the uncertainty.
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
    posterior: Any,
    inputs: Any,
    *,
    student: nn.Module | None = None,
    augment: Way | Sequence[Way] | None = None,
    num_inputs: int | None = None,
    steps: int = 3000,
    seed: int = 0,
    progress_bar: bool = True,
    **former: Any,
) -> Student:
    """Train a network that predicts what this posterior predicts, in one forward pass.

    The student learns the posterior's predictions at the given inputs, and at more inputs that
    are made from them. Elsewhere it is a network like any other: include unlabelled inputs of all
    kinds that you expect, also unusual ones, which are kept on the network's device. If you have a
    validation set, call ``la.calibrate`` first.

    Args:
        posterior (LinearisedLaplace or LaplaceEnsemble): The posterior; ``la.distil(x)`` passes la.
        inputs (Tensor, tuple, dict, DataLoader, Dataset or iterable of batches): Unlabelled inputs of one
            shape, or training data.
        student (nn.Module, optional): A network with the inputs and outputs of the model, which is copied.
            Default None: the model itself (of an ensemble, the first one).
        augment (str, callable or list of them, optional): How inputs are made: "noise" of random size,
            "swap" of entries (also tokens) between two inputs, or functions that map inputs to as many
            others. Default None: ["noise", "swap"]; for tokens "swap".
        num_inputs (int, optional): Number of inputs to make. Default None: as many as are given,
            but at least 12,000 and at most 40,000.
        steps (int): Number of steps of the training. Default 3000.
        seed (int): Seed of all random numbers. Default 0.
        progress_bar (bool): Show progress bars. Default True.

    Returns:
        A ``Student``; ``print`` shows its error, measured at inputs that were not used.

    Raises:
        ValueError: If there are too few inputs or several shapes of them, or if predictions are not finite.
        TypeError: If inputs are not tensors with one row per example.
        NotFittedError: Before ``fit``, or if the model has changed since.

    Example:
        >>> student = la.distil(x, steps=100, progress_bar=False)
        >>> probabilities = student(x)
    """
    refuse_former("distil", former, dict.fromkeys(("targets", "lr"), "leave it out"))
    check_whole(1, steps=steps, num_inputs=1 if num_inputs is None else num_inputs)
    network = required(posterior, surely=True).members[0].setting.linear_model.network
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.inference_mode(False), torch.no_grad():
        x = gathered(inputs, network.device)
        total, ways = number_of(x), chosen_ways(x, augment)
        found = _untrained(posterior, network, student, rows_of(x, slice(2)))
        count = min(max(total, _FEWEST), _MOST) if num_inputs is None else num_inputs
        order = torch.randperm(total, generator=generator, device="cpu")
        few = max(2, min(round(0.1 * total), _HELD_OUT))
        held, used = (rows_of(x, rows.sort().values) for rows in order.tensor_split([few]))
        made, made_too = (
            [*augmented(part, -(-count * number_of(part) // total), ways, generator)]
            for part in (used, held)
        )
        parts = [used, *made], [held], made_too
        learnt, *others = (_known(posterior, trees, progress_bar) for trees in parts)
    # half of the inputs of each step are drawn from those that were given, which are the first
    size = min(_BATCH, len(learnt.scores))
    among = torch.full((size,), float(len(learnt.scores)), device="cpu")
    among[: round(0.5 * size)] = float(total - few)
    shares = torch.rand(steps, size, generator=generator, device="cpu")
    with torch.inference_mode(False), torch.enable_grad():
        _train(found, learnt, (shares * among).long(), progress_bar)
    with torch.no_grad():
        own, made_error = (_error(found, known) for known in others)
    found.note(own._replace(kl_made=made_error.kl, ood_made=made_error.ood_made))
    for words in found.error.warnings:
        report("log", words)
    return found


def _untrained(posterior: Any, network: Network, own: nn.Module | None, some: Any) -> Student:
    """Return a copy of the model or of a user's network, with a head that has learnt nothing."""
    prediction = predict(posterior, some)
    due = Known.of(some, prediction)
    own = deepcopy(network.module if own is None else own).eval()
    last = called_last(Network(own, network.forward_fn, network.class_dim), some)
    target_fn = required(posterior).members[0].setting.target_fn
    called = Adapter(network.forward_fn, target_fn), network.class_dim, last
    sizes = due.uncertainty.shape[-1], due.scores.shape[-1]
    student = Student(own, Form(posterior.likelihood, *called, *sizes), some)
    shape, expected = (tuple(p.expectation.shape) for p in (student.predict(some), prediction))
    if shape != expected:
        raise ValueError(
            f"The student predicts shape {shape} for two inputs, and the posterior {expected}: pass a "
            "network with the outputs of the model."
        )
    return student


def _known(posterior: Any, inputs: list[Any], progress_bar: bool) -> Known:
    """Return inputs with their predictions."""
    parts = [some for tree in inputs for some in pieces(tree)]
    found = []
    for x in tqdm(parts, "predicting", disable=not progress_bar or len(parts) < 2):
        due = Known.of(x, predict(posterior, x))
        bad = ~due.expectation.flatten(1).isfinite().all(1)
        if bad.any():
            shown = tensors_in(rows_of(x, bad.nonzero()[:1, 0]))
            raise ValueError(
                f"Predictions are NaN or infinite at some of the inputs, such as {str(shown)[:200]}. Leave "
                "these out, or replace missing values as in training."
            )
        found.append(due)
    return joined(found)


def _train(student: Student, known: Known, order: Tensor, progress_bar: bool) -> None:
    """Train a student on the rows of each step; its head is standardised, and returns logarithms at the end."""
    likelihood, head, n = student.likelihood, student.head, student.form.uncertainties
    logs = known.logarithms()
    moments = [_moments(each) for each in logs]
    mean, size = (torch.cat(each) for each in zip(*moments))
    goals = [(values - m) / s for values, (m, s) in zip(logs, moments)]
    weights: list[Tensor] = [p for p in student.network.parameters() if p.requires_grad]
    if not weights:  # a user has frozen the network because its own training is over
        weights = [p.requires_grad_() for p in student.network.parameters()]
    largest = _STEP * _size_of(weights)
    weights += head.parameters()
    optimiser = torch.optim.Adam(weights, largest, fused=True)
    bar = tqdm(order.to(mean.device), "distilling", disable=not progress_bar)
    for step, rows in enumerate(bar):
        some = rows_of(known, rows)
        own = student.predict(some.x)
        uncertainty = own.log_uncertainty * size[:n] + mean[:n]
        loss = some.divergence(likelihood, own.centre, uncertainty).mean()
        for z, goal in zip((own.log_uncertainty, own.log_scores), goals):
            due = goal[rows]
            loss = loss + _OF_HEAD * (z - due).where(due.isfinite(), 0).square().mean()
        optimiser.zero_grad()
        loss.backward()
        clip_grad_norm_(weights, 1.0)
        done = (step + 1) / len(order)  # the step length grows, then falls like a cosine
        for group in optimiser.param_groups:
            group["lr"] = largest * min(1.0, done / _WARM_UP) * 0.5 * (1 + cos(pi * done))
        optimiser.step()
        if step % 50 == 0:
            bar.set_postfix(loss=f"{loss.item():.3g}", refresh=False)
    with torch.no_grad():
        weight, bias = head[-1].parameters()
        weight.mul_(size[:, None])
        bias.mul_(size).add_(mean)
    student.requires_grad_(False)
    optimiser.zero_grad()


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each column, over what is known."""
    values = values.flatten(0, -2)
    known = values.isfinite()
    count = known.sum(0).clamp_min(1)
    mean = values.where(known, 0).sum(0) / count
    size = ((values - mean).where(known, 0).square().sum(0) / count).sqrt()
    return mean, size.clamp_min(torch.finfo(size.dtype).eps)


def _size_of(weights: Iterable[Tensor]) -> float:
    """Return the median over matrices and kernels of the root mean square of their entries."""
    sizes = [w.detach().square().mean().sqrt() for w in weights if w.dim() > 1]
    return torch.stack(sizes or [w.detach().abs().mean() for w in weights]).median().item()


def _error(student: Student, known: Known) -> StudentError:
    """Compare a student with the posterior's predictions."""
    columns = []
    parts = 1 if student.likelihood.gives_probabilities else 2
    for due in pieces(known):
        found = student.predict(due.x)
        kl = due.divergence(student.likelihood, found.centre, found.log_uncertainty).double()
        parts_of = found.log_uncertainty, due.uncertainty
        columns.append((kl, *(p.chunk(parts, -1)[0].flatten() for p in parts_of), found.log_scores))
    kl, own, theirs, scores = map(torch.cat, zip(*columns))
    mean, error, ranked = (
        kl.mean().item(),
        (kl.var(correction=0) / max(1, len(kl) - 1)).sqrt().item(),
        _rank_correlation(own, theirs),
    )
    least = min(_rank_correlation(*pair) for pair in zip(scores.T, known.log_scores().T))
    return StudentError(len(kl), mean, error, ranked, mean, least)


def _rank_correlation(a: Tensor, b: Tensor) -> float:
    """Return Spearman's correlation of two vectors, over entries where both are finite."""
    known = a.isfinite() & b.isfinite()
    a, b = (v[known].argsort().argsort().double() for v in (a, b))
    return torch.corrcoef(torch.stack([a, b]))[0, 1].item() if len(a) > 1 else nan
