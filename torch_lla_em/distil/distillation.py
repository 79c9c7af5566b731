"""``distil``: from a posterior to a student."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from torch_lla_em.data import tensors_in, to_device
from torch_lla_em.distil.agreement import (
    Agreement,
    Likelihoods,
    StudentError,
    agreement,
)
from torch_lla_em.distil.features import feature_size
from torch_lla_em.distil.inputs import gathered, labelled, number_of, pieces, rows_of, split
from torch_lla_em.distil.predicted import has_log_prob
from torch_lla_em.distil.progress import DistillationProgress
from torch_lla_em.distil.stored import Form
from torch_lla_em.distil.student import Student
from torch_lla_em.distil.targets import StudentTargets, of_prediction
from torch_lla_em.distil.training import Block, Schedule, blocks_of, train
from torch_lla_em.distil.widening import chosen_ways, widened
from torch_lla_em.jacobian import Network, called_last
from torch_lla_em.prediction import Predictor
from torch_lla_em.runtime import check_options, files, report

# bounds on the number of inputs that are made by default, one for each given input
_FEWEST, _MOST = 12_000, 40_000


class Distillation(Predictor):
    """What posteriors and ensembles have in common besides predictions: ``distil``."""

    def distil(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        validation: Any = None,
        student: nn.Module | None = None,
        augment: str | Sequence[str] | None = None,
        widen: Callable[[Any], Any] | None = None,
        mask_token: int | None = None,
        num_inputs: int | None = None,
        steps: int = 3000,
        batch_size: int = 256,
        lr: float | None = None,
        seed: int = 0,
        progress_bar: bool = True,
        checkpoint: str | PathLike[str] | None = None,
    ) -> Student:
        """Train a network that predicts what this posterior predicts, in one forward pass.

        The student learns the posterior's predictions at the given inputs, and at more inputs that
        are made from them. Elsewhere it is a network like any other: include unlabelled inputs of all
        kinds that you expect, also unusual ones. All inputs are kept in the memory of the network's
        device. If you have a validation set, call ``la.calibrate`` first.

        Args:
            inputs (Tensor, tuple, dict, DataLoader, Dataset or iterable of batches): Unlabelled inputs,
                or training data, whose targets are not used.
            targets (Tensor, optional): Not used either, so that ``la.distil(x, y)`` takes the arguments of
                ``la.fit(x, y)``. Labels that are to be compared belong into ``validation``.
            validation (DataLoader, list of batches or tuple, optional): Labelled data on which the
                NLLs of network, posterior and student are compared, and the student is calibrated.
            student (nn.Module, optional): A network with the inputs and outputs of the model,
                trained or not; it is copied. Default None: the model itself (of an ensemble, the
                first one).
            augment (str or list of str, optional): How inputs are made: "noise" of random size,
                "mixture" of two inputs, "swap" of entries between two inputs, "replace" of tokens by
                others; for images also "shift", "rotation" and "flip". Default None: "noise",
                "mixture" and "swap"; for tokens "swap" and "replace".
            widen (callable, optional): A function that maps inputs to as many other inputs. It takes
                turns with ``augment``.
            mask_token (int, optional): For tokens: also replace some of them by this one.
            num_inputs (int, optional): Number of inputs to make. Default None: as many as are given,
                but at least 12,000 and at most 40,000.
            steps (int): Number of steps of the training. Default 3000.
            batch_size (int): Number of inputs in each step. Default 256.
            lr (float, optional): Largest learning rate of Adam. Default None: 3 % of the root mean
                square of the network's weights.
            seed (int): Seed of all random numbers. Default 0.
            progress_bar (bool): Show progress bars. Default True.
            checkpoint (str, optional): Folder to which predictions and the state of the training are
                saved, every half a minute. If the process is killed, the same call resumes from it;
                ``widen`` must make the same inputs again. Default None.

        Returns:
            A ``Student``; ``print`` shows its error, measured at inputs that were not used.

        Raises:
            ValueError: If no inputs are given, or too few, or if the model does not accept them or its
                predictions are not finite; or if a checkpoint belongs to another call.
            TypeError: If inputs are not tensors with one row per example.
            NotFittedError: Before ``fit``, or if the model has changed since.

        Example:
            >>> student = la.distil(x, steps=100, progress_bar=False)
            >>> probabilities = student(x)
        """
        check_options(checkpoint=checkpoint)
        check_options(steps=steps, batch_size=batch_size, seed=seed, progress_bar=progress_bar)
        check_options(num_inputs=num_inputs, lr=lr, mask_token=mask_token, widen=widen)
        network = self._members(surely=True)[0].setting.linear_model.network
        generator = torch.Generator("cpu").manual_seed(seed)
        with torch.inference_mode(False), torch.no_grad():
            given = gathered(inputs, targets, network.device)
            ways = chosen_ways(given[0], augment, mask_token, widen)
            for x in given:
                _last_of(network, x, "model")
            copy = self._copy(student, network, rows_of(given[0], slice(2)))
            if isinstance(validation, Iterator):  # it is read several times
                validation = list(validation)
            if validation is not None:
                self._check_targets(copy, validation)
            used, held = split(given, generator)
            total = sum(map(number_of, given))
            count = min(max(total, _FEWEST), _MOST) if num_inputs is None else num_inputs
            made = [
                [
                    z
                    for x in some
                    for z in widened(x, -(-count * number_of(x) // total), ways, generator)
                ]
                for some in (used, held)
            ]
            schedule = Schedule(steps, batch_size, lr, seed, progress_bar)
            every = ([*used, *made[0]], len(used)), (held, 0), (made[1], 0)
            own = network.module if student is None else student
            header = {} if checkpoint is None else self._named(schedule, own, every)
            progress = DistillationProgress(checkpoint, header)
            learnt, *others = (self._learnt(*some, progress_bar, progress) for some in every)
            found = self._student(copy, learnt[0])
        with torch.inference_mode(False), torch.enable_grad():
            train(found, learnt, schedule, progress)
        with torch.no_grad():
            held_out, made_too = (_agreement(found, blocks) for blocks in others)
            nll = None if validation is None else self._nll(found, validation)
        found.note(StudentError(held_out, made_too, nll))
        for words in found.error.warnings:
            report("log", words)
        return found if validation is None else found.calibrate(validation)

    def _named(self, schedule: Schedule, network: nn.Module, inputs: Any) -> dict[str, str]:
        """Return what a checkpoint is compared with, by name."""
        posterior: Any = self  # a module, and so are ensembles
        return {
            "posterior": files.plain(sorted(posterior.state_dict().items())),
            "network": files.plain(files.fingerprint(network)),
            "inputs": files.plain([tensors_in(x) for some, _ in inputs for x in some]),
            "training": files.plain(schedule[:4]),
        }

    def _learnt(
        self, inputs: list[Any], given: int, progress_bar: bool, progress: DistillationProgress
    ) -> list[Block]:
        """Return inputs with this posterior's predictions; the first few trees were given."""
        parts = [
            (x, number_of(x) * (n < given)) for n, some in enumerate(inputs) for x in pieces([some])
        ]
        bar = tqdm(parts, "predicting", disable=not progress_bar or len(parts) < 2)

        def predicted(x: Any) -> StudentTargets:
            saved = progress.next_prediction()
            if saved is None:
                return progress.add(self._finite(x))
            return StudentTargets(*(t.to(tensors_in(x)[0].device) for t in saved))

        return blocks_of(Block(x, predicted(x), count) for x, count in bar)

    def _finite(self, x: Any) -> StudentTargets:
        """Return the prediction of inputs; raise an error if it is not finite."""
        due = of_prediction(self.predict(x))
        bad = ~due.expectation.flatten(1).isfinite().all(1)
        if bad.any():
            shown = tensors_in(rows_of(x, bad.nonzero()[:1, 0]))
            raise ValueError(
                "The posterior's predictions are NaN or infinite at some of the inputs, such as "
                f"{str(shown)[:200]}. Leave such inputs out, or replace missing values as in "
                "training; `widen` must return finite inputs."
            )
        return due

    def _copy(self, own: nn.Module | None, network: Network, some: Any) -> Network:
        """Return a copy of the model or of a user's network; raise an error if its outputs differ."""
        copy = Network(
            deepcopy(network.module if own is None else own), network.forward_fn, network.class_dim
        )
        copy.module.eval()
        feature_size(copy, _last_of(copy, some, "student"), some)
        mean = self._members()[0].likelihood.mean
        shape, due = (tuple(mean(_outputs(each, some)).shape) for each in (copy, network))
        if shape != due:
            raise ValueError(
                f"The student predicts shape {shape} (classes last) for two inputs, and the posterior "
                f"{due}: pass a network with the outputs of the model."
            )
        return copy

    def _check_targets(self, network: Network, validation: Any) -> None:
        """Raise an error if the first validation batch has no targets that fit the outputs."""
        posterior = self._members()[0]
        for x, y in labelled(validation, posterior.setting.target_fn):
            f = _outputs(network, to_device(x, network.device))
            posterior.likelihood.check(
                f, posterior.likelihood.align(y.to(f.device), network.class_dim)
            )
            return

    def _student(self, network: Network, block: Block) -> Student:
        """Return a network with a head that has not learnt anything yet."""
        posterior, some = self._members()[0], block.part(slice(2))
        form = Form(
            posterior.likelihood,
            network.forward_fn,
            posterior.setting.target_fn,
            network.class_dim,
            _last_of(network, some.x, "student"),
            block.due.uncertainty.shape[-1],
            block.due.scores.shape[-1],
        )
        return Student(network.module, form, feature_size(network, form.last, some.x))

    def _nll(self, student: Student, validation: Any) -> Likelihoods | None:
        """Return the NLL of the network, this posterior and a student; None if it has no density."""
        likelihood, each = student.likelihood, []
        if not has_log_prob(likelihood):
            return None
        for x, y in labelled(validation, student.form.target_fn):
            data = self._at(x)
            own = student.predict(x)
            three = data.network(), self._predicted(data, judged=False), own
            kept = likelihood.labelled(own._aligned(y))
            each.append(torch.stack([some.log_prob(y)[kept].double() for some in three]))
        values = torch.cat(each, 1)
        network, posterior, own_nll = (-values.mean(1)).tolist()
        count, spread = values.shape[1], (values[1] - values[0]).std(correction=0).item()
        return Likelihoods(network, posterior, own_nll, count, spread / count**0.5)


def distilled(
    la: Distillation, asked: bool | dict[str, Any], inputs: Any, validation: Any, **options: Any
) -> Student | None:
    """Return the student that an argument ``distil`` of an estimator or a callback asks for, or None.

    Args:
        la (LinearisedLaplace or LaplaceEnsemble): The posterior.
        asked (bool or dict): Whether to distil, or arguments of ``la.distil``.
        inputs (Tensor, DataLoader or list of batches): As in ``la.distil``.
        validation (DataLoader or tuple, optional): As in ``la.distil``.
        **options: Further arguments of ``la.distil``; those of a dict replace them.

    Raises:
        ValueError: If ``asked`` is something else.

    Example:
        >>> student = distilled(la, {"steps": 50}, x, (x, y))
    """
    if not isinstance(asked, (bool, dict)):
        raise ValueError(
            f"distil must be True, False or a dict of arguments of la.distil, not {asked!r}."
        )
    if asked is False:
        return None
    options |= {} if asked is True else asked
    return la.distil(inputs, **{"validation": validation, "progress_bar": False, **options})


def _outputs(network: Network, x: Any) -> Tensor:
    """Return the outputs of a network in eval mode, with the classes last."""
    with network.guarded():
        return network.forward_fn(network.module, x).movedim(network.class_dim, -1)


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


def _agreement(student: Student, blocks: list[Block]) -> Agreement | None:
    """Compare a student with the posterior's predictions, if there are any."""
    if not blocks:
        return None
    found = []
    for block in blocks:
        heads = [student.heads(x) for x in pieces([block.x])]
        each = [torch.cat(part) for part in zip(*heads)]
        found.append((each[0], each[1], each[2], block.due))
    return agreement(student.likelihood, found)
