"""What a fitted posterior answers: predictions, functions, evidence, calibration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.data import Data, TargetFn, inputs_of, map_tensors, to_device
from torch_lla_em.inference import Curve, Estimate, Modes, curve
from torch_lla_em.prediction.held_out import calibrated
from torch_lla_em.prediction.prediction import Prediction, mixed
from torch_lla_em.prediction.stored import StoredPosterior
from torch_lla_em.problem import Problem
from torch_lla_em.runtime import group_of
from torch_lla_em.solvers import Spectrum


class PredictivePosterior(StoredPosterior):
    """A stored posterior that is called."""

    num_samples: int
    target_fn: TargetFn | None
    _shard: str | None

    def forward(
        self, x: Any, link_approx: str = "mc", generator: torch.Generator | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return E[y] (probabilities, rates); for regression (mean, variance with the noise).

        ``"mc"`` averages over the samples, or over as many fresh ones from a generator;
        ``"probit"`` uses the variance alone, ``"probit_shared"`` one variance for all classes,
        which keeps the most probable one.
        """
        check_choice("link_approx", link_approx, ("mc", "probit", "probit_shared"))
        prediction = self.predict(x, generator=generator)
        if self.likelihood.real_valued:
            return tuple(prediction.moments())
        if link_approx == "mc":
            return prediction.expectation
        return prediction.smoothed(shared=link_approx == "probit_shared")

    def predict(
        self, x: Any, mean: str | None = None, generator: torch.Generator | None = None
    ) -> Prediction:
        """Return the predictive distribution at x, around f(x) or around J(x) w_lin.

        ``mean`` is "network", "linear", or what ``calibrate`` chose (the network, before it).
        """
        mean = mean or self.mean
        check_choice("mean", mean, ("network", "linear"))
        self._require_fit()
        f, Jw = self._push_forward(x, torch.cat([self.w_lin[None], self.w_samples]))
        deviations = self.posterior_scale.sqrt().to(Jw) * Jw[1:]
        if generator is not None:
            deviations = mixed(deviations, generator)
        centre = f if mean == "network" else Jw[0]
        if mean == self.mean:
            centre = self.mean_factor.to(centre) * centre
        class_dim = self._linear_model.network.class_dim
        return Prediction(self.likelihood, centre, deviations, class_dim)

    def functional_samples(self, x: Any, generator: torch.Generator | None = None) -> Tensor:
        """Return the mean + √τ J(x) w_k, shape (K, B, C): joint over the inputs."""
        return self.predict(x, generator=generator).samples

    def predictive_samples(self, x: Any, generator: torch.Generator | None = None) -> Tensor:
        """Return the functional samples after the link, shape (K, B, C)."""
        return self.predict(x, generator=generator).predictive_samples

    def function_sample(self, k: int) -> Callable[[Any], Tensor]:
        """Return the k-th function of the posterior, x -> (B, C): the same at every call."""
        self._require_fit()
        if not -self.num_samples <= k < self.num_samples:
            raise IndexError(f"There are {self.num_samples} samples: k runs from 0, not to {k}.")

        linear, factor = self.mean == "linear", self.mean_factor.clone()
        w = self.posterior_scale.sqrt().to(self.w_lin) * self.w_samples[k][None]
        if linear:
            w = w + factor.to(w) * self.w_lin

        def sample(x: Any) -> Tensor:
            f, Jw = self._push_forward(x, w)
            class_dim = self._linear_model.network.class_dim
            centre = torch.zeros_like(f) if linear else factor.to(f) * f
            return Prediction(self.likelihood, centre, Jw, class_dim).samples[0]

        return sample

    def joint_log_prob(self, x: Any, y: Tensor, mean: str | None = None) -> Tensor:
        """Return log p(y_1..y_B | x_1..x_B), shape ()."""
        return self.predict(x, mean).joint_log_prob(y)

    def calibrate(self, loader: Iterable[Any], mean: str | None = None) -> PredictivePosterior:
        """Fit the posterior scale τ to held-out data; one pass.

        Where outputs are scores of classes, a factor of the mean goes with it. Unless a mean
        is given, it is that of the linear model, or of the network where this is the better
        one by more than four standard errors. Where several ranks have fitted together, all of
        them call it together.
        """
        self._require_fit()
        means = ("network", "linear") if mean is None else (mean,)
        for name in means:
            check_choice("mean", name, ("network", "linear"))
        with group_of(self._shard).joined() as group:
            data = Data(loader, self._device, self.target_fn, group)
            problem = Problem(self._linear_model, self.likelihood, data)
            columns = torch.cat([self.w_lin[None], self.w_samples])
            self.mean, best = calibrated(problem, columns, means)
        self.posterior_scale = torch.full_like(self.posterior_scale, best.scale)
        self.mean_factor = torch.full_like(self.mean_factor, best.factor)
        return self

    def log_marginal_likelihood(self) -> Estimate:
        """Return log p(y | λ, σ) of the linear model, with its standard error over samples."""
        self._require_fit()
        return Estimate(*self._log_evidence)

    def curve(self, precisions: Iterable[float] | Tensor) -> Curve:
        """Return γ and the log evidence over a grid of λ, without a pass over data.

        The evidence of a non-Gaussian likelihood is known where EM went and half a decade
        either side of λ*, and NaN beyond.
        """
        self._require_fit()
        if self._eigenvalues is None:
            raise ValueError(
                "The curve needs one λ and the block-Krylov solver: fit with prior='scalar', one "
                "sigma_noise and solver=None."
            )
        precisions = torch.as_tensor(precisions, dtype=torch.float64)
        if precisions.dim() != 1 or not (precisions > 0).all():
            raise ValueError("precisions must be a list of positive numbers.")
        spectrum = Spectrum(self._eigenvalues, self._xi_coordinates, self._eta_coordinates)
        spectrum = Spectrum(*(tensor.double().cpu() for tensor in spectrum))
        gamma, evidence = curve(spectrum, Modes(*self._modes.double().cpu()), precisions)
        path = torch.tensor([record["prior_precision"] for record in self.history])
        return Curve(precisions, gamma, evidence, path, self.prior_precision.item())

    def _push_forward(self, x: Any, w: Tensor) -> tuple[Tensor, Tensor]:
        network = self._linear_model.network
        x = to_device(inputs_of(x) if isinstance(x, Mapping) else x, network.device)
        differentiate = torch.is_grad_enabled() and _requires_grad(x)
        with network.guarded(), torch.set_grad_enabled(differentiate):
            return self._linear_model.jvp(self._linear_model.prepare(x), w)

    @property
    def _device(self) -> torch.device:
        return self._linear_model.network.device


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        expected = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name}={value!r} is not known: choose one of {expected}.")


def _requires_grad(x: Any) -> bool:
    found: list[bool] = []
    map_tensors(lambda tensor: found.append(tensor.requires_grad), x)
    return any(found)
