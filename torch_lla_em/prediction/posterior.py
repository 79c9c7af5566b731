"""The frozen records of fits, from which predictions, files and messages are made: ``Posterior`` and ``Posteriors``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from torch_lla_em.data import TargetFn, inputs_of, map_tensors, tensors_in, to_device
from torch_lla_em.inference import FitResult
from torch_lla_em.jacobian import LinearModel, NetworkState, require_rows
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction.calibration import CalibratedComponents, Calibration
from torch_lla_em.prediction.functions import MODE, NETWORK, SCALE
from torch_lla_em.prediction.neighbours import TrainingExamples, variances_without, without_itself
from torch_lla_em.prediction.pushforward import Pushforward, Rows, posterior_alone, stack_members
from torch_lla_em.prediction.reference import Reference
from torch_lla_em.prediction.scores import rounding
from torch_lla_em.runtime import check_choice, check_whole


class NotFittedError(RuntimeError):
    """Predictions were requested before ``fit``, or after the network had changed."""


class Setting(NamedTuple):
    """What a posterior belongs to: its network, and how loaders are read and shared."""

    linear_model: LinearModel
    """The network, its parameters in the posterior, and how J is computed."""

    state: NetworkState
    """The weights and running statistics of the network that the posterior was fitted to."""

    target_fn: TargetFn | None = None
    """How the fit gets targets from a batch."""

    shard: str | None = None
    """How the fit used a process group; ``calibrate`` does the same."""

    def room(self) -> float:
        """Return the relative difference up to which scores are ties, in the network's dtype."""
        parameters = self.linear_model.network.module.parameters()
        return max((rounding(p.dtype) for p in parameters if p.is_floating_point()), default=0.0)


@dataclass(frozen=True, eq=False, repr=False)
class Posterior:
    """The result of a fit. It is replaced as a whole and never changed."""

    setting: Setting

    likelihood: Likelihood
    """With the observation noise that was learnt."""

    result: FitResult
    """What the fit has learnt, with the components as fitted or as calibrated."""

    training: TrainingExamples | None = None
    """The training examples that are kept."""

    reference: Reference | None = None
    """What ``calibrate`` found by splitting the validation set."""

    calibration: Calibration | None = None
    """The result of the last ``calibrate``."""

    num_data: int | None = None
    """The number of training examples with a label."""

    room: float = 0.0
    """Relative difference up to which scores are ties: that of the dtype in which they were computed."""

    trained_on: tuple[int, ...] = ()
    """Hashes of some training examples; empty if they are not known."""

    history: tuple[dict[str, Any], ...] = ()
    """A record of every EM step."""

    messages: tuple[str, ...] = ()
    """The memory plan, then the warnings of the fit and of ``calibrate``."""

    replaced: tuple[Tensor, Tensor | None, tuple[str, ...]] | None = None
    """Components, σ and messages as fitted, which ``calibrate`` has replaced; None before it."""

    mark: str | None = None
    """Another one after every other fit or calibration; None in files of earlier versions."""

    noise = None  # σ is the likelihood's

    @classmethod
    def of_fit(
        cls, learnt: FitResult, setting: Setting, given: Likelihood, **facts: Any
    ) -> Posterior:
        """Return the record of what a fit has learnt; ``given`` is the likelihood before it."""
        sigma, mixture, examples = learnt.sigma_noise, learnt.mixture, learnt.examples
        if mixture is None:  # around the function whose residuals σ describes
            mixture = posterior_alone("network" if learnt.network_noise is None else "linear")
        if examples is not None and len(examples):  # a single one has too many numbers
            factors = without_itself(learnt.leverages)
            largest = variances_without(given, examples, factors).max().to(examples)
            training = TrainingExamples(given, examples, largest)
            facts["training"] = training._replace(between=training.distances_without(factors))
        result = learnt._replace(examples=None, leverages=None)
        device = learnt.w_lin.device
        return cls(setting, given, result, room=setting.room(), **facts)._with(
            mixture.to(device), sigma if sigma is None else sigma.to(device)
        )

    def _with(self, mixture: Tensor, sigma: Tensor | None) -> Posterior:
        """Return this posterior with other components and another σ, and a mark of them."""
        result = self.result._replace(mixture=mixture, sigma_noise=sigma)
        likelihood = self.likelihood if sigma is None else self.likelihood.with_noise(sigma)
        parts = result.w_lin.norm(), result.prior_precision, mixture, sigma
        numbers = [n for part in parts if part is not None for n in part.flatten().tolist()]
        mark = " ".join(f"{n:.12g}" for n in numbers)
        return replace(self, result=result, likelihood=likelihood, mark=mark)

    @property
    def members(self) -> tuple[Posterior]:
        """This posterior, as ``Posteriors`` has several."""
        return (self,)

    @cached_property
    def tables(self) -> tuple[Rows]:
        """The components of predictions, as fitted or as calibrated."""
        return (self.result.mixture.tolist(),)

    @property
    def mean(self) -> str:
        """Which function the samples are added to: "network" or "linear"."""
        first = self.tables[0][0]
        return "network" if abs(first[NETWORK]) >= abs(first[MODE]) else "linear"

    @property
    def scale(self) -> Tensor:
        """τ, the factor of the posterior's variance in predictions."""
        return self.result.mixture[0, SCALE]

    @cached_property
    def compared(self) -> Reference | None:
        """What inputs are compared with: the reference of ``calibrate``, or training examples."""
        apart = self.training and self.training.between
        if self.reference is not None or apart is None:
            return self.reference
        fitted, *_ = self.replaced or (self.result.mixture,)
        return Reference(fitted, None, apart.view(len(apart), -1), None)

    def require(self, surely: bool = False) -> None:
        """Raise an error if the network has changed; ``surely`` compares every bit."""
        if not self.setting.state.holds(self.setting.linear_model.network, surely):
            raise NotFittedError(
                "The model's weights have changed since fit(), so this posterior is no longer valid. "
                "Call la.fit(train_loader) again."
            )

    def asked(self, mean: str | None = None, num_samples: int | None = None) -> Posterior:
        """Return the posterior alone around f(x), "network", or J(x) w_lin, "linear"; or with its first samples."""
        check_choice("mean", mean, (None, "network", "linear"))
        result, training = self.result, self.training and self.training._replace(between=None)
        if num_samples is not None:
            known = len(result.w_samples)
            check_whole(1, num_samples=num_samples)
            if num_samples > known:
                raise ValueError(f"num_samples={num_samples}, but there are {known} samples.")
            result = result._replace(w_samples=result.w_samples[:num_samples])
            if training is not None:
                training = training._replace(deviations=training.deviations[:, :num_samples])
        if mean is not None:
            table = posterior_alone(mean, self.tables[0][0][SCALE])
            result, training = result._replace(mixture=table), None
        return replace(self, result=result, reference=None, training=training)

    def at(self, x: Any) -> Pushforward:
        """Return inputs with their products, differentiable in x if it requires gradients."""
        model, w_lin, samples = self.setting.linear_model, self.result.w_lin, self.result.w_samples
        network = model.network
        if not isinstance(x, Tensor) or x.device != network.device:
            x = to_device(inputs_of(x) if isinstance(x, Mapping) else x, network.device)
        tensors = [x] if isinstance(x, Tensor) else tensors_in(x)
        differentiate = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        is_empty = bool(tensors) and tensors[0].dim() > 0 and not len(tensors[0])
        try:
            with network.guarded():
                if model.report is None and not is_empty:
                    model.probe(map_tensors(Tensor.detach, x))
                with torch.enable_grad() if differentiate else nullcontext():
                    if is_empty:
                        f = network.outputs(x)
                        Jw = f.new_zeros(1 + len(samples), *f.shape)
                    else:
                        f, Jw = model.push(x, w_lin[None], samples)
        except RuntimeError:  # possibly because x is a single example
            with network.guarded():
                require_rows(network.outputs(x), x)
            raise
        require_rows(f, x)
        return self.of_products(f, Jw, f, network.class_dim)

    def columns(self) -> Tensor:
        """Return w_lin and samples, (1 + K, P)."""
        return torch.cat([self.result.w_lin[None], self.result.w_samples])

    def of_products(self, f: Tensor, Jw: Tensor, y: Tensor, class_dim: int = -1) -> Pushforward:
        """Return examples by f, (B, ..., C), J w of w_lin and the samples, and the targets."""
        result = self.result
        if result.constant is not None:
            Jw = torch.cat([Jw[:1] + result.constant.to(Jw), Jw[1:]])
        noise = (result.network_noise,)
        parts = (self.likelihood,), (f,), (Jw,), (self.training,), noise
        return Pushforward(y, *parts, class_dim)

    def as_fitted(self) -> Posterior:
        """Return this posterior without what ``calibrate`` has found."""
        if self.replaced is None:
            return self
        mixture, sigma, messages = self.replaced
        cleared: dict[str, Any] = dict.fromkeys(("replaced", "calibration", "reference"))
        return replace(self._with(mixture, sigma), messages=messages, **cleared)

    def calibrated(
        self, found: CalibratedComponents, reference: Reference | None, messages: list[str]
    ) -> Posterior:
        """Return this posterior, as fitted, with what ``calibrate`` has found."""
        mixture, sigma = before = self.result.mixture, self.result.sigma_noise
        if found.calibration.applied:
            mixture = found.table.to(mixture)
            sigma = sigma if found.noise is None else sigma * found.noise.to(sigma)
        return replace(
            self._with(mixture, sigma),
            replaced=(*before, self.messages),
            reference=reference,
            room=max(self.room, self.setting.room()),
            calibration=found.calibration,
            messages=(*self.messages, *(m for m in messages if m not in self.messages)),
        )

    def moved(self, fn: Callable[[Tensor], Tensor], setting: Setting) -> Posterior:
        """Return this posterior with every tensor mapped, as by ``nn.Module.to``."""
        names = "result", "training", "reference", "replaced"
        own = {name: getattr(self, name) for name in names}
        return replace(self, setting=setting, **tree_map_only(Tensor, fn, own))


@dataclass(frozen=True, eq=False, repr=False)
class Posteriors:
    """Several posteriors, of which an equally weighted mixture predicts; like ``Posterior`` it is never changed."""

    members: tuple[Posterior, ...] = ()

    table: Tensor | None = None
    """The components of every member's predictions; None: their own."""

    noise: Tensor | None = None
    """A factor of every member's σ."""

    reference: Reference | None = None
    """What inputs are compared with, after ``calibrate``."""

    calibration: Calibration | None = None
    messages: tuple[str, ...] = ()

    marks: tuple[str | None, ...] | None = None
    """Those of the members that it belongs to; None in files of earlier versions, whose members have none."""

    @property
    def likelihood(self) -> Likelihood:
        """That of the first member: they may differ in the noise."""
        return self.members[0].likelihood

    @property
    def tables(self) -> tuple[Rows, ...]:
        """The components of each member's predictions."""
        if self.table is None:
            return tuple(member.tables[0] for member in self.members)
        return (self.table.tolist(),) * len(self.members)

    @property
    def compared(self) -> Reference | None:
        """The reference."""
        return self.reference

    @property
    def room(self) -> float:
        """Relative difference up to which scores are ties."""
        return max(member.room for member in self.members)

    def require(self, surely: bool = False) -> None:
        """Raise an error if a network has changed, or a member since the ensemble was calibrated."""
        for member in self.members:
            member.require(surely)
        marks = self.marks or (None,) * len(self.members)
        if self.reference is not None and marks != tuple(m.mark for m in self.members):
            raise RuntimeError(
                "A member was fitted or calibrated again after the ensemble was calibrated, whose numbers belong to "
                "the members as they were: call ensemble.calibrate(validation_loader) again."
            )

    def asked(self, mean: str | None = None, num_samples: int | None = None) -> Posteriors:
        """Return the posteriors alone, each around one mean, or with their first samples."""
        each = tuple(member.asked(mean, num_samples) for member in self.members)
        return Posteriors(each, self.table if mean is None else None, self.noise)

    def at(self, x: Any) -> Pushforward:
        """Return inputs with their products under each."""
        return stack_members([member.at(x) for member in self.members])

    def as_fitted(self) -> Posteriors:
        """Return the members as they are, without what was found of them together."""
        return Posteriors(self.members)

    def calibrated(
        self, found: CalibratedComponents, reference: Reference, messages: list[str]
    ) -> Posteriors:
        """Return these posteriors with what ``calibrate`` has found."""
        table, noise = (found.table, found.noise) if found.calibration.applied else (None, None)
        marks = tuple(member.mark for member in self.members)
        said = found.calibration, tuple(messages), marks
        return Posteriors(self.members, table, noise, reference, *said)

    def moved(self, fn: Callable[[Tensor], Tensor]) -> Posteriors:
        """Return what was found of them together with every tensor mapped."""
        own = {name: getattr(self, name) for name in ("table", "noise", "reference")}
        return replace(self, **tree_map_only(Tensor, fn, own))


def required(la: Any, surely: bool | None = False) -> Posterior | Posteriors:
    """Return the record of a ``LinearisedLaplace`` or ``LaplaceEnsemble``, or the record itself.

    Raise an error if it is not fitted, or if its network has changed: ``surely`` compares every bit, None nothing.
    """
    found = getattr(la, "posterior", la)
    if found is None:
        raise NotFittedError(
            "This posterior is not fitted yet. Call la.fit(train_loader), or la.load_state_dict(state)."
        )
    if not isinstance(found, (Posterior, Posteriors)):
        raise TypeError(
            f"An object of the class {type(la).__name__} is not a posterior: pass a fitted LinearisedLaplace, a "
            "LaplaceEnsemble, or the record of one; in place of a student, the posterior that it was distilled from."
        )
    if surely is not None:
        found.require(surely)
    return found
