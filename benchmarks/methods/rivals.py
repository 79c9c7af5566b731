"""Methods that train a network of their own, or continue training: they run only if they are asked for.

Each takes as many epochs as the network, batches of 64, and 32 functions to predict with. No validation set
is used, except by our ensembles.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from methods.learning import train
from methods.peers import Case, Found, averaged, of_ours
from methods.tasks import Rows, SharedDropout
from torch_lla_em import LaplaceEnsemble, LinearisedLaplace

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


def ivon(case: Case) -> Found:
    """Mean-field variational inference, by IVON in place of Adam (Shen et al., 2024)."""
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


def ours_of_five(case: Case) -> Found:
    """The mixture of the posteriors of all networks, calibrated."""
    members = [LinearisedLaplace(network, case.likelihood) for network in case.networks]
    la = LaplaceEnsemble([member.fit(*case.task.train, progress_bar=False) for member in members])
    la.calibrate(*case.task.held_out)
    yield "ours of 5, calibrated", of_ours(la, calibrated=True)


def folds(case: Case) -> Found:
    """Five networks by folds of training and validation examples, each trained to the end."""
    x, y = (torch.cat(parts) for parts in zip(case.task.train, case.task.held_out))

    def trained(x: Tensor, y: Tensor) -> nn.Module:
        return train(case.task._replace(train=Rows(x, y)), case.seed, case.epochs)[1]

    options = {"likelihood": case.likelihood, "seed": case.seed, "progress_bar": False}
    la = LaplaceEnsemble.from_folds(trained, x, y, **options)
    yield "ours by folds", of_ours(la, calibrated=True)


MORE: dict[str, Callable[[Case], Found]] = {
    "dropout": dropout,
    "ivon": ivon,
    "vbll": vbll,
    "swag": swag,
    "members": ours_of_five,
    "folds": folds,
}
"""What is run where it is asked for."""
