"""A regression says that its network has overfitted, and only then."""

import pytest
import torch
from torch import nn

from torch_lla_em import LinearisedLaplace


def trained(width, num_data, steps, noise=0.3):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_data, 3, generator=generator)
    y = x[:, :1] + 0.5 * x[:, 1:2] ** 2 + noise * torch.randn(num_data, 1, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 1))
        optimizer = torch.optim.Adam(net.parameters(), 0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
    la = LinearisedLaplace(net, "regression", num_samples=8)
    return la.fit(x, y, progress_bar=False)


@pytest.mark.parametrize("width, num_data, steps", [(10, 400, 300), (5, 150, 300), (20, 600, 400)])
def test_a_healthy_regression_raises_no_alarm(width, num_data, steps):
    assert "overfitted" not in repr(trained(width, num_data, steps))


@pytest.mark.parametrize("width, num_data, steps", [(100, 60, 2000), (200, 100, 1500)])
def test_an_overfitted_regression_says_so_and_what_helps(width, num_data, steps):
    shown = repr(trained(width, num_data, steps))
    assert "The network has overfitted" in shown and "la.calibrate(validation_loader)" in shown
