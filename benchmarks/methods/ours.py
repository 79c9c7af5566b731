"""``LinearisedLaplace`` as it ships, in all its variants: one fit serves several rows."""

from dataclasses import dataclass

import torch

from methods.baselines import Predictor, Setting
from methods.metrics import Classes, Numbers
from torch_lla_em import Compute, LinearisedLaplace
from torch_lla_em.prediction import posterior_alone

READ = Compute(keep_data=False)  # at every pass, so that the loader can count them
AROUND = {"network": "mean f", "linear": "mean J w_lin"}


@dataclass(frozen=True)
class Variant:
    """What is fitted."""

    prior: str = "scalar"
    g_prior: bool = True
    curvature: str = "network"
    num_samples: int = 32

    @property
    def name(self) -> str:
        parts = [self.prior, "g-prior" if self.g_prior else "plain prior"]
        parts += ["H at linear mode"] if self.curvature == "linear" else []
        return f"ours: {', '.join(parts)}, K={self.num_samples}"

    def __call__(self, setting: Setting) -> dict[str, Predictor]:
        """Fit, and return predictors as they are and calibrated, around either mean.

        "calibrated" alone is what ``calibrate`` chooses.
        """
        return rows(fit(setting, self), self.name, setting)


def rows(la: LinearisedLaplace, name: str, setting: Setting) -> dict[str, Predictor]:
    """Return one predictor for every choice of mean, scale and factor."""
    table = {name: predictor(la, "network"), f"{name}, mean J w_lin": predictor(la, "linear")}
    for mean in ("network", "linear", None):
        la.calibrate([tuple(setting.task.val)], mean)
        row = f"{name}, calibrated" + (f", {AROUND[mean]}" if mean else "")
        table[row] = predictor(la, la.mean, la.mixture.clone())
    return table


def variants(regression: bool) -> list[Variant]:
    """Return what is fitted: the defaults, and one thing or two changed."""
    fits = [Variant(prior, g) for prior in ("scalar", "layerwise") for g in (True, False)]
    if not regression:
        fits += [Variant("scalar", g, "linear") for g in (True, False)]
    return fits + [Variant(num_samples=k) for k in (8, 128)]


def fit(setting: Setting, variant: Variant) -> LinearisedLaplace:
    """Return the fitted posterior."""
    la = LinearisedLaplace(
        setting.network,
        "regression" if setting.task.regression else "classification",
        prior=variant.prior,
        g_prior=variant.g_prior,
        curvature=variant.curvature,
        num_samples=variant.num_samples,
        seed=setting.seed,
        compute=READ,
    )
    return la.fit(setting.loader, progress_bar=False, em_steps=2 if setting.quick else 20)


def predictor(la: LinearisedLaplace, mean: str, mixture: torch.Tensor | None = None) -> Predictor:
    """Return predictions of the posterior alone around a mean, or of calibrated parts."""
    regression = la.sigma_noise is not None
    chosen = posterior_alone(mean) if mixture is None else mixture
    sigma = la.sigma_noise.item() if regression else 0.0

    def predict(x: torch.Tensor) -> Classes | Numbers:
        la.mixture = chosen
        prediction = la.predict(x)
        if regression:
            return Numbers(prediction.mean.flatten(), prediction.covariance, sigma)
        return Classes.of(prediction.functions)

    predict.details = {
        "mean": mean,
        "scale": chosen[0, 3].item(),
        "factor": chosen[0, 1:3].sum().item(),
        "prior_precision": la.prior_precision.tolist(),
        "effective_dim": la.effective_dim.sum().item(),
        "certificate": la.certificate.max().item(),
    }
    return predict
