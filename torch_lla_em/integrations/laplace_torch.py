"""``Laplace`` with the interface of laplace-torch, for code that was written for it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from math import log, pi, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em import LinearisedLaplace, NotFittedError, Prediction
from torch_lla_em.data import to_device
from torch_lla_em.runtime import check_choice

__all__ = ["Laplace"]

_LEARN = "la.optimize_prior_precision() learns prior_precision, and sigma_noise of a regression"
_BY_NAME = "select tensors by name in LinearisedLaplace(model, likelihood, parameters=[...])"
_SAMPLES = "the GGN is not stored; la.posterior.w_samples are samples of the posterior"
_REPLACED = {
    ("gridsearch",): f"it takes a fit for every value. {_LEARN}, from the training data; "
    "la.posterior.calibrate(val_loader) then uses the validation set, and la.posterior(x) predicts",
    ("nn",): 'use "glm". The network at sampled weights is another function than its linearisation',
    ("bridge", "bridge_norm"): 'use "probit", or "mc" with more n_samples',
    ("feature_reduction",): "select the outputs in the forward_fn of LinearisedLaplace",
    ("functional_variance",): "use la(x) of a regression, or la.posterior.predict(x).covariance",
    ("n_params", "n_outputs"): "use len(la.mean), and model(x).shape[-1]",
    ("sample",): "use la.mean + la.posterior.w_samples, weights of the linearised network",
    ("marglik_training",): f"train the network first; then {_LEARN}",
    ("H", "log_prob", "posterior_precision", "posterior_scale"): _SAMPLES,
    ("posterior_covariance", "posterior_variance"): _SAMPLES,
    ("last_layer_name", "subnetwork", "subnetwork_indices"): _BY_NAME,
}
_INSTEAD = {name: words for names, words in _REPLACED.items() for name in names}
"""What laplace-torch has and this module has not -> what to use."""

_CHOICES = {
    "likelihood": ("classification", "regression", "reward_modeling"),
    "subset_of_weights": ("last_layer", "all"),
    "hessian_structure": ("full", "kron", "diag", "lowrank", "gp"),
    "pred_type": ("glm",),
    "method": ("marglik",),
    "prior_structure": ("scalar", "layerwise"),
    "link_approx": ("probit", "mc"),
}
_WITHOUT_EFFECT = (
    "enable_backprop backend backend_kwargs asdl_fisher_kwargs damping n_subset independent_outputs M diagonal_kernel "
    "functional_approximation dict_key_x n_steps lr init_prior_prec val_loader loss link_approx n_samples "
    "log_prior_prec_min log_prior_prec_max log_prior_prec_base grid_size verbose"
).split()
"""Arguments of how laplace-torch computes what is computed in another way here."""

_PREFIX = "laplace_torch."
_KEPT = "prior_precision", "sigma_noise", "temperature", "prior_mean"


class Laplace:
    """The interface of laplace-torch's ``Laplace`` for the posterior of ``LinearisedLaplace``.

    ``fit`` uses the given ``prior_precision``, ``optimize_prior_precision`` learns it by EM, and
    predictions are around the network's outputs. The posterior is that of the full GGN, by samples.

    Args:
        model (nn.Module): The trained network.
        likelihood (str): "classification", "regression" or "reward_modeling".
        subset_of_weights (str): "last_layer" (default), or "all": all that require gradients.
        hessian_structure (str): Any of laplace-torch's. Default "kron". All use the full GGN.
        sigma_noise (float): Standard deviation of the observation noise. Default 1.0.
        prior_precision (float or Tensor): One number, or one for each parameter tensor. Default 1.0.
        prior_mean (float or Tensor): Mean of the prior, for ``log_marginal_likelihood``. Default 0.0.
        temperature (float): Every example counts 1/temperature times. Default 1.0.
        dict_key_y (str): The key of the targets in batches that are dicts. Default "labels".
        num_samples (int): Variances have a relative Monte Carlo error of √(2 / num_samples). Default 32.
        seed (int): Seed of the samples. Default 0.
        **options: Others of laplace-torch have no effect, or an error says what to use.

    Example:
        >>> la = Laplace(model, "classification", subset_of_weights="all", hessian_structure="kron")
        >>> la.fit(loader)
        >>> la.optimize_prior_precision(method="marglik")
        >>> probabilities = la(x, link_approx="probit")
    """

    prior_precision: Any
    sigma_noise: Any

    def __init__(
        self,
        model: nn.Module,
        likelihood: str,
        subset_of_weights: str = "last_layer",
        hessian_structure: str = "kron",
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float = 1.0,
        dict_key_y: str = "labels",
        *,
        num_samples: int = 32,
        seed: int = 0,
        **options: Any,
    ):
        """Create a posterior that is not fitted yet; the class documents the arguments."""
        self.model, self.likelihood = model, _chosen("likelihood", likelihood)
        self.subset_of_weights = _chosen("subset_of_weights", subset_of_weights)
        self.hessian_structure = _chosen("hessian_structure", hessian_structure)
        _check_others("Laplace", options)
        if self.likelihood != "regression" and sigma_noise != 1:
            raise ValueError("sigma_noise is the observation noise of a regression: leave it out.")
        self.prior_mean, self.temperature = prior_mean, temperature
        self.dict_key_y, self.num_samples, self.seed = dict_key_y, num_samples, seed
        self._device = next(model.parameters()).device
        self._generator = torch.Generator(device=self._device).manual_seed(seed)
        self._loader: Any = None
        self._posterior: LinearisedLaplace | None = None
        self._evidence: Tensor | None = None
        self.sigma_noise, self.prior_precision = sigma_noise, prior_precision

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; the next prediction uses another prior precision λ or noise σ."""
        if name in ("prior_precision", "sigma_noise"):
            value = torch.as_tensor(value, device=self._device).detach()
            if not (value > 0).all() or (name == "sigma_noise" and value.numel() > 1):
                one = "one positive number" if name == "sigma_noise" else "positive"
                raise ValueError(f"{name} must be {one}, not {value.tolist()}.")
            value = value.to(torch.promote_types(value.dtype, torch.float32))
            value = value.reshape(() if name == "sigma_noise" else -1)
            self._is_current = False
        super().__setattr__(name, value)

    @property
    def posterior(self) -> LinearisedLaplace:
        """The posterior at the present prior precision, which is fitted again if it has changed."""
        if self._posterior is None:
            raise NotFittedError("This posterior is not fitted yet. Call la.fit(train_loader).")
        if not self._is_current:
            self._fit(len(self.prior_precision) > 1, em_steps=0)
        return self._posterior

    @property
    def mean(self) -> Tensor:
        """The trained weights of the parameters in the posterior, (P,)."""
        w_MAP: Tensor = self.posterior.w_MAP
        return w_MAP

    @property
    def n_data(self) -> int:
        """The number of training examples."""
        return int(self.posterior.num_data)

    def fit(
        self, train_loader: Iterable[Any], override: bool = True, progress_bar: bool = False
    ) -> None:
        """Fit the posterior at the given ``prior_precision``.

        Args:
            train_loader (DataLoader): Batches of inputs and targets, or dicts, which are read again later.
            override (bool): Must be True, the default.
            progress_bar (bool): Show a progress bar. Default False.
        """
        if not override:
            raise ValueError("The GGN is not stored: call la.fit([*old_loader, *new_loader]).")
        self._loader, self._posterior = train_loader, None
        self._fit(len(self.prior_precision) > 1, em_steps=0, progress_bar=progress_bar)

    def optimize_prior_precision(
        self,
        pred_type: str = "glm",
        method: str = "marglik",
        prior_structure: str = "scalar",
        progress_bar: bool = False,
        **options: Any,
    ) -> None:
        """Learn λ by EM for the linear model, and σ of a regression from residuals of the network.

        Args:
            pred_type (str): Must be "glm", the default.
            method (str): Must be "marglik", the default.
            prior_structure (str): "scalar" (default), or "layerwise": one for each tensor.
            progress_bar (bool): Show a progress bar. Default False.
            **options: Other arguments of laplace-torch, without effect.
        """
        _chosen("pred_type", pred_type), _chosen("method", method)
        structure = _chosen("prior_structure", prior_structure)
        _check_others("optimize_prior_precision", options)
        self._fit(structure == "layerwise", progress_bar=progress_bar)
        if self.likelihood == "regression":
            # EM learns σ of J w, but predictions and evidence are around the network: fit again at its σ
            found = self._around_network(next(iter(self._loader)))
            self.sigma_noise = found.likelihood.observation_noise

    def log_marginal_likelihood(self, *given: Any, **named: Any) -> Tensor:
        """Return log p(y | f) - ½ (log det(I + G / λ) + λ ‖w_MAP‖²) at the fitted λ and σ, shape ().

        ``la.posterior.log_marginal_likelihood()`` is that of the linear model, at its own mode.

        Raises:
            ValueError: If a value is given, or the prior has one precision per tensor.
        """
        if any(value is not None for value in (*given, *named.values())):
            raise ValueError(
                f"log_marginal_likelihood has no derivatives in prior_precision and sigma_noise: {_LEARN}. "
                "For its value elsewhere, set la.prior_precision or la.sigma_noise, and call it without arguments."
            )
        own = self.posterior
        if len(self.prior_precision) > 1:
            raise ValueError(
                "For one precision per tensor: la.posterior.log_marginal_likelihood(train_loader)."
            )
        estimate = own.log_marginal_likelihood().value.cpu()  # an error if the network has changed
        if self._evidence is None:
            last, precision = own.history[-1], own.prior_precision.double().cpu()
            log_det = -2 * (estimate + last["loss"]) - precision * last["squared_norm"]
            apart = (own.w_MAP.double() - self.prior_mean).square().sum().cpu()
            self._evidence = self._log_likelihood() - 0.5 * (log_det + precision * apart)
        return self._evidence

    def _log_likelihood(self) -> Tensor:
        found, constant = torch.zeros((), dtype=torch.float64, device="cpu"), 0.0
        for batch in self._loader:
            f, y = self._around_network(batch).mean, self._targets(batch)
            found += self.posterior.likelihood.log_prob(f, y.to(f.device)).double().sum().cpu()
            if self.likelihood == "regression":  # whose constant has no temperature
                constant += y.numel() * (self.sigma_noise.log().item() + 0.5 * log(2 * pi))
        return (found + constant) / self.temperature - constant

    def _around_network(self, batch: Any) -> Prediction:
        x = batch if isinstance(batch, Mapping) else batch[0]
        return self.posterior.predict(to_device(x, self._device), "network", num_samples=1)

    def __call__(
        self,
        x: Any,
        pred_type: str = "glm",
        joint: bool = False,
        link_approx: str = "probit",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return probabilities (B, C), or mean and covariance of f; differentiable in x if x requires gradients.

        Args:
            x (Tensor or dict): Inputs, as the model takes them.
            pred_type (str): Must be "glm", the default: the linearised network.
            joint (bool): Return the covariance (B C, B C) over all inputs. Default False: (B, C, C).
            link_approx (str): "probit" (default) or "mc".
            n_samples (int): Number of samples if ``link_approx`` is "mc". Default 100.
            diagonal_output (bool): Return variances (B, C). Default False.
            generator (torch.Generator, optional): Used to draw the samples. Default None: the seed.
        """
        link = _chosen("link_approx", link_approx)
        if self.likelihood == "classification" and link == "mc":
            return self.predictive_samples(x, pred_type, n_samples, generator).mean(0)
        mean, deviations = self._at(x, pred_type)
        variance = deviations.square().mean(0)
        if self.likelihood == "classification":
            return (mean / (1 + pi / 8 * variance).sqrt()).softmax(-1)
        if joint:
            flat = deviations.flatten(1)
            return mean.flatten(), flat.T @ flat / len(flat)
        if diagonal_output:
            return mean, variance
        return mean, torch.einsum("kbi,kbj->bij", deviations, deviations) / len(deviations)

    def functional_samples(
        self,
        x: Any,
        pred_type: str = "glm",
        n_samples: int = 100,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return samples of f, shape (n_samples, B, C), joint over inputs and outputs.

        Args:
            x (Tensor or dict): Inputs, as the model takes them.
            pred_type (str): Must be "glm", the default.
            n_samples (int): Number of samples. Default 100.
            generator (torch.Generator, optional): As in ``la(x)``.
        """
        mean, deviations = self._at(x, pred_type)
        drawn = deviations.new_empty(n_samples, len(deviations))
        drawn.normal_(generator=generator or self._generator)
        combined: Tensor = torch.tensordot(drawn, deviations, 1) / sqrt(len(deviations))
        return mean + combined

    def predictive_samples(self, *args: Any, **options: Any) -> Tensor:
        """Return ``functional_samples`` after the softmax; those of a regression are unchanged."""
        samples = self.functional_samples(*args, **options)
        return samples.softmax(-1) if self.likelihood == "classification" else samples

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that predictions and the log marginal likelihood need, as tensors."""
        state = self.posterior.state_dict()
        own = {name: getattr(self, name) for name in _KEPT}
        if len(self.prior_precision) == 1:
            own["log_marginal_likelihood"] = self.log_marginal_likelihood()
        for name, value in own.items():
            state[f"{_PREFIX}{name}"] = torch.as_tensor(value, device=self._device).detach()
        return state

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Load what ``state_dict`` returned.

        Args:
            state_dict (dict): The tensors by name. An error is raised for those of laplace-torch.
        """
        own = {k.removeprefix(_PREFIX): v for k, v in state_dict.items() if k.startswith(_PREFIX)}
        if not own:
            raise ValueError("This state was not saved by this class: call la.fit(train_loader).")
        for name in _KEPT:
            setattr(self, name, own[name])
        self.temperature = own["temperature"].item()
        posterior = self._unfitted(len(self.prior_precision) > 1)
        posterior.load_state_dict(
            {k: v for k, v in state_dict.items() if not k.startswith(_PREFIX)}
        )
        self._posterior, self._loader, self._is_current = posterior, None, True
        self._evidence = own.get("log_marginal_likelihood")

    def __getattr__(self, name: str) -> Any:
        """Raise an error that says what to use."""
        instead = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{instead}.")

    def _fit(self, layerwise: bool, **how: Any) -> None:
        """Fit at the present λ and σ, which ``em_steps=0`` keeps, and take them from the posterior."""
        if self._loader is None:
            raise NotFittedError("This needs the training data: call la.fit(train_loader).")
        if self._posterior is not None:
            self._posterior.state_dict()  # an error if the network has changed since ``fit``
        posterior = self._unfitted(layerwise)
        if "em_steps" in how:
            how["prior_precision"] = self.prior_precision.squeeze()
        posterior.fit(self._loader, **{"validation": False, "progress_bar": False, **how})
        self._posterior, self._evidence = posterior, None
        self.prior_precision = posterior.prior_precision
        self.sigma_noise = 1.0 if posterior.sigma_noise is None else posterior.sigma_noise
        self._is_current = True

    def _unfitted(self, layerwise: bool) -> LinearisedLaplace:
        regression = self.likelihood == "regression"
        return LinearisedLaplace(
            self.model,
            "regression" if regression else "classification",  # of the two logits of a pair
            prior="layerwise" if layerwise else "scalar",
            g_prior=False,
            curvature="network",
            parameters="last_layer" if self.subset_of_weights == "last_layer" else "requires_grad",
            sigma_noise=self.sigma_noise.item() if regression else None,
            temperature=self.temperature,
            num_samples=self.num_samples,
            seed=self.seed,
            forward_fn=nn.Module.__call__,  # dicts are one argument
            target_fn=self._targets,
        )

    def _targets(self, batch: Any) -> Any:
        return batch[self.dict_key_y if isinstance(batch, Mapping) else -1]

    def _at(self, x: Any, pred_type: str) -> tuple[Tensor, Tensor]:
        """Return the mean of f, (B, C), and K samples of f less the mean, (K, B, C)."""
        _chosen("pred_type", pred_type)
        prediction = self.posterior.predict(x, mean="network")
        mean, samples = prediction.mean, prediction.samples
        if mean.dim() != 2:
            raise ValueError(
                f"The network's outputs have shape {tuple(mean.shape)}, but laplace-torch's are (B, C). "
                "Use LinearisedLaplace with class_dim, or la.posterior.predict(x)."
            )
        return mean, samples - mean


def _chosen(name: str, option: Any) -> str:
    """Return an option of laplace-torch, a string or a member of an enum, as a string."""
    given = str(getattr(option, "value", option))
    if given in _INSTEAD:
        raise ValueError(f"{name}={given!r} is not available: {_INSTEAD[given]}.")
    check_choice(name, given, _CHOICES[name])
    return given


def _check_others(function: str, options: Mapping[str, Any]) -> None:
    for name in options:
        if name in _INSTEAD:
            raise ValueError(f"{name} is not available: {_INSTEAD[name]}.")
        if name not in _WITHOUT_EFFECT:
            raise TypeError(f"{function} has no argument {name!r}.")
        logging.getLogger("torch_lla_em").info("%s has no effect here.", name)


def __getattr__(name: str) -> Any:
    """Raise an error that says what to use in place of a name of laplace-torch."""
    subset = "last_layer" if "LLLaplace" in name else "all"
    of_class = f'use Laplace(model, likelihood, "{subset}", "full"), or {_BY_NAME}'
    instead = _INSTEAD.get(name, of_class if name.endswith("Laplace") else "")
    if instead:
        raise ImportError(f"{__name__} has no {name}: {instead}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
