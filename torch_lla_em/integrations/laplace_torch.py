"""``Laplace`` with the interface of laplace-torch, for code that was written for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from math import log, pi, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em import Adapter, LinearisedLaplace, NotFittedError, Prediction, Regression
from torch_lla_em.data import Inputs, to_device
from torch_lla_em.runtime import report

__all__ = ["Laplace"]

_CHOICES: dict[str, tuple[Any, ...]] = {
    "likelihood": ("classification", "regression"),
    "subset_of_weights": ("last_layer", "all"),
    "hessian_structure": ("full", "kron", "diag", "lowrank", "gp"),
    "pred_type": ("glm",),
    "method": ("marglik",),
    "prior_structure": ("scalar",),
    "link_approx": ("probit", "mc"),
    "override": (True,),
    **dict.fromkeys(("joint", "diagonal_output"), (False,)),
    **dict.fromkeys(("last_layer_name", "feature_reduction", "subnetwork_indices"), (None,)),
}

_LEARN = "la.optimize_prior_precision() learns prior_precision, and sigma_noise of a regression"
_BY_NAME = "select tensors by name in LinearisedLaplace(model, likelihood, parameters=[...])"
_INSTEAD = {
    "gridsearch": f"it takes a fit for every value. {_LEARN}, from the training data; "
    "la.posterior.calibrate(val_loader) then uses the validation set, and la.posterior(x) predicts",
    "nn": 'use "glm". The network at sampled weights is another function than its linearisation',
    **dict.fromkeys(("bridge", "bridge_norm"), 'use "probit", or "mc" with more n_samples'),
    "reward_modeling": 'use LinearisedLaplace(model, BradleyTerry()), or "classification"',
    **dict.fromkeys(("joint", "functional_variance"), "use la.posterior.predict(x).f_covariance"),
    "diagonal_output": "use la.posterior.predict(x).f_variance",
    "override": "the GGN is not stored: call la.fit([*old_loader, *new_loader])",
    "feature_reduction": "select the outputs in the adapter of LinearisedLaplace",
    "prior_structure": "use LinearisedLaplace(model, likelihood, layerwise=True)",
    "sample": "use la.mean + la.posterior.w_samples, weights of the linearised network",
    **dict.fromkeys(("last_layer_name", "subnetwork", "subnetwork_indices"), _BY_NAME),
}
"""Values, arguments and methods of laplace-torch that do not exist here -> what to use instead."""

_BY_EVIDENCE = "prior_precision is learnt by fixed-point steps, from the training data"
_UNUSED = dict.fromkeys(("val_loader", "n_steps", "lr", "loss", "grid_size"), _BY_EVIDENCE)
"""Arguments of ``optimize_prior_precision`` without an effect -> the reason."""

_STEPS, _NEAR = 20, 0.01
"""Largest number of fits of a regression in ``optimize_prior_precision``, and the change of log λ
and log σ at which they end, which is below the Monte Carlo error of γ with 32 samples."""

_PREFIX = "laplace_torch."


class Laplace:
    """The interface of laplace-torch's ``Laplace`` for the posterior of ``LinearisedLaplace``.

    ``fit`` uses the given ``prior_precision``, ``optimize_prior_precision`` learns it by EM, and
    predictions are around the network's outputs. The posterior is that of the full GGN, by samples.

    Args:
        model (nn.Module): The trained network.
        likelihood (str): "classification" or "regression".
        subset_of_weights (str): "last_layer" (default), or "all": all that require gradients.
        hessian_structure (str): Any of laplace-torch's. Default "kron". All use the full GGN.
        sigma_noise (float): Standard deviation of the observation noise. Default 1.0.
        prior_precision (float): Prior precision λ. Default 1.0.
        prior_mean (float or Tensor): Mean of the prior, for ``log_marginal_likelihood``. Default
            0.0.
        temperature (float): The log-likelihood is divided by it. Default 1.0.
        dict_key_y (str): The key of the targets in batches that are dicts. Default "labels".
        num_samples (int): Variances have a relative Monte Carlo error of √(2 / num_samples).
            Default 32.
        seed (int): Seed of the samples. Default 0.
        **options: Other arguments of laplace-torch. They have no effect, or raise an error that
            names a replacement.

    Example:
        >>> la = Laplace(model, "classification", subset_of_weights="all")
        >>> la.fit(loader)
        >>> la.optimize_prior_precision(method="marglik")
        >>> probabilities = la(x, link_approx="probit")
    """

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
        named = {"likelihood": likelihood, "subset_of_weights": subset_of_weights}
        chosen = _checked(named | {"hessian_structure": hessian_structure} | options)
        self.model, self.likelihood = model, chosen["likelihood"]
        self.subset_of_weights = chosen["subset_of_weights"]
        if self.likelihood != "regression" and sigma_noise != 1:
            raise ValueError("Only a regression has sigma_noise: leave it out.")
        self.prior_precision: Any = prior_precision
        self.sigma_noise: Any = sigma_noise
        self.prior_mean, self.temperature = prior_mean, temperature
        self.dict_key_y, self.num_samples, self.seed = dict_key_y, num_samples, seed
        self._device = next(model.parameters()).device
        self._generator = torch.Generator(device=self._device).manual_seed(seed)
        self._loader: Any = None
        self._posterior: LinearisedLaplace | None = None
        self._fitted_at: list[Any] = []
        self._evidence: Tensor | None = None

    @property
    def posterior(self) -> LinearisedLaplace:
        """The posterior at ``prior_precision`` and ``sigma_noise``. An error is raised if these
        were set after ``fit``."""
        if self._posterior is None:
            raise NotFittedError("This posterior is not fitted yet. Call la.fit(train_loader).")
        given = [torch.as_tensor(v, device="cpu").tolist() for v in self._numbers()]
        if given != self._fitted_at:
            raise NotFittedError("la has another prior or noise. Call la.fit(train_loader).")
        return self._posterior

    def _numbers(self) -> tuple[Any, Any]:
        return self.prior_precision, self.sigma_noise

    mean = property(lambda self: self.posterior.w_MAP, doc="The trained weights, (P,).")
    n_data = property(lambda self: self.posterior.num_data, doc="The number of training examples.")

    def fit(self, train_loader: Iterable[Any], **options: Any) -> None:
        """Fit the posterior at the given ``prior_precision``.

        The ``train_loader`` has batches of inputs and targets, or dicts, and is read again later.
        ``progress_bar`` is one of the ``options``, as in ``LinearisedLaplace.fit``.
        """
        self._loader = train_loader
        self._fit(options, em_steps=0, prior_precision=self.prior_precision)

    def optimize_prior_precision(
        self, pred_type: str = "glm", method: str = "marglik", **options: Any
    ) -> None:
        """Learn λ, and σ of a regression.

        For a regression they maximise ``log_marginal_likelihood``, Laplace's evidence at the
        trained weights, whose λ is γ / ‖w_MAP‖². For a classification λ is learnt by EM for the
        linear model, γ / ‖w_lin‖² at the mode of that model, which is several times larger than
        laplace-torch's; a message states this.

        ``pred_type`` and ``method`` must be the defaults. Among the ``options``, only
        ``progress_bar`` has an effect.
        """
        options |= {"pred_type": pred_type, "method": method}
        if self._loader is None:
            raise NotFittedError("This needs the training data: call la.fit(train_loader).")
        if self._posterior is not None:
            self._posterior.state_dict()  # raises if the network has changed since ``fit``
        if self.likelihood == "regression":
            self._maximise_evidence(options)
            return
        report(
            "log",
            "optimize_prior_precision learns prior_precision by EM for the linear model. "
            "laplace-torch maximises the evidence at the trained weights, which gives a smaller "
            "one and wider predictions.",
        )
        self._fit(options)

    def _maximise_evidence(self, options: dict[str, Any]) -> None:
        """Set λ and σ of a regression to values where the derivatives of the evidence are 0
        (MacKay, 1992)."""
        squares, count = 0.0, 0
        fit = partial(self._fit, options, em_steps=0)
        fit(prior_precision=self.prior_precision)
        for batch in self._loader:
            f = self._around_network(batch).f_mean
            squares += (f - self._targets(batch).to(f.device)).double().square().sum().item()
            count += f.numel()
        w_MAP = self.posterior.w_MAP
        assert w_MAP is not None
        apart = (w_MAP.double() - self.prior_mean).square().sum()
        for _ in range(_STEPS):
            gamma = self.posterior.effective_dim
            assert gamma is not None
            gamma = gamma.double()
            free = (count - gamma).clamp_min(1)  # γ can be close to the number of targets
            due = torch.stack([gamma / apart, (squares / (free * self.temperature)).sqrt()]).log()
            now = torch.stack(
                [torch.as_tensor(v, device="cpu").to(due) for v in self._numbers()]
            ).log()
            if (due - now).abs().max() < _NEAR:
                return
            # γ falls by less than λ rises, so half a step of λ at least halves its error
            precision, self.sigma_noise = (now + (due - now) * due.new_tensor([0.5, 1.0])).exp()
            fit(prior_precision=precision)
        report("log", f"prior_precision has not converged after {_STEPS} fits.")

    def log_marginal_likelihood(self, *given: Any, **named: Any) -> Tensor:
        """Return log p(y | f) - ½ (log det(I + G / λ) + λ ‖w_MAP‖²) at the fitted λ and σ, shape
        ().

        ``la.posterior.log_marginal_likelihood()`` is that of the linear model at its mode.
        """
        posterior = self.posterior
        if any(v is not None for v in (*given, *named.values())):
            raise ValueError(
                "log_marginal_likelihood is computed for the fitted prior_precision, without "
                "derivatives: set la.prior_precision, call la.fit(train_loader), and pass no "
                f"arguments. {_LEARN}."
            )
        # an error if the network has changed
        estimate = posterior.log_marginal_likelihood().value.cpu()
        if self._evidence is None:
            precision, w_MAP = posterior.prior_precision, posterior.w_MAP
            assert precision is not None and w_MAP is not None
            last, precision = posterior.history[-1], precision.double().cpu()
            log_det = -2 * (estimate + last["loss"]) - precision * last["squared_norm"]
            apart = (w_MAP.double() - self.prior_mean).square().sum().cpu()
            evidence, constant = -0.5 * (log_det + precision * apart), 0.0
            for batch in self._loader:
                f, y = self._around_network(batch).f_mean, self._targets(batch)
                terms = posterior.likelihood.log_prob(f, y.to(f.device)).double().sum().cpu()
                if self.likelihood == "regression":  # its constant has no temperature
                    constant = y.numel() * (log(self.sigma_noise) + 0.5 * log(2 * pi))
                evidence = evidence + (terms + constant) / self.temperature - constant
            self._evidence = evidence
        return self._evidence

    def __call__(
        self, x: Inputs, pred_type: str = "glm", link_approx: str = "probit", **options: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return probabilities (B, C); for a regression mean and covariance of f, (B, C) and (B, C,
        C).

        They are differentiable in x if x requires gradients.

        Args:
            x (Tensor or dict): Inputs, as the model takes them.
            pred_type (str): Must be "glm", the default: the linearised network.
            link_approx (str): "probit" (default) or "mc".
            **options: ``n_samples`` and ``generator`` for "mc", as in ``functional_samples``.
        """
        _checked({"link_approx": link_approx, **options})
        if self.likelihood == "classification" and link_approx == "mc":
            return self.predictive_samples(x, pred_type, **options).mean(0)
        mean, deviations = self._at(x, pred_type)
        if self.likelihood == "classification":
            return (mean / (1 + pi / 8 * deviations.square().mean(0)).sqrt()).softmax(-1)
        return mean, torch.einsum("k...i,k...j->...ij", deviations, deviations) / len(deviations)

    def functional_samples(
        self,
        x: Inputs,
        pred_type: str = "glm",
        n_samples: int = 100,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return ``n_samples`` samples of f at x, shape (n_samples, B, C), joint over inputs and
        outputs.

        ``pred_type`` must be "glm". Without a ``generator``, the posterior's own one is used, whose
        seed is ``seed``.
        """
        mean, deviations = self._at(x, pred_type)
        drawn = deviations.new_empty(n_samples, len(deviations))
        drawn.normal_(generator=generator or self._generator)
        samples: Tensor = mean + torch.tensordot(drawn, deviations, 1) / sqrt(len(deviations))
        return samples

    def predictive_samples(self, *args: Any, **options: Any) -> Tensor:
        """Return ``functional_samples`` after the softmax; those of a regression are unchanged."""
        samples = self.functional_samples(*args, **options)
        return samples.softmax(-1) if self.likelihood == "classification" else samples

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that predictions and the log marginal likelihood need, as tensors."""
        numbers = {"prior_mean": self.prior_mean, "temperature": self.temperature}
        numbers |= {"evidence": self.log_marginal_likelihood()}
        tensors = {f"{_PREFIX}{n}": torch.as_tensor(v, device="cpu") for n, v in numbers.items()}
        return self.posterior.state_dict() | tensors

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Load a ``state_dict`` that this class has returned; an error is raised for those of
        laplace-torch."""
        numbers = {
            k.removeprefix(_PREFIX): v for k, v in state_dict.items() if k.startswith(_PREFIX)
        }
        if not numbers:
            raise ValueError("This state was not saved by this class: call la.fit(train_loader).")
        self.prior_mean = numbers["prior_mean"].to(self._device)
        self.temperature = numbers["temperature"].item()
        posterior = self._unfitted()
        posterior.load_state_dict({n: t for n, t in state_dict.items() if _PREFIX not in n})
        self._take(posterior)
        self._loader, self._evidence = None, numbers["evidence"]

    def __getattr__(self, name: str) -> Any:
        """Raise an error that names a replacement."""
        instead = _INSTEAD.get(name, "la.posterior, a LinearisedLaplace, may have it")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}: {instead}.")

    def _fit(self, options: dict[str, Any], **how: Any) -> None:
        how["progress_bar"] = bool(_checked(options).get("progress_bar"))
        how["weights"] = None if self.temperature == 1 else 1 / self.temperature
        posterior, self._posterior = self._unfitted(), None
        self._take(posterior.fit(self._loader, validation=False, **how))

    def _take(self, posterior: LinearisedLaplace) -> None:
        """Store a posterior, and its λ and σ."""
        noise = 1.0 if posterior.sigma_noise is None else posterior.sigma_noise
        self.prior_precision = posterior.prior_precision
        self.sigma_noise = torch.as_tensor(noise, device=self._device)
        self._fitted_at = [self.prior_precision.tolist(), self.sigma_noise.tolist()]
        self._posterior, self._evidence = posterior, None

    def _unfitted(self) -> LinearisedLaplace:
        is_regression = self.likelihood == "regression"
        return LinearisedLaplace(
            self.model,
            Regression(float(self.sigma_noise)) if is_regression else self.likelihood,
            prior="isotropic",
            curvature="network",
            parameters="last_layer" if self.subset_of_weights == "last_layer" else "requires_grad",
            num_samples=self.num_samples,
            seed=self.seed,
            adapter=Adapter(nn.Module.__call__, self._targets),  # dicts are one argument
        )

    def _targets(self, batch: Any) -> Any:
        return batch[self.dict_key_y if isinstance(batch, Mapping) else -1]

    def _around_network(self, batch: Any) -> Prediction:
        x = batch if isinstance(batch, Mapping) else batch[0]
        return self.posterior.predict(to_device(x, self._device), "network")

    def _at(self, x: Inputs, pred_type: str) -> tuple[Tensor, Tensor]:
        """Return the mean of f, (B, ..., C), and K samples of f minus the mean."""
        _checked({"pred_type": pred_type})
        prediction = self.posterior.predict(x, mean="network")
        return prediction.f_mean, prediction.samples - prediction.f_mean


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of laplace-torch with enums as strings, or raise an error that names a
    replacement."""
    given = {name: getattr(option, "value", option) for name, option in options.items()}
    for name, value in given.items():
        choices = _CHOICES.get(name)
        if choices and value not in choices:
            instead = _INSTEAD.get(str(value), _INSTEAD.get(name, f"choose one of {choices}"))
            raise ValueError(f"{name}={value!r} is not available: {instead}.")
        if not choices and name not in ("progress_bar", "n_samples", "generator"):
            why = _UNUSED.get(name, "the full GGN is used")
            report("log", f"The argument {name!r} has no effect: {why}.")
    return given
