"""A network of one forward pass that predicts what a posterior predicts."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from math import nan
from os import PathLike
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from torch_lla_em.data import (
    as_loader,
    as_targets,
    default_forward,
    default_targets,
    inputs_of,
    paired,
    to_device,
)
from torch_lla_em.distil.prediction import Scores, StudentPrediction
from torch_lla_em.jacobian import Network
from torch_lla_em.likelihoods import LIKELIHOODS, BradleyTerry, Likelihood, compare
from torch_lla_em.prediction import Printed, likelihood_options, program_of
from torch_lla_em.runtime import Adapter, files

# width of the hidden layer of a head
_HIDDEN = 64
# largest mean KL, in nats, of a student that is good enough; more is accepted far from the data
_KL, _KL_MADE = 0.03, 0.1
# smallest rank correlation that is good enough
_CORRELATION = 0.8


class StudentError(NamedTuple):
    """How far a student is from its posterior; ``print(student)`` shows it.

    Inputs are those that were left out of the training, or made from these. OOD scores of the former are nearly
    equal, and their ranks noise; uncertainties of the latter matter less.
    """

    number: int = 0
    """Number of inputs that were left out."""

    kl: float = nan
    """Mean KL(posterior's prediction ‖ student's) there, in nats."""

    kl_error: float = nan
    """Its standard error."""

    epistemic: float = nan
    """Rank correlation of the epistemic uncertainties there."""

    kl_made: float = nan
    """Mean KL at inputs that were made."""

    ood_made: float = nan
    """Rank correlation of the out-of-distribution scores there; the smallest, if there are several."""

    @property
    def warnings(self) -> list[str]:
        """What is not good enough, and what helps."""
        found = []
        for name, kl, most in (("held-out", self.kl, _KL), ("made", self.kl_made, _KL_MADE)):
            if not kl <= most:
                found.append(f"its mean KL from the posterior at {name} inputs is {kl:.2g} nats")
        ranked = {"epistemic uncertainty": self.epistemic, "OOD scores": self.ood_made}
        for name, correlation in ranked.items():
            if correlation < _CORRELATION:
                found.append(f"the rank correlation of its {name} is {correlation:.2f}")
        if not (found and self.number):
            return []
        return [
            f"The student is not close to the posterior: {'; '.join(found)}. Pass more unlabelled "
            "inputs, increase num_inputs or steps, or pass a wider network as student=."
        ]

    def rows(self) -> list[tuple[str, ...]]:
        """Return the rows of a table."""
        if not self.number:
            return []
        own = f"KL {self.kl:.2g} ± {self.kl_error:.1g}, rank correlation of epistemic {self.epistemic:.3f}"
        rows = [("held-out inputs", f"{own} ({self.number:,} inputs)")]
        made = f"KL {self.kl_made:.2g}, rank correlation of OOD scores {self.ood_made:.3f}"
        return [*rows, ("made inputs", made), *(("warning", words) for words in self.warnings)]

    @classmethod
    def of(cls, record: dict[str, Any]) -> StudentError:
        """Return the error of a JSON record, also of one of version 0.4, which has a record for each kind of inputs."""
        if "held_out" in record:
            own, made = (record[name] or [0, *4 * [nan]] for name in ("held_out", "made"))
            record = dict(zip(cls._fields, (*own[:4], made[1], made[4])))
        return cls(**record)


class Form(NamedTuple):
    """How a student's network is called, and what its head returns.

    ``last`` is the path of the layer whose inputs are the features of the head, which returns so many
    ``uncertainties`` for each site, and OOD ``scores``.
    """

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
    out-of-distribution scores. It is always in eval mode, and its parameters do not require
    gradients. ``print`` shows how well it agrees with the posterior.

    Inputs x of its methods are one batch: a tensor, tuple or dict as the model takes them.

    Attributes:
        network (nn.Module): The network, whose outputs have the link of the likelihood.
        head (nn.Sequential): The head on its features.
        error (StudentError): How far its predictions are from those of the posterior.
        reference (Scores or None): The scores of the validation set, after ``calibrate``.

    Example:
        >>> student = la.distil(x, steps=100, progress_bar=False)
        >>> probabilities = student(x)
        >>> student = student.calibrate(x, y)
        >>> p_values = student.predict(x).p_value
    """

    def __init__(self, network: nn.Module, form: Form, example: Any):
        """Add a head of a ``form``, with outputs 0, to a network; ``example`` are inputs, or its number of features."""
        super().__init__()
        self.network, self.form, self.likelihood = network, form, form.likelihood
        self.error = StudentError()
        self.reference: Scores | None = None
        self._seen: dict[int, list[Tensor]] = {}
        network.get_submodule(form.last).register_forward_pre_hook(self._keep, with_kwargs=True)
        self.eval()
        features = example
        if not isinstance(example, int):
            with torch.no_grad():
                features = self._with_features(example)[1].shape[-1]
        self.head = _head(features, form.uncertainties + form.scores, next(network.parameters()))

    def train(self, mode: bool = True) -> Student:
        """Stay in eval mode, whatever ``mode``: predictions are the same in every call."""
        return super().train(False)

    def forward(self, x: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Return what ``la(x)`` returns: probabilities or rates (B, ..., C), or mean and variance of y, with noise."""
        if self.likelihood.real_valued:
            prediction = self.predict(x)
            return prediction.expectation, prediction.predictive_variance
        y = self.likelihood.mean(self._outputs(self._moved(x)))
        return y if self.form.class_dim == -1 else y.movedim(-1, self.form.class_dim)

    def predict(self, x: Any) -> StudentPrediction:
        """Return the predictive distribution at x, which is differentiable in x if x requires gradients."""
        f, features = self._with_features(self._moved(x))
        split = [self.form.uncertainties, self.form.scores]
        uncertainty, scores = self.head(features).split(split, -1)
        scores = scores.flatten(1, -2).mean(1) if scores.dim() > 2 else scores
        form, likelihood = self.form, self.likelihood
        return StudentPrediction(likelihood, f, uncertainty, scores, form.class_dim, self.reference)

    def calibrate(self, loader: Any, targets: Tensor | None = None) -> Student:
        """Make p-values, prediction sets and intervals from the student's own scores; return the student itself.

        The validation set is a ``loader``, a dataset, a list of batches, or inputs with their ``targets``. The network
        is not changed, so all examples are the reference, and error rates hold whatever the student's
        error. They are guaranteed for examples that neither ``la.calibrate`` nor ``la.distil`` has seen;
        those of ``la.calibrate``, which fits six numbers, change them little.

        Raises:
            ValueError: If no example has a label.
        """
        found = []
        with torch.no_grad():
            target_fn = self.form.adapter.targets
            for batch in as_loader(paired(loader, targets), target_fn):
                given = None if target_fn is None else target_fn(batch)
                y = default_targets(batch) if given is None else given
                found.append(self.predict(inputs_of(batch, given)).scores_of(as_targets(y)))
        if not sum(len(scores) for scores, _ in found):
            raise ValueError("None of the validation examples has a label: pass labelled examples.")
        unusual, errors = map(torch.cat, zip(*found))
        self.reference = Scores(unusual, errors.sort(0).values)
        return self

    def note(self, error: StudentError, reference: Sequence[Tensor | None] = (None,)) -> Student:
        """Keep the ``error`` that ``la.distil`` has measured, and a ``reference`` if there is one."""
        self.error = error
        self.reference = self.reference if reference[0] is None else Scores(*reference)
        return self

    def save(self, path: str | PathLike[str]) -> None:
        """Write the student to a file with the name ``path``, without the code of its network."""
        record = self.form._asdict() | {
            "likelihood": likelihood_options(self.likelihood).get("likelihood"),
            "adapter": self.form.adapter.outputs not in (default_forward, compare),
            "error": self.error._asdict(),
        }
        version = torch.tensor(files.VERSION, device="cpu")
        own = {"student": files.to_bytes(record), "torch_lla_em_version": version}
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

        The ``network`` has its architecture and any weights, as the trained network itself; it is copied. Pass
        ``likelihood`` and ``adapter`` if those of the posterior were your own.

        Raises:
            ValueError: If the file is damaged or holds no student, or if the likelihood or adapter is missing.
            RuntimeError: If the network has another architecture.
        """
        state = files.read(path, "student")
        record: dict[str, Any] = files.from_bytes(state.pop("student"))
        del state["torch_lla_em_version"]
        error, name = StudentError.of(record.pop("error")), record["likelihood"]
        has_own = record.pop("forward_fn", record.get("adapter"))  # of version 0.4
        record.pop("target_fn", None)
        missing = ["likelihood"] * (likelihood is None and name is None)
        for argument in missing + ["adapter"] * bool(has_own and adapter is None):
            raise ValueError(
                f"The student was distilled with your own {argument}, which a file cannot store. Pass "
                f"{argument}=... to load."
            )
        likelihood, given = likelihood or LIKELIHOODS[name](), adapter or Adapter()
        usual = compare if isinstance(likelihood, BradleyTerry) else default_forward
        adapter = Adapter(given.outputs or usual, given.targets)
        record |= {"likelihood": likelihood, "adapter": adapter}
        student = cls(deepcopy(network), Form(**record), state["head.0.weight"].shape[1])
        # version 0.4 had three tensors of what calibrate keeps
        state.pop("reference_room", None)
        former = [state.pop(f"reference_{name}", None) for name in ("scores", "errors")]
        state.setdefault("_extra_state", torch.empty(0, device="cpu"))
        student.load_state_dict(state)
        return student.note(error, former).requires_grad_(False)

    def export(
        self, x: Any, path: str | PathLike[str] | None = None, level: float | None = None
    ) -> ExportedProgram:
        """Return the student as one program of torch operations with named outputs, for any number of inputs like x.

        They are "probs", or "expectation" and "predictive_variance"; "epistemic", "aleatoric" and
        "ood_score"; after ``calibrate`` also "p_value", and with a ``level`` "prediction_set", or "lower" and
        "upper" of ``interval(level)``. A ``path`` that ends with .pt2 saves it for torch.export, .onnx for ONNX.

        Raises:
            ValueError: If the name of the file has another ending.
            RuntimeError: If the program returns other values than ``student.predict(x)``.
        """
        is_label = self.likelihood.gives_probabilities
        names = ["probs"] if is_label else ["expectation", "predictive_variance"]
        names += ["epistemic", "aleatoric", "ood_score"]
        names += ["p_value"] if self.reference is not None else []

        def answer(x: Any) -> dict[str, Tensor]:
            prediction = self.predict(x)
            found = {name: getattr(prediction, name) for name in names}
            found["ood_score"] = found["ood_score"].to(found["epistemic"])
            if level is None:
                return found
            if is_label:
                return found | {"prediction_set": prediction.prediction_set(level)}
            return found | prediction.interval(level)._asdict()

        network = Network(self.network, self.form.adapter.outputs, self.form.class_dim)
        return program_of(answer, answer, [network], to_device(x, self._device), path)

    @property
    def _device(self) -> torch.device:
        return next(self.head.parameters()).device

    def _outputs(self, x: Any) -> Tensor:
        """Return the network's outputs with the classes last, (B, *sites, C)."""
        f = self.form.adapter.outputs(self.network, x)
        return f if self.form.class_dim == -1 else f.movedim(self.form.class_dim, -1)

    def _with_features(self, x: Any) -> tuple[Tensor, Tensor]:
        """Return outputs, and the features of each site or example, (B, *sites, D)."""
        self._seen[get_ident()] = []
        try:
            f = self._outputs(x)
        finally:
            seen = self._seen.pop(get_ident())
        h = torch.cat(seen, -1)  # the layer can be called several times
        if h.dim() == f.dim() and h.shape[:-1] == f.shape[:-1]:
            return f, h
        if f.dim() == 2 and len(h) == len(f):
            return f, h.flatten(1, -2).mean(1)
        raise ValueError(
            f"The features of the last layer have shape {tuple(h.shape)}, and the outputs "
            f"{tuple(f.shape)} (classes last), so the head has no features for each output. Pass "
            "student= with a network whose last layer has the sites of the outputs."
        )

    def _keep(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the inputs of the last layer for the head, in the thread that asks for them."""
        if get_ident() in self._seen:
            h = next(iter((*args, *kwargs.values())))
            is_image = isinstance(layer, nn.modules.conv._ConvNd)
            self._seen[get_ident()].append(h.movedim(1, -1) if is_image else h)

    def _moved(self, x: Any) -> Any:
        """Return inputs on the student's device; a dict can have targets."""
        return to_device(inputs_of(x) if isinstance(x, dict) else x, self._device)

    def get_extra_state(self) -> Tensor:
        """Return what ``calibrate`` keeps as one tensor of ``state_dict``: scores and errors."""
        none = torch.empty(0, device="cpu")
        return none if self.reference is None else torch.cat(self.reference, 1)

    def set_extra_state(self, state: Tensor) -> None:
        """Take the ``state`` that ``get_extra_state`` has returned."""
        self.reference = None
        if state.dim() == 2:
            self.reference = Scores(*state.tensor_split((self.form.scores,), 1))

    def _table(self) -> tuple[str, list[tuple[str, ...]]]:
        count = sum(p.numel() for p in self.parameters())
        words = "to do", "Call student.calibrate(validation_loader) for p-values and sets."
        if self.reference is not None:
            number = len(self.reference.unusual)
            words = "reference of p-values and sets", f"{number:,} examples"
        network = f"{type(self.network).__name__}, {count:,} parameters with its head"
        rows: list[tuple[str, ...]] = [("network", network), *self.error.rows(), words]
        return f"Student of a posterior under {type(self.likelihood).__name__}", rows


def _head(features: int, outputs: int, like: Tensor) -> nn.Sequential:
    """Return a head with one hidden layer, whose outputs are 0 until it is trained."""
    generator, how = torch.Generator("cpu").manual_seed(0), {"device": "cpu", "dtype": like.dtype}
    sizes = (features, _HIDDEN), (_HIDDEN, outputs)
    first, last = (nn.utils.skip_init(nn.Linear, *size, **how) for size in sizes)
    for parameter in first.parameters():
        nn.init.uniform_(parameter, -(features**-0.5), features**-0.5, generator)
    for parameter in last.parameters():
        nn.init.zeros_(parameter)
    return nn.Sequential(first, nn.SiLU(), last).to(like.device)
