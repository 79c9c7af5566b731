"""``Posterior``: the frozen record of a fit, from which predictions, files and messages are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from torch_lla_em.data import TargetFn
from torch_lla_em.inference import FitResult
from torch_lla_em.jacobian import LinearModel, NetworkState
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction.calibration import CalibratedComponents, Calibration
from torch_lla_em.prediction.neighbours import TrainingExamples, variances_without, without_itself
from torch_lla_em.prediction.pushforward import Products, Pushforward, Tables, posterior_alone
from torch_lla_em.prediction.ranks import rounding
from torch_lla_em.prediction.reference import Reference


class NotFittedError(RuntimeError):
    """Predictions were requested before ``fit``, or after the network had changed."""


class Components(NamedTuple):
    """How products with the vectors of posteriors become predictions."""

    tables: Tables
    """The components of predictions, as fitted or as calibrated."""

    noise: Tensor | None = None
    """A factor of every member's σ, which ``calibrate`` of an ensemble has found."""

    reference: Reference | None = None
    """What inputs are compared with, if there is anything."""

    room: float = 0.0
    """Relative difference up to which scores are ties, at least."""


class Setting(NamedTuple):
    """What a posterior belongs to: its network, and how loaders are read and shared."""

    linear_model: LinearModel
    """The network, its parameters in the posterior, and how J is computed."""

    state: NetworkState
    """The weights and running statistics of the network that the posterior was fitted to."""

    target_fn: TargetFn | None = None
    """The ``target_fn`` of the fit."""

    shard: str | None = None
    """How the fit used a process group; ``calibrate`` does the same."""

    def room(self) -> float:
        """Return the relative difference up to which scores are ties, in the network's dtype."""
        dtypes = {p.dtype for p in self.linear_model.network.module.parameters()}
        return max((rounding(d) for d in dtypes if d.is_floating_point), default=0.0)

    def require(self, surely: bool = False) -> None:
        """Raise an error if the network has changed; ``surely`` compares every bit."""
        if not self.state.holds(self.linear_model.network, surely):
            raise NotFittedError(
                "The model's weights have changed since fit(), so this posterior is no longer valid. "
                "Call la.fit(train_loader) again."
            )


class Replaced(NamedTuple):
    """What ``calibrate`` has replaced of a posterior as fitted."""

    mixture: Tensor
    sigma_noise: Tensor | None
    messages: tuple[str, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Posterior:
    """The result of a fit. It is replaced as a whole and never changed."""

    setting: Setting

    likelihood: Likelihood
    """With the observation noise that was learnt."""

    result: FitResult
    """What the fit has learnt, with the components as fitted or as calibrated."""

    largest_variance: Tensor | None = None
    """The largest variance of the centred outputs of the training examples that are kept, each without itself
    in the posterior, ()."""

    training_distances: Tensor | None = None
    """The distances of each to the nearest other one, without itself in the posterior, (n, 2)."""

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

    replaced: Replaced | None = None
    """What the last ``calibrate`` has replaced, from which the next one starts; None before the first."""

    @classmethod
    def of_fit(
        cls, learnt: FitResult, setting: Setting, given: Likelihood, **facts: Any
    ) -> Posterior:
        """Return the record of what a fit has learnt; ``given`` is the likelihood before it."""
        device, sigma, likelihood = learnt.w_lin.device, learnt.sigma_noise, given
        if sigma is not None:
            sigma = sigma.to(device)
            likelihood = likelihood.with_noise(sigma)
        mixture = learnt.mixture
        if mixture is None:  # around the function whose residuals σ describes
            mixture = posterior_alone("network" if learnt.network_noise is None else "linear")
        examples = learnt.examples
        if examples is not None and not len(examples):  # a single one has too many numbers
            examples = None
        result = learnt._replace(sigma_noise=sigma, mixture=mixture.to(device))
        result = result._replace(examples=examples, leverages=None)
        found = cls(setting, likelihood, result, room=setting.room(), **facts)
        if examples is None:
            return found
        factors = without_itself(learnt.leverages)
        largest = variances_without(likelihood, examples, factors).max()
        found = replace(found, largest_variance=largest.to(examples))
        return replace(found, training_distances=found.training().distances_without(factors))

    @property
    def components(self) -> Components:
        """How predictions are made: as fitted or as calibrated."""
        table, known = self.result.mixture, self.reference
        if known is None and self.training_distances is not None:
            known = Reference(
                table, None, self.training_distances.view(len(self.training_distances), -1), None
            )
        return Components(table, None, known, self.room)

    def training(self, num_samples: int | None = None) -> TrainingExamples | None:
        """Return the training examples that the fit has kept, if there are any."""
        examples = self.result.examples
        if examples is None:
            return None
        deviations = examples[:, :num_samples]
        return TrainingExamples(self.likelihood, deviations, self.largest_variance)

    def columns(self, num_samples: int | None = None) -> Tensor:
        """Return w_lin and samples, (1 + K, P)."""
        return torch.cat([self.result.w_lin[None], self.result.w_samples[:num_samples]])

    def of_products(self, f: Tensor, Jw: Tensor, y: Tensor, class_dim: int = -1) -> Pushforward:
        """Return examples by f, (B, ..., C), J w of w_lin and the samples, and the targets."""
        training = self.training(len(Jw) - 1)
        if self.result.constant is not None:
            Jw = torch.cat([Jw[:1] + self.result.constant.to(Jw), Jw[1:]])
        more = training, class_dim, self.result.network_noise
        return Pushforward((Products(self.likelihood, f, Jw, *more),), y)

    def as_fitted(self) -> Posterior:
        """Return this posterior without what ``calibrate`` has found."""
        if self.replaced is None:
            return self
        mixture, sigma, messages = self.replaced
        result = self.result._replace(mixture=mixture, sigma_noise=sigma)
        likelihood = self.likelihood if sigma is None else self.likelihood.with_noise(sigma)
        cleared: dict[str, Any] = dict.fromkeys(("replaced", "calibration", "reference"))
        return replace(self, result=result, likelihood=likelihood, messages=messages, **cleared)

    def calibrated(
        self, found: CalibratedComponents, reference: Reference, messages: list[str]
    ) -> Posterior:
        """Return this posterior, as fitted, with what ``calibrate`` has found."""
        own = tuple(words for words in messages if words not in self.messages)
        known = replace(
            self,
            replaced=Replaced(self.result.mixture, self.result.sigma_noise, self.messages),
            reference=reference,
            room=max(self.room, self.setting.room()),
            calibration=found.calibration,
            messages=(*self.messages, *own),
        )
        if not found.calibration.applied:
            return known
        result = self.result._replace(mixture=found.table.to(self.result.mixture))
        if self.likelihood.observation_noise is None:
            return replace(known, result=result)
        sigma = result.sigma_noise * found.noise.to(result.sigma_noise)
        likelihood = self.likelihood.with_noise(sigma)
        return replace(known, result=result._replace(sigma_noise=sigma), likelihood=likelihood)

    def moved(self, fn: Callable[[Tensor], Tensor], setting: Setting) -> Posterior:
        """Return this posterior with every tensor mapped, as by ``nn.Module.to``."""

        own = {name: value for name, value in vars(self).items() if name in _MOVED}
        return replace(self, setting=setting, **tree_map_only(Tensor, fn, own))


_MOVED = "result", "largest_variance", "training_distances", "reference", "replaced"
"""Fields that hold tensors."""


def mixed(posteriors: Iterable[Posterior]) -> Components:
    """Return how products with the vectors of several posteriors become predictions of their mixture."""
    posteriors = tuple(posteriors)
    tables = tuple(posterior.result.mixture for posterior in posteriors)
    return Components(tables, room=max(posterior.room for posterior in posteriors))
