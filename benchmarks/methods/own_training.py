"""Methods that train a network of their own, or go on from one: they run where they are asked for.

Each takes as many epochs as the network (the factorised Gaussian four times as many), batches of 64
and 32 functions to predict with. What is learnt of the weights is used without a validation set.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from methods.learning import train
from methods.peers import Case, Found, averaged
from methods.tasks import SharedDropout

_DRAWS = 32


def dropout(case: Case) -> Found:
    """A network of its own, trained with dropout 0.1 and averaged over masks."""
    _, network = train(case.task, 1000 * case.seed, case.epochs, 0.1)
    masks = [module for module in network.modules() if isinstance(module, SharedDropout)]

    def draws(x: Tensor) -> Tensor:
        outputs = []
        for k in range(_DRAWS):
            for position, module in enumerate(masks):
                module.index = 100 * k + position
            outputs.append(network(x))
        return torch.stack(outputs)

    yield "MC dropout", averaged(case, draws)


def variational(case: Case) -> Found:
    """A factorised Gaussian over weights, from the trained ones, by pathwise gradients.

    The prior is Gaussian, with the trained weights' mean square as its variance.
    """
    network, (x, y) = case.networks[0], case.task.train
    generator = torch.Generator().manual_seed(case.seed)
    means = {n: p.detach().clone().requires_grad_() for n, p in network.named_parameters()}
    log_sds = {n: torch.full_like(p, -5.0).requires_grad_() for n, p in means.items()}
    log_noise = torch.zeros((), requires_grad=True)
    variance = torch.cat([p.detach().flatten() for p in means.values()]).square().mean()

    def weights() -> dict[str, Tensor]:
        noise = {n: torch.randn(p.shape, generator=generator) for n, p in means.items()}
        return {n: means[n] + log_sds[n].exp() * noise[n] for n in means}

    def divergence() -> Tensor:
        total = torch.zeros(())
        for name, centre in means.items():
            ratio = (2 * log_sds[name]).exp() / variance
            total = total + 0.5 * (centre.square() / variance + ratio - ratio.log() - 1).sum()
        return total

    def loss(f: Tensor, y: Tensor) -> Tensor:
        if case.task.classes:
            return F.cross_entropy(f, y)
        return 0.5 * ((y - f) / log_noise.exp()).square().mean() + log_noise

    optimiser = torch.optim.Adam([*means.values(), *log_sds.values(), log_noise], 2e-3)
    for _ in range(5 if case.quick else 4 * case.epochs):
        for rows in torch.randperm(len(x), generator=generator).split(64):
            optimiser.zero_grad()
            f = functional_call(network, weights(), (x[rows],))
            # the negative ELBO over N
            (loss(f, y[rows]) + divergence() / len(x)).backward()
            optimiser.step()
    fixed = [{n: w.detach() for n, w in weights().items()} for _ in range(_DRAWS)]
    draws = lambda x: torch.stack([functional_call(network, w, (x,)) for w in fixed])  # noqa: E731
    sigma = None if case.task.classes else log_noise.exp().item()
    yield "mean-field variational", averaged(case, draws, sigma=sigma)


def ivon(case: Case) -> Found:
    """A factorised Gaussian learnt in place of Adam's weights, by IVON (Shen et al., 2024)."""
    from ivon import IVON

    (x, y), regression = case.task.train, not case.task.classes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        network = case.task.network(0.0)
        optimiser = IVON(network.parameters(), lr=0.1, ess=len(x), hess_init=0.5)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, case.epochs)
        for _ in range(case.epochs):
            for rows in torch.randperm(len(x)).split(64):
                with optimiser.sampled_params(train=True):
                    optimiser.zero_grad()
                    f = network(x[rows])
                    (F.mse_loss if regression else F.cross_entropy)(f, y[rows]).backward()
                optimiser.step()
            schedule.step()
        fixed = []
        for _ in range(_DRAWS):
            with optimiser.sampled_params():
                fixed.append({n: p.detach().clone() for n, p in network.named_parameters()})
    draws = lambda x: torch.stack([functional_call(network, w, (x,)) for w in fixed])  # noqa: E731
    yield "IVON", averaged(case, draws)


def vbll(case: Case) -> Found:
    """A network whose last layer is variational, trained from scratch (Harrison et al., 2024)."""
    import vbll

    (x, y), regression = case.task.train, not case.task.classes
    kind = vbll.Regression if regression else vbll.DiscClassification
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        *hidden, last = case.task.network(0.0)
        body = nn.Sequential(*hidden)
        layer = kind(last.in_features, last.out_features, 1 / len(x))
        optimiser = torch.optim.AdamW([*body.parameters(), *layer.parameters()], 2e-3)
        for _ in range(case.epochs):
            for rows in torch.randperm(len(x)).split(64):
                optimiser.zero_grad()
                layer(body(x[rows])).train_loss_fn(y[rows]).backward()
                optimiser.step()
        weights = layer.W().rsample(torch.Size([_DRAWS])).detach()
    sigma = layer.noise().scale.detach()

    def draws(x: Tensor) -> Tensor:
        f = body(x) @ weights.mT
        if regression:
            return f
        return f + sigma * torch.randn(f.shape, generator=torch.Generator().manual_seed(case.seed))

    yield "VBLL", averaged(case, draws, sigma=sigma.mean().item() if regression else None)


def swag(case: Case) -> Found:
    """The variance of SGD's weights around the trained ones (SWAG-diagonal), by laplace-torch."""
    from laplace.utils.swag import fit_diagonal_swag_var

    network, (x, y) = case.networks[0], case.task.train
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y), 64, shuffle=True, generator=torch.Generator()
    )
    loss = nn.CrossEntropyLoss() if case.task.classes else nn.MSELoss()
    variance = fit_diagonal_swag_var(network, loader, loss, 5 if case.quick else 40)
    means = {n: p.detach() for n, p in network.named_parameters()}
    parts = variance.split([p.numel() for p in means.values()])
    deviations = {n: part.view_as(means[n]).sqrt() for n, part in zip(means, parts)}
    generator = torch.Generator().manual_seed(case.seed)
    fixed = [
        {n: m + deviations[n] * torch.randn(m.shape, generator=generator) for n, m in means.items()}
        for _ in range(_DRAWS)
    ]
    draws = lambda x: torch.stack([functional_call(network, w, (x,)) for w in fixed])  # noqa: E731
    yield "SWAG, diagonal", averaged(case, draws)


MORE: dict[str, Callable[[Case], Found]] = {
    "dropout": dropout,
    "variational": variational,
    "ivon": ivon,
    "vbll": vbll,
    "swag": swag,
}
"""What is run where it is asked for."""
