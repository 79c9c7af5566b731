"""``Posterior`` and ``Posteriors``: the frozen records of fits, from which predictions, files and
messages are made."""

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
    """The network of a posterior, and how loaders are read and shared."""

    linear_model: LinearModel
    """The network, its parameters in the posterior, and how J is computed."""

    state: NetworkState
    """The weights and running statistics of the network that the posterior was fitted to."""

    target_fn: TargetFn | None = None
    """The function by which the fit gets targets from a batch."""

    shard: str | None = None
    """How the fit used a process group; ``calibrate`` uses it in the same way."""


@dataclass(frozen=True, eq=False, repr=False)
class Posterior:
    """The result of a fit. It is replaced as a whole and never changed."""

    setting: Setting

    likelihood: Likelihood
    """The likelihood with the learnt observation noise, times the factor of the correction."""

    result: FitResult
    """The result of the fit."""

    training: TrainingExamples | None = None
    """The training examples that are stored."""

    correction: Correction = Correction()
    """The result of the last ``calibrate``."""

    num_data: int | None = None
    """The number of training examples with a label."""

    tolerance: float | None = None
    """The requested largest numerical error of the fit; None: the default for K samples."""

    trained_on: tuple[int, ...] = ()
    """Hashes of some training examples; empty if there are none."""

    num_inputs: int = 0
    """Number of entries of a batch that are inputs of the network; 0 if it is not known."""

    history: tuple[dict[str, Any], ...] = ()
    """A record of every EM step."""

    messages: tuple[str, ...] = ()
    """The memory plan, then the warnings of the fit."""

    @classmethod
    def of_fit(
        cls, learnt: FitResult, setting: Setting, given: Likelihood, **facts: Any
    ) -> Posterior:
        """Return the record of a fit; ``given`` is the likelihood before the fit."""
        mixture, device = learnt.mixture, learnt.w_lin.device
        examples, leverages = learnt.examples, learnt.leverages
        if mixture is None:  # then samples are around the function whose residuals σ describes
            mixture = posterior_alone("network" if learnt.network_noise is None else "linear")
        # a single example may have too many numbers
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
        """This posterior alone, for functions that accept ``Posteriors`` too."""
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
        """The components of predictions as a tensor."""
        like = self.result.w_lin if self.result.mixture is None else self.result.mixture
        return like.new_tensor(self.tables[0])

    @property
    def mean(self) -> str:
        """The function to which the samples are added: "network" or "linear"."""
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
        """Return the posterior alone, around f(x) for "network", or J(x) w_lin for "linear"."""
        if not isinstance(mean, str):
            raise TypeError(
                "la.predict takes all inputs of the model as its first argument: pass several in "
                "one tuple, la.predict((a, b)), or in a dict by their names."
            )
        check_choice("mean", mean, ("network", "linear"))
        first = self.tables[0][0]
        table = posterior_alone(mean, first[SCALE])
        if self.likelihood.gives_probabilities:  # the temperature, if there is one
            table[:, [MODE, NETWORK]] *= first[MODE] + first[NETWORK]
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
        """Return examples from f, (B, ..., C), J w of w_lin and of the samples, and the targets if
        they are known."""
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
    """Several posteriors, whose equally weighted mixture predicts. Like a ``Posterior`` it is never
    changed."""

    members: tuple[Posterior, ...] = ()

    correction: Correction = Correction()
    """The joint result of ``calibrate``. Its table, if any, replaces those of the members."""

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood of the first member; members may differ in the observation noise."""
        return self.members[0].likelihood

    @property
    def tables(self) -> tuple[Rows, ...]:
        """The components of each member's predictions."""
        table = self.correction.table
        if table is None:
            return tuple(member.tables[0] for member in self.members)
        return (table.tolist(),) * len(self.members)

    def corrected(self, correction: Correction) -> Posteriors:
        """Return these posteriors with another joint correction."""
        return Posteriors(self.members, correction)

    def around(self, mean: str) -> Posteriors:
        """Return the posteriors without other components, each around one mean."""
        each, joint = self.members, self.correction
        if joint.table is not None:
            each = tuple(replace(m, correction=Correction(joint.table)) for m in each)
        return Posteriors(tuple(m.around(mean) for m in each), Correction(noise=joint.noise))

    def at(self, x: Inputs) -> Pushforward:
        """Return inputs with their products under each posterior."""
        return stack_members([member.at(x) for member in self.members])


Record = Posterior | Posteriors
"""The record of a fit or of several, for functions of this subpackage."""


class Holder(Printed):
    """Base class of the objects that hold a record, ``LinearisedLaplace`` and
    ``LaplaceEnsemble``."""

    @property
    def posterior(self) -> Record | None:
        """The frozen record of the fit, which can be passed to the functions of
        ``torch_lla_em.prediction``; None before the fit."""
        raise NotImplementedError


Fitted = Holder | Record
"""A fitted object, or its record."""


def required(la: Fitted, surely: bool | None = False) -> Record:
    """Return the record of an object, or a record itself. Raise an error if it is not fitted, or if
    its network or members have changed.

    With ``surely=True`` every bit of a network is compared, and with None nothing is.
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
            "LinearisedLaplace, a LaplaceEnsemble, or the record of one. Instead of a student, "
            "pass the posterior that it was distilled from."
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
            "A member was fitted or calibrated again after the ensemble was calibrated, so the "
            "numbers of the ensemble are no longer valid: call "
            "ensemble.calibrate(validation_loader) again."
        )
    return found
