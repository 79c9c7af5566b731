"""``distil``: from a posterior to a student that is trained on its predictions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from math import cos, nan, pi
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from tqdm.auto import tqdm

from torch_lla_em.data import tensors_in
from torch_lla_em.distil.error import Agreement, Likelihoods, StudentError, rank_correlation
from torch_lla_em.distil.inputs import (
    Way,
    augmented,
    chosen_ways,
    gathered,
    joined,
    labelled,
    number_of,
    pieces,
    rows_of,
    split,
)
from torch_lla_em.distil.student import Form, Student
from torch_lla_em.distil.targets import Known, divergence, log_scores
from torch_lla_em.jacobian import Network, called_last
from torch_lla_em.prediction import Predictor
from torch_lla_em.runtime import check_options, report

# bounds on the number of inputs that are made by default, one for each given input
_FEWEST, _MOST = 12_000, 40_000
# weight of the squared error of the head, whose targets have variance 1, next to the KL
_OF_HEAD = 0.3
# largest step as a part of the mean size of the network's weights, and the share of all steps over
# which it grows
_STEP, _WARM_UP = 0.03, 0.05
_REMOVED = {
    "widen": "augment takes functions of inputs: augment=[*ways, function]",
    "mask_token": "pass a function that replaces tokens: augment=[*ways, function]",
    "checkpoint": "a distillation that was killed starts again",
}


class Schedule(NamedTuple):
    """Options of the training."""

    steps: int
    batch_size: int
    lr: float | None
    seed: int
    progress_bar: bool


def distil(
    posterior: Predictor,
    inputs: Any,
    targets: Any = None,
    *,
    validation: Any = None,
    student: nn.Module | None = None,
    augment: Way | Sequence[Way] | None = None,
    num_inputs: int | None = None,
    steps: int = 3000,
    batch_size: int = 256,
    lr: float | None = None,
    seed: int = 0,
    progress_bar: bool = True,
    **removed: Any,
) -> Student:
    """Train a network that predicts what this posterior predicts, in one forward pass.

    The student learns the posterior's predictions at the given inputs, and at more inputs that
    are made from them. Elsewhere it is a network like any other: include unlabelled inputs of all
    kinds that you expect, also unusual ones. All inputs are kept in the memory of the network's
    device. If you have a validation set, call ``la.calibrate`` first.

    Args:
        posterior (LinearisedLaplace or LaplaceEnsemble): The posterior; ``la.distil(x)`` passes la.
        inputs (Tensor, tuple, dict, DataLoader, Dataset or iterable of batches): Unlabelled inputs,
            or training data, whose targets are not used.
        targets (Tensor, optional): Not used either, so that ``la.distil(x, y)`` takes the arguments of
            ``la.fit(x, y)``. Labels that are to be compared belong into ``validation``.
        validation (DataLoader, list of batches or tuple, optional): Labelled data on which the
            NLLs of network, posterior and student are compared, and the student is calibrated.
        student (nn.Module, optional): A network with the inputs and outputs of the model,
            trained or not; it is copied. Default None: the model itself (of an ensemble, the
            first one).
        augment (str, callable or list of them, optional): How inputs are made: "noise" of random size,
            "swap" of entries (also tokens) between two inputs, or functions that map inputs to as many
            others. Default None: ["noise", "swap"]; for tokens "swap".
        num_inputs (int, optional): Number of inputs to make. Default None: as many as are given,
            but at least 12,000 and at most 40,000.
        steps (int): Number of steps of the training. Default 3000.
        batch_size (int): Number of inputs in each step. Default 256.
        lr (float, optional): Largest learning rate of Adam. Default None: 3 % of the root mean
            square of the network's weights.
        seed (int): Seed of all random numbers. Default 0.
        progress_bar (bool): Show progress bars. Default True.
        **removed: Arguments of version 0.4; each raises an error with its replacement.

    Returns:
        A ``Student``; ``print`` shows its error, measured at inputs that were not used.

    Raises:
        ValueError: If there are too few inputs, or if the model does not accept them or its
            predictions are not finite.
        TypeError: If inputs are not tensors with one row per example.
        NotFittedError: Before ``fit``, or if the model has changed since.

    Example:
        >>> student = la.distil(x, steps=100, progress_bar=False)
        >>> probabilities = student(x)
    """
    for name in removed:
        words = _REMOVED.get(name, "see help(la.distil) for those it has")
        raise TypeError(f"distil has no argument {name!r}: {words}.")
    check_options(steps=steps, batch_size=batch_size, seed=seed, progress_bar=progress_bar)
    check_options(num_inputs=num_inputs, lr=lr)
    network = posterior._members(surely=True)[0].setting.linear_model.network
    generator = torch.Generator("cpu").manual_seed(seed)
    if isinstance(validation, Iterator):  # it is read several times
        validation = list(validation)
    with torch.inference_mode(False), torch.no_grad():
        given = gathered(inputs, targets, network.device)
        ways = chosen_ways(given[0], augment)
        for x in given:
            _last_of(network, x, "model")
        found = _untrained(posterior, network, student, rows_of(given[0], slice(2)))
        for x, y in () if validation is None else labelled(validation, found.form.target_fn):
            found.predict(x).aligned(y)  # raises an error if they do not fit
            break
        total = sum(map(number_of, given))
        count = min(max(total, _FEWEST), _MOST) if num_inputs is None else num_inputs
        used, held = split(given, generator)
        made, made_too = (
            [
                z
                for x in part
                for z in augmented(x, -(-count * number_of(x) // total), ways, generator)
            ]
            for part in (used, held)
        )
        every = ([*used, *made], len(used)), (held, 0), (made_too, 0)
        learnt, *others = (_known(posterior, *each, progress_bar) for each in every)
    with torch.inference_mode(False), torch.enable_grad():
        _train(found, learnt, Schedule(steps, batch_size, lr, seed, progress_bar))
    with torch.no_grad():
        held_out, at_made = (_agreement(found, known) for known in others)
        nll = None if validation is None else _nll(posterior, found, validation)
    found.note(StudentError(held_out, at_made, nll))
    for words in found.error.warnings:
        report("log", words)
    return found if validation is None else found.calibrate(validation)


def distilled(
    la: Any, asked: bool | dict[str, Any], inputs: Any, validation: Any, **options: Any
) -> Student | None:
    """Return the student that an argument ``distil`` of an estimator or a callback asks for, or None.

    Args:
        la (LinearisedLaplace or LaplaceEnsemble): The posterior.
        asked (bool or dict): Whether to distil, or arguments of ``la.distil``.
        inputs (Tensor, DataLoader or list of batches): As in ``la.distil``.
        validation (DataLoader or tuple, optional): As in ``la.distil``.
        **options: Further arguments of ``la.distil``; those of a dict replace them.
    """
    if not isinstance(asked, (bool, dict)):
        raise ValueError(
            f"distil must be True, False or a dict of arguments of la.distil, not {asked!r}."
        )
    if asked is False:
        return None
    own = asked if isinstance(asked, dict) else {}
    options = {"validation": validation, "progress_bar": False, **options, **own}
    student: Student = la.distil(inputs, **options)
    return student


def _untrained(posterior: Predictor, network: Network, own: nn.Module | None, some: Any) -> Student:
    """Return a copy of the model or of a user's network, with a head that has learnt nothing."""
    due = Known.of(some, posterior.predict(some))
    own = deepcopy(network.module if own is None else own).eval()
    copy = Network(own, network.forward_fn, network.class_dim)
    target_fn, last = posterior._members()[0].setting.target_fn, _last_of(copy, some, "student")
    sizes = due.uncertainty.shape[-1], due.scores.shape[-1]
    called = network.forward_fn, target_fn, network.class_dim, last
    student = Student(own, Form(posterior.likelihood, *called, *sizes), some)
    shape, expected = (tuple(each.predict(some).expectation.shape) for each in (student, posterior))
    if shape != expected:
        raise ValueError(
            f"The student predicts shape {shape} for two inputs, and the posterior {expected}: pass a "
            "network with the outputs of the model."
        )
    return student


def _known(posterior: Predictor, inputs: list[Any], given: int, progress_bar: bool) -> list[Known]:
    """Return inputs with their predictions, one tree for each shape; the first few inputs were given."""
    parts = [(x, n < given) for n, some in enumerate(inputs) for x in pieces(some)]
    found = []
    for x, is_given in tqdm(parts, "predicting", disable=not progress_bar or len(parts) < 2):
        due = Known.of(x, posterior.predict(x), is_given)
        bad = ~due.expectation.flatten(1).isfinite().all(1)
        if bad.any():
            shown = tensors_in(rows_of(x, bad.nonzero()[:1, 0]))
            raise ValueError(
                "The posterior's predictions are NaN or infinite at some of the inputs, such as "
                f"{str(shown)[:200]}. Leave such inputs out, or replace missing values as in "
                "training; functions of augment must return finite inputs."
            )
        found.append(due)
    return joined(found)


def _last_of(network: Network, x: Any, name: str) -> str:
    """Return the path of the last layer; an error states which network does not accept the inputs."""
    some = rows_of(x, slice(2))
    try:
        return called_last(network, some)
    except (RuntimeError, ValueError, IndexError) as error:
        shapes = [tuple(t.shape[1:]) for t in tensors_in(some)]
        raise ValueError(
            f"The {name} does not accept the inputs of distil, which have shape "
            f"{shapes[0] if len(shapes) == 1 else shapes} per example ({error}). Pass inputs as the "
            "model takes them, and a student that takes the same."
        ) from error


def _train(student: Student, known: list[Known], schedule: Schedule) -> None:
    """Train a student whose head is standardised in training, and returns logarithms at the end."""
    likelihood, head, n = student.likelihood, student.head, student.form.uncertainties
    logs = [block.logarithms() for block in known]
    moments = [_moments(each) for each in zip(*logs)]
    mean, size = (torch.cat(each) for each in zip(*moments))
    goals = [[(v - m) / s for v, (m, s) in zip(pair, moments)] for pair in logs]
    weights: list[Tensor] = [p for p in student.network.parameters() if p.requires_grad]
    if not weights:  # a user has frozen the network because its own training is over
        weights = [p.requires_grad_() for p in student.network.parameters()]
    largest = _STEP * _size_of(weights) if schedule.lr is None else schedule.lr
    weights += head.parameters()
    optimiser = torch.optim.Adam(weights, largest, fused=True)
    generator = torch.Generator("cpu").manual_seed(schedule.seed)
    counts = torch.tensor([[len(b.given), int(b.given.sum())] for b in known], device="cpu")
    bar = tqdm(range(schedule.steps), "distilling", disable=not schedule.progress_bar)
    for step in bar:
        at = int(torch.multinomial(counts[:, 0].double(), 1, generator=generator))
        every, given = counts[at].tolist()
        rows = _drawn(every, given, schedule.batch_size, generator).to(mean.device)
        some = rows_of(known[at], rows)
        f, *found = student.heads(some.x)
        loss = divergence(likelihood, f, found[0] * size[:n] + mean[:n], some).mean()
        for z, goal in zip(found, goals[at]):
            due = goal[rows]
            loss = loss + _OF_HEAD * (z - due).where(due.isfinite(), 0).square().mean()
        optimiser.zero_grad()
        loss.backward()
        clip_grad_norm_(weights, 1.0)
        done = (step + 1) / schedule.steps  # the step length grows, then falls like a cosine
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


def _drawn(total: int, given: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw the numbers of some inputs: half of them from those that were given, which are the first."""
    count = min(count, total)
    among = torch.full((count,), float(total), device="cpu")
    if given:
        among[: round(0.5 * count)] = float(given)
    return (torch.rand(count, generator=generator, device="cpu") * among).long()


def _moments(logs: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each column, over what is known."""
    values = torch.cat([each.flatten(0, -2) for each in logs])
    known = values.isfinite()
    count = known.sum(0).clamp_min(1)
    mean = values.where(known, 0).sum(0) / count
    size = ((values - mean).where(known, 0).square().sum(0) / count).sqrt()
    return mean, size.clamp_min(torch.finfo(size.dtype).eps)


def _size_of(weights: list[Tensor]) -> float:
    """Return the median over matrices and kernels of the root mean square of their entries."""
    sizes = [w.detach().square().mean().sqrt() for w in weights if w.dim() > 1]
    return torch.stack(sizes or [w.detach().abs().mean() for w in weights]).median().item()


def _agreement(student: Student, known: list[Known]) -> Agreement | None:
    """Compare a student with the posterior's predictions, if there are any."""
    columns = []
    parts = 1 if student.likelihood.gives_probabilities else 2
    for due in (some for block in known for some in pieces(block)):
        f, uncertainty, scores = student.heads(due.x)
        kl = divergence(student.likelihood, f, uncertainty, due).double()
        both = (each.chunk(parts, -1)[0].flatten() for each in (uncertainty, due.uncertainty))
        columns.append((kl, *both, scores, due.scores))
    if not columns:
        return None
    kl, own, theirs, scores, due_scores = map(torch.cat, zip(*columns))
    return Agreement(
        len(kl),
        kl.mean().item(),
        kl.std().item() / len(kl) ** 0.5 if len(kl) > 1 else nan,
        rank_correlation(own, theirs),
        min(rank_correlation(*pair) for pair in zip(scores.T, log_scores(due_scores).T)),
    )


def _nll(posterior: Predictor, student: Student, validation: Any) -> Likelihoods | None:
    """Return the NLL of the network, the posterior and a student; None if it has no density."""
    each = []
    for x, y in labelled(validation, student.form.target_fn):
        data, own = posterior._at(x), student.predict(x)
        if not own.has_log_prob():
            return None
        three = data.network(), posterior._predicted(data, judged=False), own
        kept = student.likelihood.labelled(own.aligned(y))
        each.append(torch.stack([some.log_prob(y)[kept].double() for some in three]))
    values = torch.cat(each, 1)
    network, nll, own_nll = (-values.mean(1)).tolist()
    count, spread = values.shape[1], (values[1] - values[0]).std(correction=0).item()
    return Likelihoods(network, nll, own_nll, count, spread / count**0.5)
