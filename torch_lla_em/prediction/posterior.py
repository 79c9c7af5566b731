"""``Posterior``: the frozen record of a fit, from which predictions, files and messages are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import TargetFn
from torch_lla_em.inference import FitResult
from torch_lla_em.jacobian import LinearModel, NetworkState
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction.calibration import Calibration, Kept
from torch_lla_em.prediction.conformal import TrainingExamples, output_variance
from torch_lla_em.prediction.pushed import Products, Pushed, Tables, posterior_alone
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

    reference: Callable[[], Reference] | None = None
    """Returns what inputs are compared with, if there is anything."""

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


@dataclass(frozen=True, eq=False, repr=False)
class Posterior:
    """The result of a fit. It is replaced as a whole and never changed."""

    setting: Setting

    likelihood: Likelihood
    """With the observation noise that was learnt."""

    w_lin: Tensor
    """The mode of the linear model, (P,)."""

    w_samples: Tensor
    """The posterior samples, with mean zero, (K, P)."""

    scale: Tensor
    """The prior standard deviation of every parameter at λ = 1, (P,)."""

    prior_precision: Tensor
    """λ, () or (blocks,)."""

    sigma_noise: Tensor | None
    """σ of a regression."""

    mixture: Tensor
    """The components of predictions, as fitted or as calibrated."""

    effective_dim: Tensor
    """γ, () or (blocks,)."""

    effective_dim_error: Tensor
    """The Monte Carlo error of γ."""

    certificate: Tensor
    """The numerical error of each sample, in posterior standard deviations, (K,)."""

    log_evidence: Tensor
    """log p(y | λ, σ) and its standard error, (2,)."""

    training_deviations: Tensor | None = None
    """J w_k of some training examples, (n, K, ..., C), if the curvature is variational."""

    largest_variance: Tensor | None = None
    """The largest variance of their centred outputs, ()."""

    training_distances: Tensor | None = None
    """The distance of each to the nearest other one, without itself in the posterior, (n,)."""

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

    @classmethod
    def of_fit(
        cls, learnt: FitResult, setting: Setting, given: Likelihood, **facts: Any
    ) -> Posterior:
        """Return the record of what a fit has learnt; ``given`` is the likelihood before it."""
        precision, sigma = learnt.precision, learnt.sigma
        likelihood: Any = given
        device = learnt.w_lin.device
        if sigma is not None:
            sigma = sigma.to(device)
            likelihood = likelihood.with_noise(sigma)
        mixture = posterior_alone() if learnt.mixture is None else learnt.mixture
        found = cls(
            setting,
            likelihood,
            *(learnt.w_lin, learnt.w_samples, learnt.scale, precision, sigma, mixture.to(device)),
            *(*learnt.effective_dim, learnt.certificate, torch.stack(list(learnt.log_evidence))),
            room=setting.room(),
            **facts,
        )
        examples = learnt.examples
        if examples is None or not len(examples):  # none if a single one has too many numbers
            return found
        largest = output_variance(likelihood, examples.movedim(1, 0)).max()
        found = replace(found, training_deviations=examples, largest_variance=largest)
        return replace(found, training_distances=found.training().distances(learnt.leverages))

    @property
    def components(self) -> Components:
        """How predictions are made: as fitted or as calibrated."""
        has_reference = self.reference is not None or self.training_distances is not None
        return Components(self.mixture, None, self._known if has_reference else None, self.room)

    def _known(self) -> Reference:
        """Return scores of validation or, without a calibration, of training examples."""
        return self._of_training if self.reference is None else self.reference

    @cached_property
    def _of_training(self) -> Reference:
        return Reference(self.mixture, None, self.training_distances[:, None], None)

    def training(self, num_samples: int | None = None) -> TrainingExamples | None:
        """Return the training examples that the fit has kept, if there are any."""
        if self.training_deviations is None:
            return None
        deviations = self.training_deviations[:, :num_samples]
        return TrainingExamples(self.likelihood, deviations, self.largest_variance)

    def columns(self, num_samples: int | None = None) -> Tensor:
        """Return w_lin and samples, (1 + K, P)."""
        return torch.cat([self.w_lin[None], self.w_samples[:num_samples]])

    def of_products(self, f: Tensor, Jw: Tensor, y: Tensor, class_dim: int = -1) -> Pushed:
        """Return examples by f, (B, ..., C), J w of w_lin and the samples, and the targets."""
        training = self.training(len(Jw) - 1)
        return Pushed((Products(self.likelihood, f, Jw, training, class_dim),), y)

    def calibrated(self, found: Kept, reference: Reference, messages: list[str]) -> Posterior:
        """Return this posterior with what ``calibrate`` has found."""
        own = tuple(words for words in messages if words not in self.messages)
        known = replace(
            self,
            reference=reference,
            room=max(self.room, self.setting.room()),
            calibration=found.calibration,
            messages=(*self.messages, *own),
        )
        if not found.calibration.applied:
            return known
        known = replace(known, mixture=found.table.to(self.mixture))
        if self.likelihood.observation_noise is None:
            return known
        sigma = self.sigma_noise * found.noise.to(self.sigma_noise)
        return replace(known, sigma_noise=sigma, likelihood=self.likelihood.with_noise(sigma))

    def moved(self, fn: Callable[[Tensor], Tensor], setting: Setting) -> Posterior:
        """Return this posterior with every tensor mapped, as by ``nn.Module.to``."""

        def mapped(value: Any) -> Any:
            if isinstance(value, Reference):
                return Reference(*map(mapped, value))
            return fn(value) if isinstance(value, Tensor) else value

        return Posterior(**{name: mapped(v) for name, v in fields_of(self)} | {"setting": setting})


def fields_of(posterior: Posterior) -> list[tuple[str, Any]]:
    """Return the names and values of a posterior's fields."""
    return [(name, getattr(posterior, name)) for name in Posterior.__dataclass_fields__]
