"""What a user would try first: the network itself, temperature, dropout, variational, ensemble.

A method takes a ``Setting`` and returns named predictors, x -> ``Classes`` or ``Numbers``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from methods.metrics import Classes, Numbers
from methods.tasks import Loader, SharedDropout, Task, train

DEVIATION = 0.5

Predictor = Callable[[Tensor], Classes | Numbers]


@dataclass(frozen=True)
class Setting:
    """What every method is given."""

    task: Task
    network: nn.Module
    """Trained."""

    epochs: int
    seed: int
    loader: Loader
    """Of the training data, in fixed order."""

    quick: bool = False

    def shuffled(self, offset: int = 0) -> Loader:
        """Return a loader to train with, that counts into the same passes."""
        generator = torch.Generator().manual_seed(1000 * self.seed + offset)
        return _Counted(self.loader, generator)


class _Counted(Loader):
    def __init__(self, base: Loader, generator: torch.Generator):
        super().__init__(base.rows, base.batch_size, generator)
        self._base = base

    def __iter__(self):
        self._base.passes += 1
        return super().__iter__()


def fresh(setting: Setting, offset: int, dropout: float = 0.0) -> nn.Module:
    """Return a newly trained network, as the first was trained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 * setting.seed + offset)
        network = setting.task.network(dropout)
        return train(setting.task, network, setting.shuffled(offset), setting.epochs)


def map_estimate(setting: Setting) -> dict[str, Predictor]:
    """The network alone; for regression with the training residuals as noise."""
    x, y = setting.task.train
    return {
        "MAP": _predictor(
            setting, lambda x: setting.network(x)[None], _spread(setting.network, x, y)
        )
    }


def temperature(setting: Setting) -> dict[str, Predictor]:
    """One temperature fitted to held-out data, alone and with the prior that ``calibrate`` has.

    For regression, the noise.
    """
    network, (x, y) = setting.network, setting.task.val
    if setting.task.regression:
        return {
            "MAP, held-out noise": _predictor(
                setting, lambda x: network(x)[None], _spread(network, x, y)
            )
        }
    with torch.no_grad():
        f = network(x)

    def scaled(penalty: float) -> Predictor:
        def objective(t: float) -> float:
            return F.cross_entropy(f / t, y, reduction="sum").item() + penalty * log(t) ** 2

        best = _search(objective, 0.05, 20.0)
        return lambda x: Classes.of(_detached(network, x)[None] / best)

    return {
        "temperature scaling": scaled(0.0),
        "temperature scaling, log-normal prior": scaled(0.5 / DEVIATION**2),
    }


def dropout(setting: Setting) -> dict[str, Predictor]:
    """A network of its own, trained with dropout 0.1 and averaged over 32 masks."""
    network = fresh(setting, offset=0, dropout=0.1)
    masks = [module for module in network.modules() if isinstance(module, SharedDropout)]

    def draws(x: Tensor) -> Tensor:
        outputs = []
        for k in range(32):
            for position, module in enumerate(masks):
                module.index = 100 * k + position
            outputs.append(network(x))
        return torch.stack(outputs)

    return {"MC dropout": _predictor(setting, draws)}


def ensemble(setting: Setting) -> dict[str, Predictor]:
    """The network and four more from other starts."""
    members = [setting.network] + [fresh(setting, offset) for offset in range(1, 5)]
    return {
        "deep ensemble of 5": _predictor(setting, lambda x: torch.stack([m(x) for m in members]))
    }


def variational(setting: Setting) -> dict[str, Predictor]:
    """A factorised Gaussian over weights, from the trained ones, by pathwise gradients.

    The negative ELBO of a minibatch of M of N rows is N/M times its loss plus the divergence
    from a zero-mean Gaussian prior, whose variance is the trained weights' mean square.
    """
    network, task = setting.network, setting.task
    generator = torch.Generator().manual_seed(setting.seed)
    means = {n: p.detach().clone().requires_grad_() for n, p in network.named_parameters()}
    log_sds = {n: torch.full_like(p, -5.0).requires_grad_() for n, p in means.items()}
    log_noise = torch.zeros((), requires_grad=True)

    def weights() -> dict[str, Tensor]:
        noise = {n: torch.randn(p.shape, generator=generator) for n, p in means.items()}
        return {n: means[n] + log_sds[n].exp() * noise[n] for n in means}

    flat = torch.cat([p.detach().flatten() for p in means.values()])
    variance = flat.square().mean()

    def divergence() -> Tensor:
        total = torch.zeros(())
        for name, mean in means.items():
            ratio = (2 * log_sds[name]).exp() / variance
            total = total + 0.5 * (mean.square() / variance + ratio - ratio.log() - 1).sum()
        return total

    def loss(f: Tensor, y: Tensor) -> Tensor:
        if not task.regression:
            return F.cross_entropy(f, y)
        return 0.5 * ((y - f) / log_noise.exp()).square().mean() + log_noise

    optimiser = torch.optim.Adam([*means.values(), *log_sds.values(), log_noise], 2e-3)
    for _ in range(5 if setting.quick else 4 * setting.epochs):
        for x, y in setting.shuffled():
            optimiser.zero_grad()
            f = functional_call(network, weights(), (x,))
            # the negative ELBO over N
            (loss(f, y) + divergence() / len(task.train.x)).backward()
            optimiser.step()
    fixed = [{n: w.detach() for n, w in weights().items()} for _ in range(32)]

    def draws(x: Tensor) -> Tensor:
        return torch.stack([functional_call(network, w, (x,)) for w in fixed])

    noise = log_noise.exp().item() if task.regression else None
    return {"mean-field variational": _predictor(setting, draws, noise)}


def _predictor(
    setting: Setting, draws: Callable[[Tensor], Tensor], sigma: float | None = None
) -> Predictor:
    """Return a predictor from functions (S, B, C); noise that is not given is fitted held-out."""
    if not setting.task.regression:
        return lambda x: Classes.of(_no_grad(draws, x))
    if sigma is None:
        f, y = _no_grad(draws, setting.task.val.x)[..., 0], setting.task.val.y

        def nll(sigma: float) -> float:
            return Numbers.of(f, sigma).scores(y)["nll"]

        sigma = _search(nll, 1e-2, 10.0)
    return lambda x: Numbers.of(_no_grad(draws, x)[..., 0], sigma)


def _search(objective: Callable[[float], float], low: float, high: float) -> float:
    """Return the best of a fine logarithmic grid."""
    grid = torch.logspace(*torch.tensor([low, high]).log10().tolist(), 400).tolist()
    return min(grid, key=objective)


def _spread(network: nn.Module, x: Tensor, y: Tensor) -> float:
    return (
        (y - _detached(network, x)).square().mean().sqrt().item() if y.is_floating_point() else 0.0
    )


def _detached(network: nn.Module, x: Tensor) -> Tensor:
    return _no_grad(network, x)


def _no_grad(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        return function(x)
