"""A network of one forward pass that predicts what a posterior predicts."""

from __future__ import annotations

from copy import deepcopy
from os import PathLike
from threading import get_ident
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn import functional as F

from torch_lla_em.data import Data, Inputs, Loader, default_forward, inputs_of, paired, to_device
from torch_lla_em.distil.prediction import StudentPrediction
from torch_lla_em.jacobian import Network
from torch_lla_em.likelihoods import LIKELIHOODS, BradleyTerry, Likelihood, rewards
from torch_lla_em.prediction import Monitor, Printed, Reference, likelihood_options, program_of
from torch_lla_em.runtime import Adapter, files

_HIDDEN = 32
"""Width of the hidden layer of a head. With twice this width, rank correlations on four tables are
up to .01 higher, and the head takes .4 instead of .25 forward passes of a network with two layers
of 50, for 512 examples."""

_KL, _KL_MADE, _CORRELATION = 0.03, 0.1, 0.8
"""Thresholds of a student that is good enough: largest mean KL in nats at held-out inputs and at
made inputs, and smallest rank correlation. The KL is the increase of the NLL if the posterior is
right; students of tables have .001 to .06, .02 to .09, and .46 to .95."""


class StudentError(NamedTuple):
    """How far a student is from its posterior, at a ``number`` of held-out inputs, and at inputs
    made from these.

    OOD scores are compared at made inputs, because those of held-out inputs are nearly equal, so
    that their ranks are noise. Uncertainties are compared at held-out inputs, where they matter
    more.
    """

    number: int
    kl: float
    """Mean KL(posterior's prediction ‖ student's) in nats at held-out inputs; ``kl_made`` is that
    at made inputs."""

    epistemic: float
    """Rank correlation of the epistemic uncertainties at held-out inputs."""

    kl_made: float
    ood_made: float
    """Rank correlation of the out-of-distribution scores at made inputs; the smallest one if there
    are several scores."""

    @property
    def warning(self) -> str:
        """A text that states what is not good enough and what helps; "" if all is good enough."""
        ranks = self.epistemic >= _CORRELATION and self.ood_made >= _CORRELATION
        if self.kl <= _KL and self.kl_made <= _KL_MADE and ranks:
            return ""
        return (
            f"The student is not close to the posterior: KL {self.kl:.2g} at held-out and "
            f"{self.kl_made:.2g} at made inputs, rank correlations {self.epistemic:.2f} and "
            f"{self.ood_made:.2f}. Pass more unlabelled inputs, increase num_inputs or steps, or "
            "pass a wider network as student=."
        )


class Form(NamedTuple):
    """How a student's network is called, its last layer, and the outputs of the head."""

    likelihood: Likelihood
    adapter: Adapter
    class_dim: int
    last: str
    uncertainties: int
    scores: int


class Student(Printed, nn.Module):
    """A network that predicts what a posterior predicts, in one forward pass.

    ``la.distil`` returns it. It is a copy of the network, or a network of your own, with a small
    head on the features of its last layer, for the logarithms of the uncertainties and of the
    out-of-distribution scores. It is always in eval mode, without gradients of parameters.
    ``print`` shows how well it agrees with the posterior. Inputs x of its methods are one batch: a
    tensor, tuple or dict as the model takes them.

    Attributes:
        network (nn.Module): The network; the likelihood maps its outputs to predictions. ``head``
            is the small network on its features.
        error (StudentError or None): How far its predictions are from those of the posterior.
        reference (Reference or None): The scores of the validation set, after ``calibrate``.

    Example:
        >>> student = la.distil(x, steps=100, progress_bar=False)
        >>> probabilities = student(x)
        >>> student = student.calibrate(x, y)
        >>> p_values = student.predict(x).p_value
    """

    _place: Tensor

    def __init__(self, network: nn.Module, form: Form, example: Inputs | int):
        """Add a head with outputs 0 to a network, for a ``form``; ``example`` are inputs, or the
        number of features of the last layer."""
        super().__init__()
        self.network, self.form, self.likelihood = network, form, form.likelihood
        self.error: StudentError | None = None
        self.reference: Reference | None = None
        self._seen: dict[int, list[Tensor]] = {}
        network.get_submodule(form.last).register_forward_pre_hook(self._keep, with_kwargs=True)
        first = next(network.parameters())
        # reading its device is faster than finding the first parameter of many layers
        self.register_buffer("_place", first.new_empty(0), persistent=False)
        self.eval()
        if isinstance(example, int):
            features = example
        else:
            with torch.no_grad():
                features = self._with_features(example)[1].shape[-1]
        self.head = _head(features, form.uncertainties + form.scores, first)

    def train(self, mode: bool = True) -> Student:
        """Stay in eval mode for any ``mode``."""
        return super().train(False)

    def forward(self, x: Inputs) -> Tensor | tuple[Tensor, Tensor]:
        """Return probabilities or rates (B, ..., C), or mean and variance of y with noise, like
        ``la(x)``."""
        # for small networks the time of every operation matters here
        axis = self.form.class_dim
        if not self.likelihood.real_valued:
            mean = self.likelihood.mean(self._outputs(x))
            return mean if axis == -1 else mean.movedim(-1, axis)
        f, of_head = self._with_head(x)
        mean = self.likelihood.mean(f)
        # both parts of the uncertainty, without the rest of a prediction
        uncertainty, count = of_head.exp(), self.form.uncertainties // 2
        variance = uncertainty.narrow(-1, 0, count) + uncertainty.narrow(-1, count, count)
        variance = variance.view_as(mean)
        return (
            (mean, variance) if axis == -1 else (mean.movedim(-1, axis), variance.movedim(-1, axis))
        )

    def predict(self, x: Inputs) -> StudentPrediction:
        """Return the predictive distribution at x, which is differentiable in x if x requires
        gradients."""
        f, of_head = self._with_head(x)
        split = [self.form.uncertainties, self.form.scores]
        uncertainty, scores = of_head.split(split, -1)
        scores = scores.flatten(1, -2).mean(1) if scores.dim() > 2 else scores
        axis = self.form.class_dim
        return StudentPrediction(self.likelihood, f, uncertainty, scores, axis, self.reference)

    def calibrate(self, loader: Inputs | Loader, targets: Tensor | None = None) -> Student:
        """Make p-values, prediction sets and intervals from the student's own scores; return the
        student itself.

        The validation set is a ``loader``, a dataset, a list of batches, or inputs with their
        ``targets``. The network is not changed, so all examples are the reference, and error rates
        hold for any error of the student. They are guaranteed for examples that neither
        ``la.calibrate`` nor ``la.distil`` has seen; those of ``la.calibrate``, which fits at most
        six numbers, affect them little.
        """
        device, found = self._place.device, []
        with torch.no_grad():
            for batch in Data(paired(loader, targets), device, self.form.adapter.targets):
                prediction = self.predict(batch.inputs)
                y = prediction._aligned(batch.targets)
                kept = self.likelihood.labelled(y)
                prediction = prediction._map(Tensor.detach, kept)
                found.append((prediction.ood_score, prediction._errors(y[kept])))
        if not sum(len(scores) for scores, _ in found):
            raise ValueError("None of the validation examples has a label: pass labelled examples.")
        unusual, errors = map(torch.cat, zip(*found, strict=True))
        self.reference = Reference(None, None, unusual, errors.sort(0).values)
        return self

    def monitor(self, rate: float = 0.01, *, level: float = 0.9, seed: int = 0) -> Monitor:
        """Return a monitor of new inputs. The probability that it ever raises a false alarm is at
        most ``rate``; ``level`` and ``seed`` are as for ``la.monitor``."""
        return Monitor(self, rate, level, seed)

    def note(self, error: StudentError) -> Student:
        """Store a measured ``error``, and return the student itself."""
        self.error = error
        return self

    def save(self, path: str | PathLike[str]) -> None:
        """Write the student to the file ``path``, without the code of its network."""
        name = likelihood_options(self.likelihood).get("likelihood")
        is_own = self.form.adapter.outputs not in (default_forward, rewards)
        record = self.form._asdict() | {"likelihood": name, "adapter": is_own}
        own = {"student": files.to_bytes(record | {"error": self.error})}
        own["torch_lla_em_version"] = torch.tensor(files.VERSION, device="cpu")
        files.write_atomically({**self.state_dict(), **own}, path)

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        network: nn.Module,
        likelihood: Likelihood | None = None,
        adapter: Adapter | None = None,
    ) -> Student:
        """Return the student that ``save`` has written to ``path``.

        The ``network`` must have the student's architecture, with any weights, for example the
        trained network itself; it is copied. Pass ``likelihood`` and ``adapter`` if the posterior
        used your own ones.
        """
        state = files.read(path, "student")
        record: dict[str, Any] = files.from_bytes(state.pop("student"))
        del state["torch_lla_em_version"]
        if "forward_fn" in record:
            raise ValueError("The student is of version 0.4: distil the posterior again.")
        error, name = record.pop("error"), record["likelihood"]
        missing = "adapter" if adapter is None and record["adapter"] else ""
        if likelihood is None and name is None:
            missing = "likelihood"
        if missing:
            raise ValueError(f"A file cannot store your own {missing}: pass {missing}=...")
        likelihood, given = likelihood or LIKELIHOODS[name](), adapter or Adapter()
        usual = rewards if isinstance(likelihood, BradleyTerry) else default_forward
        adapter = Adapter(given.outputs or usual, given.targets)
        record |= {"likelihood": likelihood, "adapter": adapter}
        student = cls(deepcopy(network), Form(**record), state["head.0.weight"].shape[1])
        student.load_state_dict(state)
        error = StudentError(**dict(zip(StudentError._fields, error, strict=True)))
        return student.note(error).requires_grad_(False)

    def export(
        self,
        x: Inputs,
        path: str | PathLike[str] | None = None,
        level: float | None = None,
        p_value: bool = False,
    ) -> ExportedProgram:
        """Return the student as one program of torch operations with named outputs, for any number
        of inputs like x.

        The outputs are "probs", or "expectation" and "predictive_variance"; "epistemic",
        "aleatoric" and "ood_score"; with a ``level`` "prediction_set", or "lower" and "upper" of
        ``interval(level)``; and with ``p_value=True`` "p_value", which takes longer than all other
        outputs. Sets, intervals and p-values need ``calibrate``. A ``path`` that ends with .pt2
        saves the program for torch.export, and one that ends with .onnx for ONNX. An error is
        raised if the program returns other values than ``student.predict(x)``.
        """
        is_label = self.likelihood.gives_probabilities
        names = ["probs"] if is_label else ["expectation", "predictive_variance"]
        names += ["epistemic", "aleatoric", "ood_score", *(["p_value"] if p_value else [])]

        def answer(x: Inputs) -> dict[str, Tensor]:
            prediction = self.predict(x)
            found = {name: getattr(prediction, name) for name in names}
            found["ood_score"] = found["ood_score"].to(found["epistemic"])
            if level is None:
                return found
            if is_label:
                return found | {"prediction_set": prediction.prediction_set(level)}
            return found | prediction.interval(level)._asdict()

        network = Network(self.network, self.form.adapter.outputs, self.form.class_dim)
        return program_of(answer, answer, [network], to_device(x, self._place.device), path)

    def _outputs(self, x: Inputs) -> Tensor:
        """Return the network's outputs with the classes last, (B, *sites, C); a dict of inputs can
        have targets."""
        device = self._place.device
        if not isinstance(x, Tensor) or x.device != device:
            x = to_device(inputs_of(x) if isinstance(x, dict) else x, device)
        call, axis = self.form.adapter.outputs or default_forward, self.form.class_dim
        f = call(self.network, x)
        return f if axis == -1 else f.movedim(axis, -1)

    def _with_features(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Return outputs, and the features of each site or example, (B, *sites, D)."""
        self._seen[get_ident()] = []
        try:
            f = self._outputs(x)
        finally:
            seen = self._seen.pop(get_ident())
        # the layer can be called several times
        h = torch.cat(seen, -1) if len(seen) > 1 else seen[0]
        if h.shape[:-1] == f.shape[:-1]:
            return f, h
        if f.dim() == 2 and len(h) == len(f):
            return f, h.flatten(1, -2).mean(1)
        raise ValueError(
            f"The last layer has features {tuple(h.shape)}, and no features for each output "
            f"{tuple(f.shape)} (classes last): pass student= with a network whose last layer has "
            "the sites of the outputs."
        )

    def _with_head(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Return outputs, and those of the head."""
        f, features = self._with_features(x)
        # calls of the head and its three modules would take half of its time for one input
        first, _, last = cast(tuple[nn.Linear, ...], self.head)
        h = F.silu(F.linear(features, first.weight, first.bias), inplace=True)
        return f, F.linear(h, last.weight, last.bias)

    def _keep(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Store the inputs of the last layer for the head, if this thread waits for them."""
        if get_ident() in self._seen:
            h = next(iter((*args, *kwargs.values())))
            is_image = isinstance(layer, nn.modules.conv._ConvNd)
            self._seen[get_ident()].append(h.movedim(1, -1) if is_image else h)

    def get_extra_state(self) -> Tensor:
        """Return the scores and errors that ``calibrate`` stores, as one tensor of
        ``state_dict``."""
        if self.reference is None:
            return torch.empty(0, device="cpu")
        return torch.cat([self.reference.unusual, self.reference.errors], -1)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore a ``state`` that ``get_extra_state`` has returned."""
        self.reference = None
        if state.dim() == 2:
            unusual, errors = state.tensor_split((self.form.scores,), 1)
            self.reference = Reference(None, None, unusual, errors)

    def _table(self) -> tuple[str, list[tuple[str, ...]]]:
        count, error = sum(p.numel() for p in self.parameters()), self.error
        rows = [("network", f"{type(self.network).__name__}, {count:,} parameters with its head")]
        if error is not None:
            own = (
                f"KL {error.kl:.2g}, rank correlation of epistemic {error.epistemic:.3f} "
                f"({error.number:,})"
            )
            made = f"KL {error.kl_made:.2g}, rank correlation of OOD scores {error.ood_made:.3f}"
            rows += [("held-out inputs", own), ("made inputs", made)]
            rows += [("warning", error.warning)] if error.warning else []
        words = "to do", "Call student.calibrate(validation_loader) for p-values and sets."
        if self.reference is not None:
            words = "reference of p-values and sets", f"{len(self.reference.unusual):,} examples"
        return f"Student of a posterior under {type(self.likelihood).__name__}", [*rows, words]


def _head(features: int, outputs: int, like: Tensor) -> nn.Sequential:
    """Return a head with one hidden layer, whose outputs are 0 until it is trained."""
    how, generator = {"device": "cpu", "dtype": like.dtype}, torch.Generator("cpu").manual_seed(0)
    first = nn.utils.skip_init(nn.Linear, features, _HIDDEN, **how)
    last = nn.utils.skip_init(nn.Linear, _HIDDEN, outputs, **how)
    for parameter in first.parameters():
        nn.init.uniform_(parameter, -(features**-0.5), features**-0.5, generator)
    for parameter in last.parameters():
        nn.init.zeros_(parameter)
    return nn.Sequential(first, nn.SiLU(inplace=True), last).to(like.device)
