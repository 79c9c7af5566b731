"""A posterior on its network: its tensors, whether they still hold, and how they are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.data import Data, TargetFn
from torch_lla_em.inference import Curve, Estimate, Modes, Posterior, curve
from torch_lla_em.jacobian import LinearModel
from torch_lla_em.likelihoods import Example, Likelihood, Regression, is_named
from torch_lla_em.prediction import parts, stored
from torch_lla_em.prediction.calibration import Calibration
from torch_lla_em.prediction.standing import Standing
from torch_lla_em.problem import place_of_vectors
from torch_lla_em.runtime import Compute, check_options, free_memory, records
from torch_lla_em.solvers import Spectrum


class StoredPosterior(nn.Module):
    """What a fit leaves, as buffers of a module that a network is beside, not inside.

    The network is no submodule: its weights are the user's, and no part of this state.
    """

    model: nn.Module
    likelihood: Likelihood
    compute: Compute
    num_samples: int
    target_fn: TargetFn | None
    _linear_model: LinearModel
    _given_likelihood: Any
    _given: list[str]
    sigma_noise: Tensor
    mixture: Tensor

    def __init__(self, model: nn.Module):
        super().__init__()
        object.__setattr__(self, "model", model)
        self.history: list[dict[str, Any]] = []
        self.calibration: Calibration | None = None
        """What the last ``calibrate`` measured on its validation set."""

        self.said: list[str] = []
        """The plan of the fit, and the warnings of it and of ``calibrate``."""

        self.num_data: int | None = None
        for name in stored.TENSORS:
            self.register_buffer(name, None)
        self._standing: Standing | None = None
        self._example: Example | None = None
        self._shard: str | None = None

    @property
    def mean(self) -> str:
        """What the posterior is around in predictions: "network" or "linear"."""
        return "network" if self.mixture is None else parts.mean_of(self.mixture)

    @property
    def posterior_scale(self) -> Tensor | None:
        """τ, by which the posterior's variance is multiplied in predictions."""
        return None if self.mixture is None else self.mixture[0, parts.SCALE]

    @property
    def mean_factor(self) -> Tensor | None:
        """What the posterior's mean is multiplied by in predictions."""
        if self.mixture is None:
            return None
        return self.mixture[0, parts.MODE if self.mean == "linear" else parts.NETWORK]

    def log_marginal_likelihood(self) -> Estimate:
        """Return log p(y | λ, σ) of the linear model, with its standard error over samples.

        It compares what stands on the features of one network: λ, σ, priors, likelihoods. It does
        not compare networks, whose features were learnt from the same targets, and follows their
        training loss: for these there is ``held_out_evidence``.
        """
        self._require_fit()
        return Estimate(*self._log_evidence)

    def curve(self, precisions: Iterable[float] | Tensor) -> Curve:
        """Return γ and the log evidence over a grid of λ, without a pass over data.

        The evidence of a non-Gaussian likelihood is known where EM went and half a decade
        either side of λ*, and NaN beyond.
        """
        self._require_fit()
        check_options(precisions=precisions)
        if self._eigenvalues is None:
            raise ValueError(
                "The curve needs one λ, one curvature for all of them and the block-Krylov solver: "
                "fit with curvature='network' (or 'linear'), prior='scalar', one sigma_noise, "
                "solver=None."
            )
        parts_of_T = self._eigenvalues, self._xi_coordinates, self._eta_coordinates
        spectrum = Spectrum(*(tensor.double().cpu() for tensor in parts_of_T))
        precisions = torch.as_tensor(precisions, dtype=torch.float64, device="cpu")
        gamma, evidence = curve(spectrum, Modes(*self._modes.double().cpu()), precisions)
        path = [record["prior_precision"] for record in self.history]
        found = self.prior_precision.item()
        return Curve(precisions, gamma, evidence, torch.tensor(path, device="cpu"), found)

    def _columns(self, num_samples: int | None = None) -> Tensor:
        """Return w_lin and samples, (1 + K, P)."""
        return torch.cat([self.w_lin[None], self.w_samples[:num_samples]])

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the posterior as tensors, with a version and the network's fingerprint."""
        self._require_fit(surely=True)
        layout, tensors = self._linear_model.layout, dict(self._buffers)
        record = {
            "likelihood": type(self.likelihood).__name__,
            "given": self._given,
            "num_data": self.num_data,
            "history": self.history,
            "calibration": self.calibration,
            "said": self.said,
            "names": layout.names,
            "shapes": [list(shape) for shape in layout.shapes],
        }
        example = self._example and self._example.by(self.likelihood, self._device)
        return {
            **{name: tensors[name] for name in stored.TENSORS if tensors[name] is not None},
            **(example.tensors() if example else {}),
            "torch_lla_em_version": torch.tensor(records.VERSION, device="cpu"),
            "fingerprint": self._standing.fingerprint,
            "record": records.to_bytes(record),
        }

    def load_state_dict(self, state: dict[str, Tensor], strict: bool = True) -> None:
        """Take over a posterior; refused where the network is not the one it was fitted to."""
        tensors, record = stored.checked(state, self._linear_model)
        self._refuse_other_options(state, record)
        size = state["w_samples"].nbytes
        place = place_of_vectors(size, self.compute, self._device, free_memory(self._device))
        for name, tensor in tensors.items():
            setattr(self, name, None if tensor is None else tensor.to(place, copy=True))
        self.history, self.num_data = record["history"], record["num_data"]
        self.calibration = record.get("calibration") and Calibration(*record["calibration"])
        self.said = record.get("said", ["The plan was not kept."])
        if self.sigma_noise is not None:
            self.likelihood = self._given_likelihood.at_noise(self.sigma_noise)
        self.num_samples = len(self.w_samples)
        self._example = Example.known(state)
        self._standing = Standing(self._linear_model.network)

    def __getattr__(self, name: str) -> Any:
        """Return a buffer."""
        return super().__getattr__(name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StoredPosterior:
        """Move posterior and network together."""
        network = self._linear_model.network
        stands = self.w_lin is not None and self._standing.holds(network)
        super()._apply(fn, recurse)
        self.model._apply(fn, recurse)
        self._linear_model = LinearModel(network, self._linear_model.layout)  # to be probed there
        if stands:
            self._standing = Standing(network)
        return self

    def _store(self, posterior: Posterior, history: list[dict[str, Any]], num_data: int) -> None:
        for name, tensor in stored.tensors_of(posterior).items():
            setattr(self, name, tensor)
        self.history, self.num_data, self.calibration = history, num_data, None
        if self.sigma_noise is not None:
            self.likelihood = self._given_likelihood.at_noise(self.sigma_noise)
        elif isinstance(self._given_likelihood, Regression):  # tempered, so its noise stays
            self.likelihood = self._given_likelihood
            self.sigma_noise = self.likelihood.sigma_noise.to(self.w_lin.device)
        self._standing = Standing(self._linear_model.network)

    def _example_of(self, data: Data) -> Example | None:
        """Return what a likelihood of one's own makes of a few outputs, to know it again."""
        if is_named(self._given_likelihood):
            return None
        network, batch = self._linear_model.network, next(data.first().split(64))
        with network.guarded():
            f = network.outputs(batch.inputs).movedim(network.class_dim, -1)
        y = self.likelihood.align(batch.targets, network.class_dim)
        return Example.of(self.likelihood, f, y)

    def _refuse_other_options(self, state: dict[str, Tensor], record: dict[str, Any]) -> None:
        """Refuse a state that was fitted with another likelihood, or with a forward_fn."""
        if "forward_fn" in record.get("given", ()) and "forward_fn" not in self._given:
            raise ValueError(
                "The posterior was fitted with a forward_fn of your own, but this object has none: "
                "construct it with the same forward_fn."
            )
        likelihood, sigma = self._given_likelihood, state.get("sigma_noise")
        if record["likelihood"] != type(likelihood).__name__:
            raise ValueError(
                f"The posterior was fitted with the likelihood {record['likelihood']}, but this "
                f"object has {type(likelihood).__name__}: construct it with the same one."
            )
        example = Example.known(state)
        at = likelihood if sigma is None else likelihood.at_noise(sigma)
        if example is not None and example.contradicts(at, self._device):
            raise ValueError(
                f"The posterior was fitted with another {record['likelihood']}: for the same outputs "
                "and targets, this object's likelihood returns other values. Construct it with the "
                "same likelihood, or fit again."
            )

    def _require_fit(self, surely: bool = False) -> None:
        if self.w_lin is None:
            raise stored.NotFittedError(
                "There is no posterior yet: call la.fit(train_loader), or la.load_state_dict(state)."
            )
        if not self._standing.holds(self._linear_model.network, surely):
            raise stored.NotFittedError(
                "The model's weights have changed since fit(), so this posterior is no longer valid. "
                "Call la.fit(train_loader) again."
            )

    @property
    def _device(self) -> torch.device:
        return self._linear_model.network.device
