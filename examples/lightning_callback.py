# %% [markdown]
# # Lightning: error bars when training ends
#
# A callback of twenty lines fits the posterior once training is over, calibrates it on the validation
# loader, logs what was found, and keeps the posterior beside the checkpoint.

# %%
import logging
import os
import tempfile
import warnings
from pathlib import Path

import lightning
import torch
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from torch_lla_em import LinearisedLaplace

TINY = "TINY" in os.environ  # for the tests: one epoch, a few samples
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class ErrorBars(lightning.Callback):
    """Fit a posterior to ``module.network`` after training, and log what it says."""

    def __init__(self, likelihood, path=None, **options):
        self.likelihood, self.path, self.options = likelihood, path, options

    def on_train_end(self, trainer, module):
        self.la = LinearisedLaplace(module.network, self.likelihood, **self.options)
        self.la.fit(trainer.train_dataloader, progress_bar=False)
        found = {"prior_precision": self.la.prior_precision, "gamma": self.la.effective_dim}
        if trainer.val_dataloaders:
            self.la.calibrate(trainer.val_dataloaders)
            found["nll_as_fitted"] = self.la.calibration.before
            found["nll_calibrated"] = self.la.calibration.after
        for logger in trainer.loggers:
            values = {f"posterior/{name}": float(value) for name, value in found.items()}
            logger.log_metrics(values, step=trainer.global_step)
            logger.save()
        if self.path and trainer.is_global_zero:
            self.la.save(self.path)


# %% [markdown]
# `fit` looks at `trainer.train_dataloader`, shuffled as it is. It leaves the network as it found it:
# weights, mode, gradients, hooks. If the loader augments at random, pass one that does not: the posterior
# is that of fixed rows, and `fit` says so where they change.

# %%


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.cross_entropy(self.network(x), y)

    def validation_step(self, batch, _):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.network(x), y))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


lightning.seed_everything(0, verbose=False)
x, y = load_digits(return_X_y=True)
rows = TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
train, validation, test = random_split(rows, [800, 200, len(rows) - 1000])

folder = Path(tempfile.mkdtemp())
bars = ErrorBars("classification", folder / "posterior.pt", num_samples=4 if TINY else 16)
trainer = lightning.Trainer(
    max_epochs=1 if TINY else 20,
    accelerator="cpu",
    callbacks=[bars],
    logger=CSVLogger(folder),
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Digits(), DataLoader(train, 50, shuffle=True), DataLoader(validation, 100))
print(bars.la)

# %% [markdown]
# ## What was logged, and what it is worth on rows that nobody has seen

# %%
columns, *lines = (next(folder.rglob("metrics.csv"))).read_text().splitlines()
last = dict(zip(columns.split(","), lines[-1].split(","), strict=True))
print({name: f"{float(value):.4g}" for name, value in last.items() if "posterior" in name})
x, y = next(iter(DataLoader(test, len(test))))
network = nn.functional.cross_entropy(bars.la.model(x), y)
print(f"NLL on test rows: network {network:.3f}, ", end="")
print(f"posterior {-bars.la.predict(x).log_prob(y).mean():.3f}")

# %% [markdown]
# Another process needs the network and the file:

# %%
again = LinearisedLaplace.load(folder / "posterior.pt", bars.la.model)
print(again.predict(x[:4]))
