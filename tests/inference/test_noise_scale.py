"""The observation noise is learnt whatever the scale of the targets."""

import pytest
import torch
from torch import nn

from torch_lla_em import BlockCG, LinearisedLaplace

NOISE = 0.4


def scaled(scale, dtype, outputs=1, offset=0.0):
    """A network whose outputs have this scale, inputs, and targets around its outputs."""
    torch.manual_seed(0)
    x = torch.randn(400, 3).double()
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)).double()
    with torch.no_grad():
        model[2].weight.mul_(scale)
        model[2].bias.mul_(scale).add_(offset * scale)
        y = model(x) + NOISE * scale * torch.randn(400, outputs).double()
    return model.to(dtype), x.to(dtype), y.to(dtype)


def learnt(model, x, y, **options):
    la = LinearisedLaplace(model, "regression", **options).fit(x, y, progress_bar=False)
    return la.sigma_noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-6, 5e-4, 1e6])
@pytest.mark.parametrize(
    "options",
    [{}, {"solver": BlockCG()}, {"sigma_noise": 1.0}, {"g_prior": False}, {"prior": "layerwise"}],
    ids=str,
)
def test_sigma_follows_the_scale_of_the_targets(scale, dtype, options):
    sigma = learnt(*scaled(scale, dtype), **options)
    # 400 residuals know their standard deviation to 1 / sqrt(800)
    assert abs(sigma.item() / scale / NOISE - 1) < 5 / 800**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_sigma_of_every_output_follows_its_scale(scale, dtype):
    sigma = learnt(*scaled(scale, dtype, outputs=2), sigma_noise=torch.ones(2))
    assert ((sigma / scale / NOISE - 1).abs() < 5 / 800**0.5).all()


def test_residuals_are_not_lost_beside_a_large_mean():
    sigma = learnt(*scaled(1.0, torch.float64, offset=1e5))
    assert abs(sigma.item() / NOISE - 1) < 5 / 800**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_targets_are_warned_of(dtype):
    model, x, y = scaled(1.0, dtype)
    with pytest.warns(UserWarning) as warned:
        sigma = learnt(model, x, 0 * y + 3)
    assert any("subtract their mean" in str(one.message) for one in warned)
    assert sigma < 1e-2


def test_targets_of_zero_are_refused():
    model, x, y = scaled(1.0, torch.float32)
    with pytest.raises(ValueError, match="All targets are 0"):
        learnt(model, x, 0 * y)


def test_sigma_starts_from_the_residuals_of_the_network():
    model, x, y = scaled(1e-3, torch.float64)
    la = LinearisedLaplace(model, "regression")
    la.fit([(x[:150], y[:150]), (x[150:], y[150:])], em_steps=0, prior_precision=1.0)
    residuals = (y - model(x)).detach().square().mean().sqrt()
    torch.testing.assert_close(la.sigma_noise.item(), residuals.item())
