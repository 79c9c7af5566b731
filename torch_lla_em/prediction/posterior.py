"""The tensors of a posterior: as buffers of a module, in state dicts and in files."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from os import PathLike
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torch_lla_em.data import TargetFn
from torch_lla_em.inference import Estimate, Posterior
from torch_lla_em.jacobian import LinearModel, NetworkState
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction import stored
from torch_lla_em.prediction.calibration import Calibration, restored
from torch_lla_em.prediction.conformal import TrainingExamples, output_variance
from torch_lla_em.prediction.functions import MODE, NETWORK, SCALE
from torch_lla_em.prediction.pushed import Products, Pushed, posterior_alone
from torch_lla_em.problem import place_of_vectors
from torch_lla_em.runtime import Compute, files, free_memory, report

Loaded = TypeVar("Loaded", bound="StoredPosterior")


class StoredPosterior(nn.Module):
    """The result of a fit, as buffers of a module.

    The network is not a submodule: its weights are the user's, and not part of this state.
    """

    model: nn.Module
    likelihood: Likelihood
    compute: Compute
    num_samples: int
    tolerance: float
    target_fn: TargetFn | None
    _linear_model: LinearModel
    _given_likelihood: Any
    _given: list[str]
    _state_of_network: NetworkState

    w_lin: Tensor | None
    w_samples: Tensor | None
    prior_precision: Tensor | None
    sigma_noise: Tensor | None
    mixture: Tensor | None

    def __init__(self, model: nn.Module):
        super().__init__()
        object.__setattr__(self, "model", model)
        for name in stored.TENSORS:
            self.register_buffer(name, None)
        self.history: list[dict[str, Any]] = []
        """A record of every EM step."""

        self.calibration: Calibration | None = None
        """The result of the last ``calibrate``, or None."""

        self.messages: list[str] = []
        """The memory plan of the fit, then the warnings of it and of ``calibrate``."""

        self.num_data: int | None = None
        """The number of training examples with a label."""

        self._shard: str | None = None

    @property
    def said(self) -> list[str]:
        """Deprecated: the former name of ``messages``."""
        warnings.warn("la.said is now called la.messages.", DeprecationWarning, stacklevel=2)
        return self.messages

    @property
    def mean(self) -> str:
        """Which function the posterior's samples are added to: "network" or "linear"."""
        if self.mixture is None or self.mixture[0, NETWORK].abs() >= self.mixture[0, MODE].abs():
            return "network"
        return "linear"

    @property
    def posterior_scale(self) -> Tensor | None:
        """τ, the factor of the posterior's variance in predictions; None before ``fit``."""
        return None if self.mixture is None else self.mixture[0, SCALE]

    def log_marginal_likelihood(self) -> Estimate:
        """Return log p(y | λ, σ) of the linear model, with its standard error over samples.

        It compares priors, noise levels and likelihoods on the features of one network. It does not
        compare networks, whose features were learnt from the same targets: use ``compare`` for
        these.

        Returns:
            An ``Estimate`` of ``value`` and ``standard_error``.

        Raises:
            NotFittedError: Before ``fit``, or if the model has changed since.

        Example:
            >>> evidence = la.log_marginal_likelihood().value
        """
        self._require_fit()
        return Estimate(*self._log_evidence)

    def _training(self, num_samples: int | None = None) -> TrainingExamples | None:
        """Return the training examples that the fit has kept, if there are any."""
        if self.training_deviations is None:
            return None
        deviations = self.training_deviations[:, :num_samples]
        return TrainingExamples(self.likelihood, deviations, self.largest_variance)

    def _of_products(self, f: Tensor, Jw: Tensor, y: Tensor, class_dim: int = -1) -> Pushed:
        """Return examples by f, (B, ..., C), J w of w_lin and the samples, and the targets."""
        training = self._training(len(Jw) - 1)
        return Pushed((Products(self.likelihood, f, Jw, training, class_dim),), y)

    def _columns(self, num_samples: int | None = None) -> Tensor:
        """Return w_lin and samples, (1 + K, P)."""
        return torch.cat([self.w_lin[None], self.w_samples[:num_samples]])

    def state_dict(
        self,
        *args: Any,
        destination: dict[str, Tensor] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Tensor]:
        """Return the posterior as tensors, with a format version and the network's fingerprint.

        The posterior is part of the ``state_dict`` of a module that contains it once it is fitted,
        and as long as the network does not change.

        Args:
            destination (dict, optional): Where to add the tensors, as PyTorch passes it.
            prefix (str): What their names start with there. Default "".
            keep_vars (bool): Ignored: no tensor requires gradients.

        Raises:
            NotFittedError: Before ``fit``, or if the model has changed since.
        """
        if destination is not None:
            return self._add_to(destination, prefix)
        self._require_fit(surely=True)
        layout, tensors = self._linear_model.layout, dict(self._buffers)
        record = {
            "likelihood": type(self.likelihood).__name__,
            "likelihood_options": stored.attributes_of(self._given_likelihood),
            "given": self._given,
            "num_data": self.num_data,
            "history": self.history,
            "calibration": self.calibration,
            "said": self.messages,
            "names": layout.names,
            "shapes": [list(shape) for shape in layout.shapes],
        }
        return {
            **{name: tensors[name] for name in stored.TENSORS if tensors[name] is not None},
            "torch_lla_em_version": torch.tensor(files.VERSION, device="cpu"),
            "fingerprint": self._state_of_network.fingerprint,
            "record": files.to_bytes(record),
        }

    def load_state_dict(self, state: dict[str, Tensor], strict: bool = True) -> None:
        """Load a posterior that ``state_dict`` returned.

        Args:
            state (dict): The tensors by name.
            strict (bool): Ignored: the state is always compared with the network and the options.

        Raises:
            ValueError: If the state belongs to another network or likelihood.
        """
        stored.refuse_other_network(state, self._linear_model.network.module)
        self._load(state, NetworkState(self._linear_model.network))

    def _add_to(self, destination: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
        """Add the tensors of this module to those of the module that contains it."""
        if self.w_lin is not None:
            try:
                own = self.state_dict()
            except stored.NotFittedError as error:
                report("warn", f"The state_dict has no posterior. {error}")
                own = {}
            destination.update({f"{prefix}{name}": tensor for name, tensor in own.items()})
        return destination

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *more: Any, **named: Any
    ) -> None:
        """Load the tensors of this module from those of the module that contains it.

        The network may be loaded later, so it is compared when the posterior is used.
        """
        _, _, missing, _, errors = more
        own = stored.without_prefix(state_dict, prefix)
        if not own:
            missing += [f"{prefix}w_lin"] * (self.w_lin is not None)
            return
        try:
            files.check(own)
            expected = NetworkState(self._linear_model.network, own["fingerprint"].cpu())
            self._load(own, expected)
        except ValueError as error:
            errors.append(str(error))

    def _load(self, state: dict[str, Tensor], of_network: NetworkState) -> None:
        record = stored.checked(state, self._linear_model, self._given_likelihood, self._given)
        size = state["w_samples"].nbytes
        place = place_of_vectors(size, self.compute, self._device, free_memory(self._device))
        tensors = {
            name: state[name].to(place, copy=True) for name in stored.TENSORS if name in state
        }
        likelihood, calibration = self._given_likelihood, restored(record.get("calibration"))
        if "sigma_noise" in tensors:
            likelihood = likelihood.at_noise(tensors["sigma_noise"])
        self._replace(tensors, likelihood, of_network)
        self.history, self.num_data = record["history"], record["num_data"]
        self.calibration, self.num_samples = calibration, len(self.w_samples)
        self.messages = record.get("said", ["The memory plan was not saved."])

    def save(self, path: str | PathLike[str]) -> None:
        """Write the posterior to a file, without the network. Loading it runs no code.

        Args:
            path (str): Name of the file. The ending .safetensors selects that format, which needs
                the package safetensors; any other is written by ``torch.save``.

        Raises:
            NotFittedError: Before ``fit``, or if the model has changed since.

        Example:
            >>> la.save("posterior.pt")  # doctest: +SKIP
        """
        given, model = self._given_likelihood, self._linear_model
        own = "prior", "g_prior", "num_samples", "tolerance", "curvature", "seed", "temperature"
        options = {
            **{name: getattr(self, name) for name in own},
            **stored.likelihood_options(given),
            "parameters": model.layout.names,
            "class_dim": model.network.class_dim,
        }
        state = {**self.state_dict(), "options": files.to_bytes(options)}
        files.write_atomically(state, path)

    @classmethod
    def load(
        cls: type[Loaded], path: str | PathLike[str], model: nn.Module, **options: Any
    ) -> Loaded:
        """Return a saved posterior on its network.

        Args:
            path (str): Name of the file that ``save`` has written.
            model (nn.Module): The network, with the weights that the posterior was fitted to.
            **options: Arguments of ``LinearisedLaplace`` that the fit had and a file cannot store: a
                custom likelihood, ``forward_fn``, ``target_fn`` or ``solver``. Other arguments replace
                those saved.

        Raises:
            ValueError: If the file is damaged or belongs to another network, or if an option is
                missing.

        Example:
            >>> la = LinearisedLaplace.load("posterior.pt", model)  # doctest: +SKIP
        """
        state, options = stored.read(path, model, options)
        make: Any = cls
        la: Loaded = make(model, options.pop("likelihood"), **options)
        la.load_state_dict(state)
        return la

    def __getattr__(self, name: str) -> Any:
        """Return a buffer."""
        return super().__getattr__(name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StoredPosterior:
        """Move posterior and network together."""
        network = self._linear_model.network
        unchanged = self.w_lin is not None and self._state_of_network.holds(network)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.model._apply(fn, recurse)
        self._linear_model = LinearModel(network, self._linear_model.layout)  # to be probed there
        if unchanged:
            self._state_of_network = NetworkState(network)
        return self

    def _store(self, posterior: Posterior, history: list[dict[str, Any]], num_data: int) -> None:
        """Replace the posterior once everything that belongs to the new one is known."""
        precision, sigma = posterior.hyper
        likelihood, device = self._given_likelihood, posterior.w_lin.device
        if sigma is not None:
            sigma = sigma.to(device)
            likelihood = likelihood.at_noise(sigma)
        mixture = posterior_alone() if posterior.mixture is None else posterior.mixture
        tensors = {
            "w_lin": posterior.w_lin,
            "w_samples": posterior.w_samples,
            "scale": posterior.scale,
            "prior_precision": precision,
            "sigma_noise": sigma,
            "mixture": mixture.to(device),
            "effective_dim": posterior.effective_dim[0],
            "effective_dim_error": posterior.effective_dim[1],
            "certificate": posterior.certificate,
            "_log_evidence": torch.stack(list(posterior.log_evidence)),
        }
        examples = posterior.examples
        if examples is not None and len(examples):  # none if a single one has too many numbers
            largest = output_variance(likelihood, examples.movedim(1, 0)).max()
            tensors |= {"training_deviations": examples, "largest_variance": largest}
        state = NetworkState(self._linear_model.network)
        self._replace(tensors, likelihood, state)
        self.history, self.num_data, self.calibration = history, num_data, None

    def _replace(
        self, tensors: dict[str, Tensor | None], likelihood: Likelihood, state: NetworkState
    ) -> None:
        for name in stored.TENSORS:
            setattr(self, name, tensors.get(name))
        self.likelihood, self._state_of_network = likelihood, state

    def _require_fit(self, surely: bool = False) -> None:
        if self.w_lin is None:
            raise stored.NotFittedError(
                "This posterior is not fitted yet. Call la.fit(train_loader), or "
                "la.load_state_dict(state)."
            )
        if not self._state_of_network.holds(self._linear_model.network, surely):
            raise stored.NotFittedError(
                "The model's weights have changed since fit(), so this posterior is no longer valid. "
                "Call la.fit(train_loader) again."
            )

    @property
    def _device(self) -> torch.device:
        return self._linear_model.network.device
