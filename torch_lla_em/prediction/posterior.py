"""The frozen records of fits, from which predictions, files and messages are made: ``Posterior``
and ``Posteriors``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from torch_lla_em.data import Inputs, TargetFn, inputs_of, map_tensors, tensors_in, to_device
from torch_lla_em.inference import FitResult
from torch_lla_em.jacobian import LinearModel, NetworkState, require_rows
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction.calibration import Correction
from torch_lla_em.prediction.conformal import rounding
from torch_lla_em.prediction.mixture import MODE, NETWORK, SCALE
from torch_lla_em.prediction.neighbours import TrainingExamples, largest_variance
from torch_lla_em.prediction.printed import Printed
from torch_lla_em.prediction.pushforward import (
    Member,
    Pushforward,
    Rows,
    posterior_alone,
    stack_members,
)
from torch_lla_em.runtime import check_choice


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


@dataclass(frozen=True, eq=False, repr=False)
class Posterior:
    """The result of a fit. It is replaced as a whole and never changed."""

    setting: Setting

    likelihood: Likelihood
    """With the observation noise that was learnt, times the factor of the correction."""

    result: FitResult
    """What the fit has learnt."""

    training: TrainingExamples | None = None
    """The training examples that are kept."""

    correction: Correction = Correction()
    """The result of the last ``calibrate``."""

    num_data: int | None = None
    """The number of training examples with a label."""

    tolerance: float | None = None
    """The largest numerical error that the fit was to have; None: that of the object."""

    trained_on: tuple[int, ...] = ()
    """Hashes of some training examples; empty if they are not known."""

    num_inputs: int = 0
    """Entries of a batch that are inputs of the network; 0 if that is not known."""

    history: tuple[dict[str, Any], ...] = ()
    """A record of every EM step."""

    messages: tuple[str, ...] = ()
    """The memory plan, then the warnings of the fit."""

    @classmethod
    def of_fit(
        cls, learnt: FitResult, setting: Setting, given: Likelihood, **facts: Any
    ) -> Posterior:
        """Return the record of what a fit has learnt; ``given`` is the likelihood before it."""
        mixture, device = learnt.mixture, learnt.w_lin.device
        examples, leverages = learnt.examples, learnt.leverages
        if mixture is None:  # around the function whose residuals σ describes
            mixture = posterior_alone("network" if learnt.network_noise is None else "linear")
        # a single one has too many numbers
        if examples is not None and leverages is not None and len(examples):
            largest = largest_variance(given, examples, leverages).to(examples)
            facts["training"] = TrainingExamples(given, examples, largest)
        own: dict[str, Any] = {"mixture": mixture.to(device), "examples": None, "leverages": None}
        if learnt.sigma_noise is not None:
            own["sigma_noise"] = learnt.sigma_noise.to(device)
        return cls(setting, given, learnt._replace(**own), **facts).corrected(Correction())

    def corrected(self, correction: Correction) -> Posterior:
        """Return this posterior with another correction."""
        sigma, factor, likelihood = self.result.sigma_noise, correction.noise, self.likelihood
        if sigma is not None:
            sigma = sigma if factor is None else sigma * factor.to(sigma)
            likelihood = likelihood.with_noise(sigma)
        return replace(self, likelihood=likelihood, correction=correction)

    @property
    def members(self) -> tuple[Posterior]:
        """This posterior, as ``Posteriors`` has several."""
        return (self,)

    @cached_property
    def tables(self) -> tuple[Rows]:
        """The components of predictions, as fitted or as calibrated."""
        table = self.correction.table
        if table is None:
            table = self.result.mixture
        return ((posterior_alone() if table is None else table).tolist(),)

    @property
    def mixture(self) -> Tensor:
        """The same as a tensor."""
        like = self.result.w_lin if self.result.mixture is None else self.result.mixture
        return like.new_tensor(self.tables[0])

    @property
    def mean(self) -> str:
        """Which function the samples are added to: "network" or "linear"."""
        first = self.tables[0][0]
        return "network" if abs(first[NETWORK]) >= abs(first[MODE]) else "linear"

    @property
    def scale(self) -> Tensor:
        """τ, the factor of the posterior's variance in predictions."""
        return self.mixture[0, SCALE]

    @cached_property
    def mark(self) -> str:
        """A string that identifies this fit and calibration. Saving, loading and casting do not
        change it."""
        return json.dumps([self.history[-1:], self.correction.calibration])

    def around(self, mean: str) -> Posterior:
        """Return the posterior alone around f(x), "network", or J(x) w_lin, "linear"."""
        if not isinstance(mean, str):
            raise TypeError(
                "la.predict takes all inputs of the model as its first argument: pass several in "
                "one tuple, la.predict((a, b)), or in a dict by their names."
            )
        check_choice("mean", mean, ("network", "linear"))
        table = posterior_alone(mean, self.tables[0][0][SCALE])
        return replace(self, training=None, correction=Correction(table))

    def room(self) -> float:
        """Return the relative difference up to which scores are ties, in the network's dtype."""
        parameters = self.setting.linear_model.network.module.parameters()
        return max((rounding(p.dtype) for p in parameters if p.is_floating_point()), default=0.0)

    def at(self, x: Inputs) -> Pushforward:
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
                if model.ways is None and not is_empty:
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
        return self.of_products(f, Jw, class_dim=network.class_dim)

    def columns(self) -> Tensor:
        """Return w_lin and samples, (1 + K, P)."""
        return torch.cat([self.result.w_lin[None], self.result.w_samples])

    def of_products(
        self, f: Tensor, Jw: Tensor, targets: Tensor | None = None, class_dim: int = -1
    ) -> Pushforward:
        """Return examples by f, (B, ..., C), J w of w_lin and the samples, and the targets if they
        are known."""
        result = self.result
        if result.constant is not None:
            Jw = torch.cat([Jw[:1] + result.constant.to(Jw), Jw[1:]])
        own = Member(self.likelihood, f, Jw, self.training, result.network_noise)
        return Pushforward((own,), targets, class_dim)

    def moved(self, fn: Callable[[Tensor], Tensor], setting: Setting) -> Posterior:
        """Return this posterior with every tensor mapped, as by ``nn.Module.to``."""
        own = {"result": self.result, "training": self.training}
        found = replace(self, setting=setting, **tree_map_only(Tensor, fn, own))
        return found.corrected(tree_map_only(Tensor, fn, self.correction))


@dataclass(frozen=True, eq=False, repr=False)
class Posteriors:
    """Several posteriors, of which an equally weighted mixture predicts; like ``Posterior`` it is
    never changed."""

    members: tuple[Posterior, ...] = ()

    correction: Correction = Correction()
    """What ``calibrate`` has found of them together, beside their own corrections."""

    @property
    def likelihood(self) -> Likelihood:
        """That of the first member: they may differ in the noise."""
        return self.members[0].likelihood

    @property
    def tables(self) -> tuple[Rows, ...]:
        """The components of each member's predictions."""
        table = self.correction.table
        if table is None:
            return tuple(member.tables[0] for member in self.members)
        return (table.tolist(),) * len(self.members)

    def corrected(self, correction: Correction) -> Posteriors:
        """Return these posteriors with another correction of them together."""
        return Posteriors(self.members, correction)

    def around(self, mean: str) -> Posteriors:
        """Return the posteriors alone, each around one mean."""
        each = tuple(member.around(mean) for member in self.members)
        return Posteriors(each, Correction(noise=self.correction.noise))

    def at(self, x: Inputs) -> Pushforward:
        """Return inputs with their products under each."""
        return stack_members([member.at(x) for member in self.members])


Record = Posterior | Posteriors
"""What functions of this subpackage need of a fit."""


class Holder(Printed):
    """What holds a record: the base class of ``LinearisedLaplace`` and ``LaplaceEnsemble``."""

    @property
    def posterior(self) -> Record | None:
        """The frozen record of the fit, which functions of ``torch_lla_em.prediction`` take; None
        before it."""
        raise NotImplementedError


Fitted = Holder | Record
"""What predicts: a fitted object, or its record."""


def required(la: Fitted, surely: bool | None = False) -> Record:
    """Return the record of an object, or a record itself; raise an error if it is not fitted, or
    what it belongs to has changed.

    ``surely`` compares every bit of a network, None nothing.
    """
    found = getattr(la, "posterior", la)
    if found is None:
        raise NotFittedError(
            "This posterior is not fitted yet. Call la.fit(train_loader), or "
            "la.load_state_dict(state)."
        )
    if not isinstance(found, (Posterior, Posteriors)):
        raise TypeError(
            f"An object of the class {type(la).__name__} is not a posterior: pass a fitted "
            "LinearisedLaplace, a LaplaceEnsemble, or the record of one; in place of a student, "
            "the posterior that it was distilled from."
        )
    if surely is None:
        return found
    for member in found.members:
        if not member.setting.state.holds(member.setting.linear_model.network, surely):
            raise NotFittedError(
                "The model's weights have changed since fit(), so this posterior is no longer "
                "valid. Call la.fit(train_loader) again."
            )
    marks = found.correction.marks
    if marks and marks != tuple(member.mark for member in found.members):
        raise RuntimeError(
            "A member was fitted or calibrated again after the ensemble was calibrated, whose "
            "numbers belong to the members as they were: call "
            "ensemble.calibrate(validation_loader) again."
        )
    return found
