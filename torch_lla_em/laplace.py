"""``LinearisedLaplace``: the posterior of a trained network, its fit and its files."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torch_lla_em.checkpoint import FORMAT
from torch_lla_em.data import Data, TargetFn, Weights, paired, with_weights
from torch_lla_em.distil import distil as train_student
from torch_lla_em.inference import (
    Estimate,
    FitOptions,
    Solver,
    is_cold,
    learn,
    learn_cold,
    log_evidence,
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
    PosteriorBase,
    Setting,
    calibrated_on,
    stored,
    warn_of_collapse,
)
from torch_lla_em.problem import Plan, Problem
from torch_lla_em.report import report
from torch_lla_em.runtime import (
    Compute,
    Group,
    check_choice,
    check_options,
    files,
    group_of,
)
from torch_lla_em.session import Run, Session

logger = logging.getLogger("torch_lla_em")

# the default tolerance as a share of the Monte Carlo error of a standard deviation, 1/√(2K)
_QUARTER = 0.25

Task = Literal[
    "classification", "regression", "bernoulli", "poisson", "heteroscedastic", "reward_modeling"
]


class LinearisedLaplace(PosteriorBase):
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
            with the default ``prior``, ``solver`` and ``update``, if memory allows; else "network".
        solver (Solver, optional): BlockKrylov(), BlockCG(), FunctionSpace() or SGD(). None (default):
            a span of directions for one prior precision if memory allows, else an iterative solver.
        class_dim (int): Axis of the classes in the outputs. Default -1; 1 for outputs (B, C, H, W).
        forward_fn (callable, optional): (model, inputs) -> outputs, if model(inputs) does not work.
        target_fn (callable, optional): batch -> targets, if they are not the last entry of a tuple
            or the "labels" of a dict.
        seed (int): Seed of all random numbers. Default 0.
        temperature (float): Every example counts 1/temperature times: lower is narrower. Default 1.0.
        compute (Compute): Precision, device of the samples, limits on memory. Default Compute().

    Attributes:
        prior_precision (Tensor): λ.
        sigma_noise (Tensor): σ of a regression, otherwise None.
        effective_dim (Tensor): γ, the number of parameters that the data determine.
        w_lin (Tensor): The mode of the linear model, shape (P,).
        w_samples (Tensor): The posterior samples, with mean zero, shape (K, P).
        calibration (Calibration): The result of the last ``calibrate``, or None.
        messages (list of str): The memory plan, then the warnings of the fit.

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
        super().__init__(model, _likelihood(likelihood, sigma_noise))
        check_choice("prior", prior, ("scalar", "layerwise"))
        check_choice("curvature", curvature, (None, "network", "linear", "variational"))
        if prior == "layerwise" and curvature == "variational":
            raise ValueError('curvature="variational" has one precision: use prior="scalar".')
        own = {"forward_fn": forward_fn, "target_fn": target_fn}
        self._given = [name for name in own if own[name] is not None]
        if isinstance(self.likelihood, BradleyTerry):
            forward_fn, target_fn = forward_fn or compare, target_fn or preferred
        network = Network(model, forward_fn, int(class_dim))
        network.use(compute.precision)
        self._parameters_asked = parameters
        self._base = _linear_model(network, parameters)
        self.prior, self.g_prior, self.curvature = prior, g_prior, curvature
        self.num_samples, self.seed, self.temperature = int(num_samples), int(seed), temperature
        self.tolerance = _QUARTER * (2 * num_samples) ** -0.5 if tolerance is None else tolerance
        self.solver, self.target_fn, self.compute = solver, target_fn, compute

    distil, report = train_student, report

    def fit(
        self,
        loader: Any,
        targets: Tensor | None = None,
        *,
        validation: Iterable[Any] | None = None,
        em_steps: int = 20,
        prior_precision: float | Tensor | None = None,
        progress_bar: bool = True,
        checkpoint: str | PathLike[str] | None = None,
        update: Literal["mackay", "em"] = "mackay",
        shard: Literal["data"] | None = "data",
        weights: Any = None,
        budget: float | None = None,
    ) -> LinearisedLaplace:
        """Learn λ (and σ) by EM, then find the mode and the posterior samples.

        Args:
            loader (DataLoader, Dataset, list of batches, or inputs): The training data.
            targets (Tensor, optional): The targets, if ``loader`` are inputs.
            validation (DataLoader, optional): Held-out data to calibrate on; we recommend it.
            em_steps (int): The largest number of EM steps. Default 20; 0 keeps ``prior_precision``.
            prior_precision (float or Tensor, optional): Initial λ. Default None: chosen from the data.
            progress_bar (bool): Show a progress bar. Default True.
            checkpoint (str, optional): Folder to which the state is saved after every EM step. If
                the process is killed, the same call resumes from it. Default None.
            update (str): "mackay" (default); "em" takes slower steps that never lower the evidence.
            shard (str, optional): How an initialised process group is used. "data" (default): ranks
                share the batches. None: every rank fits on its own.
            weights (Tensor, str or callable, optional): Weights of the examples: a tensor, if inputs
                and targets are tensors; "last" if batches are (inputs, targets, weights); or a
                function of the targets, such as ``lambda y: class_weights[y]``. Predictions and
                ``calibrate`` use no weights. Default None: every example counts once.
            budget (float, optional): Seconds after which the fit ends with the posterior that it has
                reached, with a warning that has its error. With ``checkpoint``, the same call goes on.

        Returns:
            The posterior itself.

        Raises:
            ValueError: If targets do not fit the outputs, outputs are not finite, or the data of a
                checkpoint have changed.

        Example:
            >>> fresh = LinearisedLaplace(model, "classification").fit(loader, em_steps=1)
        """
        check_choice("shard", shard, ("data", None))
        check_choice("update", update, ("mackay", "em"))
        check_options(em_steps=em_steps, prior_precision=prior_precision)
        check_options(progress_bar=progress_bar, checkpoint=checkpoint, budget=budget)
        data = paired(loader, targets)
        if weights is not None:
            data, weights = with_weights(data, weights)
        start = _start(prior_precision, em_steps)
        options = self._options(update=update, em_steps=int(em_steps), prior_precision=start)
        unseen = None
        if validation is not None:
            ranks = group_of(shard).joined()
            unseen = Data(validation, self._device, self.target_fn, ranks).read()
        run = Run(checkpoint, progress_bar, budget, shard, unseen)
        found = self._fit(data, weights, options, run)
        if validation is not None:
            found = found.calibrated(*calibrated_on([found], validation))
        self._posterior = found
        return self

    def _fit(
        self, loader: Any, weights: Weights | None, options: FitOptions, run: Run
    ) -> Posterior:
        """Return the posterior by one scaling of the prior; this object is not changed."""
        problem = self._problem(loader, group_of(run.shard).joined(), weights)
        model = problem.linear_model
        session = Session(problem, self._header(options, model), run)
        setting = Setting(model, NetworkState(model.network), self.target_fn, run.shard)
        with session.running() as around:
            state = around.finished()
            if state is not None:
                stored.refuse_other_network(state, model.network.module)
                return self._loaded(state, setting)
            around.follow(around.plan(options, self.compute))
            problem.data.confirm_first()
            run_em = learn_cold if is_cold(problem, options) else learn
            learnt = run_em(problem, options, around.watch, around.begin())
            around.end(learnt.why)
            facts: dict[str, Any] = {"history": tuple(around.history)}
            facts |= dict(zip(("trained_on", "num_data"), around.trained_on()))
            found = Posterior.of_fit(learnt, setting, self._given_likelihood, **facts)
            warn_of_collapse(found, problem)
            found = replace(found, messages=tuple(around.messages))
            setting.require(surely=True)
            if learnt.complete:  # otherwise the checkpoint continues from the last state
                around.keep(self._state_of(found))
        return found

    def _options(self, **of_fit: Any) -> FitOptions:
        """Return the options of a fit."""
        names = "num_samples", "seed", "solver", "tolerance", "g_prior"
        own = {name: getattr(self, name) for name in names}
        layerwise = self.prior == "layerwise"
        return FitOptions(**own, layerwise=layerwise, curvature=self.curvature, **of_fit)

    def plan(self, loader: Any, targets: Tensor | None = None) -> Plan:
        """Return a ``Plan`` of the time and memory of ``fit`` for these data; print it to read it.

        Args:
            loader (DataLoader, Dataset, list of batches, or inputs): The training data.
            targets (Tensor, optional): The targets, if ``loader`` are inputs.

        Raises:
            ValueError: If the first batch has other inputs when it is read again, as by augmentation.

        Example:
            >>> words = str(la.plan(x, y))
        """
        problem = self._problem(paired(loader, targets), Group())
        with Session(problem, {}).running() as run:
            plan = run.timed(run.plan(self._options(), self.compute))
        problem.data.confirm_first()
        return plan

    def log_marginal_likelihood(
        self, loader: Any = None, targets: Tensor | None = None, *, weights: Any = None
    ) -> Estimate:
        """Return log p(y | λ, σ) of the linear model, with its standard error over samples.

        It compares priors, noise levels and likelihoods on the features of one network. It does not
        compare networks, whose features were learnt from the same targets: use ``compare`` for these.

        Args:
            loader (DataLoader, Dataset, list of batches, or inputs, optional): The training data, for a fit by a
                solver or with ``prior="layerwise"``: it takes up to 120 passes then. Default None: found by the fit.
            targets (Tensor, optional): The targets, if ``loader`` are inputs.
            weights (Tensor, str or callable, optional): The ``weights`` of the fit.

        Returns:
            An ``Estimate`` of ``value`` and ``standard_error``.

        Raises:
            NotFittedError: Before ``fit``, or if the model has changed since.
            ValueError: If the training data are needed.

        Example:
            >>> evidence = la.log_marginal_likelihood().value
        """
        found = self._fitted().result
        if loader is None:
            if found.log_evidence.value.isnan():
                raise ValueError(
                    "A fit by a solver computes no evidence, which takes up to 120 passes over the data. Pass the "
                    "training data: la.log_marginal_likelihood(train_loader)."
                )
            return found.log_evidence
        data = paired(loader, targets)
        if weights is not None:
            data, weights = with_weights(data, weights)
        problem = self._problem(data, Group(), weights)
        with Session(problem, {}).running() as run:
            run.plan(self._options(), self.compute)
            return log_evidence(problem, found, self._options())

    def _problem(self, loader: Any, group: Group, weights: Weights | None = None) -> Problem:
        """Return the problem of a fit, once it is known which layer is the last."""
        data, model = Data(loader, self._device, self.target_fn, group, weights), self._linear_model
        if self._parameters_asked == "last_layer":
            # a call is needed to see which layer is called last
            network = model.network
            last = called_last(network, data.first().inputs)
            model = _linear_model(network, "last_layer", last)
        return Problem(model, self._given_likelihood, data, self.temperature)

    def _header(self, options: FitOptions, model: LinearModel) -> dict[str, Any]:
        """Return what a checkpoint is compared with, by name."""
        layout, network = model.layout, model.network
        likelihood = self._given_likelihood
        weights = files.fingerprint(network.module)
        settings = {name: files.plain(value) for name, value in vars(options).items()}
        return {
            "format": f"{files.VERSION}.{FORMAT}",
            "network weights": bytes(weights.tolist()).hex(),
            "layers": [type(layer).__qualname__ for layer in network.module.modules()],
            "parameters in the posterior": list(layout.names),
            "likelihood": type(likelihood).__name__,
            "options of the likelihood": files.plain(vars(likelihood)),
            "class_dim": network.class_dim,
            "forward_fn": files.plain(network.forward_fn),
            "temperature": self.temperature,
            "precision": self.compute.precision,
            **settings,
        }


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
