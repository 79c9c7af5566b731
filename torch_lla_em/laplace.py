"""``LinearisedLaplace``: the posterior of a trained network, its fit and its files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from math import inf
from numbers import Real
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from torch_lla_em.checkpoint import header_of
from torch_lla_em.data import (
    Data,
    GivenWeights,
    Identity,
    Inputs,
    Loader,
    Weights,
    paired,
    with_weights,
)
from torch_lla_em.inference import Estimate, FitOptions, learn
from torch_lla_em.jacobian import (
    LinearModel,
    Network,
    NetworkState,
    ParameterLayout,
    Selection,
    last_layers,
    select_parameters,
)
from torch_lla_em.likelihoods import LIKELIHOODS, BradleyTerry, Likelihood, Task, preferred, rewards
from torch_lla_em.prediction import (
    Accuracy,
    Cells,
    NoSubstitute,
    NotFittedError,
    Posterior,
    Record,
    Setting,
    calibrated_on,
    likelihood_options,
    required,
    stored,
    summary,
    usual_tolerance,
    without_validation,
)
from torch_lla_em.predicts import Predicts
from torch_lla_em.problem import FEW, Plan, Problem
from torch_lla_em.runtime import (
    PRECISION_BOUNDS,
    PRIORS,
    Adapter,
    Compute,
    Group,
    check_choice,
    check_whole,
    check_within,
    collected,
    files,
    group_of,
    refuse_former,
    report,
    require,
)
from torch_lla_em.session import Session

_FORMER = {
    "loader": "pass it as x",
    "targets": "pass them as y",
    "g_prior": 'write prior="isotropic" for g_prior=False, and prior="g" for True',
    "sigma_noise": "pass the likelihood Regression(sigma_noise)",
    "tolerance": "pass compute=Compute(tolerance=...)",
    "solver": "pass compute=Compute(solver=...)",
    "temperature": "pass weights=1 / temperature to fit",
    "forward_fn": "pass adapter=Adapter(outputs=...)",
    "target_fn": "pass adapter=Adapter(targets=...)",
    "checkpoint": "pass compute=Compute(checkpoint=folder) to LinearisedLaplace",
    "budget": "pass compute=Compute(budget=seconds) to LinearisedLaplace",
    "shard": "pass compute=Compute(shard=None) to LinearisedLaplace for a fit on each rank alone",
    "update": "the steps are those of MacKay's update",
}
"""Arguments of ``LinearisedLaplace`` and ``fit`` in version 0.4, and what replaces them."""


class LinearisedLaplace(Predicts):
    """The linearised Laplace posterior of a trained network, represented by samples.

    ``fit`` learns the prior precision λ (and the observation noise σ of a regression) by EM and
    draws posterior samples; calling the object predicts. The network is not changed: its weights,
    buffers, mode and attributes are restored after every call. ``print`` shows the results of the
    fit, an assessment of it, and recommendations. It is an ``nn.Module`` so that ``to``,
    ``state_dict`` and modules that contain it treat it like a network; it has no parameters to
    train.

    Args:
        model (nn.Module): The trained network, in any mode, on any device.
        likelihood (str or Likelihood): "classification" (outputs are logits), "regression",
            "bernoulli" (one logit per label), "poisson" (log rates), "heteroscedastic" (means, then
            log variances), "reward_modeling", or a ``Likelihood``, such as
            ``Regression(sigma_noise)``, or one of your own.
        prior (str): The scaling of the prior. "scalar" (default): the prior standard deviations of
            parameters are ‖w‖ m/s, for the trained weights w of their tensor, the size s of their
            feature (the derivative of the outputs with respect to the parameter), and the root mean
            square m of s in their tensor; the posterior then does not depend on the unit of the
            targets. "g": 1/s, the g-prior. "isotropic": the same for all parameters.
        layerwise (bool): Learn one prior precision per tensor, at several times the cost; it can
            prune tensors. Default False: one for all parameters.
        num_samples (int): Number K of posterior samples. Default 32, for which standard deviations
            have a Monte Carlo error of 12 %; with 8 it is 25 %. Time and memory grow with K.
        parameters (str, list or callable, optional): The parameters in the posterior. Default None:
            all that require gradients, except those of normalisation layers. Use "last_layer" for
            very large networks: it selects the layer that computes the outputs, or the layers of
            all heads if there are several. "requires_grad", "all", a pattern of names such as
            "*lora*", a list of patterns, or a predicate (name, parameter) -> bool select others.
        curvature (str, optional): Where the generalised Gauss–Newton matrix (GGN) is evaluated.
            "variational": in expectation under the posterior; "network": at the network's outputs,
            as in the paper. Default None: "variational" if the likelihood is not "regression", the
            prior has one precision, the solver is the default, and memory allows it; otherwise
            "network".
        class_dim (int): Axis of the classes in the outputs. Default -1; 1 for outputs (B, C, H, W).
        adapter (Adapter): How a batch becomes outputs and targets, if not by ``model(inputs)`` and
            (inputs, targets). Default Adapter().
        seed (int): Seed of all random numbers. Default 0.
        compute (Compute): Options of the computation: accuracy, solver, memory, time, processes,
            and a folder for checkpoints. Default Compute().

    Raises:
        TypeError: If an argument has a type that is not allowed, or is one of an earlier version.
        ValueError: If an argument has a value that is not allowed.

    Example:
        >>> la = LinearisedLaplace(model, "classification", num_samples=8)
        >>> probabilities = la.fit(x, y, progress_bar=False)(x)
    """

    model: nn.Module

    def __init__(
        self,
        model: nn.Module,
        likelihood: Task | Likelihood,
        *,
        prior: Literal["scalar", "g", "isotropic"] = "scalar",
        layerwise: bool = False,
        num_samples: int = 32,
        parameters: Selection = None,
        curvature: Literal["variational", "network"] | None = None,
        class_dim: int = -1,
        adapter: Adapter = Adapter(),
        seed: int = 0,
        compute: Compute = Compute(),
        **former: Any,
    ):
        """Create a posterior that is not fitted yet; the class documents the arguments."""
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a trained nn.Module, not {type(model).__name__}.")
        refuse_former("LinearisedLaplace", former, _FORMER)
        check_whole(1, num_samples=num_samples)
        check_whole(-inf, seed=seed, class_dim=class_dim)
        is_own = isinstance(compute, Compute)
        require(is_own, "compute", compute, "a Compute object", TypeError)
        is_own = isinstance(adapter, Adapter)
        require(is_own, "adapter", adapter, "an Adapter object", TypeError)
        if isinstance(prior, str) and prior.startswith("layerwise"):
            scaling = prior.removeprefix("layerwise").strip() or "scalar"
            raise ValueError(f'Write prior="{scaling}", layerwise=True instead of prior={prior!r}.')
        check_choice("prior", prior, tuple(PRIORS))
        require(isinstance(layerwise, bool), "layerwise", layerwise, "True or False", TypeError)
        check_choice("curvature", curvature, (None, "network", "variational"))
        super().__init__()
        # not a submodule: its weights are the user's, and not part of this state
        object.__setattr__(self, "model", model)
        if not isinstance(likelihood, Likelihood):
            check_choice("likelihood", likelihood, tuple(LIKELIHOODS))
            likelihood = LIKELIHOODS[likelihood]()
        if layerwise and curvature == "variational":
            raise ValueError('curvature="variational" needs one precision: use layerwise=False.')
        if isinstance(likelihood, BradleyTerry):
            adapter = Adapter(adapter.outputs or rewards, adapter.targets or preferred)
        network = Network(model, adapter.outputs, int(class_dim), compute.precision)
        self._given_likelihood: Likelihood = likelihood
        self._posterior: Posterior | None = None
        self._parameters_asked = parameters
        self._linear_model = _linear_model(network, parameters)
        self.prior, self.layerwise, self.curvature = prior, layerwise, curvature
        self.num_samples = int(num_samples)
        self.seed, self.adapter, self.compute = int(seed), adapter, compute
        self.trained_with: tuple[Any, Weights | None] = (None, None)
        """The data of the fit and their weights, which copies and files do not contain."""

    @property
    def posterior(self) -> Posterior | None:
        """The frozen record of the fit, which can be passed to the functions of
        ``torch_lla_em.prediction``; None before ``fit``."""
        return self._posterior

    @property
    def prior_precision(self) -> Tensor | None:
        """λ, () or one value per tensor; None before ``fit``."""
        return None if self._posterior is None else self._posterior.result.prior_precision

    @property
    def sigma_noise(self) -> Tensor | None:
        """σ of a regression; None before ``fit``, and for other likelihoods."""
        return None if self._posterior is None else self._posterior.likelihood.observation_noise

    @property
    def effective_dim(self) -> Tensor | None:
        """γ, the number of parameters that the data determine, in the shape of λ; None before
        ``fit``."""
        return None if self._posterior is None else self._posterior.result.effective_dim.value

    @property
    def effective_dim_error(self) -> Tensor | None:
        """The Monte Carlo standard error of γ; None before ``fit``."""
        if self._posterior is None:
            return None
        return self._posterior.result.effective_dim.standard_error

    @property
    def certificate(self) -> Tensor | None:
        """The bound on the numerical error of each sample, (K,); None before ``fit``."""
        return None if self._posterior is None else self._posterior.result.certificate

    @property
    def accuracy(self) -> Accuracy | None:
        """The numerical error of samples and mode, the bound for samples, and the tolerance; None
        before ``fit``.

        Example:
            >>> la.accuracy.is_reached
            True
        """
        return None if self._posterior is None else summary.accuracy(self._posterior)

    @property
    def scale(self) -> Tensor | None:
        """The prior standard deviation of each parameter at λ = 1, (P,); None before ``fit``."""
        return None if self._posterior is None else self._posterior.result.scale

    @property
    def w_MAP(self) -> Tensor | None:
        """The trained weights of the parameters, (P,); None before ``fit``."""
        return None if self._posterior is None else self._posterior.setting.linear_model.w_MAP

    @property
    def w_lin(self) -> Tensor | None:
        """The mode of the linear model, (P,); None before ``fit``."""
        return None if self._posterior is None else self._posterior.result.w_lin

    @property
    def w_samples(self) -> Tensor | None:
        """The posterior samples, with mean zero, (K, P); None before ``fit``."""
        return None if self._posterior is None else self._posterior.result.w_samples

    @property
    def mixture(self) -> Tensor | None:
        """The components of predictions; None before ``fit``."""
        return None if self._posterior is None else self._posterior.mixture

    @property
    def mean(self) -> str | None:
        """The function to which samples are added: "network" or "linear"; None before ``fit``."""
        return None if self._posterior is None else self._posterior.mean

    @property
    def posterior_scale(self) -> Tensor | None:
        """τ, the factor of the posterior's variance in predictions; None before ``fit``."""
        return None if self._posterior is None else self._posterior.scale

    @property
    def num_data(self) -> int | None:
        """The number of training examples with a label; None before ``fit``."""
        return None if self._posterior is None else self._posterior.num_data

    @property
    def history(self) -> list[dict[str, Any]]:
        """A record of every EM step; empty before ``fit``."""
        return [] if self._posterior is None else list(self._posterior.history)

    @property
    def messages(self) -> list[str]:
        """The memory plan, then the warnings of the fit; empty before it."""
        return [] if self._posterior is None else list(self._posterior.messages)

    def take(self, posterior: Record) -> None:
        """Use another record from now on.

        Args:
            posterior (Posterior): The record, for example a result of
                ``torch_lla_em.prediction.calibrate``.
        """
        words = "the record of a fit, as la.posterior, or predict(record, x) for one of several"
        require(isinstance(posterior, Posterior), "posterior", posterior, words, TypeError)
        self._posterior = posterior.members[0]
        self._linear_model = self._posterior.setting.linear_model

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood, with the observation noise that was learnt."""
        return self._given_likelihood if self.posterior is None else self.posterior.likelihood

    def __getstate__(self) -> dict[str, Any]:
        """Leave data out of copies and pickles."""
        return {**self.__dict__, "trained_with": (None, None)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Record the tensors of a copied network; otherwise a cast of it would look like a
        change."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.posterior is not None:
            self.posterior.setting.state.holds(self._linear_model.network)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LinearisedLaplace:
        """Move posterior and network together, unless a module that contains both has already moved
        the network."""
        posterior, network = self._posterior, self._linear_model.network
        unchanged = posterior is not None and posterior.setting.state.holds(network, or_cast=True)
        self.model._apply(fn)
        self._linear_model = model = LinearModel(network, self._linear_model.layout)  # not probed
        if posterior is not None:
            state = NetworkState(network) if unchanged else posterior.setting.state
            setting = posterior.setting._replace(linear_model=model, state=state)
            self._posterior = posterior.moved(fn, setting)
        return self

    @property
    def tolerance(self) -> float:
        """The requested largest numerical error of the samples, in posterior standard
        deviations."""
        return self.compute.tolerance or usual_tolerance(self.num_samples)

    def fit(
        self,
        x: Inputs | Loader | None = None,
        y: Tensor | None = None,
        *,
        validation: Loader | Literal[False] | None = None,
        em_steps: int = 20,
        prior_precision: float | Tensor | None = None,
        progress_bar: bool = True,
        weights: GivenWeights | None = None,
        **former: Any,
    ) -> LinearisedLaplace:
        """Learn λ (and σ) by EM, then find the mode and the posterior samples.

        Args:
            x (DataLoader, Dataset, list of batches, or inputs): The training data.
            y (Tensor, optional): The targets, if ``x`` are inputs.
            validation (DataLoader, optional): Held-out data to calibrate on; we recommend it.
                Default None: no validation set. If only some of the network's parameters are in the
                posterior (a last layer, or a head on a frozen backbone) and the inputs are columns
                of numbers, predictions are calibrated on moved training examples, as by
                ``calibrate()``. With other inputs, or more than 10,000 examples, probabilities of
                classes get a temperature, from a posterior of all parameters on some examples.
                False, or None with ``em_steps=0``: predictions stay as fitted.
            em_steps (int): The largest number of EM steps. Default 20; 0 keeps ``prior_precision``.
            prior_precision (float or Tensor, optional): Initial λ. Default None: chosen from the
                data.
            progress_bar (bool): Show a progress bar. Default True.
            weights (Tensor, str, callable or float, optional): Weights of the examples: a tensor,
                if inputs and targets are tensors; "last" if batches are (inputs, targets, weights);
                a function of the targets, such as ``lambda y: class_weights[y]``; or one number for
                all examples. Predictions and ``calibrate`` use no weights, and with weights the σ
                of a regression is not learnt. Default None: every example counts once.

        Returns:
            The posterior itself.

        Raises:
            TypeError: If an argument is one of an earlier version; the error names its replacement.
            ValueError: If targets do not fit the outputs, or the data of a checkpoint have changed.
            FloatingPointError: If the network's outputs are not finite.

        Example:
            >>> fresh = LinearisedLaplace(model, "classification").fit(loader, em_steps=1)
        """
        refuse_former("fit", former, _FORMER)
        if x is None:
            raise TypeError("fit needs training data: pass fit(loader), or fit(x, y).")
        check_whole(0, em_steps=em_steps)
        check_within(*PRECISION_BOUNDS, prior_precision=prior_precision)
        data = paired(x, y)
        if weights is not None:
            data, weights = with_weights(data, weights)
        if prior_precision is not None:
            start = torch.as_tensor(prior_precision, dtype=torch.float64, device="cpu")
            prior_precision = start.detach().clone()
        elif em_steps == 0:
            raise ValueError("em_steps=0 keeps the prior precision: pass prior_precision too.")
        options = self._options(em_steps=int(em_steps), prior_precision=prior_precision)
        unseen, held_out = None, None if validation is False else validation
        if held_out is not None:
            is_data = isinstance(held_out, (Iterable, Dataset)) and not isinstance(held_out, str)
            words = (
                "None, False, or held-out data: a DataLoader, a Dataset or a list of batches (x, y)"
            )
            if isinstance(held_out, Real):
                words += " (split them off before training, as with torch.utils.data.random_split)"
            require(is_data, "validation", held_out, words, TypeError)
            unseen = self._data(held_out, group_of(self.compute.shard)).read()
        found = self._fit(data, weights, options, progress_bar, unseen)
        if held_out is not None:
            found = found.corrected(calibrated_on(found, held_out))
        elif validation is None and em_steps:
            found = without_validation(found, data, weights, self._fit_all)
        self.take(found)
        self.trained_with = data, weights
        return self

    def _fit(
        self,
        loader: Loader,
        weights: Weights | None,
        options: FitOptions,
        progress_bar: bool,
        unseen: Identity | None,
    ) -> Posterior:
        """Return the fitted posterior; this object is not changed."""
        problem = self._problem(loader, group_of(self.compute.shard), weights)
        model = problem.linear_model
        state, header, compute = problem.sweep.begun_with, dict[str, Any](), self.compute
        if compute.checkpoint is not None or problem.data.group.size > 1:
            header = header_of(problem, options, self._given_likelihood)
        session = Session(problem, header, compute, progress_bar, unseen)
        setting = Setting(model, state, self.adapter.targets, compute.shard)
        with session.running() as around:
            known = around.finished()
            if known is not None:
                return stored.loaded(known, setting, self._given_likelihood, compute)
            start = around.begin(around.plan(options, compute))
            learnt = learn(problem, options, around, start)
            around.end(learnt.why)
            facts = problem.data.facts
            found = Posterior.of_fit(
                learnt,
                setting,
                self._given_likelihood,
                tolerance=options.tolerance,
                history=tuple(around.history),
                trained_on=facts.least,
                num_data=facts.num_labelled,
                num_inputs=facts.num_inputs,
                messages=tuple(around.messages),
            )
            if learnt.why != "budget":  # otherwise the checkpoint continues from the last state
                around.keep(partial(stored.state_of, found, self._given_likelihood))
        return found

    def _fit_all(self, part: Loader) -> Posterior:
        """Return a posterior of all parameters, with few samples, fitted to some examples."""
        network, compute = self._linear_model.network, self.compute
        whole = LinearisedLaplace(
            self.model,
            self._given_likelihood,
            num_samples=4,  # only one temperature is taken from them
            class_dim=network.class_dim,
            adapter=Adapter(self.adapter.outputs),
            seed=self.seed,
            compute=replace(compute, checkpoint=None, shard=None, solver=None, tolerance=None),
        )
        if whole.plan(part).is_long:
            raise NoSubstitute(
                "a posterior of all parameters would take more than five minutes, or half of the "
                "free memory"
            )
        options = whole._options(em_steps=20, prior_precision=None)
        with collected([], is_shown=False):
            return whole._fit(part, None, options, False, None)

    def _options(self, **of_fit: Any) -> FitOptions:
        """Return the options of a fit."""
        return FitOptions(
            num_samples=self.num_samples,
            seed=self.seed,
            curvature=self.curvature,
            tolerance=self.tolerance,
            span_memory=self.compute.span_memory,
            solver=self.compute.solver,
            layerwise=self.layerwise,
            g_prior=PRIORS[self.prior],
            **of_fit,
        )

    def log_marginal_likelihood(self) -> Estimate:
        """Return log p(y | λ, σ) of the linear model, an ``Estimate`` with its standard error over
        samples.

        Use it to compare priors, noise levels and likelihoods for one network. It does not rank
        networks.

        Raises:
            ValueError: If the fit used a solver, or had one precision per tensor.
            NotFittedError: Before ``fit``, or if the model has changed since.

        Example:
            >>> value, standard_error = la.log_marginal_likelihood()
        """
        found = required(self).members[0].result.log_evidence
        if found.value.isnan():
            raise ValueError(
                "A fit by a solver, or with one precision per tensor, has no evidence. "
                "Fit with one precision (layerwise=False) and without Compute(solver=...)."
            )
        return found

    def save(self, path: str | PathLike[str]) -> None:
        """Write the posterior to a file, without the network. Loading it runs no code.

        Args:
            path (str): Name of the file.

        Raises:
            NotFittedError: Before ``fit``, or if the model has changed since.

        Example:
            >>> la.save("posterior.pt")  # doctest: +SKIP
        """
        state, model, compute = self.state_dict(), self._linear_model, self.compute
        names = "prior", "layerwise", "num_samples", "curvature", "seed"
        options = {name: getattr(self, name) for name in names}
        options |= {"parameters": model.layout.names, "class_dim": model.network.class_dim}
        options |= {"precision": compute.precision, "tolerance": compute.tolerance}
        options |= likelihood_options(self._given_likelihood)
        files.write_atomically({**state, "options": files.to_bytes(options)}, path)

    @classmethod
    def load(cls, path: str | PathLike[str], model: nn.Module, **options: Any) -> LinearisedLaplace:
        """Return a saved posterior on its network.

        Args:
            path (str): Name of the file that ``save`` has written.
            model (nn.Module): The network, with the weights that the posterior was fitted to.
            **options: Arguments of ``LinearisedLaplace`` that a file cannot store: a custom
                likelihood, ``adapter``, and ``compute`` if you call ``fit`` again. Other arguments
                replace the saved ones.

        Raises:
            ValueError: If the file is damaged or belongs to another network, or if an option is
                missing.

        Example:
            >>> la = LinearisedLaplace.load("posterior.pt", model)  # doctest: +SKIP
        """
        state = files.read(path, "posterior")
        options = stored.options_of(state, model, options)
        la = cls(model, options.pop("likelihood"), **options)
        la.take(la._loaded(state))
        return la

    def _loaded(self, state: dict[str, Tensor], later: bool = False) -> Posterior:
        """Return the record of a state. With ``later`` the weights of the network may be loaded
        after the state."""
        files.check(state, "posterior")
        model = self._linear_model
        network_state = NetworkState(model.network, state["fingerprint"].cpu() if later else None)
        setting = Setting(model, network_state, self.adapter.targets)
        return stored.loaded(state, setting, self._given_likelihood, self.compute)

    def _save_to_state_dict(
        self, destination: dict[str, Tensor], prefix: str, keep_vars: bool
    ) -> None:
        """Add the posterior to a state. A module that contains this object calls it with a
        prefix."""
        try:
            record = required(self, surely=True).members[0]
        except NotFittedError as error:
            if not prefix:
                raise
            if self.posterior is not None:
                report("warn", f"The state_dict has no posterior. {error}")
            return
        own = stored.state_of(record, self._given_likelihood)
        destination.update({f"{prefix}{name}": tensor for name, tensor in own.items()})

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *more: Any, **named: Any
    ) -> None:
        """Load the posterior from its own state, or from that of a module that contains this
        object; the networks of that module may be loaded later."""
        own, (_, _, missing, _, errors) = stored.without_prefix(state_dict, prefix), more
        if own or not prefix:
            try:
                self.take(self._loaded(own, later=bool(prefix)))
            except ValueError as error:
                if not prefix:
                    raise
                errors.append(str(error))
        elif self.posterior is not None:
            missing.append(f"{prefix}w_lin")

    def _table(self) -> tuple[str, Cells]:
        title, unfitted = type(self).__name__, "none yet: call la.fit(train_loader)"
        models = [self._linear_model]
        return summary.table_of(title, models, self.likelihood, self.posterior or unfitted)

    def plan(self, x: Inputs | Loader, y: Tensor | None = None) -> Plan:
        """Return a ``Plan`` of the memory of ``fit`` and the time of a pass over these data; print
        it.

        Args:
            x (DataLoader, Dataset, list of batches, or inputs): The training data.
            y (Tensor, optional): The targets, if ``x`` are inputs.

        Example:
            >>> words = str(la.plan(x, y))
        """
        problem = self._problem(paired(x, y), Group())
        with Session(problem, {}).running() as run:
            return run.plan(self._options(), self.compute, timed=True)

    def _data(self, loader: Loader, group: Group, weights: Weights | None = None) -> Data:
        device = self._linear_model.network.device
        return Data(loader, device, self.adapter.targets, group, weights)

    def _problem(self, loader: Loader, group: Group, weights: Weights | None = None) -> Problem:
        """Return the problem of a fit, after finding the last layer if that is needed."""
        data, model = self._data(loader, group, weights), self._linear_model
        problem = Problem(model, self._given_likelihood, data)
        if self._parameters_asked == "last_layer":
            # a call is needed to see which layers are applied last; it uses few examples, since the
            # first batch may contain all data
            few = problem.sweep.pieces(data.first(), FEW)[0]
            model = _linear_model(
                model.network, "last_layer", last_layers(model.network, few.inputs)
            )
            problem = Problem(model, self._given_likelihood, data, problem.sweep.begun_with)
        return problem


def linear_problem(
    model: nn.Module,
    likelihood: Task | Likelihood,
    x: Inputs | Loader,
    y: Tensor | None = None,
    parameters: Selection = None,
) -> Problem:
    """Return the linear model of a network with its likelihood and data, for the four stages of the
    method.

    Args:
        model (nn.Module): The trained network.
        likelihood (str or Likelihood): As in ``LinearisedLaplace``.
        x (DataLoader, Dataset, list of batches, or inputs): The training data.
        y (Tensor, optional): The targets, if ``x`` are inputs.
        parameters (str, list or callable, optional): As in ``LinearisedLaplace``. Default None: all
            that require gradients, except those of normalisation layers.

    Returns:
        A ``Problem``, for which ``get_sto_samples`` draws the random probes. For a regression, pass
        ``problem.with_targets(probes.targets)`` to the other stages.

    Example:
        >>> problem = linear_problem(model, "classification", x, y)
        >>> probes = get_sto_samples(problem, num_samples=4)
    """
    la = LinearisedLaplace(model, likelihood, parameters=parameters)
    return la._problem(paired(x, y), Group())


def _linear_model(
    network: Network, parameters: Selection, last: tuple[str, ...] = ()
) -> LinearModel:
    names = select_parameters(network.module, parameters, last)
    return LinearModel(network, ParameterLayout.of(network.module, names))
