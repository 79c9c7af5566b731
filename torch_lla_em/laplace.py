"""``LinearisedLaplace``: the posterior of a trained network, its fit and its files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from torch_lla_em.checkpoint import header_of
from torch_lla_em.data import Data, TargetFn, Weights, paired, with_weights
from torch_lla_em.distil import distil as train_student
from torch_lla_em.inference import (
    FitOptions,
    Solver,
    is_cold,
    learn,
    learn_cold,
)
from torch_lla_em.jacobian import (
    ForwardFn,
    LinearModel,
    Network,
    NetworkState,
    ParameterLayout,
    Selection,
    called_last,
    select_parameters,
)
from torch_lla_em.likelihoods import (
    LIKELIHOODS,
    BradleyTerry,
    Likelihood,
    Regression,
    compare,
    preferred,
)
from torch_lla_em.prediction import (
    Posterior,
    Printed,
    Setting,
    calibrates,
    check,
    exports,
    fitted,
    predictor,
    result,
    stored,
    summary,
    warn_of_collapse,
)
from torch_lla_em.problem import Plan, Problem
from torch_lla_em.report import report
from torch_lla_em.runtime import (
    Compute,
    Group,
    check_choice,
    check_options,
    group_of,
    refuse_former,
)
from torch_lla_em.session import Run, Session, log_marginal_likelihood

logger = logging.getLogger("torch_lla_em")

# the default tolerance as a share of the Monte Carlo error of a standard deviation, 1/√(2K)
_QUARTER = 0.25

_FORMER = {
    "checkpoint": "pass compute=Compute(checkpoint=folder) to LinearisedLaplace",
    "budget": "pass compute=Compute(budget=seconds) to LinearisedLaplace",
    "shard": "pass compute=Compute(shard=None) to LinearisedLaplace for a fit on each rank alone",
    "update": "the steps are those of MacKay's update",
}
"""Arguments of ``fit`` in earlier versions, and what replaces them."""

Task = Literal[
    "classification", "regression", "bernoulli", "poisson", "heteroscedastic", "reward_modeling"
]


class _Known(NamedTuple):
    """The data of a fit, which copies and files leave out."""

    data: Any = None
    weights: Weights | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Known, ()


class LinearisedLaplace(Printed, nn.Module):
    """The linearised Laplace posterior of a trained network, represented by samples.

    ``fit`` learns the prior precision λ (and the observation noise σ of a regression) by EM and
    draws posterior samples; calling the object predicts. The network is not changed: its weights,
    buffers, mode and attributes are restored after every call. ``print`` shows the results of the
    fit, an assessment of it, and recommendations. It is an ``nn.Module`` so that ``to``, ``state_dict`` and
    modules that contain it treat it like a network; it has no parameters to train.

    Args:
        model (nn.Module): The trained network, in any mode, on any device.
        likelihood (str or Likelihood): "classification" (outputs are logits), "regression",
            "bernoulli" (one logit per label), "poisson" (log rates), "heteroscedastic" (means, then
            log variances), "reward_modeling", or a ``Likelihood`` of your own.
        prior (str): "scalar" (default): one precision for all parameters. "layerwise": one per
            tensor, at several times the cost; it can prune tensors.
        g_prior (bool or str, optional): Prior standard deviation of a parameter, where s is the size
            of its feature and m the mean size in its tensor. None (default): ‖w‖ m/s, where w are the
            trained weights of its layer, so that the posterior is the same in all units of the targets.
            True: 1/s. "half": √m/s. "tensor": m/s. "root": √(m/s). False: the same for all parameters.
        num_samples (int): Number K of posterior samples. Default 32, for which standard deviations
            have a Monte Carlo error of 12 %; with 8 it is 25 %. Time and memory grow with K.
        parameters (str, list or callable, optional): The parameters in the posterior. None
            (default): all that require gradients, except those of normalisation layers. Use
            "last_layer" for very large networks. Otherwise a pattern of names such as "*lora*", a
            list of patterns, or a predicate (name, parameter) -> bool.
        sigma_noise (float or Tensor, optional): Standard deviation of the observation noise at
            which EM starts, for regression. None (default): that of the network's residuals. A
            tensor learns one per output. It is not learnt with ``weights``, or if ``em_steps`` is 0.
        tolerance (float, optional): Numerical error of the samples in posterior standard deviations.
            None (default): a quarter of their Monte Carlo error, 0.03 for 32 samples.
        curvature (str, optional): Where the GGN is evaluated: "variational": in expectation under
            the posterior; "linear": at the mode of the linear model; "network": at the network's
            outputs, as in the paper. None (default): "variational" for all but Gaussian likelihoods,
            with the default ``prior`` and ``solver``, if memory allows; else "network".
        solver (Solver, optional): BlockCG() or SGD(). None (default):
            a span of directions for one prior precision if memory allows, else an iterative solver.
        class_dim (int): Axis of the classes in the outputs. Default -1; 1 for outputs (B, C, H, W).
        forward_fn (callable, optional): (model, inputs) -> outputs, if model(inputs) does not work.
        target_fn (callable, optional): batch -> targets, if they are not the last entry of a tuple
            or the "labels" of a dict.
        seed (int): Seed of all random numbers. Default 0.
        temperature (float): Every example counts 1/temperature times: lower is narrower. Default 1.0.
        compute (Compute): What a fit may use: precision, memory, time, processes, and a folder for checkpoints.
            Default Compute().

    Raises:
        TypeError: If an argument has a type that is not allowed.
        ValueError: If an argument has a value that is not allowed.

    Example:
        >>> la = LinearisedLaplace(model, "classification", num_samples=8)
        >>> probabilities = la.fit(x, y, progress_bar=False)(x)
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Task | Likelihood,
        *,
        prior: Literal["scalar", "layerwise"] = "scalar",
        g_prior: bool | Literal["root", "half", "tensor"] | None = None,
        num_samples: int = 32,
        parameters: Selection = None,
        sigma_noise: float | Tensor | None = None,
        tolerance: float | None = None,
        curvature: Literal["variational", "linear", "network"] | None = None,
        solver: Solver | None = None,
        class_dim: int = -1,
        forward_fn: ForwardFn | None = None,
        target_fn: TargetFn | None = None,
        seed: int = 0,
        temperature: float = 1.0,
        compute: Compute = Compute(),
    ):
        """Create a posterior that is not fitted yet; the class documents the arguments."""
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a trained nn.Module, not {type(model).__name__}.")
        check_options(g_prior=g_prior, num_samples=num_samples, parameters=parameters, seed=seed)
        check_options(sigma_noise=sigma_noise, tolerance=tolerance, solver=solver, compute=compute)
        check_options(class_dim=class_dim, forward_fn=forward_fn, target_fn=target_fn)
        check_options(temperature=temperature)
        super().__init__()
        # not a submodule: its weights are the user's, and not part of this state
        object.__setattr__(self, "model", model)
        self._given_likelihood = _likelihood(likelihood, sigma_noise)
        self._posterior: Posterior | None = None
        check_choice("prior", prior, ("scalar", "layerwise"))
        check_choice("curvature", curvature, (None, "network", "linear", "variational"))
        if prior == "layerwise" and curvature == "variational":
            raise ValueError('curvature="variational" has one precision: use prior="scalar".')
        given = ("forward_fn", forward_fn), ("target_fn", target_fn)
        self._given = [name for name, function in given if function is not None]
        if isinstance(self._given_likelihood, BradleyTerry):
            forward_fn, target_fn = forward_fn or compare, target_fn or preferred
        network = Network(model, forward_fn, int(class_dim))
        network.use(compute.precision)
        self._parameters_asked = parameters
        self._base = _linear_model(network, parameters)
        self.prior, self.g_prior, self.curvature = prior, g_prior, curvature
        self.num_samples, self.seed, self.temperature = int(num_samples), int(seed), temperature
        self.tolerance = _QUARTER * (2 * num_samples) ** -0.5 if tolerance is None else tolerance
        self.solver, self.target_fn, self.compute = solver, target_fn, compute
        self.trained_with = _Known()

    forward, predict, predictions = predictor.forward, predictor.predict, predictor.predictions
    is_ood, joint_log_prob = predictor.is_ood, predictor.joint_log_prob
    functional_samples = predictor.functional_samples
    predictive_samples = predictor.predictive_samples
    function_sample, export = predictor.function_sample, exports.export
    calibrate, check = calibrates.calibrate, check
    distil, report, details, _table = train_student, report, summary.details, summary.table_of
    state_dict, load_state_dict = fitted.state_dict, fitted.load_state_dict  # type: ignore[assignment]
    _load_from_state_dict, save = fitted.load_from_state_dict, fitted.save
    load: Any = classmethod(fitted.load)
    accuracy, log_marginal_likelihood = property(summary.accuracy), log_marginal_likelihood

    prior_precision = result("result.prior_precision", "λ, () or one value per tensor.")
    sigma_noise = result("result.sigma_noise", "σ of a regression.")
    effective_dim = result("result.effective_dim.value", "γ, how many parameters data determine.")
    effective_dim_error = result("result.effective_dim.standard_error", "Its Monte Carlo error.")
    certificate = result("result.certificate", "The numerical error of each sample, (K,).")
    scale = result("result.scale", "Prior standard deviation of each parameter at λ = 1, (P,).")
    w_MAP = result("setting.linear_model.w_MAP", "The trained weights of the parameters, (P,).")
    w_lin = result("result.w_lin", "The mode of the linear model, (P,).")
    w_samples = result("result.w_samples", "The posterior samples, with mean zero, (K, P).")
    mixture = result("result.mixture", "The components of predictions.")
    mean = result("mean", 'What samples are added to: "network" or "linear".')
    posterior_scale = result("scale", "τ, the factor of the posterior's variance in predictions.")
    reference = result("reference", "The scores of validation examples, if there are any.")
    calibration = result("calibration", "The result of the last ``calibrate``, if any.")
    num_data = result("num_data", "The number of training examples with a label.")
    training_deviations = result("result.examples", "J w_k of some training examples.")
    largest_variance = result("largest_variance", "The largest variance of their outputs.")
    history = result("history", "A record of every EM step.", list)
    messages = result("messages", "The memory plan, then the warnings.", list)

    @property
    def posterior(self) -> Posterior | None:
        """The record of the fit, of which ``prediction`` has functions; None before ``fit``."""
        return self._posterior

    def take(self, posterior: Posterior) -> None:
        """Hold another record from now on.

        Args:
            posterior (Posterior): The record, as ``calibrate`` of a record returns it.
        """
        self._posterior, self.num_samples = posterior, len(posterior.result.w_samples)

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood, with the observation noise that was learnt."""
        return self._given_likelihood if self._posterior is None else self._posterior.likelihood

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LinearisedLaplace:
        """Move posterior and network together."""
        self._base, self._posterior = fitted.moved(self, fn)
        return self

    @property
    def _linear_model(self) -> LinearModel:
        return self._base if self._posterior is None else self._posterior.setting.linear_model

    def fit(
        self,
        loader: Any,
        targets: Tensor | None = None,
        *,
        validation: Iterable[Any] | Literal[False] | None = None,
        em_steps: int = 20,
        prior_precision: float | Tensor | None = None,
        progress_bar: bool = True,
        weights: Any = None,
        **former: Any,
    ) -> LinearisedLaplace:
        """Learn λ (and σ) by EM, then find the mode and the posterior samples.

        Args:
            loader (DataLoader, Dataset, list of batches, or inputs): The training data.
            targets (Tensor, optional): The targets, if ``loader`` are inputs.
            validation (DataLoader, optional): Held-out data to calibrate on; we recommend it. Default None: for a
                posterior of some ``parameters`` moved training examples, as by ``calibrate()``, if inputs are
                columns of numbers. False: as fitted.
            em_steps (int): The largest number of EM steps. Default 20; 0 keeps ``prior_precision``.
            prior_precision (float or Tensor, optional): Initial λ. Default None: chosen from the data.
            progress_bar (bool): Show a progress bar. Default True.
            weights (Tensor, str or callable, optional): Weights of the examples: a tensor, if inputs
                and targets are tensors; "last" if batches are (inputs, targets, weights); or a
                function of the targets, such as ``lambda y: class_weights[y]``. Predictions and
                ``calibrate`` use no weights. Default None: every example counts once.

        Returns:
            The posterior itself.

        Raises:
            TypeError: For an argument of an earlier version, with what replaces it.
            ValueError: If targets do not fit the outputs, outputs are not finite, or the data of a
                checkpoint have changed.

        Example:
            >>> fresh = LinearisedLaplace(model, "classification").fit(loader, em_steps=1)
        """
        refuse_former("fit", former, _FORMER)
        check_options(em_steps=em_steps, prior_precision=prior_precision, progress_bar=progress_bar)
        data = paired(loader, targets)
        if weights is not None:
            data, weights = with_weights(data, weights)
        start = _start(prior_precision, em_steps)
        options = self._options(em_steps=int(em_steps), prior_precision=start)
        unseen = None
        if validation is not None and validation is not False:
            ranks = group_of(self.compute.shard).joined()
            unseen = Data(
                validation, self._linear_model.network.device, self.target_fn, ranks
            ).read()
        found = self._fit(data, weights, options, Run(self.compute, progress_bar, unseen))
        if unseen is not None:
            found = found.calibrated(*calibrates.calibrated_on(found, validation))
        elif validation is None and em_steps and self._parameters_asked is not None:
            found = calibrates.without_validation(found, data, weights)
        self.take(found)
        self.trained_with = _Known(data, weights)
        return self

    def _fit(
        self, loader: Any, weights: Weights | None, options: FitOptions, run: Run
    ) -> Posterior:
        """Return the posterior by one scaling of the prior; this object is not changed."""
        problem = self._problem(loader, group_of(self.compute.shard).joined(), weights)
        model = problem.linear_model
        given = self._given_likelihood, self.temperature
        session = Session(problem, header_of(model, options, *given), run)
        setting = Setting(model, NetworkState(model.network), self.target_fn, self.compute.shard)
        with session.running() as around:
            state = around.finished()
            if state is not None:
                stored.refuse_other_network(state, model.network.module)
                return fitted.loaded(self, state, setting)
            around.follow(around.plan(options, self.compute))
            run_em = learn_cold if is_cold(problem, options) else learn
            learnt = run_em(problem, options, around.watch, around.begin())
            around.end(learnt.why)
            facts: dict[str, Any] = {"history": tuple(around.history)}
            facts |= dict(zip(("trained_on", "num_data"), around.trained_on()))
            found = Posterior.of_fit(learnt, setting, self._given_likelihood, **facts)
            warn_of_collapse(found, problem)
            found = replace(found, messages=tuple(around.messages))
            found.require(surely=True)
            if learnt.complete:  # otherwise the checkpoint continues from the last state
                around.keep(stored.state_of(found, self._given_likelihood, self._given))
        return found

    def _options(self, **of_fit: Any) -> FitOptions:
        """Return the options of a fit."""
        names = "num_samples", "seed", "solver", "tolerance", "g_prior"
        own = {name: getattr(self, name) for name in names}
        layerwise = self.prior == "layerwise"
        own |= {"span_memory": self.compute.span_memory, "curvature": self.curvature}
        return FitOptions(**own, layerwise=layerwise, **of_fit)

    def plan(self, loader: Any, targets: Tensor | None = None) -> Plan:
        """Return a ``Plan`` of the time and memory of ``fit`` for these data; print it to read it.

        Args:
            loader (DataLoader, Dataset, list of batches, or inputs): The training data.
            targets (Tensor, optional): The targets, if ``loader`` are inputs.

        Example:
            >>> words = str(la.plan(x, y))
        """
        problem = self._problem(paired(loader, targets), Group())
        with Session(problem, {}).running() as run:
            return run.timed(run.plan(self._options(), self.compute))

    def _problem(self, loader: Any, group: Group, weights: Weights | None = None) -> Problem:
        """Return the problem of a fit, once it is known which layer is the last."""
        data, model = (
            Data(loader, self._linear_model.network.device, self.target_fn, group, weights),
            self._linear_model,
        )
        if self._parameters_asked == "last_layer":
            # a call is needed to see which layer is called last
            network = model.network
            last = called_last(network, data.first().inputs)
            model = _linear_model(network, "last_layer", last)
        return Problem(model, self._given_likelihood, data, self.temperature)


def _linear_model(network: Network, parameters: Selection, last: str | None = None) -> LinearModel:
    names = select_parameters(network.module, parameters, last)
    return LinearModel(network, ParameterLayout.of(network.module, names))


def _start(asked: float | Tensor | None, em_steps: int) -> Tensor | None:
    """Return λ at which EM starts, or None if it is to be chosen."""
    if asked is None:
        if em_steps == 0:
            raise ValueError("em_steps=0 keeps the prior precision: pass prior_precision too.")
        return None
    return torch.as_tensor(asked, dtype=torch.float64, device="cpu").detach().clone()


def _likelihood(likelihood: Task | Likelihood, sigma_noise: float | Tensor | None) -> Likelihood:
    if isinstance(likelihood, Likelihood):
        return likelihood
    check_choice("likelihood", likelihood, tuple(LIKELIHOODS))
    return Regression(sigma_noise) if likelihood == "regression" else LIKELIHOODS[likelihood]()
