"""``LinearisedLaplace``: wrap a trained network, fit, predict with error bars."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.checkpoint import FORMAT
from torch_lla_em.data import Chain, Data, Identity, TargetFn, Weighed, paired
from torch_lla_em.hub import OnHub
from torch_lla_em.inference import FitOptions, Solver, choose_scalings, learn
from torch_lla_em.jacobian import (
    ForwardFn,
    LinearModel,
    Network,
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
    Weighted,
    compare,
    preferred,
    tempered,
)
from torch_lla_em.prediction import Fitted, NotFittedError, stored
from torch_lla_em.problem import Plan, Problem
from torch_lla_em.report import write_report
from torch_lla_em.runtime import Compute, Group, check_choice, check_options, group_of
from torch_lla_em.runtime import records as persistence
from torch_lla_em.session import Session, check_shard

logger = logging.getLogger("torch_lla_em")

# of the Monte Carlo error of a standard deviation, 1/√(2K), for the error of each sample
_QUARTER = 0.25


class LinearisedLaplace(OnHub, Fitted):
    """The linearised Laplace posterior of a trained network, by samples.

    ``fit`` learns the prior precision (and the noise of a regression) by EM and draws posterior
    samples; calling the object predicts. The network itself is never changed: its weights, buffers,
    mode and attributes come back as they were. ``print`` shows what is fitted.

    Arguments, with their defaults and when to change them:

    ``model``: the trained module, in any mode, on any device.
    ``likelihood``: "classification" (the outputs are logits), "regression", "bernoulli" (a logit a
    label), "poisson" (log rates), "heteroscedastic" (means, then log variances),
    "reward_modeling", or a ``Likelihood``, which may have arguments.
    ``prior`` ("scalar"): one precision for all weights; "layerwise" learns one per tensor, at some
    times the price, and can prune tensors.
    ``g_prior`` (None): how the prior standard deviation of a weight follows from the size s of its
    feature. True: 1/s. "tensor": 1/s times the size of the features of its whole tensor. "half":
    half-way between these two. False: the same for all weights. None: "half" where the curvature
    is variational, else True; and with ``fit(validation=...)`` True and "tensor" are both fitted,
    and the one with the lower calibrated validation NLL is kept.
    ``num_samples`` (32): K posterior samples. Time and memory grow with it, errors fall as 1/√K:
    a standard deviation is known to 12 % at 32, 25 % at 8.
    ``parameters`` (None): which weights are random: all that require gradients but those of
    normalisation layers. "last_layer" for large trunks; a pattern ("*lora*"), a list of them, or a
    predicate (name, parameter) -> bool.
    ``sigma_noise`` (None): standard deviation of the observation noise of a regression at which EM
    starts. None starts from the network's own residuals (from 1 where ``temperature`` is not 1,
    which holds it); a tensor with one number per output learns one per output.
    ``tolerance`` (None): error of the samples, in posterior standard deviations; None is a quarter
    of what K samples leave open of a standard deviation: .03 at 32.
    ``curvature`` (None): where the Hessian is taken: in expectation under the posterior itself
    ("variational"), at the "linear" mode, or at the "network"'s outputs, as in the paper and for
    ``curve``. None is "variational" for all but Gaussian likelihoods, with the default ``prior``,
    ``solver`` and ``update``, up to 256 classes, where memory allows; else "network".
    ``solver`` (None): chosen by size and logged; BlockKrylov(), BlockCG(), FunctionSpace(), SGD().
    ``class_dim`` (-1): the axis of the outputs that classes are on; 1 for maps (B, C, H, W).
    ``forward_fn``: (model, inputs) -> outputs, where calling the model on them does not do it.
    ``target_fn``: batch -> targets, where they are not last in a tuple or "labels" of a dict.
    ``seed`` (0): of all noise; fits of different seeds differ by the Monte Carlo error.
    ``temperature`` (1.0): each row counts 1/T times in the fit; below 1 the posterior is narrower.
    ``compute``: precision of products, where vectors lie, and how much is done at once.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        *,
        prior: str = "scalar",
        g_prior: bool | str | None = None,
        num_samples: int = 32,
        parameters: Selection = None,
        sigma_noise: float | Tensor | None = None,
        tolerance: float | None = None,
        curvature: str | None = None,
        solver: Solver | None = None,
        class_dim: int = -1,
        forward_fn: ForwardFn | None = None,
        target_fn: TargetFn | None = None,
        seed: int = 0,
        temperature: float = 1.0,
        compute: Compute = Compute(),
    ):
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a trained nn.Module, not {type(model).__name__}.")
        check_options(g_prior=g_prior, num_samples=num_samples, parameters=parameters, seed=seed)
        check_options(sigma_noise=sigma_noise, tolerance=tolerance, solver=solver, compute=compute)
        check_options(class_dim=class_dim, forward_fn=forward_fn, target_fn=target_fn)
        check_options(temperature=temperature)
        super().__init__(model)
        check_choice("prior", prior, ("scalar", "layerwise"))
        check_choice("curvature", curvature, (None, "network", "linear", "variational"))
        if prior == "layerwise" and curvature == "variational":
            raise ValueError('curvature="variational" has one precision: use prior="scalar".')
        tolerance = _QUARTER * (2 * num_samples) ** -0.5 if tolerance is None else tolerance
        own = {"forward_fn": forward_fn, "target_fn": target_fn, "solver": solver}
        self._given = [name for name, value in own.items() if value is not None]
        self.likelihood = self._given_likelihood = _likelihood(likelihood, sigma_noise)
        tempered(self.likelihood, temperature)
        if isinstance(self.likelihood, BradleyTerry):
            forward_fn, target_fn = forward_fn or compare, target_fn or preferred
        network = Network(model, forward_fn, int(class_dim))
        network.precision = compute.precision
        self._parameters_asked = parameters
        self._linear_model = _linear_model(network, parameters)
        self.temperature = temperature
        self.prior, self.g_prior, self.curvature = prior, g_prior, curvature
        self.num_samples, self.tolerance, self.seed = int(num_samples), tolerance, int(seed)
        self.solver, self.target_fn, self.compute = solver, target_fn, compute
        self._loaders: Chain | None = None
        self._data_seen: list[Identity] = []
        """The rows of each of these loaders, by which a change of them is noticed."""

    def fit(
        self,
        loader: Any,
        targets: Tensor | None = None,
        *,
        validation: Iterable[Any] | None = None,
        em_steps: int = 20,
        prior_precision: float | Tensor | None = None,
        progress_bar: bool = True,
        checkpoint: str | PathLike | None = None,
        update: str = "mackay",
        override: bool = True,
        shard: str | None = "auto",
        weights: Any = None,
    ) -> LinearisedLaplace:
        """Learn λ (and σ) by EM from ``prior_precision``, then find mode and samples.

        ``loader`` is a DataLoader, a Dataset or a list of batches; or inputs, with ``targets``.
        ``validation`` is a loader of held-out rows, by which predictions are calibrated.
        ``em_steps=0`` keeps ``prior_precision``. ``update="em"`` takes the slower steps
        that never lower the evidence. ``checkpoint`` is a folder that keeps the state after
        every EM step: the same call after a kill goes on from there.

        ``override=False`` adds the data to those of earlier fits, which are read again: the
        result is that of one fit of all data. ``em_steps=0`` then keeps the λ and σ learnt so far.
        An error is raised where the earlier data have changed since they were fitted.

        ``weights`` says how often each example counts: a tensor beside inputs and targets; "last"
        where batches end with their weights, (inputs, targets, weights); or a function of the
        targets, such as ``lambda y: class_weights[y]``. Predictions and ``calibrate`` take none.

        Under ``torchrun``, once its process group is initialised, all ranks fit together, each
        on its share of the data (``shard="data"``). ``"weights"`` slices all vectors over the
        ranks as well; ``"auto"`` does so where they do not fit on one rank, and logs its choice.
        ``None`` lets each rank fit on its own.
        """
        check_shard(shard)
        check_choice("update", update, ("mackay", "em"))
        check_options(em_steps=em_steps, prior_precision=prior_precision, override=override)
        check_options(progress_bar=progress_bar, checkpoint=checkpoint)
        data = paired(loader, targets)
        if weights is not None:
            data = Weighed(data, weights, self.target_fn)
        self._shard = shard
        more = not override and self.w_lin is not None
        keeps = more and em_steps == 0
        options = FitOptions(
            self.num_samples,
            self.seed,
            True,
            self.prior == "layerwise",
            self.solver,
            self.tolerance,
            self.curvature,
            update,
            int(em_steps),
            _start(prior_precision, em_steps, self.prior_precision if keeps else None),
        )
        may_vary = not self.likelihood.is_quadratic and options.allows_variational
        choices = choose_scalings(self.g_prior, may_vary, validation is not None)
        before, best = self._snapshot(), None
        for g_prior in choices:
            self.__dict__.update(before)
            folder = checkpoint
            if checkpoint is not None and len(choices) > 1:
                folder = Path(checkpoint) / f"g_prior={g_prior}"
            run = replace(options, g_prior=g_prior)
            self._fit(data, run, more, folder, progress_bar)
            if validation is not None:
                self.calibrate(validation)
                logger.info("g_prior=%r: validation NLL %.4g.", g_prior, self.calibration.kept)
            if best is None or self.calibration.kept < best["calibration"].kept:
                best = self._snapshot()
        self.__dict__.update(best)
        return self

    def _fit(
        self,
        loader: Any,
        options: FitOptions,
        more: bool,
        checkpoint: str | PathLike | None,
        progress_bar: bool,
    ) -> None:
        """Fit with one scaling of the prior; ``more`` adds the data to those of earlier fits."""
        keeps = more and options.em_steps == 0
        with group_of(self._shard).joined() as group:
            loaders, data = self._open(loader, more, group)
            likelihood = self.likelihood if keeps else self._given_likelihood
            is_weighted = isinstance(loader, Weighed)
            in_fit = tempered(likelihood, self.temperature)
            in_fit = Weighted(in_fit) if is_weighted else in_fit
            problem = Problem(self._linear_model, in_fit, data)
            header = self._header(options, likelihood)
            with Session(problem, header, self._shard, checkpoint, progress_bar) as run:
                state = run.finished()
                if state is not None:
                    self.load_state_dict(state)
                else:
                    run.plan(self.num_samples, self.compute)
                    example = None if is_weighted else self._example_of(data)
                    posterior = learn(problem, options, run.on_step, run.begin(example))
                    run.end()
                    self._store(posterior, run.history, data.num_labelled)
                    self._example = example
                    if not is_weighted:  # whose targets are packed with their weights
                        self._warn_of_collapse(data)
                    self.messages = run.said
                    run.keep(self.state_dict())
            self._loaders, self._data_seen = loaders, data.parts

    def _snapshot(self) -> dict[str, Any]:
        """Return what a fit changes, as it is now: a fit replaces tensors, it does not write to them."""
        return {**self.__dict__, "_buffers": dict(self._buffers)}

    def plan(self, loader: Any, targets: Tensor | None = None) -> Plan:
        """Return the memory that ``fit`` of this loader will take: print it."""
        _, data = self._open(paired(loader, targets), False, Group())
        likelihood = tempered(self._given_likelihood, self.temperature)
        with Session(Problem(self._linear_model, likelihood, data), {}) as run:
            return run.plan(self.num_samples, self.compute)

    def load_state_dict(self, state: dict[str, Tensor], strict: bool = True) -> None:
        """Take over a posterior; refused where the network is not the one it was fitted to."""
        super().load_state_dict(state, strict)
        self._loaders = None

    def save(self, path: str | PathLike) -> None:
        """Write the posterior to a file, without the network.

        A name that ends with .safetensors is written in that format (which needs safetensors), any
        other by torch. Loading runs no code from either.
        """
        given, model = self._given_likelihood, self._linear_model
        own = "prior", "g_prior", "num_samples", "tolerance", "curvature", "seed", "temperature"
        options = {
            **{name: getattr(self, name) for name in own},
            **stored.likelihood_option(given),
            "sigma_noise": _sigma_noise(given),
            "parameters": model.layout.names,
            "class_dim": model.network.class_dim,
        }
        stored.write(self.state_dict(), path, options)

    @classmethod
    def load(cls, path: str | PathLike, model: nn.Module, **options: Any) -> LinearisedLaplace:
        """Return a saved posterior on its network.

        What tensors cannot hold (a likelihood of your own, forward_fn, target_fn, solver) has to
        be passed again, as ``options``: the file records which of them the fit had.
        """
        with stored.naming(path):
            state, options = stored.read(path, model, options, signature(cls).parameters)
            la = cls(model, options.pop("likelihood"), **options)
            la.load_state_dict(state)
        return la

    def report(self, loader: Any, path: str | PathLike = "report.html", other: Any = None) -> None:
        """Write one page about a loader's rows; ``other`` are inputs that should be unfamiliar."""
        write_report(self, loader, path, other)

    def _open(self, loader: Iterable[Any], more: bool, group: Group) -> tuple[Chain, Data]:
        """Return the loaders to fit on, as they are and as data; settle which layer is last."""
        if more and not (self._loaders and self._loaders.loaders):
            raise NotFittedError(
                "The earlier data are not here, since a posterior is stored without them: call "
                "la.fit with one loader of all data, old and new."
            )
        if type(loader) is list:  # so that it may be filled anew for the next fit
            loader = tuple(loader)
        loaders = Chain([*(self._loaders.loaders if more else ()), loader])
        whole = loader if len(loaders.loaders) == 1 else loaders
        known = self._data_seen if more else None
        weighted = {isinstance(part, Weighed) for part in loaders.loaders}
        if len(weighted) > 1:
            raise ValueError(
                "Some of the data have weights and some have none: pass weights for all, ones where "
                "an example counts once."
            )
        target_fn = None if True in weighted else self.target_fn
        data = Data(whole, self._device, target_fn, group, known)
        if self._parameters_asked == "last_layer":
            # which layer is called last is only known once there is something to call it on
            network = self._linear_model.network
            last = called_last(network, data.first().inputs)
            self._linear_model = _linear_model(network, "last_layer", last)
        return loaders, data

    def _header(self, options: FitOptions, likelihood: Likelihood) -> dict[str, Any]:
        """Return what a checkpoint must agree with, by name."""
        layout, network = self._linear_model.layout, self._linear_model.network
        weights = persistence.fingerprint(network.module)
        settings = {name: persistence.plain(value) for name, value in vars(options).items()}
        return {
            "format": f"{persistence.VERSION}.{FORMAT}",
            "network weights": bytes(weights.tolist()).hex(),
            "layers": [type(layer).__qualname__ for layer in network.module.modules()],
            "random weights": list(layout.names),
            "likelihood": type(likelihood).__name__,
            "options of the likelihood": persistence.plain(vars(likelihood)),
            "class_dim": self._linear_model.network.class_dim,
            "temperature": self.temperature,
            "precision": self.compute.precision,
            **settings,
        }


def _linear_model(network: Network, parameters: Selection, last: str | None = None) -> LinearModel:
    names = select_parameters(network.module, parameters, last)
    return LinearModel(network, ParameterLayout.of(network.module, names))


def _start(asked: float | Tensor | None, em_steps: int, learnt: Tensor | None) -> Tensor | None:
    """Return λ where EM starts, or None to have it chosen; ``learnt`` is an earlier fit's."""
    if asked is None:
        if em_steps == 0 and learnt is None:
            raise ValueError("em_steps=0 keeps the prior precision: pass prior_precision too.")
        return learnt
    return torch.as_tensor(asked, dtype=torch.float64, device="cpu").detach().clone()


def _sigma_noise(given: Likelihood) -> float | list[float] | None:
    """Return where a regression starts its noise, as it was asked for."""
    asked = type(given) is Regression and not given.from_data
    return given.sigma_noise.tolist() if asked else None  # type: ignore[attr-defined]


def _likelihood(likelihood: str | Likelihood, sigma_noise: float | Tensor | None) -> Likelihood:
    if isinstance(likelihood, Likelihood):
        return likelihood
    check_choice("likelihood", likelihood, tuple(LIKELIHOODS))
    return Regression(sigma_noise) if likelihood == "regression" else LIKELIHOODS[likelihood]()
