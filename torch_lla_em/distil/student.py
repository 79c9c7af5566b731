"""A network of one forward pass that predicts what a posterior predicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from os import PathLike
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils.data import DataLoader, Dataset

from torch_lla_em.data import as_loader, inputs_of, paired, to_device
from torch_lla_em.distil import stored
from torch_lla_em.distil.agreement import StudentError
from torch_lla_em.distil.export import exported
from torch_lla_em.distil.features import features_of, head_of, is_convolution
from torch_lla_em.distil.inputs import labelled
from torch_lla_em.distil.predicted import StudentPrediction, without_functions
from torch_lla_em.jacobian import ForwardFn, Network, explained
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction import Printed, Reference, rounding
from torch_lla_em.runtime import write_atomically

_REFERENCE = ("reference_scores", "reference_errors", "reference_room")
_OF_FUNCTIONS = {
    "function_sample",
    "functional_samples",
    "joint_log_prob",
    "predictive_samples",
}


class Student(Printed, nn.Module):
    """A network that predicts what a posterior predicts, in one forward pass.

    ``la.distil`` returns it. It is a copy of the network, or a network of your own, with a small
    head on the features of its last layer, for the logarithms of the uncertainties and of the
    out-of-distribution scores. It is always in eval mode, and its parameters do not require
    gradients. ``print`` shows how well it agrees with the posterior.

    Attributes:
        network (nn.Module): The network, whose outputs have the link of the likelihood.
        head (nn.Sequential): The head on its features.
        error (StudentError): How far its predictions are from those of the posterior.

    Example:
        >>> student = la.distil(x, steps=100, progress_bar=False)
        >>> probabilities = student(x)
        >>> student = student.calibrate(x, y)
        >>> p_values = student.predict(x).p_value
    """

    head: nn.Sequential
    _place: Tensor
    """An empty tensor on the device of the student."""

    def __init__(self, network: nn.Module, form: stored.Form, features: int):
        """Add a head whose outputs are 0 to a network; ``la.distil`` trains both.

        Args:
            network (nn.Module): The network; it is not copied.
            form (Form): What the outputs of the network and of its head are.
            features (int): Number of features that the head takes from the network's last layer.
        """
        super().__init__()
        self.network = network
        like = next(self.network.parameters())
        self.head = head_of(features, form.uncertainties + form.scores, like)
        self.form, self.error = form, StudentError()
        self._seen: dict[int, list[Tensor]] = {}
        layer = self.network.get_submodule(form.last)
        layer.register_forward_pre_hook(self._keep, with_kwargs=True)
        self._channels_first = is_convolution(layer)
        for name in _REFERENCE:
            self.register_buffer(name, None)
        # of the buffer, because an exported program cannot read it from a tensor
        self._known_room = 0.0
        self.register_buffer("_place", like.new_zeros(0), persistent=False)
        self.eval()

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood of the posterior."""
        return self.form.likelihood

    def _room(self) -> float:
        """Return the relative difference up to which scores are ties.

        It is that of the coarsest dtype since ``calibrate``: scores keep its rounding in others.
        """
        return max(self._known_room, rounding(self._place.dtype))

    def train(self, mode: bool = True) -> Student:
        """Stay in eval mode: predictions are the same in every call.

        Args:
            mode (bool, optional): It has no effect. Default True.

        Returns:
            The student itself.
        """
        super().train(False)
        return self

    def forward(self, x: Any = None, **inputs: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Return what ``la(x)`` returns: probabilities or rates, or (mean, variance) of y.

        Args:
            x (Tensor, tuple, dict, DataLoader or Dataset): Inputs, as the model takes them; they may
                also be given by name.

        Returns:
            Tensor (B, ..., C) of probabilities or rates; for regression two tensors, the mean and
            the variance of y. The variance includes the observation noise.

        Example:
            >>> probabilities = student(x)  # doctest: +SKIP
        """
        if self.likelihood.real_valued:
            prediction = self.predict(x, **inputs)
            return prediction.expectation, prediction.predictive_variance
        mean, class_dim = self.form.likelihood.mean, self.form.class_dim
        if isinstance(x, Tensor) and not inputs:  # without microseconds that small networks notice
            y = mean(self.outputs(x.to(self._place.device)))
        else:
            y = torch.cat([mean(self.outputs(each)) for each in self._batches(x, inputs)])
        return y if class_dim == -1 else y.movedim(-1, class_dim)

    def predict(self, x: Any = None, **inputs: Any) -> StudentPrediction:
        """Return the predictive distribution at x, one forward pass for each batch.

        Args:
            x (Tensor, tuple, dict, DataLoader or Dataset): Inputs, as the model takes them; they may
                also be given by name.

        Returns:
            A ``StudentPrediction``. It is differentiable in x if x requires gradients.

        Example:
            >>> uncertainty = student.predict(x).epistemic  # doctest: +SKIP
        """
        found = [self.heads(each) for each in self._batches(x, inputs)]
        f, uncertainty, scores = (
            found[0] if len(found) == 1 else (torch.cat(each) for each in zip(*found))
        )
        none, class_dim = f.new_zeros(0, *f.shape), self.form.class_dim
        return StudentPrediction(
            self.likelihood,
            f,
            none,
            class_dim,
            log_uncertainty=uncertainty,
            log_scores=scores,
            reference=self._reference(),
            room=self._room(),
        )

    def is_ood(self, x: Any = None, rate: float = 0.05, **inputs: Any) -> Tensor:
        """Return which inputs are out-of-distribution (OOD), as a mask of shape (B,).

        Args:
            x (Tensor, tuple, dict, DataLoader or Dataset): Inputs, as the model takes them.
            rate (float): Largest share of false alarms among inputs from the validation set's
                distribution. Default 0.05.

        Raises:
            ValueError: Before ``student.calibrate``, or if it had too few examples for this rate.
        """
        return self.predict(x, **inputs).is_ood(rate)

    def calibrate(self, loader: Any, targets: Tensor | None = None) -> Student:
        """Make p-values, prediction sets and intervals from the student's own scores.

        The network is not changed, so all examples are the reference, and error rates hold whatever
        the student's error. They are guaranteed for examples that neither ``la.calibrate`` nor
        ``la.distil`` has seen. Examples of ``la.calibrate``, which fits six numbers, change them
        little.

        Args:
            loader (DataLoader, Dataset, list of batches, or inputs): The validation set.
            targets (Tensor, optional): The targets, if ``loader`` are inputs.

        Returns:
            The student itself.

        Raises:
            ValueError: If no example has a label.

        Example:
            >>> suspicious = student.calibrate(x, y).is_ood(x)  # doctest: +SKIP
        """
        scores, errors = [], []
        with torch.no_grad():
            for x, y in labelled(paired(loader, targets), self.form.target_fn):
                prediction = self.predict(x)
                y = prediction._aligned(y)
                kept = self.likelihood.labelled(y)
                scores.append(prediction._ood_scores()[kept])
                errors.append(prediction.part(kept)._errors(y[kept]))
        if not sum(map(len, scores)):
            raise ValueError("None of the validation examples has a label: pass labelled examples.")
        self.reference_scores = torch.cat(scores)
        self.reference_errors = torch.cat(errors).sort(0).values
        self._known_room = rounding(self._place.dtype)
        self.reference_room = self.reference_scores.new_tensor(self._known_room)
        return self

    def note(self, error: StudentError) -> None:
        """Keep the error that was measured.

        Args:
            error (StudentError): How far the student is from its posterior.
        """
        self.error = error

    def outputs(self, x: Any) -> Tensor:
        """Return the network's outputs with the classes last, (B, *sites, C).

        Args:
            x (Tensor, tuple or dict): One batch of inputs, on the device of the student.
        """
        form = self.form
        try:
            f = form.forward_fn(self.network, x)
        except RuntimeError:
            with explained(Network(self.network, form.forward_fn, form.class_dim), x):
                raise
        return f if self.form.class_dim == -1 else f.movedim(self.form.class_dim, -1)

    def heads(self, x: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return outputs, and the logarithms of uncertainties and of scores.

        Args:
            x (Tensor, tuple or dict): One batch of inputs, on the device of the student.

        Returns:
            Tensors (B, *sites, C), (B, *sites, uncertainties) and (B, scores).
        """
        seen: list[Tensor] = []
        self._seen[get_ident()] = seen
        try:
            f = self.outputs(x)
        finally:
            del self._seen[get_ident()]
        found = self.head(features_of(seen, f, self._channels_first))
        split = [self.form.uncertainties, self.form.scores]
        uncertainty, scores = found.split(split, -1)
        return f, uncertainty, scores.flatten(1, -2).mean(1) if scores.dim() > 2 else scores

    def save(self, path: str | PathLike[str]) -> None:
        """Write the student to a file, without the code of its network.

        Args:
            path (str): Name of the file; .safetensors selects that format.
        """
        state = stored.state_of(self.state_dict(), self.form, self.error)
        write_atomically(state, path)

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        network: nn.Module,
        likelihood: Likelihood | None = None,
        forward_fn: ForwardFn | None = None,
    ) -> Student:
        """Return a saved student.

        Args:
            path (str): Name of the file that ``save`` has written.
            network (nn.Module): A network with the student's architecture and any weights, such as
                the trained network itself; it is copied.
            likelihood (Likelihood, optional): The likelihood of the posterior, if it is your own.
            forward_fn (callable, optional): The posterior's forward_fn, if it had one.

        Raises:
            ValueError: If the file is damaged or holds no student, if the network has another
                architecture, or if the likelihood or forward_fn is missing.

        Example:
            >>> student = Student.load("student.pt", model)  # doctest: +SKIP
        """
        state, form, error = stored.read(path, network, likelihood, forward_fn)
        student = cls(deepcopy(network), form, state["head.0.weight"].shape[1])
        student.load_state_dict(state)
        student.note(error)
        return student.requires_grad_(False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Student:
        """Map all tensors, as ``to`` and ``half`` do; what ``calibrate`` found stays in float64."""
        known = {name: getattr(self, name) for name in _REFERENCE}
        super()._apply(fn, recurse)
        for name, tensor in known.items():
            moved = getattr(self, name)
            if tensor is not None and moved.dtype != tensor.dtype:
                setattr(self, name, tensor.to(moved.device))
        if self.reference_room is not None:
            self._known_room = self._room()
            self.reference_room = torch.full_like(self.reference_room, self._known_room)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *more: Any) -> None:
        """Load the scores of ``calibrate`` too, of any number of examples or none."""
        for name in _REFERENCE:
            tensor, place = state_dict.get(f"{prefix}{name}"), self._place.device
            setattr(self, name, None if tensor is None else torch.empty_like(tensor, device=place))
        super()._load_from_state_dict(state_dict, prefix, *more)
        room = state_dict.get(f"{prefix}reference_room")
        self._known_room = 0.0 if room is None else room.item()

    def export(
        self, x: Any, path: str | PathLike[str] | None = None, level: float | None = None
    ) -> ExportedProgram:
        """Return the student as one program of torch operations with named outputs.

        They are "probs", or "expectation" and "predictive_variance"; "epistemic", "aleatoric" and
        "ood_score"; after ``calibrate`` also "p_value". The program takes any number of examples and
        runs without this library.

        Args:
            x (Tensor, tuple or dict): Example inputs.
            path (str, optional): Where to save it: a name that ends with .pt2 for torch.export, or
                with .onnx for ONNX. Default None: it is not saved.
            level (float, optional): Return "prediction_set" as well, or "lower" and "upper" of
                ``interval(level)`` for continuous targets. It needs ``calibrate``.

        Raises:
            ValueError: If the name of the file has another ending.
            RuntimeError: If the program returns other values than ``student.predict(x)``.

        Example:
            >>> program = student.export(x).module()  # doctest: +SKIP
        """
        return exported(self, to_device(x, self._place.device), path, level)

    def __getattr__(self, name: str) -> Any:
        """Raise an error for what needs functions from the posterior, that names the posterior."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name not in _OF_FUNCTIONS:
                raise
            raise AttributeError(without_functions(name, "la")) from error

    def _keep(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the inputs of the last layer for the head, in the thread that asks for them."""
        seen = self._seen.get(get_ident())
        if seen is not None:
            seen.append(next(iter((*args, *kwargs.values()))))

    def _batches(self, x: Any, inputs: dict[str, Any]) -> Iterator[Any]:
        options = inputs.keys() & {"mean", "generator", "num_samples", "groups", "weights"}
        if options and x is not None:
            raise TypeError(
                f"A student has no {min(options)}, because it predicts in one forward pass: leave it "
                "out, or use la.predict of the posterior."
            )
        if inputs and x is not None:
            raise TypeError("Pass all inputs by name, or all in one tuple or dict.")
        device = self._place.device
        if isinstance(x, Tensor):
            yield x.to(device)
        elif isinstance(x, (DataLoader, Dataset)):
            yield from (to_device(inputs_of(batch), device) for batch in as_loader(x))
        else:
            x = inputs_of(inputs or x) if inputs or isinstance(x, dict) else x
            yield to_device(x, device)

    def _reference(self) -> Reference | None:
        if self.reference_scores is None:
            return None
        none = self.reference_scores.new_zeros(0)
        return Reference(none, None, self.reference_scores, self.reference_errors)

    def _table(self) -> tuple[str, list[tuple[str, ...]]]:
        count = sum(p.numel() for p in self.parameters())
        title = f"Student of a posterior under {type(self.likelihood).__name__}"
        rows: list[tuple[str, ...]] = [
            ("network", f"{type(self.network).__name__}, {count:,} parameters with its head")
        ]
        rows += self.error.rows()
        if self.reference_scores is not None:
            rows.append(
                ("reference of p-values and sets", f"{len(self.reference_scores):,} examples")
            )
        else:
            rows.append(
                ("to do", "Call student.calibrate(validation_loader) for p-values and sets.")
            )
        return title, rows
