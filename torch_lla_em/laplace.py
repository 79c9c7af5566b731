"""``LinearisedLaplace``: wrap a trained network, fit, predict with error bars."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from torch_lla_em.checkpoint import FORMAT, FirstOutputs, PassLog, RecordedProblem, SharedLog
from torch_lla_em.data import Chain, Data, TargetFn, inputs_of, map_tensors, to_device
from torch_lla_em.distributed import SHARDS, compare_ranks, share_path, spread_of
from torch_lla_em.history import record_of, summary_of
from torch_lla_em.inference import (
    Curve,
    Earlier,
    EMState,
    Estimate,
    FitOptions,
    Modes,
    Posterior,
    Solver,
    curve,
    fit_posterior,
)
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
    compare,
    preferred,
    tempered,
)
from torch_lla_em.prediction import (
    MODE,
    NETWORK,
    SCALE,
    WEIGHT,
    Calibration,
    NotFittedError,
    Prediction,
    Standing,
    calibrated,
    mean_of,
    mixed,
    posterior_alone,
    predicted,
    slots,
    stored,
)
from torch_lla_em.problem import Problem, place_of_vectors
from torch_lla_em.runtime import Compute, Group, free_memory, group_of, leaving_cleanly, tf32
from torch_lla_em.runtime import records as persistence
from torch_lla_em.solvers import Newton, Spectrum

logger = logging.getLogger("torch_lla_em")

# beside the posterior in a finished checkpoint: what the fit of later data adds to
_ETA = "eta"


class _Wish(NamedTuple):
    """What a call of ``fit`` asks for."""

    em_steps: int
    prior_precision: float | Tensor | None
    progress_bar: bool
    checkpoint: str | PathLike | None
    update: str
    override: bool


class LinearisedLaplace(nn.Module):
    """The linearised Laplace posterior of a trained network, by samples.

    ``fit`` learns the prior precision (and the noise of a regression) by EM and draws
    posterior samples; calling the object predicts. The network itself is never changed:
    its weights, buffers, mode and attributes come back as they were. See ``README.md``
    for what each argument means.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        *,
        prior: str = "scalar",
        g_prior: bool = True,
        num_samples: int = 32,
        parameters: Selection = None,
        sigma_noise: float | Tensor = 1.0,
        tolerance: float = 1e-2,
        curvature: str = "network",
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
        if isinstance(solver, (type, Newton)):  # which finds modes
            raise TypeError(
                f"solver={solver!r} draws no samples: pass BlockKrylov(), BlockCG(), "
                "FunctionSpace() or SGD(), an object and not its class, or None to have it chosen."
            )
        super().__init__()
        object.__setattr__(
            self, "model", model
        )  # its weights are the user's, no part of this state
        check_choice("prior", prior, ("scalar", "layerwise"))
        check_choice("curvature", curvature, ("network", "linear"))
        if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
            raise ValueError(f"num_samples must be a whole number of 1 or more, not {num_samples}.")
        if not tolerance > 0:
            raise ValueError(f"tolerance must be above 0, not {tolerance}.")
        self.likelihood = self._given_likelihood = _likelihood(likelihood, sigma_noise)
        tempered(self.likelihood, temperature)
        if isinstance(self.likelihood, BradleyTerry):
            forward_fn, target_fn = forward_fn or compare, target_fn or preferred
        network = Network(model, forward_fn, class_dim)
        network.precision = compute.precision
        self._parameters_asked = parameters
        self._linear_model = _linear_model(network, parameters)
        self.temperature = temperature
        self.prior, self.g_prior, self.curvature = prior, g_prior, curvature
        self.num_samples, self.tolerance, self.seed = num_samples, tolerance, seed
        self.solver, self.target_fn, self.compute = solver, target_fn, compute
        self.history: list[dict[str, Any]] = []
        self.calibration: Calibration | None = None
        """What the last ``calibrate`` gained on held-out rows."""

        self.num_data: int | None = None
        for name in stored.TENSORS:
            self.register_buffer(name, None)
        self._standing: Standing | None = None
        self._shard: str | None = None
        self._loaders: Chain | None = None
        self._earlier: Earlier | None = None

    def fit(
        self,
        loader: Iterable[Any],
        *,
        em_steps: int = 20,
        prior_precision: float | Tensor | None = None,
        progress_bar: bool = True,
        checkpoint: str | PathLike | None = None,
        update: str = "mackay",
        override: bool = True,
        shard: str | None = "auto",
    ) -> LinearisedLaplace:
        """Learn λ (and σ) by EM from ``prior_precision``, then find mode and samples.

        ``em_steps=0`` keeps ``prior_precision``. ``update="em"`` takes the slower steps
        that never lower the evidence. ``checkpoint`` is a folder that keeps every pass: the
        same call after a kill goes on from there.

        ``override=False`` adds the data to those of earlier fits, which are read again: what
        a fit of all of them at once would give, from the λ and σ learnt so far.

        Under ``torchrun``, once its process group is initialised, all ranks fit together, each
        on its share of the data or of the columns: ``shard="data"``, ``"columns"``, or
        ``"auto"``, which logs its choice; ``"weights"`` slices all vectors over the ranks as
        well, where they do not fit on one; ``None`` lets each rank fit on its own.
        """
        check_choice("shard", shard, SHARDS)
        self._shard = shard
        wish = _Wish(em_steps, prior_precision, progress_bar, checkpoint, update, override)
        with group_of(shard).joined() as group:
            return self._fit(loader, wish, group)

    def _fit(self, loader: Iterable[Any], wish: _Wish, group: Group) -> LinearisedLaplace:
        em_steps, prior_precision, progress_bar, checkpoint, update, override = wish
        check_choice("update", update, ("mackay", "em"))
        if em_steps < 0:
            raise ValueError(f"em_steps must be 0 or more, not {em_steps}.")
        more = not override and self.w_lin is not None
        start = self._start(prior_precision, em_steps, more)
        loaders, data = self._open(loader, more, group)
        fitted = self.likelihood if more else self._given_likelihood
        likelihood = tempered(fitted, self.temperature)
        earlier = self._earlier.at(likelihood) if more and self._earlier else None
        options = FitOptions(
            self.num_samples,
            self.seed,
            self.g_prior,
            self.prior == "layerwise",
            self.solver,
            self.tolerance,
            self.curvature,
            update,
            em_steps,
            start,
            earlier.num_rows if earlier else 0,
            keep_noise=not override,
            warm=(self.w_lin, self.w_samples) if more else None,
        )
        header = self._header(options, fitted) if checkpoint is not None or group.size > 1 else {}
        shared = {"shard": self._shard, "checkpoint": checkpoint is not None}
        compare_ranks(group, self._device, {**shared, **header})
        problem = Problem(self._linear_model, likelihood, data)
        if checkpoint is not None:
            log = (
                PassLog(checkpoint, header)
                if group.size == 1
                else SharedLog(checkpoint, header, group)
            )
            if self._comes_back(log, data, likelihood):
                self._loaders = loaders
                return self
            if group.rank == 0:
                log.require_room(2 * self.num_samples * problem.size * problem.dtype.itemsize)
            problem = RecordedProblem(self._linear_model, likelihood, data)
        problem.spread = spread_of(problem, self._shard, self.num_samples)
        if checkpoint is not None and group.size > 1:
            log.spread = problem.spread
        problem.earlier = earlier
        history: list[dict[str, Any]] = []
        with (
            leaving_cleanly(at_once=checkpoint is None) as leaving,
            tqdm(total=em_steps, desc="EM", disable=group.rank > 0 or not progress_bar) as bar,
        ):
            if checkpoint is not None:
                problem.record(log, leaving)
            plan = problem.prepare(self.num_samples, self.compute)
            if checkpoint is not None:
                self._compare_outputs(log, data)
            logger.log(logging.WARNING if plan.tight else logging.INFO, "%s", plan)
            if progress_bar and group.rank == 0:
                bar.write(str(plan))

            def report(state: EMState) -> None:
                history.append(record_of(state, data.num_passes))
                bar.update()
                bar.set_postfix(summary_of(history[-1]))

            # for the solvers; the network has a precision of its own
            with tf32(self._device, False):
                posterior = fit_posterior(problem, options, report)
        data.confirm()
        problem.refuse_changed_weights()
        share_path(problem)
        self._store(posterior, history, data.num_rows)
        self._loaders = loaders
        kept = {} if posterior.noise is None else {_ETA: posterior.noise.eta}
        self._earlier = Earlier.of(kept[_ETA], self.scale, likelihood, data) if kept else None
        if checkpoint is not None:
            log.finish({**self.state_dict(), **kept}, data.facts())
        return self

    def _comes_back(self, log: PassLog, data: Data, likelihood: Likelihood) -> bool:
        """Take over the posterior of a finished checkpoint, if it is one and of these data."""
        state = log.posterior(self._device)
        if state is None:
            return False
        self._compare_outputs(log, data)
        data.restore(persistence.from_bytes(state["facts"]))
        data.confirm()
        self.load_state_dict(state)
        if _ETA in state:
            self._earlier = Earlier.of(state[_ETA], self.scale, likelihood, data)
        return True

    def _compare_outputs(self, log: PassLog, data: Data) -> None:
        """Refuse a checkpoint of other outputs; every rank reads a batch, so that all go on alike."""
        outputs = FirstOutputs.of(self._linear_model, data)
        if data.group.rank == 0:
            log.compare(outputs)

    def _start(
        self, prior_precision: float | Tensor | None, em_steps: int, more: bool
    ) -> Tensor | None:
        """Return λ where EM starts, or None to have it chosen."""
        if prior_precision is not None:
            start = torch.as_tensor(prior_precision, dtype=torch.float64).detach().clone()
            if not (start > 0).all() or start.isinf().any():
                raise ValueError(f"prior_precision must be positive, not {prior_precision}.")
            return start
        if em_steps == 0 and not more:
            raise ValueError("em_steps=0 keeps the prior precision: pass prior_precision too.")
        return self.prior_precision if more else None

    def _open(self, loader: Iterable[Any], more: bool, group: Group) -> tuple[Chain, Data]:
        """Return the loaders to fit on, as they are and as data; settle which layer is last."""
        if more and not (self._loaders and self._loaders.loaders):
            raise NotFittedError(
                "The earlier data are not here, since a posterior is stored without them: call "
                "la.fit with one loader of all data, old and new."
            )
        loaders = Chain([*(self._loaders.loaders if more else ()), loader])
        whole = loader if len(loaders.loaders) == 1 else loaders
        data = Data(whole, self._device, self.target_fn, group)
        if self._parameters_asked == "last_layer":
            # which layer is called last is only known once there is something to call it on
            network = self._linear_model.network
            last = called_last(network, data.first().inputs)
            self._linear_model = _linear_model(network, "last_layer", last)
        return loaders, data

    def _options(self) -> dict[str, Any]:
        given = self._given_likelihood
        return {
            "sigma_noise": given.sigma_noise.tolist() if type(given) is Regression else 1.0,
            "prior": self.prior,
            "g_prior": self.g_prior,
            "num_samples": self.num_samples,
            "parameters": self._linear_model.layout.names,
            "tolerance": self.tolerance,
            "curvature": self.curvature,
            "class_dim": self._linear_model.network.class_dim,
            "seed": self.seed,
            "temperature": self.temperature,
        }

    def _header(self, options: FitOptions, likelihood: Likelihood) -> dict[str, Any]:
        """Return what a checkpoint must agree with, by name."""
        layout = self._linear_model.layout
        network = self._linear_model.network
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

    def forward(
        self,
        x: Any = None,
        link_approx: str = "mc",
        generator: torch.Generator | None = None,
        **inputs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return E[y] (probabilities, rates); for regression (mean, variance with the noise).

        A model of several inputs takes a tuple, a dict, or keywords: ``la(input_ids=...)``.

        ``"mc"`` averages over the samples, or over as many fresh ones from a generator;
        ``"probit"`` uses the variance alone, ``"probit_shared"`` one variance for all classes,
        which keeps the most probable one.
        """
        check_choice("link_approx", link_approx, ("mc", "probit", "probit_shared"))
        prediction = self.predict(x, generator=generator, **inputs)
        if self.likelihood.real_valued:
            return tuple(prediction.moments())
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
        ``num_samples`` takes the first few samples only, which is faster and less exact: see
        ``Prediction.standard_error``.
        """
        if num_samples is not None and not 1 <= num_samples <= self.num_samples:
            raise ValueError(
                f"num_samples={num_samples}, but there are {self.num_samples} samples to choose from."
            )
        if inputs and x is not None:
            raise TypeError("Pass all inputs by name, or all in one tuple or dict.")
        x, table = inputs if x is None else x, self._parts(mean)
        columns = torch.cat([self.w_lin[None], self.w_samples[:num_samples]])
        f, Jw = self._push_forward(x, columns)
        if generator is not None:
            Jw = torch.cat([Jw[:1], mixed(Jw[1:], generator)])
        class_dim = self._linear_model.network.class_dim
        return predicted(self.likelihood, f, Jw, table, class_dim)

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

        table, k = self._parts(None).clone(), k % self.num_samples
        part = int(slots(table[:, WEIGHT], self.num_samples)[k])
        alone = table[part].to(self.w_lin)
        w = alone[MODE] * self.w_lin + alone[SCALE].sqrt() * self.w_samples[k]

        def sample(x: Any) -> Tensor:
            f, Jw = self._push_forward(x, w[None])
            class_dim = self._linear_model.network.class_dim
            centre = alone[NETWORK].to(f) * f
            return Prediction(self.likelihood, centre, Jw, class_dim).samples[0]

        return sample

    def joint_log_prob(self, x: Any, y: Tensor, mean: str | None = None) -> Tensor:
        """Return log p(y_1..y_B | x_1..x_B), shape ()."""
        return self.predict(x, mean).joint_log_prob(y)

    def calibrate(self, loader: Iterable[Any], mean: str | None = None) -> LinearisedLaplace:
        """Fit how predictions go from the network to the posterior by held-out rows; one pass.

        For classes and labels: a temperature of the network, a scale of the posterior, a factor
        of the softmax at its mean, and the weights of the three; temperature scaling is a special
        case. For real numbers: the scale, σ, and the share of the linear mode in the mean. All
        are most probable under mild priors. ``calibration`` tells what was gained. ``mean``
        keeps to the posterior around the "network" or the "linear" mode, beside the network.
        Where several ranks have fitted together, all of them call it together.
        """
        if mean is not None:
            check_choice("mean", mean, ("network", "linear"))
        self._require_fit(surely=True)
        table = self._parts(None)
        with torch.inference_mode(False), torch.no_grad(), group_of(self._shard).joined() as group:
            data = Data(loader, self._device, self.target_fn, group)
            problem = Problem(self._linear_model, self.likelihood, data)
            columns = torch.cat([self.w_lin[None], self.w_samples])
            found = calibrated(problem, columns, mean, table)
        self.mixture, self.calibration = found.table.to(table), found.calibration
        if isinstance(self.likelihood, Regression):
            self.sigma_noise = self.sigma_noise * found.noise
            self.likelihood = self.likelihood.at_noise(self.sigma_noise)
        return self

    @property
    def mean(self) -> str:
        """What the posterior is around in predictions: "network" or "linear"."""
        return "network" if self.mixture is None else mean_of(self.mixture)

    @mean.setter
    def mean(self, mean: str) -> None:
        check_choice("mean", mean, ("network", "linear"))
        self._set_alone(mean, self.mean_factor, self.posterior_scale)

    @property
    def posterior_scale(self) -> Tensor | None:
        """τ, by which the posterior's variance is multiplied in predictions."""
        return None if self.mixture is None else self.mixture[0, SCALE]

    @posterior_scale.setter
    def posterior_scale(self, scale: Tensor) -> None:
        self._set_alone(self.mean, self.mean_factor, scale)

    @property
    def mean_factor(self) -> Tensor | None:
        """What the posterior's mean is multiplied by in predictions."""
        if self.mixture is None:
            return None
        return self.mixture[0, MODE if self.mean == "linear" else NETWORK]

    @mean_factor.setter
    def mean_factor(self, factor: Tensor) -> None:
        self._set_alone(self.mean, factor, self.posterior_scale)

    def _set_alone(self, mean: str, factor: Tensor, scale: Tensor) -> None:
        """Have predictions be of the posterior alone."""
        self.mixture = posterior_alone(mean, factor, scale).to(self.w_lin.device)

    def _parts(self, mean: str | None) -> Tensor:
        """Return the parts of predictions, of the posterior alone around a mean if it is given."""
        self._require_fit()
        if mean is None:
            return self.mixture
        check_choice("mean", mean, ("network", "linear"))
        factor = self.mean_factor if mean == self.mean else 1.0
        return posterior_alone(mean, factor, self.posterior_scale)

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
        try:
            if self._linear_model.report is None:
                self._linear_model.probe(map_tensors(Tensor.detach, x))
            with network.guarded(), torch.set_grad_enabled(differentiate):
                return self._linear_model.jvp(self._linear_model.prepare(x), w)
        except RuntimeError as error:
            _explain_dtype(error, x, network.module)
            raise

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the posterior as tensors, with a version and the network's fingerprint."""
        self._require_fit(surely=True)
        record = {
            "likelihood": type(self.likelihood).__name__,
            "num_data": self.num_data,
            "history": self.history,
            "calibration": self.calibration,
        }
        tensors = {name: getattr(self, name) for name in stored.TENSORS}
        layout = self._linear_model.layout
        return stored.state_of(tensors, record, layout, self._standing.fingerprint)

    def load_state_dict(self, state: dict[str, Tensor], strict: bool = True) -> None:
        """Take over a posterior; refused where the network is not the one it was fitted to."""
        tensors, record = stored.checked(state, self._linear_model, self.likelihood)
        size = state["w_samples"].nbytes
        place = place_of_vectors(size, self.compute, self._device, free_memory(self._device))
        for name, tensor in tensors.items():
            setattr(self, name, None if tensor is None else tensor.to(place, copy=True))
        self.history, self.num_data = record["history"], record["num_data"]
        self.calibration = record.get("calibration") and Calibration(*record["calibration"])
        if self.sigma_noise is not None:
            self.likelihood = self._given_likelihood.at_noise(self.sigma_noise)
        self.num_samples = len(self.w_samples)
        self._loaders = self._earlier = None
        self._standing = Standing(self._linear_model.network.module)

    def save(self, path: str | PathLike) -> None:
        """Write the posterior to a file, without the network."""
        options = {**self._options(), **stored.likelihood_option(self._given_likelihood)}
        stored.write(self.state_dict(), path, options)

    @classmethod
    def load(cls, path: str | PathLike, model: nn.Module, **options: Any) -> LinearisedLaplace:
        """Return a saved posterior on its network.

        What tensors cannot hold (a likelihood of your own, forward_fn, target_fn, solver) is
        passed again, as ``options``.
        """
        try:
            state, options = stored.read(path, model, options)
            unknown = [name for name in options if name not in signature(cls).parameters]
            if unknown:
                raise stored.DamagedError(f"there is no option {unknown[0]!r}.")
            la = cls(model, options.pop("likelihood"), **options)
            la.load_state_dict(state)
        except stored.DamagedError as error:
            raise stored.DamagedError(f"{str(path)!r} cannot be loaded: {error}") from None
        return la

    def train(self, mode: bool = True) -> LinearisedLaplace:
        """Set this object's own flag; predictions always run the network in eval mode."""
        self.training = mode
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LinearisedLaplace:
        """Move posterior and network together."""
        network = self._linear_model.network
        stands = self.w_lin is not None and self._standing.holds(network.module)
        super()._apply(fn, recurse)
        self.model._apply(fn, recurse)
        # what derivatives can be trusted is another question on another device
        self._linear_model = LinearModel(network, self._linear_model.layout)
        if stands:
            self._standing = Standing(network.module)
        return self

    def _store(self, posterior: Posterior, history: list[dict[str, Any]], num_data: int) -> None:
        for name, tensor in stored.tensors_of(posterior).items():
            setattr(self, name, tensor)
        self.history, self.num_data, self.calibration = history, num_data, None
        if self.sigma_noise is not None:
            self.likelihood = self._given_likelihood.at_noise(self.sigma_noise)
        elif isinstance(self._given_likelihood, Regression):  # tempered, so its noise stays
            self.likelihood = self._given_likelihood
            self.sigma_noise = self.likelihood.sigma_noise.to(self.w_lin.device)
        self._standing = Standing(self._linear_model.network.module)

    def _require_fit(self, surely: bool = False) -> None:
        if self.w_lin is None:
            raise NotFittedError(
                "There is no posterior yet: call la.fit(train_loader), or la.load_state_dict(state)."
            )
        if not self._standing.holds(self._linear_model.network.module, surely):
            raise NotFittedError(
                "The network's weights have changed since the fit, so the posterior is not theirs: "
                "call la.fit(train_loader) again."
            )

    @property
    def _device(self) -> torch.device:
        return self._linear_model.network.device


def _linear_model(
    network: Network, parameters: Selection, last_layer: str | None = None
) -> LinearModel:
    names = select_parameters(network.module, parameters, last_layer)
    return LinearModel(network, ParameterLayout.of(network.module, names))


def _likelihood(likelihood: str | Likelihood, sigma_noise: float | Tensor) -> Likelihood:
    if isinstance(likelihood, Likelihood):
        return likelihood
    check_choice("likelihood", likelihood, tuple(LIKELIHOODS))
    return Regression(sigma_noise) if likelihood == "regression" else LIKELIHOODS[likelihood]()


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        expected = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name}={value!r} is not known: choose one of {expected}.")


def _explain_dtype(error: RuntimeError, x: Any, module: nn.Module) -> None:
    """Raise with what to do where inputs are of another precision than all weights."""
    found: set[torch.dtype] = set()
    map_tensors(lambda tensor: found.add(tensor.dtype), x)
    own = {p.dtype for p in module.parameters() if p.is_floating_point()}
    other = {dtype for dtype in found - own if dtype.is_floating_point}
    if other and len(own) == 1:
        raise TypeError(
            f"The inputs are {other.pop()}, but the network's weights {(*own,)[0]}, and it failed "
            f"({str(error).splitlines()[0]}): pass inputs of the weights' dtype."
        ) from error


def _requires_grad(x: Any) -> bool:
    found: list[bool] = []
    map_tensors(lambda tensor: found.append(tensor.requires_grad), x)
    return any(found)
