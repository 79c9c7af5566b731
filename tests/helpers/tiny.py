"""Tiny problems with their exact answers, and a basis in place of random noise."""

from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from dense import ExactLaplace, gaussian_log_prob
from direct import rows_of
from torch import Tensor, nn
from torch.nn import functional

from torch_lla_em import Compute, LinearisedLaplace, Prediction
from torch_lla_em.data.loader import Data
from torch_lla_em.inference.prior import Prior, StochasticPrior
from torch_lla_em.jacobian.linear_model import LinearModel
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.parameters import ParameterLayout, select_parameters
from torch_lla_em.likelihoods import Bernoulli, Classification, Likelihood, Poisson, Regression
from torch_lla_em.prediction.mixture import Component, Mixture
from torch_lla_em.problem.problem import Problem


def batched(at: Any, *parts: Tensor) -> list[tuple[Tensor, ...]]:
    """Cut tensors into batches: of a size, of a list of sizes, or before the examples of a tuple."""
    pieces = (part.tensor_split(at) if isinstance(at, tuple) else part.split(at) for part in parts)
    return list(zip(*pieces, strict=True))


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in double precision."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Binomial(Likelihood):
    """A user's likelihood of successes in three trials, by the three required methods."""

    elementwise = True

    def log_prob(self, f, y):
        return (y * f - 3 * functional.softplus(f)).sum(-1)

    def hessian_sqrt_product(self, f, noise):
        return (3 * f.sigmoid() * (1 - f.sigmoid())).sqrt() * noise

    def mean(self, f):
        return 3 * f.sigmoid()


LOG_PROBS = {
    "classification": lambda f, y: -functional.cross_entropy(f[None], y[None]),
    "regression": gaussian_log_prob(torch.tensor(0.4, dtype=torch.float64)),
    "regression per output": gaussian_log_prob(torch.tensor([0.4, 0.7, 0.2]).double()),
    "bernoulli": lambda f, y: -functional.binary_cross_entropy_with_logits(f, y, reduction="sum"),
    "poisson": lambda f, y: (y * f - f.exp() - torch.lgamma(y + 1)).sum(),
    "binomial": lambda f, y: (y * f - 3 * functional.softplus(f)).sum(),
}


def likelihood_of(name: str) -> Likelihood:
    return {
        "classification": Classification(),
        "regression": Regression(0.4),
        "regression per output": Regression(torch.tensor([0.4, 0.7, 0.2])),
        "bernoulli": Bernoulli(),
        "poisson": Poisson(),
        "binomial": Binomial(),
    }[name]


def problem_of(model, likelihood: Likelihood, loader, selection=None, weights=None) -> Problem:
    layout = ParameterLayout.of(model, select_parameters(model, selection))
    linear = LinearModel(Network(model), layout)
    data = Data(loader, torch.device("cpu"), weights=weights)
    return Problem(linear, likelihood, data)


@dataclass(frozen=True)
class Tiny:
    model: nn.Module
    x: Tensor
    y: Tensor
    name: str

    @property
    def layout(self):
        return ParameterLayout.of(self.model, select_parameters(self.model))

    def problem(self, *cuts: int) -> Problem:
        """The problem over uneven minibatches, cut before these examples."""
        pieces = batched(cuts, self.x, self.y)
        return problem_of(self.model, likelihood_of(self.name), pieces)

    def exact(self, scale: Tensor | None = None) -> ExactLaplace:
        names = list(self.layout.names)
        exact = ExactLaplace.of(self.model.eval(), self.x, self.y, LOG_PROBS[self.name], names)
        return exact if scale is None else replace(exact, scale=scale)


def tiny(name: str) -> Tiny:
    """A network and targets that its linear model explains."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(30, 2, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        model[2].weight *= 3
        f = model(x)
        noise = torch.randn(f.shape, generator=generator, dtype=torch.float64)
    if name == "classification":
        y = (f + 0.5 * noise).argmax(1)
    elif name.startswith("regression"):
        y = f + 0.4 * noise
    elif name == "poisson":
        y = torch.poisson(f.clamp(max=2).exp(), generator=generator)
    elif name == "binomial":
        y = torch.bernoulli(f.sigmoid()[None].expand(3, -1, -1), generator=generator).sum(0)
    else:
        y = torch.bernoulli(f.sigmoid(), generator=generator)
    return Tiny(model, x, y, name)


OF_FIT = "em_steps prior_precision validation weights progress_bar".split()
OF_COMPUTE = [field.name for field in fields(Compute)]


def posterior_of(model: nn.Module, likelihood, x, y=None, *, at=None, **options):
    """Return a fitted posterior; arguments of ``fit`` and fields of ``Compute`` are among the options.

    ``at`` is a prior precision that is not learnt.
    """
    if at is not None:
        options |= {"em_steps": 0, "prior_precision": at}
    of_compute = {key: options.pop(key) for key in OF_COMPUTE if key in options}
    options["compute"] = replace(options.get("compute", Compute()), **of_compute)
    of_fit = {key: options.pop(key) for key in OF_FIT if key in options}
    la = LinearisedLaplace(model, likelihood, **{"num_samples": 4, **options})
    return la.fit(x, y, **{"progress_bar": False, **of_fit})


def fitted(
    name: str = "classification", loader=None, model=None, likelihood=None, **options
) -> tuple[Tiny, LinearisedLaplace]:
    """Return a tiny problem and its posterior, as ``posterior_of`` does."""
    case = tiny(name)
    likelihood = likelihood_of(name) if likelihood is None else likelihood
    loader = [(case.x, case.y)] if loader is None else loader
    options = {"validation": False, **options}
    return case, posterior_of(model or case.model, likelihood, loader, **options)


@cache
def known(name: str = "classification", **options) -> tuple[Tiny, LinearisedLaplace]:
    """Return a posterior for all tests of a process: they work on copies, whose network they leave alone."""
    return fitted(name, **{"num_samples": 6, "em_steps": 2, **options})


def prediction_of(
    likelihood: Likelihood, centre: Tensor, deviations: Tensor, class_dim: int = -1
) -> Prediction:
    """The prediction by a mean of f, (B, ..., C), and samples minus it, (K, B, ..., C)."""
    return Prediction(Mixture((Component(likelihood, centre, deviations),)), class_dim)


class Basis(StochasticPrior):
    """Random probes of which the first belong to weights, and the others to outputs."""

    def epsilon(self, numbers: Tensor, like: Tensor) -> Tensor:
        P, K = self.xi.shape[1], len(self.xi)
        epsilon = torch.cat([torch.zeros(P, K - P), K**0.5 * torch.eye(K - P)]).to(like)
        return epsilon.view(K, *like.shape)


def basis_noise(problem: Problem, g_prior: bool, layerwise: bool) -> StochasticPrior:
    """Noise for which the mean over samples of any product of two entries is its expectation."""
    rows = rows_of(problem)
    num_samples = problem.size + len(rows)
    xi = num_samples**0.5 * torch.eye(num_samples, problem.size).to(rows)
    eta = torch.cat([torch.zeros(problem.size, problem.size).to(rows), num_samples**0.5 * rows])
    squares = rows.square().sum(0) / problem.data.facts.num_rows
    scale = squares.rsqrt() if g_prior else torch.ones_like(squares)
    return Basis(xi, eta, Prior(problem.linear_model.layout, scale, layerwise))


def label_log_prob(prediction, y, column=None):
    """Return the mean log-probability of the labels of each example, (B,...), each output by itself, or that of one."""
    if y.dim() == 1:
        return prediction.log_prob(y)
    if column is None:
        each = [label_log_prob(prediction, y, c) for c in range(y.shape[-1])]
        return torch.stack(each, -1).mean(-1)
    columns = slice(column, None, y.shape[-1])  # with μ the log variance
    alone = prediction._map(lambda values: values[..., columns])
    own = []
    for part in alone._mixture.components:
        if part.likelihood.observation_noise is not None:
            sigma = part.likelihood.sigma_noise.expand(y.shape[-1])[columns]
            part = part._replace(likelihood=part.likelihood.with_noise(sigma))
        own.append(part)
    return replace(alone, _mixture=Mixture(tuple(own))).log_prob(y[..., column : column + 1])
