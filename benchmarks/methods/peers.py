"""What a user would try, in one form: a method takes a ``Case`` and yields named predictors."""

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from math import exp
from statistics import mean
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from methods.metrics import Classes, Groups, Numbers, equal_functions
from methods.tasks import Task
from torch_lla_em import (
    Compute,
    LinearisedLaplace,
    Prediction,
    Student,
    temperature_of_neighbours,
)

REFERENCE = "temperature"
LEVEL, RATE = 0.9, 0.05
Predictor = Callable[[Tensor], Classes | Numbers]
Found = Iterator[tuple[str, Predictor]]


class Case(NamedTuple):
    """What a method is given."""

    task: Task
    networks: list[nn.Module]
    """Trained; the first is the one that is looked at."""

    seed: int
    ours: list[str]
    """Options of ``LinearisedLaplace``, its ``budget``, and ``validation`` of its ``fit``, as ``name=value,...``."""

    epochs: int
    quick: bool

    @property
    def likelihood(self) -> str:
        return "classification" if self.task.classes else "regression"


def network(case: Case) -> Found:
    """The network alone; for regression with the training residuals as noise."""
    yield "network", averaged(case, _outputs(case.networks[:1]))


def temperature(case: Case) -> Found:
    """The network with a temperature (or noise) that held-out rows like best."""
    yield REFERENCE, averaged(case, _outputs(case.networks[:1]), fitted=True)


def moved(case: Case) -> Found:
    """The network with a temperature from moved training rows, without held-out ones."""
    if case.task.classes:
        own = temperature_of_neighbours(case.networks[0], *case.task.train)
        draw = torch.no_grad()(_outputs(case.networks[:1]))
        yield "temperature, moved examples", lambda x: Classes.of(draw(x) / own)


def ensemble(case: Case) -> Found:
    """Networks from different starts, as they are and with one temperature (or noise)."""
    name = f"ensemble of {len(case.networks)}"
    yield name, averaged(case, _outputs(case.networks))
    yield f"{name}, temperature", averaged(case, _outputs(case.networks), fitted=True)


def _outputs(networks: list[nn.Module]) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.stack([network(x) for network in networks])


def averaged(case: Case, draw: Callable[[Tensor], Tensor], fitted: bool = False) -> Predictor:
    """Return the average over functions (S, B, C), at the best temperature where one is fitted.

    For regression the noise is fitted, to training rows or, ``fitted``, to held-out ones.
    """
    draw = torch.no_grad()(draw)
    rows = case.task.held_out if fitted else case.task.train
    if case.task.classes and not fitted:
        return lambda x: Classes.of(draw(x))
    if case.task.classes:
        f, y, grid = draw(rows.x), rows.y, torch.logspace(-1.3, 1.3, 400).tolist()
        best = min(grid, key=lambda t: F.nll_loss(Classes.of(f / t).log_probs, y).item())
        return lambda x: Classes.of(draw(x) / best)
    sigma = best_noise(draw(rows.x)[..., 0], rows.y.flatten())
    return lambda x: Numbers.of(draw(x)[..., 0], sigma)


def best_noise(f: Tensor, y: Tensor) -> float:
    """Return the σ with the least NLL of targets (B,) given functions (S, B), without their covariance."""
    error, variance = (y - f.mean(0)) ** 2, f.var(0, correction=0)

    def loss(sigma: float) -> float:
        total = variance + sigma**2
        return (error / total + total.log()).mean().item()

    return min(torch.logspace(-3, 1, 400).tolist(), key=loss)


def laplace_torch(name: str, form: dict, case: Case) -> Found:
    """laplace-torch with KFAC, as its README and examples use it, in double precision, which its factors need.

    The prior is tuned by the marginal likelihood (for regression together with the noise, as in its example), or
    ("grid search") on the validation set by its own search over 21 values, with the probit predictive.
    """
    from laplace import Laplace

    regression, grid = not case.task.classes, "grid search" in name
    everything = form.get("subset_of_weights") == "all"
    if (regression and grid) or (everything and (case.task.classes or 1) > 10):
        return  # Jacobians of all layers for many classes take minutes
    la = Laplace(copy.deepcopy(case.networks[0]).double(), case.likelihood, **form)

    def loader(x: Tensor, y: Tensor) -> torch.utils.data.DataLoader:
        rows = torch.utils.data.TensorDataset(x.double(), y.double() if regression else y)
        return torch.utils.data.DataLoader(rows, 500)

    la.fit(loader(*case.task.train))
    steps, probit = 5 if case.quick else 100, {"pred_type": "glm", "link_approx": "probit"}
    if regression:
        tune_with_noise(la, steps)
    elif grid:
        rows = loader(*case.task.held_out)
        la.optimize_prior_precision(**probit, method="gridsearch", val_loader=rows, grid_size=21)
    else:
        la.optimize_prior_precision(pred_type="glm", method="marglik", n_steps=steps)
    yield f"laplace-torch, {name}", _of_laplace_torch(case, la, everything, probit)
    if not (regression or grid):
        sampled = {"pred_type": "glm", "link_approx": "mc", "n_samples": 100}
        name = f"laplace-torch, {name}, Monte Carlo"
        yield name, _of_laplace_torch(case, la, everything, sampled)


def tune_with_noise(la, steps: int) -> None:
    """Tune prior and noise together, as laplace-torch's regression example does."""
    log_prior = torch.zeros(1, requires_grad=True)
    log_sigma = torch.zeros(1, requires_grad=True)
    optimiser = torch.optim.Adam([log_prior, log_sigma], lr=1e-1)
    for _ in range(steps):
        optimiser.zero_grad()
        (-la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())).backward()
        optimiser.step()
    la.prior_precision, la.sigma_noise = log_prior.detach().exp(), log_sigma.detach().exp()


def _of_laplace_torch(case: Case, la, everything: bool, link: dict) -> Predictor:
    """Return its own predictions; joint ones from samples of weights through its Jacobian."""

    @cache
    def draws(x: Tensor) -> Tensor:
        w = la.sample(64, generator=torch.Generator().manual_seed(case.seed)) - la.mean
        jacobians = la.backend.jacobians if everything else la.backend.last_layer_jacobians
        parts = [jacobians(part) for part in x.double().split(50)]
        moved = [torch.einsum("bcp,sp->sbc", J, w).detach() for J, _ in parts]
        together = [f.detach() + move for (_, f), move in zip(parts, moved, strict=True)]
        return torch.cat(together, dim=1).float()

    def predict(x: Tensor) -> Classes | Numbers:
        with torch.no_grad():
            if case.task.classes:
                # all rows at once take tens of gigabytes
                probs = torch.cat([la(part, **link) for part in x.double().split(50)])
                return Classes(probs.clamp_min(1e-30).log().float(), lambda: draws(x))
            f, covariance = la(x.double(), joint=True)
            return Numbers(f.flatten().float(), covariance.float(), la.sigma_noise.item())

    return predict


def sparse_gp(name: str, network: nn.Module, x: Tensor, y: Tensor, quick: bool = False) -> Callable:
    """Return a function from inputs to the prediction of a Gaussian process around a network.

    It returns mean and variance of y, (B,), or class probabilities, (B, C). ELLA and VaLLA are laplace-torch's: ELLA
    has its default prior and, for regressions, the noise of the residuals; VaLLA tunes both. FMGP is that of BayesiPy
    (a clone on PYTHONPATH), by the example of its README with more steps, for regressions alone.
    """
    from laplace import ELLA, VaLLA
    from laplace.curvature import CurvlinopsGGN

    classes = not y.is_floating_point()
    network, kind = copy.deepcopy(network), torch.double if name == "FMGP" else x.dtype
    task = "classification" if classes else "regression"
    noise = {} if classes else {"sigma_noise": (network(x) - y).square().mean().sqrt().item()}
    rows, options = torch.utils.data.TensorDataset(x.to(kind), y if classes else y.to(kind)), {}
    many = 100 if x.ndim == 2 else 20  # Jacobians of a residual network for 100 images take 25 GB
    rows = torch.utils.data.DataLoader(rows, many, shuffle=True)
    if name == "FMGP":
        from bayesipy.fmgp import FMGP

        if classes:
            raise ValueError("FMGP is used for regressions alone.")
        options = {"inducing_locations": "kmeans", "num_inducing": 50, "noise_variance": exp(-5)}
        gp = FMGP(None, network.double()[1:], task, "RBF", **options)  # without Flatten
        options = {"iterations": 20_000, "lr": 1e-3, "verbose": False}
    elif name == "VaLLA":
        gp = VaLLA(network, task, "kmeans", 50, **noise)
        options = {"iterations": 1000, "lr": 0.01}
    else:  # with this backend, it needs no Jacobians but those of its basis
        gp = ELLA(network, task, min(300, len(x) // 2), 20, **noise, backend=CurvlinopsGGN)
    gp.fit(train_loader=rows, **options | ({"iterations": 5} if quick and options else {}))

    def predict(at: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        if classes:
            return torch.cat([gp(part).detach() for part in at.split(100)]).clamp_min(1e-30)
        mean, variance = getattr(gp, "predict", gp)(at.to(kind))
        sigma = 0.0 if name == "FMGP" else float(gp.sigma_noise)
        return mean.detach().flatten().float(), variance.detach().flatten().float() + sigma**2

    return predict


def sparse(name: str, case: Case) -> Found:
    """A Gaussian process around the network, whose predictions are of one input each."""
    predict = sparse_gp(name, case.networks[0], *case.task.train, case.quick)
    if case.task.classes:
        yield name, lambda x: Marginals.of(predict(x).log()[None])
        return
    independent = lambda mean, variance: Numbers(mean, variance.diag(), 0.0)  # noqa: E731
    yield name, lambda x: independent(*predict(x))


class Marginals(Classes):
    """Class probabilities without joint scores."""

    def scores(self, y: Tensor, groups: Groups | None = None) -> dict[str, float]:
        return super().scores(y, {})


def ours(name: str, form: dict, case: Case) -> Found:
    """``LinearisedLaplace`` as fitted, without ``validation`` also on moved rows, and calibrated on held-out ones."""
    for text in case.ours:
        options = {"seed": case.seed, **form, **parsed(text)}
        told = {key: options.pop(key) for key in ("validation",) if key in options}
        options["compute"] = Compute(budget=options.pop("budget", None))
        la = LinearisedLaplace(case.networks[0], case.likelihood, **options)
        told |= {"em_steps": 2} if case.quick else {}
        la.fit(*case.task.train, progress_bar=False, **told)
        row = f"{name} ({text})" if text else name
        yield f"{row}, as fitted", of_ours(la)
        if told.get("validation") is False:
            yield f"{row}, moved examples", of_ours(la.calibrate())
        la.calibrate(*case.task.held_out)
        yield f"{row}, calibrated", of_ours(la, calibrated=True)


def parsed(text: str) -> dict[str, object]:
    """Return the options in ``name=value,...``; a value that is no literal is a word."""
    found: dict[str, object] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            found[name] = ast.literal_eval(value)
        except ValueError:
            found[name] = value
    return found


@dataclass(frozen=True)
class Ours(Classes):
    """Predictions whose joint scores are the library's own."""

    found: Prediction
    calibrated: bool

    @property
    def unfamiliarity(self) -> Tensor:
        return -self.found.p_value if self.calibrated else self.found.epistemic

    def joint(self, y: Tensor, groups: Tensor) -> float:
        parts = ((self.found._map(lambda t: t, r), y[r]) for r in groups)
        values = [part.joint_log_prob(labels).item() for part, labels in parts]
        return -mean(values) / groups.shape[-1]

    def scores(self, y: Tensor, groups: Groups | None = None) -> dict[str, float]:
        scored = super().scores(y, groups)
        if self.calibrated:
            sets = self.found.prediction_set(LEVEL)
            scored["coverage"] = sets.gather(1, y[:, None]).double().mean().item()
            scored["flagged"] = (self.found.p_value <= RATE).double().mean().item()
        return scored


@dataclass(frozen=True)
class OurNumbers(Numbers):
    """Predictions whose intervals and false alarms are the library's own."""

    found: Prediction

    def scores(self, y: Tensor, groups: Groups | None = None) -> dict[str, float]:
        lower, upper = self.found.interval(LEVEL)
        inside = ((lower <= y) & (y <= upper)).double().mean().item()
        flagged = (self.found.p_value <= RATE).double().mean().item()
        return super().scores(y, groups) | {"coverage": inside, "flagged": flagged}


def of_ours(la: LinearisedLaplace, mean: str | None = None, calibrated: bool = False) -> Predictor:
    """Return the library's own predictions, around a mean of one's own or the fitted one."""

    def predict(x: Tensor) -> Classes | Numbers:
        found = la.predict(x, mean=mean)
        if not found.likelihood.real_valued:
            return Ours(found.log_probs, lambda: equal_functions(found), found, calibrated)
        sigma = found.aleatoric.mean().sqrt().item()
        parts = found.f_mean.flatten(), found.f_covariance, sigma
        return OurNumbers(*parts, found) if calibrated else Numbers(*parts)

    return predict


@dataclass(frozen=True)
class OfStudent(Marginals):
    """Predictions of a calibrated student."""

    p_value: Tensor
    """(B,)."""

    @property
    def unfamiliarity(self) -> Tensor:
        return -self.p_value


def of_student(student: Student) -> Predictor:
    """Return the predictions of a student, of few inputs at a time."""

    def predict(x: Tensor) -> OfStudent:
        parts = [student.predict(part) for part in x.split(100)]
        log_probs = torch.cat([part.log_probs for part in parts])
        p_value = torch.cat([part.p_value for part in parts])
        return OfStudent(log_probs, lambda: log_probs[None], p_value)

    return predict


METHODS: dict[str, Callable[[Case], Found]] = {
    "network": network,
    "temperature": temperature,
    "moved": moved,
    "ensemble": ensemble,
    **{
        f"laplace-torch, {name}": partial(laplace_torch, name, form)
        for name, form in {
            "last layer": {},
            "last layer, grid search": {},
            "all layers": {"subset_of_weights": "all"},
        }.items()
    },
    **{name: partial(sparse, name) for name in ("ELLA", "VaLLA", "FMGP")},
    "ours": partial(ours, "ours", {}),
    "ours, last layer": partial(ours, "ours, last layer", {"parameters": "last_layer"}),
}
