"""Predictions of loaders, whose batches are read as in a fit."""

import pytest
import torch
from tiny import draw, fitted, tiny
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from torch_lla_em import LaplaceEnsemble, LinearisedLaplace


class Scaled(nn.Module):
    """A network of two inputs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 3, dtype=torch.float64)

    def forward(self, x, scale):
        return self.linear(x) * scale


TARGETS = {"entry": lambda batch: batch[1], "changed": lambda batch: batch[-1] - 1}


@pytest.mark.parametrize("kind", TARGETS)
def test_loaders_are_read_by_the_target_fn(kind):
    torch.manual_seed(0)
    case = tiny("classification")
    scale = 1 + draw(30, 1).abs()
    entries = (case.x, case.y, scale) if kind == "entry" else (case.x, scale, case.y + 1)
    loader = DataLoader(TensorDataset(*entries), 7)
    la = LinearisedLaplace(Scaled(), "classification", num_samples=4, target_fn=TARGETS[kind])
    la.fit(loader, progress_bar=False, em_steps=1)
    expected = la((case.x, scale))
    for posterior in (la, LaplaceEnsemble([la])):
        assert_close(posterior.predict(loader).probs, expected)
        assert_close(posterior.predict(loader.dataset).probs, expected)
    epistemic = torch.cat([prediction.epistemic for prediction in la.predictions(loader)])
    assert_close(epistemic, la.predict((case.x, scale)).epistemic)


def test_batches_without_targets_are_inputs_where_a_target_fn_is_given():
    case, la = fitted("classification", target_fn=lambda batch: batch[1])
    for rows in (TensorDataset(case.x), list(case.x)):
        assert_close(la.predict(DataLoader(rows, batch_size=7)).probs, la(case.x))
    named, la = fitted(
        "classification",
        loader=[{"x": case.x, "y": case.y}],
        model=case.model,
        target_fn=lambda batch: batch["y"],
        forward_fn=lambda model, inputs: model(inputs["x"]),
    )
    every = [{"x": x, "y": y} for x, y in zip(named.x, named.y)]
    expected = la({"x": case.x})
    assert_close(la.predict(DataLoader(every, batch_size=7)).probs, expected)
    assert_close(la.predict(DataLoader([{"x": x} for x in named.x], 7)).probs, expected)
