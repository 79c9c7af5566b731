"""``Laplace`` with the interface of laplace-torch, for code that was written for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.compat.at_precision import AtPrecision
from torch_lla_em.compat.links import LINKS, RunningLoss, lowest, probabilities
from torch_lla_em.compat.options import (
    REPLACEMENTS,
    check_arguments,
    check_pred_type,
    name_of,
    without_warnings,
)
from torch_lla_em.data import to_device
from torch_lla_em.runtime import check_choice


class Laplace(AtPrecision):
    """The interface of laplace-torch's ``Laplace`` for the posterior of ``LinearisedLaplace``.

    Names and meanings are those of laplace-torch: ``fit`` uses the given ``prior_precision``,
    ``optimize_prior_precision`` learns it, and predictions are around the outputs of the network. The
    posterior is that of the full GGN, represented by samples. For the EM algorithm, the calibration
    and the out-of-distribution scores of this library use ``LinearisedLaplace``;
    ``la.posterior`` is one, with the same prior precision.

    Args:
        model (nn.Module): The trained network.
        likelihood (str): "classification", "regression" or "reward_modeling".
        subset_of_weights (str): "last_layer" (default), or "all": all that require gradients.
        hessian_structure (str): "kron" (default), "full", "diag", "lowrank" or "gp": all of these use the
            full GGN, which the others approximate.
        sigma_noise (float): Standard deviation of the observation noise. Default 1.0.
        prior_precision (float or Tensor): Precision of the prior; a tensor of shape (L,) has one for
            each of the L parameter tensors. Default 1.0.
        prior_mean (float): Mean of the prior, for the log marginal likelihood. Default 0.0.
        temperature (float): Every example counts 1/temperature times. Default 1.0.
        enable_backprop (bool): Whether predictions are differentiable in x. Default False.
        dict_key_x (str): Not needed: the model is called with the whole batch. Default "input_ids".
        dict_key_y (str): The key of the targets in batches that are dicts. Default "labels".
        num_samples (int): Number K of posterior samples, with which variances have a relative Monte
            Carlo error of √(2/K). Default 32.
        seed (int): Seed of the samples. Default 0.
        **options: Arguments of laplace-torch that have no meaning here; an error names what to use.

    Raises:
        ValueError: If an argument has no meaning here. The error names what to use.

    Example:
        >>> la = Laplace(model, "classification", subset_of_weights="all", hessian_structure="kron")
        >>> la.fit(loader)
        >>> la.optimize_prior_precision(method="marglik")
        >>> probabilities = la(x, link_approx="probit")
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str,
        subset_of_weights: str = "last_layer",
        hessian_structure: str = "kron",
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float = 1.0,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        *,
        num_samples: int = 32,
        seed: int = 0,
        **options: Any,
    ):
        """Create a posterior that is not fitted yet; the class documents the arguments."""
        check_arguments(likelihood, subset_of_weights, hessian_structure, options)
        if likelihood != "regression" and sigma_noise != 1:
            raise ValueError("sigma_noise is the observation noise of a regression: leave it out.")
        super().__init__()
        self.model, self.likelihood = model, name_of(likelihood)
        self.subset_of_weights, self.temperature = name_of(subset_of_weights), temperature
        self.hessian_structure, self.dict_key_x = name_of(hessian_structure), dict_key_x
        self.prior_mean, self.enable_backprop, self.dict_key_y = (
            prior_mean,
            enable_backprop,
            dict_key_y,
        )
        self.num_samples, self.seed = num_samples, seed
        self.sigma_noise, self.prior_precision = sigma_noise, prior_precision
        self._generator = torch.Generator(device=self._device).manual_seed(seed)

    def optimize_prior_precision(
        self,
        pred_type: str = "glm",
        method: str = "marglik",
        n_steps: int = 100,
        lr: float = 1e-1,
        init_prior_prec: float | Tensor = 1.0,
        prior_structure: str = "scalar",
        val_loader: Iterable[Any] | None = None,
        loss: Callable[..., Any] | None = None,
        log_prior_prec_min: float = -4,
        log_prior_prec_max: float = 4,
        grid_size: int = 100,
        link_approx: str = "probit",
        n_samples: int = 100,
        verbose: bool = False,
        progress_bar: bool = False,
        log_prior_prec_base: float = 10.0,
    ) -> None:
        """Learn one prior precision for all parameters.

        Args:
            pred_type (str): Must be "glm", the default.
            method (str): "marglik" (default): maximise ``log_marginal_likelihood`` by Adam.
                "gridsearch": minimise the loss on ``val_loader``, which takes a fit for every value.
            n_steps (int): Number of steps of Adam. Default 100.
            lr (float): Learning rate of Adam. Default 0.1.
            init_prior_prec (float): Prior precision at which Adam starts. Default 1.0.
            prior_structure (str): Must be "scalar", the default.
            val_loader (DataLoader, optional): The validation set of "gridsearch".
            loss (callable, optional): Called with the outputs of ``la(x)`` and the targets; or a
                metric of torchmetrics. Default None: the negative log-likelihood.
            log_prior_prec_min (float): Logarithm of the smallest prior precision. Default -4.
            log_prior_prec_max (float): Logarithm of the largest one. Default 4.
            grid_size (int): Number of values of the grid. Default 100. Every tenth is tried, and
                then those around the best.
            link_approx (str): Link approximation of "gridsearch". Default "probit".
            n_samples (int): Number of samples if ``link_approx`` is "mc". Default 100.
            verbose (bool): Print the prior precision. Default False.
            progress_bar (bool): Show the progress of the fits. Default False.
            log_prior_prec_base (float): Base of the logarithms. Default 10.0.

        Raises:
            ValueError: If an argument has no meaning here. The error names what to use.
        """
        check_pred_type(pred_type)
        check_choice("method", name_of(method), ("marglik", "gridsearch"))
        if (
            name_of(prior_structure) != "scalar"
            or torch.as_tensor(init_prior_prec, device=self._device).numel() > 1
        ):
            raise ValueError(
                f"prior_structure={name_of(prior_structure)!r} is not available here, only 'scalar'. For "
                'one precision per tensor use LinearisedLaplace(model, likelihood, prior="layerwise"); '
                "for a prior scaled by the size of each feature, its default g_prior."
            )
        if name_of(method) == "marglik":
            log_precision = torch.as_tensor(init_prior_prec, device=self._device).double().log()
            log_precision = log_precision.reshape(1).requires_grad_()
            optimiser = torch.optim.Adam([log_precision], lr=lr)
            with torch.enable_grad():
                for _ in range(n_steps):
                    optimiser.zero_grad()
                    (-self.log_marginal_likelihood(log_precision.exp())).backward()
                    optimiser.step()
            self.prior_precision = log_precision.detach().exp()
        else:
            if self.likelihood == "reward_modeling":
                raise ValueError(
                    'method="gridsearch" is not available for rewards, only "marglik".'
                )
            if val_loader is None:
                raise ValueError('method="gridsearch" needs a validation set: pass val_loader.')
            grid = torch.logspace(
                log_prior_prec_min,
                log_prior_prec_max,
                grid_size,
                base=log_prior_prec_base,
                dtype=torch.float64,
                device=self._device,
            )
            self._shows = progress_bar
            how = {"link_approx": link_approx, "n_samples": n_samples}

            def tried(i: int) -> float:
                self.prior_precision = grid[i]
                return self._loss(val_loader, loss, how)

            with without_warnings():
                best = lowest(tried, grid_size)
            self.prior_precision = grid[best]
        if verbose:
            print(f"Optimized prior precision is {self.prior_precision}.")

    def __call__(
        self,
        x: Any,
        pred_type: str = "glm",
        joint: bool = False,
        link_approx: str = "probit",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        **model_kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return probabilities, or mean and covariance of f for a regression or a reward.

        Args:
            x (Tensor or dict): Inputs, as the model takes them.
            pred_type (str): Must be "glm", the default: the linearised network.
            joint (bool): Return the covariance (B C, B C) over all inputs of a regression. Default
                False: a covariance (B, C, C) for each input.
            link_approx (str): "probit" (default), "mc", "bridge" or "bridge_norm".
            n_samples (int): Number of samples if ``link_approx`` is "mc". Default 100.
            diagonal_output (bool): Return variances (B, C) of a regression. Default False.
            generator (torch.Generator, optional): Used to draw the samples. Default None: the seed.
            **model_kwargs: Not available: pass all inputs in ``x``.

        Returns:
            Probabilities (B, C). For regression the mean (B, C) and the covariance (B, C, C) of f,
            without observation noise.

        Raises:
            NotFittedError: Before ``fit``, or if the model has changed since.
            ValueError: If an argument has no meaning here. The error names what to use.
        """
        check_pred_type(pred_type)
        check_choice("link_approx", name_of(link_approx), LINKS)
        if model_kwargs:
            raise ValueError(f"Pass all inputs of the model in x, not {sorted(model_kwargs)}.")
        mean, deviations = self._of(x)
        if self.likelihood == "classification":
            draws = mean + self._combined(deviations, n_samples, generator)
            return probabilities(name_of(link_approx), mean, _covariance(deviations), draws)
        if joint:
            flat = deviations.flatten(1)
            return mean.flatten(), flat.T @ flat / len(flat)
        covariance = _covariance(deviations)
        return mean, covariance.diagonal(dim1=1, dim2=2) if diagonal_output else covariance

    def functional_variance(self, x: Any) -> Tensor:
        """Return the covariance of f at each input, shape (B, C, C).

        Args:
            x (Tensor or dict): Inputs. laplace-torch takes their Jacobians.
        """
        return _covariance(self._of(x)[1])

    def functional_samples(
        self,
        x: Any,
        pred_type: str = "glm",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return samples of f, shape (n_samples, B, C), joint over inputs.

        Args:
            x (Tensor or dict): Inputs, as the model takes them.
            pred_type (str): Must be "glm", the default.
            n_samples (int): Number of samples. Default 100.
            diagonal_output (bool): Must be False: samples are joint over outputs.
            generator (torch.Generator, optional): Used to draw the samples. Default None: the seed.
        """
        check_pred_type(pred_type)
        if diagonal_output:
            raise ValueError("Samples are joint over outputs: leave out diagonal_output.")
        mean, deviations = self._of(x)
        return mean + self._combined(deviations, n_samples, generator)

    def predictive_samples(
        self,
        x: Any,
        pred_type: str = "glm",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return ``functional_samples`` after the softmax; those of a regression are unchanged.

        Args:
            x (Tensor or dict): Inputs, as the model takes them.
            pred_type (str): Must be "glm", the default.
            n_samples (int): Number of samples. Default 100.
            diagonal_output (bool): Must be False: samples are joint over outputs.
            generator (torch.Generator, optional): Used to draw the samples. Default None: the seed.
        """
        samples = self.functional_samples(x, pred_type, n_samples, diagonal_output, generator)
        return samples.softmax(-1) if self.likelihood == "classification" else samples

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Return samples of the weights, w_MAP + w, shape (n_samples, P).

        They belong to the linearised network; ``functional_samples`` evaluates it.

        Args:
            n_samples (int): Number of samples. Default 100.
            generator (torch.Generator, optional): Used to draw the samples. Default None: the seed.
        """
        deviations = self.posterior.w_samples
        return self.mean.to(deviations) + self._combined(deviations, n_samples, generator)

    def __getattr__(self, name: str) -> Any:
        """Raise an error that names what to use in place of an attribute of laplace-torch."""
        if name in REPLACEMENTS:
            raise AttributeError(f"torch_lla_em has no {name}: {REPLACEMENTS[name]}.")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")

    def _of(self, x: Any) -> tuple[Tensor, Tensor]:
        """Return the mean of f, (B, C), and K samples of f less the mean, (K, B, C)."""
        prediction = self.posterior.predict(x, mean="network")
        mean = prediction.mean
        if mean.dim() != 2:
            raise ValueError(
                f"The network's outputs have shape {tuple(mean.shape)}, but laplace-torch's are (B, C). "
                "Use LinearisedLaplace with class_dim, or la.posterior.predict(x)."
            )
        deviations = prediction.samples - mean
        return (mean, deviations) if self.enable_backprop else (mean.detach(), deviations.detach())

    def _combined(
        self, deviations: Tensor, count: int, generator: torch.Generator | None
    ) -> Tensor:
        """Return samples with the covariance of the deviations, (count, ...)."""
        like = {"dtype": deviations.dtype, "device": deviations.device}
        source = self._generator if generator is None else generator
        drawn = torch.randn(count, len(deviations), generator=source, **like)  # type: ignore[call-overload]
        combined: Tensor = torch.tensordot(drawn, deviations, 1) / len(deviations) ** 0.5
        return combined

    def _loss(
        self, loader: Iterable[Any], loss: Callable[..., Any] | None, how: dict[str, Any]
    ) -> float:
        """Return the loss of predictions on a validation set."""
        total = RunningLoss(loss, self.sigma_noise)
        for batch in loader:
            x, y = (batch, batch[self.dict_key_y]) if self._is_dict else batch
            outputs = self(to_device(x, self._device), **how)
            as_tuple = outputs if isinstance(outputs, tuple) else (outputs,)
            total.add(as_tuple, y.to(self._device))
        return total.value()


def _covariance(deviations: Tensor) -> Tensor:
    """Return the covariance of the outputs of each input, (B, C, C)."""
    return torch.einsum("kbi,kbj->bij", deviations, deviations) / len(deviations)
