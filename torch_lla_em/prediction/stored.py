"""A posterior as the state of a module: its tensors, saved and loaded, and when they are valid."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.inference import Posterior
from torch_lla_em.jacobian import LinearModel, Network
from torch_lla_em.likelihoods import LIKELIHOODS, Likelihood, Regression
from torch_lla_em.problem import place_of_vectors
from torch_lla_em.runtime import Compute, files, free_memory
from torch_lla_em.runtime import records as persistence


class NotFittedError(RuntimeError):
    """Something was asked of a posterior that is not there yet."""


# what a fit leaves, as buffers; the private ones serve evidence and curve
_TENSORS = (
    "w_lin",
    "w_samples",
    "scale",
    "prior_precision",
    "sigma_noise",
    "posterior_scale",
    "mean_factor",
    "effective_dim",
    "effective_dim_error",
    "certificate",
    "_log_evidence",
    "_eigenvalues",
    "_xi_coordinates",
    "_eta_coordinates",
    "_modes",
)


class StoredPosterior(nn.Module):
    """What a fit leaves, as buffers of a module that a network is beside, not inside.

    The network is no submodule: its weights are the user's, and no part of this state.
    """

    model: nn.Module
    likelihood: Likelihood
    compute: Compute
    _linear_model: LinearModel
    _given_likelihood: Likelihood

    def __init__(self, model: nn.Module):
        super().__init__()
        object.__setattr__(self, "model", model)
        self.history: list[dict[str, Any]] = []
        self.mean = "network"
        """What predictions are around: "network" or "linear", as ``calibrate`` found better."""

        self.num_data: int | None = None
        self._versions: list[int] | None = []
        for name in _TENSORS:
            self.register_buffer(name, None)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the posterior as tensors, with a version and the network's fingerprint."""
        self._require_fit()
        state = {name: getattr(self, name) for name in _TENSORS if getattr(self, name) is not None}
        state["torch_lla_em_version"] = torch.tensor(persistence.VERSION)
        state["fingerprint"] = persistence.fingerprint(self._linear_model.network.module)
        state["record"] = persistence.to_bytes(
            {
                "likelihood": type(self.likelihood).__name__,
                "names": self._linear_model.layout.names,
                "shapes": [list(shape) for shape in self._linear_model.layout.shapes],
                "num_data": self.num_data,
                "history": self.history,
                "mean": self.mean,
            }
        )
        return state

    def load_state_dict(self, state: dict[str, Tensor], strict: bool = True) -> None:
        """Take over a posterior; refused where the network is not the one it was fitted to."""
        persistence.check(state)
        record = persistence.from_bytes(state["record"])
        self._refuse_other_network(state, record)
        if record["likelihood"] != type(self.likelihood).__name__:
            raise ValueError(
                f"The posterior was fitted with the likelihood {record['likelihood']}, but this "
                f"object has {type(self.likelihood).__name__}: construct it with the same one."
            )
        device, size = self._linear_model.network.device, state["w_samples"].nbytes
        device = place_of_vectors(size, self.compute, device, free_memory(device))
        for name in _TENSORS:
            tensor = state.get(name)
            setattr(self, name, None if tensor is None else tensor.to(device, copy=True))
        self.history, self.num_data = record["history"], record["num_data"]
        self.mean = record.get("mean", "network")
        if self.mean_factor is None:  # of an earlier release
            self.mean_factor = torch.ones_like(self.posterior_scale)
        if self.sigma_noise is not None:
            self.likelihood = self._given_likelihood.at_noise(self.sigma_noise)
        self._versions = self._linear_model.network.versions()

    def save(self, path: str | PathLike) -> None:
        """Write the posterior to a file, without the network."""
        options = self._options()
        given = self._given_likelihood
        likelihood = {kind: name for name, kind in LIKELIHOODS.items()}.get(type(given))
        # arguments other than the noise are not stored, so they make it one's own
        if likelihood == "regression" or (likelihood and vars(given) == vars(type(given)())):
            options["likelihood"] = likelihood
        state = {**self.state_dict(), "options": persistence.to_bytes(options)}
        files.write_atomically(state, path)

    @classmethod
    def load(cls, path: str | PathLike, model: nn.Module, **options: Any) -> StoredPosterior:
        """Return a saved posterior on its network.

        What tensors cannot hold (a likelihood of your own, forward_fn, target_fn, solver) is
        passed again, as ``options``.
        """
        state = persistence.read(path)
        if "options" not in state:
            raise ValueError(
                "The file holds a state_dict: construct the object and load_state_dict."
            )
        options = {**persistence.from_bytes(state["options"]), **options}
        if "likelihood" not in options:
            raise ValueError(
                "The file was written with a likelihood of your own, or with arguments of your "
                "own: pass likelihood=."
            )
        options["sigma_noise"] = torch.as_tensor(options["sigma_noise"], dtype=torch.float64)
        record = persistence.from_bytes(state["record"])
        shapes = {name: list(p.shape) for name, p in Network(model).module.named_parameters()}
        missing = [n for n, s in zip(record["names"], record["shapes"]) if shapes.get(n) != s]
        if missing:
            raise ValueError(
                f"The model has no parameter {missing[0]!r} of the saved shape: the posterior "
                "belongs to another architecture."
            )
        la = cls(model, options.pop("likelihood"), **options)
        la.load_state_dict(state)
        return la

    def _options(self) -> dict[str, Any]:
        """Return the constructor's plain arguments, for ``save``."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        """Copies of a network count their changes anew; say whether they are up to date."""
        current = self._versions == self._linear_model.network.versions()
        return {**self.__dict__, "_versions": None if current else self._versions}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._versions is None:
            self._versions = self._linear_model.network.versions()

    def train(self, mode: bool = True) -> StoredPosterior:
        """Set this object's own flag; predictions always run the network in eval mode."""
        self.training = mode
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StoredPosterior:
        """Move posterior and network together."""
        super()._apply(fn, recurse)
        self.model._apply(fn, recurse)
        if self.w_lin is not None:
            self._versions = self._linear_model.network.versions()
        return self

    def _store(self, posterior: Posterior, history: list[dict[str, Any]], num_data: int) -> None:
        self.w_lin, self.w_samples = posterior.w_lin, posterior.w_samples
        self.scale, self.certificate = posterior.scale, posterior.certificate
        self.prior_precision, self.sigma_noise = posterior.hyper
        self.effective_dim, self.effective_dim_error = posterior.effective_dim
        self.posterior_scale = torch.ones((), dtype=torch.float64, device=self.w_lin.device)
        self.mean_factor, self.mean = torch.ones_like(self.posterior_scale), "network"
        self._log_evidence = torch.stack(list(posterior.log_evidence))
        spectrum = posterior.spectrum or (None, None, None)
        self._eigenvalues, self._xi_coordinates, self._eta_coordinates = spectrum
        self._modes = posterior.modes
        if self.sigma_noise is not None:
            self.likelihood = self._given_likelihood.at_noise(self.sigma_noise)
        elif isinstance(self._given_likelihood, Regression):  # tempered, so its noise stays
            self.likelihood = self._given_likelihood
            self.sigma_noise = self.likelihood.sigma_noise.to(self.w_lin.device)
        self.history, self.num_data = history, num_data
        self._versions = self._linear_model.network.versions()

    def _require_fit(self) -> None:
        if self.w_lin is None:
            raise NotFittedError(
                "There is no posterior yet: call la.fit(train_loader), or la.load_state_dict(state)."
            )
        if self._versions != self._linear_model.network.versions():
            raise NotFittedError(
                "The network's weights have changed since the fit, so the posterior is not theirs: "
                "call la.fit(train_loader) again."
            )

    def _refuse_other_network(self, state: dict[str, Tensor], record: dict[str, Any]) -> None:
        layout = self._linear_model.layout
        saved = list(zip(record["names"], map(tuple, record["shapes"])))
        if saved != list(zip(layout.names, map(tuple, layout.shapes))):
            raise ValueError(
                f"The posterior is over {len(saved)} tensors that start with {saved[0]}, but this "
                f"object's random weights are {len(layout.names)} that start with "
                f"{(layout.names[0], tuple(layout.shapes[0]))}: pass the same `parameters`."
            )
        module, saved = self._linear_model.network.module, state["fingerprint"].cpu()
        own = (persistence.fingerprint(module, earlier) for earlier in (False, True))
        if not any(torch.equal(mark, saved) for mark in own):
            raise ValueError(
                "The network's weights or buffers are not those that the posterior was fitted to: "
                "load the checkpoint of that network first, or fit again."
            )
