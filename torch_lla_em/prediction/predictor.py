"""Predictions and calibration, the same for a posterior and for an ensemble of posteriors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from torch_lla_em.data import as_loader, in_order
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction.calibrates import calibrate, check
from torch_lla_em.prediction.conformal import Score
from torch_lla_em.prediction.exports import export
from torch_lla_em.prediction.functions import SCALE, redrawn
from torch_lla_em.prediction.posterior import Components, Posterior, mixed
from torch_lla_em.prediction.prediction import Prediction
from torch_lla_em.prediction.pushforward import (
    Pushforward,
    inputs_in,
    joined,
    posterior_alone,
    push_forward,
    require_one_shape,
    stack_members,
)
from torch_lla_em.prediction.reference import Stated
from torch_lla_em.runtime import check_choice, free_memory

Mean = Literal["network", "linear"]
Link = Literal["mc", "probit"]


class Predictor:
    """The public methods that a posterior and an ensemble have in common: they hold records, and forward."""

    calibrate, check, export = calibrate, check, export

    def _members(self, surely: bool = False) -> tuple[Posterior, ...]:
        """Return the posteriors; raise an error if one is not fitted or its network has changed."""
        raise NotImplementedError

    def _as_fitted(self) -> tuple[Posterior, ...]:
        """Return the posteriors from which ``calibrate`` starts: those of an ensemble as they are."""
        return self._members()

    @property
    def _components(self) -> Components:
        """How products become predictions."""
        raise NotImplementedError

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood, with the observation noise that was learnt; members may differ in the noise."""
        return self._members()[0].likelihood

    def forward(
        self,
        x: Any = None,
        link_approx: Link = "mc",
        generator: torch.Generator | None = None,
        **inputs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return predicted probabilities or rates; for continuous targets (mean, variance) of y.

        Args:
            x (Tensor, tuple, dict, DataLoader or Dataset): Inputs, as the model takes them. The
                model may also be given its inputs by name: ``la(input_ids=...)``.
            link_approx (str): How E[y] is computed. "mc" (default): as an average over functions.
                "probit": from the mean and the variance of f.
            generator (torch.Generator, optional): Used to draw new samples with the same covariance.
                Default None: the posterior samples themselves, so that calls are repeatable.

        Returns:
            Tensor (B, ..., C) of probabilities or rates; for regression two tensors, the mean and
            the variance of y. The variance includes the observation noise σ².

        Raises:
            NotFittedError: Before ``fit``, or if the model has changed since.

        Example:
            >>> probabilities = la(x)
            >>> mean, variance = regression(x)
        """
        check_choice("link_approx", link_approx, ("mc", "probit"))

        def answer(prediction: Prediction) -> tuple[Tensor, ...]:
            if prediction.likelihood.real_valued:
                return prediction.expectation, prediction.predictive_variance
            return (prediction.smoothed() if link_approx == "probit" else prediction.expectation,)

        if _is_loader(x) and not inputs:
            each = list(zip(*map(answer, self.predictions(x, generator=generator))))
            for parts in each[:1]:
                require_one_shape(parts, "predict batch by batch, with la.predictions(loader).")
            first, *more = map(torch.cat, each)
        else:
            first, *more = answer(self.predict(x, generator=generator, **inputs))
        return (first, more[0]) if more else first

    def predict(
        self,
        x: Any = None,
        mean: Mean | None = None,
        generator: torch.Generator | None = None,
        num_samples: int | None = None,
        groups: Any = None,
        weights: Any = None,
        **inputs: Any,
    ) -> Prediction:
        """Return the predictive distribution at x: as fitted, or as calibrated.

        Args:
            x (Tensor, tuple, dict, DataLoader or Dataset): Inputs, as the model takes them; or pass
                them by name. Batches of a loader are read as in ``fit``, with its ``target_fn``;
                they may have no targets. The samples of all its outputs have to fit into memory:
                see ``predictions``.
            mean (str, optional): Use the posterior alone, around f(x) ("network") or J(x) w_lin
                ("linear"). Default None: what the fit or ``calibrate`` has chosen. A fit chooses J(x) w_lin for
                a regression, with the σ that is learnt from it (f(x) has the σ of its own residuals); with
                variational curvature a mixture; with others f(x), to which the curvature belongs.
            generator (torch.Generator, optional): Used to draw new samples with the same covariance.
            num_samples (int, optional): Number of samples to use; fewer are faster and less
                accurate. Default None: all.
            groups (integers, optional): The group of each input, if ``calibrate`` had groups. A loader that shuffles
                is then read in the order of its dataset, as ``calibrate`` reads it, and so it is with weights.
            weights (sequence, optional): The weight of each input, if ``calibrate`` had weights. Default
                None: the largest of a reference example.

        Returns:
            A ``Prediction``. It is differentiable in x if x requires gradients. That of an ensemble
            has the predictions of its ``members``.

        Raises:
            NotFittedError: Before ``fit``, or if the model has changed since.
            ValueError: If ``num_samples`` exceeds the number of samples.
            TypeError: If inputs are passed both by position and by name.
            MemoryError: If the samples of all outputs of a loader do not fit into memory.

        Example:
            >>> uncertainty = la.predict(x).epistemic
        """
        if inputs and x is not None:
            raise TypeError("Pass all inputs by name, or all in one tuple or dict.")
        x, posteriors = inputs if x is None else x, self._members()
        if not (groups is None and weights is None) and _is_loader(x):
            x = in_order(x)
        predict = self._predict_by(posteriors, mean, generator, num_samples)
        found = predict(at_inputs(posteriors, x, slice(num_samples)))
        if groups is None and weights is None:
            return found
        stated = Stated(groups, weights).checked(len(found.mixture.f), found.mixture.f.device)
        return replace(found, stated=stated)

    def predictions(
        self,
        loader: Any,
        mean: Mean | None = None,
        generator: torch.Generator | None = None,
        num_samples: int | None = None,
    ) -> Iterator[Prediction]:
        """Yield the predictive distribution at each batch of a loader, in its order.

        Use it for data whose outputs times samples do not fit into memory: only one batch is held
        at a time. ``la(loader)`` and ``la.is_ood(loader)`` use it. All batches have the same functions:
        the k-th sample is the same function everywhere.

        Args:
            loader (DataLoader, Dataset or list of batches): Read as in ``fit``, with its
                ``target_fn``; batches may have no targets.
            mean (str, optional): As in ``predict``.
            generator (torch.Generator, optional): Used to draw new samples, the same for all batches.
            num_samples (int, optional): As in ``predict``.

        Returns:
            An iterator of ``Prediction``.

        Raises:
            NotFittedError: Before ``fit``, or if the model has changed since.
            ValueError: If ``num_samples`` exceeds the number of samples.

        Example:
            >>> uncertainty = torch.cat([batch.epistemic for batch in la.predictions(loader)])
        """
        posteriors = self._members()
        predict = self._predict_by(posteriors, mean, generator, num_samples)
        return map(predict, in_batches(posteriors, as_loader(loader), slice(num_samples)))

    def _predict_by(
        self,
        posteriors: Sequence[Posterior],
        mean: Mean | None,
        generator: torch.Generator | None,
        num_samples: int | None,
    ) -> Callable[[Pushforward], Prediction]:
        """Return the map from products to predictions by these arguments of ``predict``."""
        check_choice("mean", mean, (None, "network", "linear"))
        components, state = self._components, None
        for posterior in posteriors:
            count = len(posterior.result.w_samples)
            if num_samples is not None and not 1 <= num_samples <= count:
                raise ValueError(f"num_samples={num_samples}, but there are {count} samples.")
        if generator is not None:
            state = generator.get_state()

        def predict(data: Pushforward) -> Prediction:
            if mean is None:
                found = predicted(data, components, judged=num_samples is None)
            else:
                alone = (
                    posterior_alone(mean, scale=p.result.mixture[0, SCALE]) for p in posteriors
                )
                found = data.plain().prediction(tuple(alone), components.noise)
            if generator is None:
                return found
            generator.set_state(state)  # every batch gets the same functions
            return replace(
                found,
                mixture=found.mixture.map(
                    lambda c: c._replace(deviations=redrawn(c.deviations, generator))
                ),
            )

        return predict

    def is_ood(
        self,
        x: Any = None,
        rate: float = 0.05,
        groups: Any = None,
        score: Score = "all",
        **inputs: Any,
    ) -> Tensor:
        """Return which inputs are out-of-distribution (OOD).

        Call ``calibrate`` first. Without it, posteriors with variational curvature compare inputs
        with training examples and give more false alarms than ``rate``; others raise an error.

        Args:
            x (Tensor, tuple, dict, DataLoader or Dataset): Inputs, as the model takes them.
            rate (float): Largest share of false alarms among inputs from the validation set's
                distribution. Default 0.05.
            groups (integers, optional): The group of each input, if ``calibrate`` had groups.
            score (str): "all" (default), "epistemic" or "distance", as in ``predict(x).p_values(score)``.

        Returns:
            A mask of shape (B,). ``predict(x).p_value`` has the p-values.

        Raises:
            ValueError: If there are no reference examples, or too few for this rate.

        Example:
            >>> suspicious = la.is_ood(x, rate=0.1)
        """
        if _is_loader(x) and not inputs and groups is None:
            return torch.cat([each.is_ood(rate, score) for each in self.predictions(x)])
        return self.predict(x, groups=groups, **inputs).is_ood(rate, score)

    def functional_samples(self, x: Any, generator: torch.Generator | None = None) -> Tensor:
        """Return samples of f at x, shape (K, B, ..., C), joint over inputs.

        Args:
            x (Tensor, tuple, dict, DataLoader or Dataset): Inputs, as the model takes them.
            generator (torch.Generator, optional): Used to draw new samples with the same covariance.

        Example:
            >>> spread = la.functional_samples(x).std(0)
        """
        return self.predict(x, generator=generator).samples

    def predictive_samples(self, x: Any, generator: torch.Generator | None = None) -> Tensor:
        """Return the functional samples after the link function, such as softmax.

        Args:
            x (Tensor, tuple, dict, DataLoader or Dataset): Inputs, as the model takes them.
            generator (torch.Generator, optional): Used to draw new samples with the same covariance.

        Returns:
            Tensor of shape (K, B, ..., C).
        """
        return self.predict(x, generator=generator).predictive_samples

    def joint_log_prob(self, x: Any, y: Tensor) -> Tensor:
        """Return log p(y_1..y_B | x_1..x_B), shape ().

        Args:
            x (Tensor, tuple, dict, DataLoader or Dataset): Inputs, as the model takes them.
            y (Tensor): Targets, as in the training data.
        """
        return self.predict(x).joint_log_prob(y)

    def _at(self, x: Any, samples: slice = slice(None)) -> Pushforward:
        """Return inputs, or all batches of a loader, with the products of some samples."""
        return at_inputs(self._members(), x, samples)

    def _predicted(self, data: Pushforward, judged: bool = True) -> Prediction:
        """Return the prediction, with its comparison with reference examples if ``judged``."""
        return predicted(data, self._components, judged)


class Records(Predictor):
    """The predictions of one posterior or several, given as records: without a fit, files or a module.

    Args:
        posteriors (Posterior or sequence of Posterior): The records; several are an equally weighted mixture.

    Example:
        >>> predictions = Records(posterior).predict(x)  # doctest: +SKIP
    """

    def __init__(self, posteriors: Posterior | Sequence[Posterior]):
        """Take the records; the class documents the argument."""
        several = (posteriors,) if isinstance(posteriors, Posterior) else tuple(posteriors)
        self.posteriors: tuple[Posterior, ...] = several
        if not self.posteriors:
            raise ValueError("There are no posteriors: pass one record or more.")

    def _members(self, surely: bool = False) -> tuple[Posterior, ...]:
        for posterior in self.posteriors:
            posterior.setting.require(surely)
        return self.posteriors

    def _as_fitted(self) -> tuple[Posterior, ...]:
        if len(self.posteriors) > 1:
            raise ValueError(
                "Several records are not calibrated together: use LaplaceEnsemble, or calibrate each of them."
            )
        return tuple(posterior.as_fitted() for posterior in self.posteriors)

    @property
    def _components(self) -> Components:
        if len(self.posteriors) == 1:
            return self.posteriors[0].components
        return mixed(self.posteriors)

    def _keep(self, *found: Any) -> None:
        (posterior,) = self._as_fitted()
        self.posteriors = (posterior.calibrated(*found),)


def _is_loader(x: Any) -> bool:
    return isinstance(x, (DataLoader, Dataset))


def at_inputs(posteriors: Sequence[Posterior], x: Any, samples: slice = slice(None)) -> Pushforward:
    """Return inputs, or all batches of a loader, with the products of some samples."""
    if not _is_loader(x):
        return stack_members([at(posterior, x, samples) for posterior in posteriors])
    loader: Any = as_loader(x)
    found, size = [], 0
    for part in in_batches(posteriors, loader, samples):
        found.append(part)
        size += sum(member.Jw.nbytes for member in part.members)
        batches = len(found)
        with suppress(TypeError):  # of an iterable dataset
            batches = len(loader)
        # joined, they take as much memory again
        if len(found) == 1 and size * (2 * batches - 1) > free_memory(part.f.device):
            raise MemoryError(
                f"The samples of all outputs of {batches} batches take {size * batches / 1e9:.3g} GB, "
                "and twice as much when they are joined. Use la(loader) for probabilities, or the "
                "predictions of one batch at a time: la.predictions(loader)."
            )
    return joined(found)


def in_batches(
    posteriors: Sequence[Posterior], loader: Iterable[Any], samples: slice = slice(None)
) -> Iterator[Pushforward]:
    """Yield the batches of a loader with the products of some samples."""
    settings = [posterior.setting for posterior in posteriors]
    for batch in loader:
        each = (
            inputs_in(batch, setting.target_fn, setting.linear_model.network.device)
            for setting in settings
        )
        yield stack_members([at(posterior, x, samples) for posterior, x in zip(posteriors, each)])


def at(posterior: Posterior, x: Any, samples: slice = slice(None)) -> Pushforward:
    """Return inputs with the products of some samples."""
    model = posterior.setting.linear_model
    f, Jw = push_forward(
        model, x, posterior.result.w_lin[None], posterior.result.w_samples[samples]
    )
    return posterior.of_products(f, Jw, f, model.network.class_dim)


def predicted(data: Pushforward, components: Components, judged: bool = True) -> Prediction:
    """Return the prediction, with its comparison with reference examples if ``judged``."""
    prediction = data.prediction(components.tables, components.noise)
    if not judged or components.reference is None:
        return prediction
    return replace(prediction, reference=components.reference, room=components.room)
