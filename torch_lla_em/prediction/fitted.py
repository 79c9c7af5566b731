"""A fitted posterior as a module: its results, its predictions, its files and its programs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from operator import attrgetter
from os import PathLike
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torch_lla_em.data import TargetFn
from torch_lla_em.jacobian import LinearModel, NetworkState
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction import stored
from torch_lla_em.prediction.calibration import CalibratedComponents
from torch_lla_em.prediction.functions import MODE, NETWORK, SCALE, WEIGHT, slots
from torch_lla_em.prediction.posterior import Components, NotFittedError, Posterior, Setting
from torch_lla_em.prediction.predictor import Predictor
from torch_lla_em.prediction.reference import Reference
from torch_lla_em.prediction.summary import PrintedPosterior
from torch_lla_em.runtime import Compute, files, report

logger = logging.getLogger("torch_lla_em")

Loaded = TypeVar("Loaded", bound="PosteriorBase")


def _result(name: str, meaning: str) -> Any:
    """Return a property with a field of the posterior, None before ``fit``."""

    of = attrgetter(name)

    def value(self: PosteriorBase) -> Any:
        return None if self._posterior is None else of(self._posterior)

    return property(value, doc=f"{meaning} None before ``fit``.")


class PosteriorBase(PrintedPosterior, Predictor, nn.Module):
    """A posterior that is fitted or loaded; the base class of ``LinearisedLaplace``.

    The network is not a submodule: its weights are the user's, and not part of this state.
    """

    model: nn.Module
    compute: Compute
    num_samples: int
    tolerance: float
    target_fn: TargetFn | None
    _given_likelihood: Likelihood
    """The likelihood that the user has passed, before its noise is learnt."""

    _given: list[str]
    """The options that a file cannot store."""

    _base: LinearModel
    """The linear model of the first fit."""

    prior_precision = _result("result.prior_precision", "λ, () or one value per tensor.")
    sigma_noise = _result("result.sigma_noise", "σ of a regression.")
    effective_dim = _result("result.effective_dim.value", "γ, how many parameters data determine.")
    effective_dim_error = _result("result.effective_dim.standard_error", "Monte Carlo error of γ.")
    certificate = _result("result.certificate", "The numerical error of each sample, (K,).")
    scale = _result("result.scale", "Prior standard deviation of each parameter at λ = 1, (P,).")
    w_MAP = _result(
        "setting.linear_model.w_MAP", "The trained weights of the parameters in it, (P,)."
    )
    w_lin = _result("result.w_lin", "The mode of the linear model, (P,).")
    w_samples = _result("result.w_samples", "The posterior samples, with mean zero, (K, P).")
    mixture = _result("result.mixture", "The components of predictions.")
    reference = _result("reference", "The scores of validation examples, if there are any.")
    calibration = _result("calibration", "The result of the last ``calibrate``, if there is one.")
    num_data = _result("num_data", "The number of training examples with a label.")
    training_deviations = _result("result.examples", "J w_k of some training examples.")
    largest_variance = _result(
        "largest_variance", "The largest variance of their outputs, each without its own label."
    )

    def __init__(self, model: nn.Module, likelihood: Likelihood):
        super().__init__()
        object.__setattr__(self, "model", model)
        self._given_likelihood = likelihood
        self._posterior: Posterior | None = None
        """The result of the last fit, replaced as a whole."""

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood, with the observation noise that was learnt."""
        return self._given_likelihood if self._posterior is None else self._posterior.likelihood

    @property
    def history(self) -> list[dict[str, Any]]:
        """A record of every EM step."""
        return [] if self._posterior is None else list(self._posterior.history)

    @property
    def messages(self) -> list[str]:
        """The memory plan of the fit, then the warnings of it and of ``calibrate``."""
        return [] if self._posterior is None else list(self._posterior.messages)

    @property
    def mean(self) -> str:
        """Which function the posterior's samples are added to: "network" or "linear"."""
        if self.mixture is None or self.mixture[0, NETWORK].abs() >= self.mixture[0, MODE].abs():
            return "network"
        return "linear"

    @property
    def posterior_scale(self) -> Any:
        """τ, the factor of the posterior's variance in predictions; None before ``fit``."""
        return None if self.mixture is None else self.mixture[0, SCALE]

    def _fitted(self, surely: bool = False) -> Posterior:
        """Return the posterior; raise an error if there is none, or if the network has changed."""
        if self._posterior is None:
            raise NotFittedError(
                "This posterior is not fitted yet. Call la.fit(train_loader), or "
                "la.load_state_dict(state)."
            )
        self._posterior.setting.require(surely)
        return self._posterior

    def function_sample(self, k: int) -> Callable[[Any], Tensor]:
        """Return the k-th function of the posterior, the same function at every call.

        Args:
            k (int): Number of the sample, from 0 to K - 1.

        Returns:
            A function that maps inputs to outputs of shape (B, ..., C).

        Raises:
            IndexError: If there is no such sample.
            NotFittedError: Before ``fit``, or if the model has changed since.

        Example:
            >>> outputs = la.function_sample(0)(x)
        """
        posterior = self._fitted()
        count, some = len(posterior.result.w_samples), slice(None)
        if not 0 <= k < count:
            raise IndexError(
                f"k must be from 0 to {count - 1}, since there are {count} samples, not {k}."
            )
        if posterior.training() is None:  # else the variance of all samples shrinks the mean
            some = slice(k, k + 1)
        part = slots(posterior.result.mixture[:, WEIGHT], count)[k]
        alone = posterior.result.mixture[None, part].clone()
        alone[:, WEIGHT] = 1

        def sample(x: Any) -> Tensor:
            samples = self._at(x, some).prediction(alone).samples
            return samples[k] if len(samples) == count else samples[0]

        return sample

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
        if destination is None:
            return self._state_of(self._fitted(surely=True))
        if self._posterior is not None:
            try:
                own = self.state_dict()
            except NotFittedError as error:
                report("warn", f"The state_dict has no posterior. {error}")
                own = {}
            destination.update({f"{prefix}{name}": tensor for name, tensor in own.items()})
        return destination

    def load_state_dict(self, state: dict[str, Tensor], strict: bool = True) -> None:
        """Load a posterior that ``state_dict`` returned.

        Args:
            state (dict): The tensors by name.
            strict (bool): Ignored: the state is always compared with the network and the options.

        Raises:
            ValueError: If the state belongs to another network or likelihood.
        """
        network = self._linear_model.network
        stored.refuse_other_network(state, network.module)
        setting = Setting(self._linear_model, NetworkState(network), self.target_fn)
        self._take(self._loaded(state, setting))

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *more: Any, **named: Any
    ) -> None:
        """Load the tensors of this module from those of the module that contains it.

        The network may be loaded later, so it is compared when the posterior is used.
        """
        _, _, missing, _, errors = more
        own = stored.without_prefix(state_dict, prefix)
        if not own:
            missing += [f"{prefix}w_lin"] * (self._posterior is not None)
            return
        try:
            files.check(own, "posterior")
            expected = NetworkState(self._linear_model.network, own["fingerprint"].cpu())
            self._take(self._loaded(own, Setting(self._linear_model, expected, self.target_fn)))
        except ValueError as error:
            errors.append(str(error))

    def _state_of(self, posterior: Posterior) -> dict[str, Tensor]:
        return stored.state_of(posterior, self._given_likelihood, self._given)

    def _loaded(self, state: dict[str, Tensor], setting: Setting) -> Posterior:
        own = self._given_likelihood, self._given
        return stored.posterior_of(state, setting, *own, self.compute)

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
        given, posterior = self._given_likelihood, self._fitted(surely=True)
        model = posterior.setting.linear_model
        own = "prior", "g_prior", "num_samples", "tolerance", "curvature", "seed", "temperature"
        options = {
            **{name: getattr(self, name) for name in own},
            **stored.likelihood_options(given),
            "parameters": model.layout.names,
            "class_dim": model.network.class_dim,
            "precision": self.compute.precision,
        }
        state = {**self._state_of(posterior), "options": files.to_bytes(options)}
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
                custom likelihood, ``forward_fn`` or ``target_fn``, and ``solver`` if you call ``fit``
                again. Other arguments replace those saved.

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

    def _take(self, posterior: Posterior) -> None:
        """Load a posterior."""
        self._posterior, self.num_samples = posterior, len(posterior.result.w_samples)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PosteriorBase:
        """Move posterior and network together; a module that contains both may have moved the latter."""
        network, posterior = self._linear_model.network, self._posterior
        unchanged = posterior is not None and posterior.setting.state.holds(network)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.model._apply(fn, recurse)
        model = LinearModel(network, self._linear_model.layout)  # to be probed there
        if posterior is None:
            self._base = model
            return self
        state = NetworkState(network) if unchanged else posterior.setting.state
        setting = posterior.setting._replace(linear_model=model, state=state)
        self._posterior = posterior.moved(fn, setting)
        return self

    def _members(self, surely: bool = False) -> tuple[Posterior, ...]:
        return (self._fitted(surely),)

    def _as_fitted(self) -> tuple[Posterior, ...]:
        posterior = self._posterior or self._fitted()  # all ranks check the network together
        return (posterior.as_fitted(),)

    @property
    def _components(self) -> Components:
        return self._posterior.components

    def _keep(self, found: CalibratedComponents, reference: Reference, messages: list[str]) -> None:
        self._posterior = self._posterior.as_fitted().calibrated(found, reference, messages)

    @property
    def _linear_model(self) -> LinearModel:
        return self._base if self._posterior is None else self._posterior.setting.linear_model

    @property
    def _device(self) -> torch.device:
        return self._linear_model.network.device
