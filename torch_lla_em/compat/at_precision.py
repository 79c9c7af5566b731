"""A posterior at one prior precision, which is fitted again when the prior precision changes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.compat.evidence import AtTheNetwork, Quadrature, quadrature_of
from torch_lla_em.laplace import LinearisedLaplace
from torch_lla_em.prediction import NotFittedError
from torch_lla_em.problem import Problem
from torch_lla_em.runtime import Group


class AtPrecision:
    """The posterior at a prior precision λ and noise σ, its evidence, and its files."""

    model: nn.Module
    likelihood: str
    subset_of_weights: str
    temperature: float
    prior_mean: float | Tensor
    dict_key_y: str
    num_samples: int
    seed: int

    def __init__(self) -> None:
        self._loader: Iterable[Any] | None = None
        self._posterior: LinearisedLaplace | None = None
        self._fitted_at: tuple[Tensor, Tensor] | None = None
        self._quadrature: Quadrature | None = None
        self._at_network: AtTheNetwork | None = None
        self._is_dict = self._shows = False

    @property
    def prior_precision(self) -> Tensor:
        """The prior precision λ, shape (1,) or (L,). The next prediction uses a new value."""
        return self._precision

    @prior_precision.setter
    def prior_precision(self, value: float | Tensor) -> None:
        value = torch.as_tensor(value, device=self._device)
        value = value.to(torch.promote_types(value.dtype, torch.float32)).reshape(-1)
        if not (value > 0).all():
            raise ValueError(f"prior_precision must be positive, not {value.tolist()}.")
        self._precision = value

    @property
    def sigma_noise(self) -> Tensor:
        """The standard deviation σ of the observation noise, shape ()."""
        return self._sigma

    @sigma_noise.setter
    def sigma_noise(self, value: float | Tensor) -> None:
        value = torch.as_tensor(value, device=self._device)
        if value.numel() != 1:
            raise ValueError(
                "sigma_noise must be one number, as in laplace-torch. For one number per output use "
                'LinearisedLaplace(model, "regression", sigma_noise=tensor).'
            )
        value = value.to(torch.promote_types(value.dtype, torch.float32)).reshape(())
        if not value > 0:
            raise ValueError(f"sigma_noise must be positive, not {value.item()}.")
        self._sigma = value

    @property
    def posterior(self) -> LinearisedLaplace:
        """The posterior at the present prior precision, which is fitted again if it has changed."""
        self._require_fit()
        now = self.prior_precision.detach(), self.sigma_noise.detach()
        if self._fitted_at is None or any(not torch.equal(*p) for p in zip(now, self._fitted_at)):
            if self._loader is None:
                raise NotFittedError(
                    "The prior precision or the noise has changed since the posterior was saved. "
                    "Call la.fit(train_loader), which needs the data."
                )
            posterior = self._unfitted()
            precision = now[0] if len(now[0]) > 1 else now[0][0]
            posterior.fit(
                self._loader, em_steps=0, prior_precision=precision, progress_bar=self._shows
            )
            self._posterior, self._fitted_at = posterior, (now[0].clone(), now[1].clone())
        return self._posterior

    def fit(
        self, train_loader: Iterable[Any], override: bool = True, progress_bar: bool = False
    ) -> None:
        """Fit the posterior at the given ``prior_precision``.

        Args:
            train_loader (DataLoader): Batches of inputs and targets, or dicts. They are read again
                when the prior precision changes.
            override (bool): Must be True: the data replace those of earlier fits.
            progress_bar (bool): Show a progress bar. Default False.

        Raises:
            ValueError: If ``override`` is False. The error names what to use.
        """
        if not override:
            raise ValueError(
                "fit(override=False) is not available, because the GGN is not stored. Fit old and new "
                "data together: la.fit([*old_loader, *new_loader])."
            )
        self._shows = progress_bar
        self.read(train_loader)
        self._posterior = self.posterior

    def read(self, train_loader: Iterable[Any]) -> None:
        """Prepare ``log_marginal_likelihood`` without fitting; the first prediction fits the posterior.

        Args:
            train_loader (DataLoader): As for ``fit``.
        """
        self._is_dict = isinstance(next(iter(train_loader)), Mapping)
        self._loader, self._quadrature, self._fitted_at = train_loader, None, None
        self._posterior = self._unfitted()
        self._at_network = AtTheNetwork.of(self._problem())

    def log_marginal_likelihood(
        self, prior_precision: Tensor | None = None, sigma_noise: Tensor | None = None
    ) -> Tensor:
        """Return Laplace's approximation of log p(y) at the trained weights, shape ().

        It is that of laplace-torch with the full GGN: log p(y | f) - ½ (log det(I + G / λ) + λ ‖w_MAP‖²),
        differentiable in λ and σ. Above 1,024 parameters the log det is estimated by ``num_samples``
        random probes. ``la.posterior.log_marginal_likelihood()`` is that of the linear model,
        at its own mode.

        Args:
            prior_precision (Tensor, optional): A new prior precision λ, which is kept.
            sigma_noise (Tensor, optional): A new observation noise σ, which is kept.

        Raises:
            NotFittedError: Before ``fit``.
            ValueError: If the prior has one precision per tensor.
        """
        self._require_fit()
        if prior_precision is not None:
            self.prior_precision = prior_precision
        if sigma_noise is not None:
            if self.likelihood != "regression":
                raise ValueError("sigma_noise is the observation noise of a regression.")
            self.sigma_noise = sigma_noise
        precision, noise = self.prior_precision.double(), self.sigma_noise.double()
        if len(precision) > 1:
            raise ValueError(
                "The log marginal likelihood is available for one prior precision. With one per tensor "
                "use la.posterior.log_marginal_likelihood().value."
            )
        if self._quadrature is None:
            self._quadrature = self._spectrum()
        variance = noise.square() * self.temperature
        log_det = self._quadrature.log_det(precision * variance)
        return self.log_likelihood - 0.5 * (log_det + self.scatter.squeeze())

    @property
    def log_likelihood(self) -> Tensor:
        """The log-likelihood of the training data at the network's outputs, shape ()."""
        loss, count = self._known.loss, self._known.num_targets
        noise = self.sigma_noise.double()
        value = -loss / (noise.square() * self.temperature)
        if self.likelihood == "regression":
            value = value - count * (noise * math.sqrt(2 * math.pi)).log()
        return value

    @property
    def scatter(self) -> Tensor:
        """λ ‖w_MAP - prior mean‖², shape (1,)."""
        precision = self.prior_precision.double()
        return precision * (self.mean.double() - self.prior_mean).square().sum()

    @property
    def mean(self) -> Tensor:
        """The trained weights of the parameters in the posterior, w_MAP, shape (P,)."""
        return self._known.mean

    @property
    def n_params(self) -> int:
        """The number of parameters in the posterior."""
        return len(self.mean)

    @property
    def n_data(self) -> int:
        """The number of training examples."""
        return int(self._known.num_data)

    @property
    def n_outputs(self) -> int:
        """The number of outputs of the network."""
        return int(self._known.num_outputs)

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that predictions and the log marginal likelihood need, as tensors."""
        if self._quadrature is None and len(self.prior_precision) == 1:
            self._quadrature = self._spectrum()
        own = {"prior_precision": self.prior_precision.detach(), "sigma_noise": self.sigma_noise}
        own |= self._known._asdict() | {"is_dict": torch.tensor(self._is_dict, device="cpu")}
        if self._quadrature is not None:
            own |= {"nodes": self._quadrature.nodes, "weights": self._quadrature.weights}
        posterior = self.posterior.state_dict()
        return posterior | {f"compat.{name}": tensor.detach() for name, tensor in own.items()}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Load what ``state_dict`` returned.

        Args:
            state_dict (dict): The tensors by name.

        Raises:
            ValueError: If the state belongs to another network, or to laplace-torch.
        """
        prefix = "compat."
        own = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
        if not own:
            raise ValueError(
                "This state was not saved by torch_lla_em.compat.Laplace: laplace-torch stores the "
                "GGN, which is not used here. Call la.fit(train_loader)."
            )
        state = {k: v for k, v in state_dict.items() if not k.startswith(prefix)}
        self._is_dict = bool(own.pop("is_dict"))
        self.prior_precision, self.sigma_noise = own.pop("prior_precision"), own.pop("sigma_noise")
        posterior = self._unfitted()
        posterior.load_state_dict(state)
        self._quadrature, self._loader = None, None
        if "nodes" in own:
            self._quadrature = Quadrature(own.pop("nodes"), own.pop("weights"))
        self._posterior, self._at_network = posterior, AtTheNetwork(**own)
        self._fitted_at = self.prior_precision, self.sigma_noise

    def _unfitted(self, unit: bool = False) -> LinearisedLaplace:
        """Return a posterior of the library at the present σ and temperature, or at 1."""
        noise = 1.0 if unit else self.sigma_noise.item()
        # a reward model returns the two logits of a pair during the fit
        pairs = self.likelihood == "reward_modeling"
        likelihood: Any = "classification" if pairs else self.likelihood
        return LinearisedLaplace(
            self.model,
            likelihood,
            prior="layerwise" if len(self.prior_precision) > 1 else "scalar",
            g_prior=False,
            curvature="network",
            parameters="last_layer" if self.subset_of_weights == "last_layer" else "requires_grad",
            sigma_noise=noise if likelihood == "regression" else None,
            temperature=1.0 if unit else self.temperature,
            num_samples=self.num_samples,
            seed=self.seed,
            forward_fn=_whole if self._is_dict else None,
            target_fn=(lambda batch: batch[self.dict_key_y]) if self._is_dict else None,
        )

    def _spectrum(self) -> Quadrature:
        return quadrature_of(self._problem(), self.prior_precision.min().item(), self.num_samples)

    def _problem(self) -> Problem:
        """Return the training data with a noise and a temperature of 1."""
        if self._loader is None:
            raise NotFittedError("This needs the training data. Call la.fit(train_loader).")
        return self._unfitted(unit=True)._problem(self._loader, Group())

    @property
    def _known(self) -> AtTheNetwork:
        self._require_fit()
        return self._at_network

    def _require_fit(self) -> None:
        if self._at_network is None:
            raise NotFittedError("This posterior is not fitted yet. Call la.fit(train_loader).")

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device


def _whole(model: nn.Module, batch: Any) -> Tensor:
    """Call a model that takes a dict as one argument."""
    outputs: Tensor = model(batch)
    return outputs
