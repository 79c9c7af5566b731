"""Fits advise only what helps, and draw the same numbers whatever torch's default dtype is."""

import pytest
import torch
from tiny import draw, tiny
from torch import nn

from torch_lla_em import Classification, LinearisedLaplace
from torch_lla_em.problem import sites


def test_draws_do_not_depend_on_the_default_dtype():
    case, found = tiny("classification"), []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            la = LinearisedLaplace(case.model, "classification", num_samples=4)
            found.append(la.fit(case.x, case.y, progress_bar=False).w_samples)
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float64_is_advised_to_other_dtypes_only(dtype):
    torch.manual_seed(0)
    x = torch.randn(60, 4).to(dtype)
    y = x @ torch.randn(4, 2).to(dtype) + 7
    la = LinearisedLaplace(nn.Linear(4, 2).to(dtype), "regression", num_samples=8)
    with pytest.warns(UserWarning, match="lost to rounding"):
        la.fit(x, y, progress_bar=False)
    assert any("to float64" in words for words in la.messages) == (dtype == torch.float32)


def test_more_em_steps_are_advised_to_fits_that_took_all():
    torch.manual_seed(0)
    x = torch.randn(120, 2)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    for steps in (1, 20):
        la = LinearisedLaplace(model, "bernoulli", num_samples=8)
        la.fit(x, (x[:, :1] > 0).float(), em_steps=steps, progress_bar=False)
        assert any("Increase em_steps" in words for words in la.messages) == (steps == 1)


def test_images_of_which_some_sites_were_kept_are_calibrated_and_compared(monkeypatch):
    monkeypatch.setattr(sites, "KEPT_OUTPUTS", 200)
    torch.manual_seed(0)
    model = nn.Conv2d(2, 2, 1)
    x = draw(10, 2, 6, 6).float()
    y = (x[:, 0] + draw(10, 6, 6, seed=1) > 0).long()
    la = LinearisedLaplace(model, Classification(), class_dim=1, num_samples=4)
    la.fit(x[:7], y[:7], progress_bar=False)
    la.calibrate(x[7:], y[7:])
    assert la.predict(x[:2]).p_value.isfinite().all()


def test_inputs_of_another_size_than_the_training_examples_are_refused():
    torch.manual_seed(0)
    x = draw(10, 2, 6, 6).float()
    la = LinearisedLaplace(nn.Conv2d(2, 2, 1), Classification(), class_dim=1, num_samples=4)
    y = (x[:, 0] > 0).long()
    la.fit(x[:7], y[:7], progress_bar=False).calibrate(x[7:], y[7:])
    with pytest.raises(ValueError, match="their distances cannot be compared"):
        la.predict(draw(2, 2, 8, 8).float()).p_value
