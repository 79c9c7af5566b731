"""A fitted posterior: what it predicts, and how predictions are calibrated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from torch_lla_em.data import paired
from torch_lla_em.inference import Estimate
from torch_lla_em.likelihoods import Regression
from torch_lla_em.prediction import parts, summary
from torch_lla_em.prediction.calibration import calibrated
from torch_lla_em.prediction.conformal import REFERENCE, Judge, Reference
from torch_lla_em.prediction.export import Ways, exported
from torch_lla_em.prediction.functions import mixed, slots
from torch_lla_em.prediction.held_out import held_out_evidence, over
from torch_lla_em.prediction.posterior import StoredPosterior
from torch_lla_em.prediction.prediction import Prediction
from torch_lla_em.prediction.pushing import push_forward
from torch_lla_em.prediction.tables import Lines, Shown
from torch_lla_em.runtime import check_choice, check_options, heard


class Fitted(Shown, StoredPosterior):
    """A fitted posterior that predicts."""

    def forward(
        self,
        x: Any = None,
        link_approx: str = "mc",
        generator: torch.Generator | None = None,
        **inputs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return probabilities or rates; for regression (mean, variance of y).

        The variance includes the observation noise σ²: it is ``predict(x).predictive_variance``,
        and that of f alone is ``predict(x).function_variance``. A model of several inputs takes a
        tuple, a dict, or keywords: ``la(input_ids=...)``. ``"mc"`` averages over the samples, or
        over as many fresh ones from a generator; ``"probit"`` uses the variance of f alone,
        ``"probit_shared"`` one variance for all classes, which keeps the most probable class.
        """
        check_choice("link_approx", link_approx, ("mc", "probit", "probit_shared"))
        prediction = self.predict(x, generator=generator, **inputs)
        if self.likelihood.real_valued:
            return prediction.expectation, prediction.predictive_variance
        if link_approx == "mc":
            return prediction.expectation
        return prediction.smoothed(shared=link_approx == "probit_shared")

    def predict(
        self,
        x: Any = None,
        mean: str | None = None,
        generator: torch.Generator | None = None,
        num_samples: int | None = None,
        **inputs: Any,
    ) -> Prediction:
        """Return the predictive distribution at x: as fitted, or as calibrated.

        ``mean`` takes the posterior alone, around f(x) ("network") or J(x) w_lin ("linear").
        ``num_samples`` takes the first few samples only, which is faster and less exact.
        """
        self._require_fit()
        count = len(self.w_samples)
        if num_samples is not None and not 1 <= num_samples <= count:
            raise ValueError(f"num_samples={num_samples}, but there are {count} samples.")
        if inputs and x is not None:
            raise TypeError("Pass all inputs by name, or all in one tuple or dict.")
        x = inputs if x is None else x
        prediction = self._predicted(x, self._parts(mean), num_samples)
        if generator is None:
            return prediction
        return replace(prediction, deviations=mixed(prediction.deviations, generator))

    def is_ood(self, x: Any = None, rate: float = 0.05, **inputs: Any) -> Tensor:
        """Return which inputs are out-of-distribution, (B,), after ``calibrate``.

        At most this share of inputs from the distribution of the validation set are flagged
        (false alarms). ``predict(x).p_value`` has the p-values that are compared with ``rate``.
        """
        return self.predict(x, **inputs).is_ood(rate)

    def functional_samples(self, x: Any, generator: torch.Generator | None = None) -> Tensor:
        """Return the mean + √τ J(x) w_k, shape (K, B, C): joint over the inputs."""
        return self.predict(x, generator=generator).samples

    def predictive_samples(self, x: Any, generator: torch.Generator | None = None) -> Tensor:
        """Return the functional samples after the link, shape (K, B, C)."""
        return self.predict(x, generator=generator).predictive_samples

    def function_sample(self, k: int) -> Callable[[Any], Tensor]:
        """Return the k-th function of the posterior, x -> (B, C): the same at every call."""
        self._require_fit()
        count = len(self.w_samples)
        if not -count <= k < count:
            raise IndexError(f"There are {count} samples: k runs from 0, not to {k}.")
        part = slots(self.mixture[:, parts.WEIGHT], count)[k]
        alone = self.mixture[part].to(self.w_lin, copy=True)
        w = alone[parts.MODE] * self.w_lin + alone[parts.SCALE].sqrt() * self.w_samples[k]

        def sample(x: Any) -> Tensor:
            f, Jw = push_forward(self._linear_model, x, w[None])
            class_dim = self._linear_model.network.class_dim
            centre = alone[parts.NETWORK].to(f) * f
            return Prediction(self.likelihood, centre, Jw, class_dim).samples[0]

        return sample

    def export(
        self,
        x: Any,
        path: Any = None,
        num_samples: int | None = None,
        level: float | None = None,
    ) -> ExportedProgram:
        """Return ``la(x)`` as a program of torch alone, and save it.

        ``x``: example inputs; the program takes any number of them where that is possible.
        ``path`` (None): a name that ends with .pt2 for torch.export, or with .onnx.
        ``num_samples`` (None): take the first few samples only, as ``predict`` does.
        ``level`` (None): after ``calibrate``, also return the mask of ``prediction_set(level)``, or
        both ends of ``interval(level)`` for continuous targets.
        """
        self._require_fit(surely=True)
        judges = num_samples is None and self.conformal_table is not None
        of_products = partial(self._of_products, table=self.mixture, judges=judges)
        ways = Ways(partial(self.predict, num_samples=num_samples), of_products, level)
        return exported(self._linear_model, self._columns(num_samples), x, ways, path)

    def joint_log_prob(self, x: Any, y: Tensor, mean: str | None = None) -> Tensor:
        """Return log p(y_1..y_B | x_1..x_B), shape ()."""
        return self.predict(x, mean).joint_log_prob(y)

    def calibrate(
        self, loader: Any, targets: Tensor | None = None, *, mean: str | None = None
    ) -> Fitted:
        """Fit a few numbers of the predictions to a validation set, in one pass; return self.

        For classes and labels these are a temperature of the network, a scale of the posterior's
        variance, a factor of the softmax at the posterior's mean, and the weights of the three;
        temperature scaling is a special case. For regression: the scale, the observation noise σ,
        and the share of the linear mode in the mean. Predictions are kept as they were if their
        validation negative log-likelihood (NLL) is lower; ``calibration`` holds what was found.

        The numbers are fitted to all examples. For ``p_value``, ``is_ood``, ``prediction_set`` and
        ``interval`` of predictions they are fitted once more to every other example, and the
        examples between, which they were not fitted to, are the reference.

        ``loader`` is a loader of inputs and targets, or the inputs, with ``targets``. ``mean`` keeps
        to the posterior around the "network" or the "linear" mode. Ranks call it together.
        """
        check_choice("mean", mean, (None, "network", "linear"))
        self._require_fit(surely=True)
        before = self.mixture
        if mean is not None and not parts.is_around(before, mean):
            before = self._parts(mean).to(before)
        with heard(self.said), over(self, paired(loader, targets)) as problem:
            found = calibrated(problem, self._columns(), mean, before)
        self.mixture, self.calibration = found.table.to(self.mixture), found.calibration
        for name, tensor in zip(REFERENCE, found.reference):
            setattr(self, name, tensor)
        if isinstance(self.likelihood, Regression):
            self.sigma_noise = self.sigma_noise * found.noise
            self.likelihood = self.likelihood.at_noise(self.sigma_noise)
        return self

    def _parts(self, mean: str | None) -> Tensor:
        """Return the parts of predictions, of the posterior alone around a mean if it is given."""
        self._require_fit()
        check_choice("mean", mean, (None, "network", "linear"))
        if mean is None:
            return self.mixture
        factor = self.mean_factor if mean == self.mean else 1.0
        return parts.posterior_alone(mean, factor, self.posterior_scale)

    def held_out_evidence(
        self, loader: Any, targets: Tensor | None = None, *, together: int = 1
    ) -> Estimate:
        """Return the log predictive density of held-out data, with its standard error over groups.

        ``loader`` is a loader of held-out data, or inputs that come with ``targets``. The value
        compares networks with their posteriors: the larger the better. (What networks predict
        alone is ranked by their validation loss.) ``together`` is the number of consecutive
        examples that are predicted jointly, whatever the loader's batch size.
        """
        check_options(together=together)
        self._require_fit(surely=True)
        with over(self, paired(loader, targets)) as problem:
            return held_out_evidence(problem, self._columns(), self.mixture, together)

    def _predicted(self, x: Any, table: Tensor, num_samples: int | None = None) -> Prediction:
        judges = table is self.mixture and num_samples is None and self.conformal_table is not None
        has_mode = judges or bool(table[:, parts.MODE].any())
        mode = [self.w_lin[None]] * has_mode
        f, Jw = push_forward(self._linear_model, x, *mode, self.w_samples[:num_samples])
        if not has_mode:
            Jw = torch.cat([torch.zeros_like(Jw[:1]), Jw])
        return self._of_products(f, Jw, table, judges)

    def _of_products(self, f: Tensor, Jw: Tensor, table: Tensor, judges: bool) -> Prediction:
        """Return the prediction out of f, (B, ..., C), and J w of w_lin and the samples."""
        class_dim = self._linear_model.network.class_dim
        prediction = parts.predicted(self.likelihood, f, Jw, table, class_dim)
        if not judges:
            return prediction
        reference, likelihood = Reference(*(getattr(self, n) for n in REFERENCE)), self.likelihood
        if isinstance(likelihood, Regression):
            likelihood = likelihood.at_noise(reference.sigma)
        other = partial(parts.predicted, likelihood, f, Jw, reference.table, class_dim)
        return replace(prediction, judge=Judge(reference, other))

    def _table(self) -> tuple[str, Lines]:
        return summary.of_fit(self)
