"""EM over the prior precision: its acceleration, its one update, and the plain prior it may take."""

import warnings

import pytest
import torch
from torch import nn

from torch_lla_em import LinearisedLaplace
from torch_lla_em.inference.mackay import Hyperparameters, MStep, Step

torch.set_num_threads(1)


@pytest.mark.parametrize("slope", [0.6, -0.6])
def test_a_secant_step_ends_a_geometric_approach_from_one_side_or_both(slope):
    def mapped(log_precision: float) -> Hyperparameters:
        there = torch.tensor(3 + slope * (log_precision - 3), dtype=torch.float64)
        return Hyperparameters(there.exp())

    start = Hyperparameters(torch.tensor(5.0, dtype=torch.float64).exp())
    first, second = mapped(5.0), mapped(mapped(5.0).precision.log().item())
    before = Step(1, start, first.precision.log(), first, 1.0, False)
    new = MStep(None, None).accelerated(before, first, second)
    assert new.precision.log().item() == pytest.approx(3.0)


def test_where_the_g_prior_keeps_nothing_the_plain_one_is_taken(caplog):
    torch.manual_seed(0)
    model = nn.Linear(300, 260)
    x, y = 0.5 * torch.randn(16, 300).relu(), torch.randint(260, (16,))
    with torch.no_grad():
        model.weight[y] += 0.1 * x
    la = LinearisedLaplace(model, "classification", num_samples=8, curvature="network")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la.fit([(x, y)], progress_bar=False)
        plain = LinearisedLaplace(
            model, "classification", num_samples=8, curvature="network", g_prior=False
        ).fit([(x, y)], progress_bar=False)
    assert "The plain prior has a log evidence" in caplog.text
    torch.testing.assert_close(la.prior_precision, plain.prior_precision, rtol=1e-3, atol=0)
    assert (la.scale == 1).all()
    assert [step["step"] for step in la.history] == list(range(1, len(la.history) + 1))


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_every_fit_moves_its_prior_precision_by_the_same_update(likelihood, monkeypatch):
    monkeypatch.setattr(
        "torch_lla_em.inference.mackay._bounded", lambda proposed, here, warns=True: here
    )
    torch.manual_seed(0)
    x, model = torch.randn(20, 2), nn.Linear(2, 3)
    y = torch.randint(3, (20,)) if likelihood == "classification" else torch.randn(20, 3)
    la = LinearisedLaplace(model, likelihood, num_samples=4)
    la.fit([(x, y)], em_steps=2, prior_precision=3.0, progress_bar=False)
    assert la.prior_precision.item() == pytest.approx(3.0)
