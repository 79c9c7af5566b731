"""A Lightning callback that fits the posterior. Needs ``pip install torch_lla_em[lightning]``."""

from __future__ import annotations

import copy
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from torch_lla_em import Likelihood, LinearisedLaplace, compare
from torch_lla_em.data import Loader
from torch_lla_em.likelihoods import Task
from torch_lla_em.runtime import report

__all__ = ["LaplaceCallback"]

_SCORES = {name: name for name in ("NLL", "accuracy", "ECE", "RMSE")}
_SCORES |= {"network NLL": "network_NLL", "90 % coverage": "coverage_90"}


class LaplaceCallback(Callback):
    """Fit a posterior to the network when training ends, and log its scores on the validation set.

    If a ``ModelCheckpoint`` with ``monitor`` has saved a best checkpoint, the posterior is that of
    a copy of the network with the weights of this checkpoint, ``la.model``; the module keeps the
    weights of the last step. Otherwise the posterior is that of the last step. A message states
    which weights are used.

    These scores are logged under ``posterior/``: the NLL of the posterior and of the network alone,
    accuracy and ECE (or RMSE and coverage), prior precision λ and effective dimension γ, and
    "calibrated_NLL" after ``calibrate`` on the validation set.

    Args:
        likelihood (str or Likelihood): As in ``LinearisedLaplace``.
        network (str, optional): Name of the submodule that maps inputs to outputs, such as "net".
            Default None: the LightningModule itself, which needs a ``forward``.
        loader (DataLoader, optional): The training data. Default None: the training loader of the
            trainer. Pass a loader without augmentation if that one augments at random.
        **options: Further arguments of ``LinearisedLaplace``, such as ``num_samples``.

    Attributes:
        la (LinearisedLaplace): The posterior, on the CPU once the trainer is done.
        metrics (dict): The logged scores.

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
        loader: Loader | None = None,
        **options: Any,
    ):
        """Store the options; the class documents the arguments."""
        self.likelihood, self.network, self.loader = likelihood, network, loader
        self.options = options
        self.metrics: dict[str, float] = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit, log and calibrate."""
        loader = trainer.train_dataloader if self.loader is None else self.loader
        held_out = trainer.val_dataloaders
        if isinstance(held_out, (list, tuple)):
            held_out = next(iter(held_out), None)
        network: nn.Module = pl_module.get_submodule(self.network or "")
        if network is pl_module and type(pl_module).forward is LightningModule.forward:
            raise TypeError(
                f"{type(pl_module).__name__} has no forward method, which the posterior needs: "
                "define it, or name the submodule that is the network: LaplaceCallback(..., "
                'network="net").'
            )
        network = self._at_best(trainer, pl_module, network)
        self.la = LinearisedLaplace(network, self.likelihood, **self.options)
        self.la.fit(loader, progress_bar=False)
        precision, gamma = self.la.prior_precision, self.la.effective_dim
        assert precision is not None and gamma is not None
        self.metrics = {
            "posterior/prior_precision": precision.log().mean().exp().item(),
            "posterior/effective_dim": gamma.sum().item(),
        }
        if held_out is not None:
            (scores,) = compare([self.la], held_out).records.values()
            for name in filter(scores.__contains__, _SCORES):  # ranks reduce in one order
                value = torch.tensor(scores[name], dtype=torch.float64, device=pl_module.device)
                self.metrics[f"posterior/{_SCORES[name]}"] = trainer.strategy.reduce(value).item()
            self.la.calibrate(held_out)
            if self.la.calibration is not None:
                self.metrics["posterior/calibrated_NLL"] = self.la.calibration.after
        for logger in trainer.loggers:
            logger.log_metrics(self.metrics, step=trainer.global_step)
            logger.save()

    def _at_best(self, trainer: Trainer, module: LightningModule, network: nn.Module) -> nn.Module:
        """Return a copy of the network with the weights of the best checkpoint, or the network
        itself if there is no such checkpoint."""
        for saved in trainer.checkpoint_callbacks:
            if isinstance(saved, ModelCheckpoint) and saved.monitor and saved.best_model_path:
                break
        else:
            report(
                "log",
                "The posterior is that of the weights of the last step: no ModelCheckpoint with "
                "`monitor` has saved a best checkpoint.",
            )
            return network
        trainer.strategy.barrier()  # one rank has written it
        path, start = saved.best_model_path, f"{self.network}." if self.network else ""
        state = trainer.strategy.checkpoint_io.load_checkpoint(path)["state_dict"]
        of_network = {n.removeprefix(start): t for n, t in state.items() if n.startswith(start)}
        network = copy.deepcopy(network)
        network.load_state_dict(of_network, strict=module.strict_loading)
        score = "" if saved.best_model_score is None else f" {saved.best_model_score:.4g}"
        report(
            "log",
            f"The posterior is that of the best checkpoint ({saved.monitor}{score}), {path}. Its "
            "network is `la.model`; the module keeps the weights of the last step.",
        )
        return network

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Move the posterior to the CPU, where the trainer leaves the network."""
        if stage == "fit" and hasattr(self, "la"):
            self.la.to("cpu")
