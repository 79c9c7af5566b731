# %% [markdown]
# # Lightning
#
# `LaplaceCallback` fits the posterior at the end of training, calibrates it on the validation
# loader, logs NLL, ECE, prior precision and effective dimension, and saves the posterior.

# %%
import logging
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
from torch_lla_em.integrations.lightning import LaplaceCallback

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


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
data = TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
train, validation, test = random_split(data, [800, 200, len(data) - 1000])

folder = Path(tempfile.mkdtemp())
posterior = LaplaceCallback(
    "classification",
    network="network",
    num_samples=16,
)
trainer = lightning.Trainer(
    max_epochs=20,
    accelerator="cpu",
    callbacks=[posterior],
    logger=CSVLogger(folder),
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Digits(), DataLoader(train, 50, shuffle=True), DataLoader(validation, 100))
print(posterior.la)

# %% [markdown]
# - `network` is the name of the submodule that maps inputs to outputs. Omit it if the
#   LightningModule has a `forward`.
# - If the training loader augments at random, pass a loader without augmentation as `loader=`,
#   because the posterior needs fixed data.
#
# ## Logged metrics and test NLL

# %%
columns, *lines = (next(folder.rglob("metrics.csv"))).read_text().splitlines()
last = dict(zip(columns.split(","), lines[-1].split(","), strict=True))
print({name: f"{float(value):.4g}" for name, value in last.items() if "posterior" in name})
x, y = next(iter(DataLoader(test, len(test))))
network = nn.functional.cross_entropy(posterior.la.model(x), y)
print(f"test NLL: network {network:.3f}, ", end="")
print(f"posterior {-posterior.la.predict(x).log_prob(y).mean():.3f}")

# %% [markdown]
# ## Load the posterior
#
# Another process needs the network and the file.

# %%
posterior.la.save(folder / "posterior.pt")
again = LinearisedLaplace.load(folder / "posterior.pt", posterior.la.model)
print(again.predict(x[:4]))
