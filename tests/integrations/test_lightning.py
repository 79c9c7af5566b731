"""The callback in a real Trainer: what it fits, what it logs, and what can monitor it."""

import copy
import csv
import warnings

import pytest
import torch
from fresh import run_python
from tiny import posterior_of
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning")

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from torch_lla_em import compare
from torch_lla_em.integrations.lightning import LaplaceCallback

pytestmark = pytest.mark.filterwarnings("ignore")
K = 4
OFF = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
OFF |= {"enable_checkpointing": False}


class Small(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, _):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def data(n, seed):
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0))


def trained(callback, tmp_path, epochs=2, module=Small, **options):
    torch.manual_seed(0)
    others = options.pop("callbacks", [])
    options = OFF | {"max_epochs": epochs, "logger": CSVLogger(tmp_path)} | options
    trainer, module = lightning.Trainer(callbacks=[callback, *others], **options), module()
    validation = DataLoader(data(40, 1), 16)
    trainer.fit(module, DataLoader(data(60, 0), 20, shuffle=True), validation)
    return trainer, module, validation


def test_the_posterior_is_that_of_the_trained_network(tmp_path):
    callback = LaplaceCallback("classification", "net", num_samples=K)
    trainer, module, validation = trained(callback, tmp_path)
    assert callback.la.model is module.net
    own = posterior_of(module.net, "classification", DataLoader(data(60, 0), 20), num_samples=K)
    assert_close(callback.la.w_samples, own.w_samples)
    record = compare([own], validation).records["0: Sequential"]
    with open(trainer.logger.log_dir + "/metrics.csv") as file:
        logged = {k: float(v) for row in csv.DictReader(file) for k, v in row.items() if v}
    la, (x, y) = callback.la, data(40, 1).tensors
    due = {n.replace(" ", "_"): record[n] for n in ("NLL", "network NLL", "accuracy", "ECE")}
    due |= {"prior_precision": la.prior_precision.item(), "calibrated_NLL": la.calibration.after}
    for name, value in (due | {"effective_dim": la.effective_dim.item()}).items():
        assert logged[f"posterior/{name}"] == pytest.approx(value), name
    assert la.predict(x).p_value.shape == y.shape


class Whole(Small):
    def forward(self, x):
        return self.net(x)


def test_other_modules_and_loaders(tmp_path):
    callback = LaplaceCallback("classification", num_samples=K)
    trained(callback, tmp_path, 1, Whole)
    assert isinstance(callback.la.model, Whole) and "posterior/NLL" in callback.metrics
    other = LaplaceCallback("classification", num_samples=K, loader=[data(20, 3).tensors])
    trained(other, tmp_path, 1, Whole, limit_val_batches=0)
    assert other.la.num_data == 20 and "posterior/NLL" not in other.metrics
    with pytest.raises(TypeError, match='Small has no forward.*network="net"'):
        trained(LaplaceCallback("classification"), tmp_path, 1)


@pytest.mark.parametrize("module, name", [(Small, "net"), (Whole, None)])
def test_the_posterior_is_that_of_the_best_checkpoint(tmp_path, caplog, module, name):
    """Also of a network that was trained for too long; the module keeps its weights."""
    best = ModelCheckpoint(tmp_path, monitor="val_loss", mode="max")  # the first epoch
    callback = LaplaceCallback("classification", name, num_samples=K)
    how = {"callbacks": [best], "enable_checkpointing": True}
    _, last, validation = trained(callback, tmp_path, 3, module, **how)
    assert "epoch=0" in best.best_model_path and best.best_model_path in caplog.text
    saved = copy.deepcopy(last)
    saved.load_state_dict(torch.load(best.best_model_path, weights_only=False)["state_dict"])
    due = saved.get_submodule(name or "")
    for key, value in callback.la.model.state_dict().items():
        assert torch.equal(value, due.state_dict()[key])
    assert not torch.equal(value, last.get_submodule(name or "").state_dict()[key])
    own = posterior_of(due, "classification", DataLoader(data(60, 0), 20), num_samples=K)
    assert_close(callback.la.w_samples, own.w_samples)


@pytest.mark.parametrize("kind", ["none", "without monitor"])
def test_without_a_best_checkpoint_a_message_says_so(tmp_path, caplog, kind):
    callback = LaplaceCallback("classification", "net", num_samples=K)
    saved = [ModelCheckpoint(tmp_path)] if kind == "without monitor" else []
    how = {"callbacks": saved, "enable_checkpointing": bool(saved)}
    _, module, _ = trained(callback, tmp_path, 1, **how)
    assert callback.la.model is module.net
    assert "weights of the last step: no ModelCheckpoint with `monitor`" in caplog.text


SEVERAL = """
import sys, warnings
warnings.simplefilter("ignore")
import lightning
from test_lightning import OFF, DataLoader, LaplaceCallback, Small, data
callback = LaplaceCallback("classification", "net", num_samples=4)
several = {"devices": 2, "strategy": "ddp", "max_epochs": 1, "logger": False}
trainer = lightning.Trainer(callbacks=[callback], **OFF, **several)
trainer.fit(Small(), DataLoader(data(60, 0), 20, shuffle=True), DataLoader(data(40, 1), 20))
assert callback.la.num_data == 60
with open(f"{sys.argv[1]}/{trainer.global_rank}.txt", "w") as file:
    file.write(repr((callback.metrics, callback.la.w_samples.sum().item())))
"""


@pytest.mark.slow
def test_ranks_fit_one_posterior(tmp_path):
    script = tmp_path / "several.py"
    script.write_text(SEVERAL)
    run_python(script, tmp_path)
    ranks = [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)]
    assert ranks[0] == ranks[1] and "posterior/NLL" in ranks[0]
