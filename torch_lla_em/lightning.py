"""A Lightning callback that fits the posterior.

Needs Lightning: ``pip install torch_lla_em[lightning]``.
"""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch
from torch import nn

from torch_lla_em.distil import Student, distilled
from torch_lla_em.laplace import LinearisedLaplace, Task
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction import compare

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError(
        "torch_lla_em.lightning needs Lightning: pip install torch_lla_em[lightning], or pip install "
        "lightning."
    ) from error

# name of a score -> its name in the log
_LOGGED = {name: name for name in ("NLL", "accuracy", "ECE", "RMSE")}
_LOGGED |= {"network NLL": "network_NLL", "90 % coverage": "coverage_90"}


class LaplaceCallback(Callback):
    """Fit a posterior to the network when training ends, and log its scores on the validation set.

    Logged under ``posterior/``: NLL, that of the network alone, accuracy and ECE (or RMSE and
    coverage), prior precision λ and effective dimension γ.

    Args:
        likelihood (str or Likelihood): As in ``LinearisedLaplace``.
        network (str, optional): Name of the submodule that maps inputs to outputs, such as "net".
            None (default) for the LightningModule itself, which needs a ``forward``.
        loader (DataLoader, optional): The training data. None (default) takes the trainer's. Pass
            one without augmentation if the trainer's augments at random.
        calibrate (bool): Calibrate on the validation set after the scores were computed; logs
            "posterior/calibrated_NLL". Default True.
        path (str, optional): File to which rank 0 saves the posterior. Default None.
        distil (bool or dict): Train a network on the posterior's predictions at the training inputs,
            which predicts in one forward pass, and log its KL divergence from the posterior and its
            NLL. A dict has arguments of ``la.distil``. In a distributed run every rank trains the
            student on its own share of the data. Default False.
        **options: Further arguments of ``LinearisedLaplace``, such as ``num_samples``.

    Attributes:
        la (LinearisedLaplace): The posterior, on the CPU once the trainer is done.
        student (Student or None): The network of one forward pass, with ``distil=True``.
        metrics (dict): The logged scores.

    Raises:
        TypeError: When fitting, if the LightningModule has no ``forward``.

    Example:
        >>> callback = LaplaceCallback("classification", network="net")
        >>> Trainer(callbacks=[callback], **quiet).fit(module, loader)
        >>> probabilities = callback.la(x)
    """

    la: LinearisedLaplace

    def __init__(
        self,
        likelihood: Task | Likelihood,
        network: str | None = None,
        *,
        loader: Any = None,
        calibrate: bool = True,
        path: str | PathLike[str] | None = None,
        distil: bool | dict[str, Any] = False,
        **options: Any,
    ):
        """Keep the options; the class documents the arguments."""
        self.likelihood, self.network = likelihood, network
        self.loader, self.calibrate, self.path = loader, calibrate, path
        self.distil, self.options = distil, options
        self.student: Student | None = None
        self.metrics: dict[str, float] = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit, log, calibrate and save."""
        validation = _validation(trainer)
        self._fit(trainer, pl_module, validation)
        if self.calibrate and validation is not None:
            self.la.calibrate(validation)
            self.metrics["posterior/calibrated_NLL"] = self.la.calibration.after
        if self.path is not None and trainer.is_global_zero:
            self.la.save(self.path)
        self._distil(trainer, validation)
        for logger in trainer.loggers:
            logger.log_metrics(self.metrics, step=trainer.global_step)
            logger.save()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Move the posterior to the CPU, where the trainer leaves the network."""
        if stage == "fit" and hasattr(self, "la"):
            self.la.to("cpu")
            if self.student is not None:
                self.student.to("cpu")

    def _fit(self, trainer: Trainer, module: LightningModule, validation: Any) -> None:
        loader = trainer.train_dataloader if self.loader is None else self.loader
        self.la = LinearisedLaplace(self._network(module), self.likelihood, **self.options)
        self.la.fit(loader, progress_bar=False)
        self.metrics = {
            "posterior/prior_precision": self.la.prior_precision.log().mean().exp().item(),
            "posterior/effective_dim": self.la.effective_dim.sum().item(),
        }
        if validation is None:
            return
        (scores,) = compare([self.la], validation).records.values()
        for name in [name for name in _LOGGED if name in scores]:  # ranks reduce in one order
            value = torch.tensor(scores[name], dtype=torch.float64, device=module.device)
            self.metrics[f"posterior/{_LOGGED[name]}"] = trainer.strategy.reduce(value).item()

    def _distil(self, trainer: Trainer, validation: Any) -> None:
        loader = trainer.train_dataloader if self.loader is None else self.loader
        self.student = distilled(self.la, self.distil, loader, validation)
        if self.student is None:
            return
        error = self.student.error
        if error.held_out is not None:
            self.metrics["student/KL"] = error.held_out.kl
        if error.nll is not None:
            self.metrics["student/NLL"] = error.nll.student

    def _network(self, module: LightningModule) -> nn.Module:
        if self.network is not None:
            return module.get_submodule(self.network)
        if type(module).forward is LightningModule.forward:
            raise TypeError(
                f"{type(module).__name__} has no forward method, which the posterior needs: define "
                'it, or name the submodule that is the network: LaplaceCallback(..., network="net").'
            )
        return module


def _validation(trainer: Trainer) -> Any:
    """Return the first validation loader, or None."""
    loaders = trainer.val_dataloaders
    return next(iter(loaders), None) if isinstance(loaders, (list, tuple)) else loaders
