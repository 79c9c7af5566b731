"""Training by the marginal likelihood, with the interface of laplace-torch."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm.auto import trange

from torch_lla_em.compat.laplace import Laplace
from torch_lla_em.compat.options import name_of
from torch_lla_em.runtime import check_choice


@dataclass(frozen=True)
class Training:
    """The options of ``marglik_training``, with the names and defaults of laplace-torch."""

    hessian_structure: Any = "kron"
    backend: Any = None
    optimizer_cls: Any = torch.optim.Adam
    optimizer_kwargs: dict[str, Any] | None = None
    scheduler_cls: Any = None
    scheduler_kwargs: dict[str, Any] | None = None
    n_epochs: int = 300
    lr_hyp: float = 0.1
    prior_structure: Any = "layerwise"
    n_epochs_burnin: int = 0
    n_hypersteps: int = 10
    marglik_frequency: int = 1
    prior_prec_init: float = 1.0
    sigma_noise_init: float = 1.0
    temperature: float = 1.0
    fix_sigma_noise: bool = False
    progress_bar: bool = False
    enable_backprop: bool = False
    dict_key_x: str = "input_ids"
    dict_key_y: str = "labels"


def marglik_training(
    model: nn.Module, train_loader: Any, likelihood: Any = "classification", **options: Any
) -> tuple[Laplace, nn.Module, list[float], list[float]]:
    """Train a network, and its prior precision and noise by the log marginal likelihood after each epoch.

    It is Algorithm 1 of Immer et al. (2021) as in laplace-torch, with the full GGN.

    Args:
        model (nn.Module): The network, which is trained in place.
        train_loader (DataLoader): Batches of inputs and targets, or dicts.
        likelihood (str): "classification" (default) or "regression".
        **options: As in laplace-torch: ``n_epochs``, ``optimizer_cls``, ``optimizer_kwargs``, ``lr_hyp``,
            ``n_hypersteps``, and others. ``prior_structure`` must be "scalar".

    Returns:
        The fitted posterior, the network with the weights of the highest marginal likelihood, all negative
        log marginal likelihoods, and the loss of each epoch.

    Raises:
        ValueError: If ``prior_structure`` is not "scalar", which is not its default.

    Example:
        >>> la, model, margliks, losses = marglik_training(
        ...     model, loader, n_epochs=2, prior_structure="scalar"
        ... )
    """
    given, kind = Training(**options), name_of(likelihood)
    check_choice("likelihood", kind, ("classification", "regression"))
    if name_of(given.prior_structure) != "scalar":
        raise ValueError(
            f"prior_structure={name_of(given.prior_structure)!r} is not available here: pass "
            'prior_structure="scalar". For one precision per tensor train the network first, then use '
            'LinearisedLaplace(model, likelihood, prior="layerwise").'
        )
    like = next(model.parameters()).detach()
    hyper = [
        like.new_tensor([value]).log().requires_grad_()
        for value in (given.temperature * given.prior_prec_init, given.sigma_noise_init)
    ]
    learns_noise = kind == "regression" and not given.fix_sigma_noise
    hyper_optimiser = torch.optim.Adam(hyper[: 1 + learns_noise], lr=given.lr_hyp)
    fixed = {"weight_decay": 0.0} if "weight_decay" in (given.optimizer_kwargs or {}) else {}
    optimiser = given.optimizer_cls(
        model.parameters(), **{**(given.optimizer_kwargs or {}), **fixed}
    )
    scheduler = None
    if given.scheduler_cls is not None:
        scheduler = given.scheduler_cls(optimiser, **(given.scheduler_kwargs or {}))

    def posterior() -> Laplace:
        noise: dict[str, Any] = {}
        if kind == "regression":
            noise["sigma_noise"] = hyper[1].detach().exp()
        return Laplace(
            model,
            kind,
            "all",
            name_of(given.hessian_structure),
            prior_precision=hyper[0].detach().exp(),
            temperature=given.temperature,
            enable_backprop=given.enable_backprop,
            dict_key_y=given.dict_key_y,
            **noise,
        )

    margliks: list[float] = []
    losses: list[float] = []
    best, kept = float("inf"), None
    for epoch in trange(1, given.n_epochs + 1, disable=not given.progress_bar):
        step = _Step(model, kind, given, hyper)
        losses.append(step.epoch(train_loader, optimiser, scheduler))
        if epoch % given.marglik_frequency or epoch < given.n_epochs_burnin:
            continue
        la = posterior()
        la.read(train_loader)
        for _ in range(given.n_hypersteps):
            hyper_optimiser.zero_grad()
            used = hyper[0].detach().exp(), hyper[1].detach().exp()
            noise = hyper[1].exp() if learns_noise else None
            loss = -la.log_marginal_likelihood(hyper[0].exp(), noise)
            loss.backward()
            hyper_optimiser.step()
            margliks.append(loss.item())
        if margliks[-1] < best:
            best, kept = margliks[-1], (deepcopy(model.state_dict()), used)
    if kept is not None:
        model.load_state_dict(kept[0])
        with torch.no_grad():
            for value, chosen in zip(hyper, kept[1]):
                value.copy_(chosen.log())
    la = posterior()
    la.fit(train_loader)
    return la, model, margliks, losses


@dataclass(frozen=True)
class _Step:
    """Ordinary training at the present prior precision λ and noise σ."""

    model: nn.Module
    kind: str
    given: Training
    hyper: list[Tensor]

    def epoch(self, loader: Any, optimiser: Any, scheduler: Any) -> float:
        """Train for one epoch, and return its mean loss, with the prior."""
        precision, noise = (value.detach().exp() for value in self.hyper)
        device, count = precision.device, len(loader.dataset)
        factor: Any = self.given.temperature
        loss_of: Any = functional.cross_entropy
        if self.kind == "regression":
            factor, loss_of = factor / (2 * noise.square()), functional.mse_loss
        total = 0.0
        for batch in loader:
            is_dict = isinstance(batch, Mapping)
            x, y = (batch, batch[self.given.dict_key_y]) if is_dict else batch
            x, y = x if is_dict else x.to(device), y.to(device)
            optimiser.zero_grad()
            weights = [p.square().sum() for p in self.model.parameters() if p.requires_grad]
            prior = 0.5 * precision * torch.stack(weights).sum() / count / factor
            loss = loss_of(self.model(x), y) + prior.squeeze()
            loss.backward()
            optimiser.step()
            if scheduler is not None:
                scheduler.step()
            total += loss.item() * len(y)
        return total / count
