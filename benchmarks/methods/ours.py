"""``LinearisedLaplace`` in all its variants: one fit serves several rows."""

from collections.abc import Callable
from dataclasses import dataclass
from math import log
from unittest.mock import patch

import torch
from methods.baselines import Predictor, Setting
from methods.metrics import Classes, Numbers
from torch import Tensor

from torch_lla_em import Compute, LinearisedLaplace
from torch_lla_em.prior import g_prior_scale

READ = Compute(keep_data=False)  # at every pass, so that the loader can count them
_SCALES = [0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0]
_CENTRES = [0.4, 0.5, 0.6, 0.7, 0.85, 1.0, 1.2, 1.4, 1.7, 2.0, 2.5, 3.0]


@dataclass(frozen=True)
class Variant:
    """What is fitted."""

    prior: str = "scalar"
    g_prior: bool = True
    curvature: str = "network"
    num_samples: int = 32
    damping: float = 0.0
    """What share of its mean is added to the g-prior's expected squared features."""

    @property
    def name(self) -> str:
        damped = f"g-prior damped by {self.damping}" if self.damping else "g-prior"
        parts = [self.prior, damped if self.g_prior else "plain prior"]
        parts += ["H at linear mode"] if self.curvature == "linear" else []
        return f"ours: {', '.join(parts)}, K={self.num_samples}"

    def __call__(self, setting: Setting) -> dict[str, Predictor]:
        """Fit, and return predictors around both means, for each choice of scale."""
        la = fit(setting, self)
        rows = {}
        for mean in ("network", "linear"):
            name = self.name + ("" if mean == "network" else ", mean J w_lin")
            rows[name] = predictor(la, mean)
            rows[f"{name}, calibrated"] = calibrated(la, mean, setting)
            if not setting.task.regression:
                rows[f"{name}, joint calibration"] = predictor(la, mean, *_jointly(la, mean, setting))
                both = _jointly(la, mean, setting, centres=_CENTRES)
                rows[f"{name}, two numbers"] = predictor(la, mean, *both)
                both = _two_numbers(la, mean, setting)
                rows[f"{name}, two numbers with a prior"] = predictor(la, mean, *both)
        return rows


@dataclass(frozen=True)
class Shipped(Variant):
    """The library as it is: its own defaults but for what is named, and its ``calibrate``."""

    @property
    def name(self) -> str:
        prior = "g-prior" if self.g_prior else "plain prior"
        return f"library: {prior}, curvature {self.curvature}"

    def __call__(self, setting: Setting) -> dict[str, Predictor]:
        """Fit, and return predictions as they are, and calibrated with either mean or the better."""
        la = LinearisedLaplace(
            setting.network,
            "regression" if setting.task.regression else "classification",
            g_prior=self.g_prior,
            curvature=self.curvature,
            seed=setting.seed,
            compute=READ,
        )
        la.fit(setting.loader, progress_bar=False, em_steps=2 if setting.quick else 20)
        rows = {self.name: predictor(la, "network")}
        for mean in ("network", "linear", None):
            la.calibrate([tuple(setting.task.val)], mean)
            chosen = la.mean, la.posterior_scale.item(), la.mean_factor.item()
            label = {None: "calibrated", "linear": "calibrated, mean J w_lin"}
            row = f"{self.name}, {label.get(mean, 'calibrated, mean f')}"
            rows[row] = predictor(la, *chosen)
        return rows


def shipped() -> list[Variant]:
    """Return the library with its defaults, and with what might be better ones."""
    return [Shipped(), Shipped(curvature="linear")]


def variants(regression: bool) -> list[Variant]:
    """Return what is fitted at K = 32, and other K with the plain scalar prior."""
    fits = [Variant(p, g) for p in ("scalar", "layerwise") for g in (True, False)]
    if not regression:
        fits += [Variant("scalar", g, "linear") for g in (True, False)]
        fits += [Variant("scalar", True, c, damping=0.1) for c in ("network", "linear")]
    return fits + [Variant(g_prior=False, num_samples=k) for k in (8, 128)]


def fit(setting: Setting, variant: Variant) -> LinearisedLaplace:
    """Return the fitted posterior.

    Damping is no option of the library; here it replaces the g-prior's scale.
    """
    likelihood = "regression" if setting.task.regression else "classification"
    la = LinearisedLaplace(
        setting.network,
        likelihood,
        prior=variant.prior,
        g_prior=variant.g_prior,
        curvature=variant.curvature,
        num_samples=variant.num_samples,
        seed=setting.seed,
        compute=READ,
    )

    def damped(squares: Tensor) -> Tensor:
        return g_prior_scale(torch.where(squares > 0, squares + variant.damping * squares.mean(), 0))

    with patch("torch_lla_em.stochastic_prior.g_prior_scale", damped):
        return la.fit(setting.loader, progress_bar=False, em_steps=2 if setting.quick else 20)


def predictor(
    la: LinearisedLaplace, mean: str, scale: float = 1.0, factor: float = 1.0
) -> Predictor:
    """Return predictions with posterior scale ``scale``, and the mean times ``factor``."""
    regression = la.sigma_noise is not None

    def predict(x: Tensor) -> Classes | Numbers:
        la.posterior_scale = torch.tensor(scale, dtype=torch.float64)
        la.mean_factor = torch.ones((), dtype=torch.float64)
        prediction = la.predict(x, mean)
        if regression:
            sigma = la.sigma_noise.item()
            return Numbers(prediction.mean.flatten(), prediction.covariance, sigma)
        return Classes.of(prediction.samples + (factor - 1) * prediction.mean)

    predict.details = {
        "mean": mean,
        "scale": scale,
        "factor": factor,
        "prior_precision": la.prior_precision.tolist(),
        "effective_dim": la.effective_dim.sum().item(),
        "certificate": la.certificate.max().item(),
    }
    return predict


def calibrated(la: LinearisedLaplace, mean: str, setting: Setting) -> Predictor:
    """Return predictions with τ by the library's ``calibrate``."""
    la.calibrate([tuple(setting.task.val)], mean)
    return predictor(la, mean, la.posterior_scale.item(), la.mean_factor.item())


def _held_out(
    la: LinearisedLaplace, mean: str, setting: Setting
) -> Callable[[float, float], Classes]:
    """Return the predictions on held-out data as a function of τ and a factor of the mean."""
    la.posterior_scale = torch.ones((), dtype=torch.float64)
    prediction = la.predict(setting.task.val.x, mean)
    centre, deviations = prediction.mean, prediction.samples - prediction.mean
    return lambda scale, factor: Classes.of(factor * centre + scale**0.5 * deviations)


def _jointly(
    la: LinearisedLaplace, mean: str, setting: Setting, centres: list[float] | None = None
) -> tuple[float, float]:
    """Return τ by the held-out joint likelihood of ten labels at two anchors.

    With ``centres``, return τ and a factor of the mean: those that are best for the sum of
    joint and marginal log-likelihoods, as the joint one alone asks for ever larger factors.
    """
    y, classes_at = setting.task.val.y, _held_out(la, mean, setting)

    def nll(pair: tuple[float, float]) -> float:
        classes = classes_at(*pair)
        marginal = classes.nll(y) if centres is not None else 0.0
        return classes.joint_dyadic(y) + marginal

    return min(((s, c) for s in _SCALES for c in centres or [1.0]), key=nll)


def _two_numbers(la: LinearisedLaplace, mean: str, setting: Setting) -> tuple[float, float]:
    """Return τ and a factor of the mean, by held-out likelihood and log-normal priors.

    Where the held-out data hold only a few errors, the likelihood alone knows neither; the
    priors, of standard deviation ½ around 1, then decide.
    """
    y, classes_at = setting.task.val.y, _held_out(la, mean, setting)

    def loss(pair: tuple[float, float]) -> float:
        scale, factor = pair
        return len(y) * classes_at(scale, factor).nll(y) + 2 * log(scale) ** 2 + 2 * log(factor) ** 2

    return min(((s, c) for s in _SCALES for c in _CENTRES), key=loss)
