"""Coverage within groups: what is measured, and what is advised where it is too low."""

import pytest
import torch
from torch import nn

from torch_lla_em import LaplaceEnsemble, LinearisedLaplace

FIXED = {"em_steps": 0, "prior_precision": 1.0, "progress_bar": False}


def calibrated(likelihood, outputs, y):
    """A posterior of a linear network on inputs with one extreme feature."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1200, 3, generator=generator)
    x[:, 1] = x[:, 1] ** 3
    y = y(x, torch.randn(1200, generator=generator))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Linear(3, outputs)
    loss = nn.functional.cross_entropy if likelihood == "classification" else nn.functional.mse_loss
    optimiser = torch.optim.Adam(net.parameters(), 0.05)
    for _ in range(200):
        optimiser.zero_grad()
        loss(net(x[:300]), y[:300]).backward()
        optimiser.step()
    la = LinearisedLaplace(net, likelihood, num_samples=4).fit(x[:300], y[:300], **FIXED)
    return la, x, y


def test_a_rare_class_is_found():
    def labels(x, noise):
        return ((x[:, 0] + 0.8 * noise) > 1.6).long()

    la, x, y = calibrated("classification", 2, labels)
    with pytest.raises(ValueError, match="calibrate"):
        la.check(x[600:], y[600:])
    la.calibrate(x[300:600], y[300:600])
    found = la.check(list(zip(x[600:].split(70), y[600:].split(70))))
    sets = la.predict(x[600:]).prediction_set(0.9)
    inside = sets.gather(1, y[600:, None])[:, 0].double()
    by_name = {group.name: group for group in found.groups}
    assert by_name["all"].coverage == pytest.approx(inside.mean().item())
    assert by_name["class 1"].coverage == pytest.approx(inside[y[600:] == 1].mean().item())
    assert by_name["class 1"].is_low(0.9) and not by_name["all"].is_low(0.9)
    shown = repr(found)
    assert "clearly below 0.9 for: class 1" in shown and 'groups="classes"' in shown
    assert any(name.startswith("feature 1, highest") for name in by_name)
    ensemble = LaplaceEnsemble([la, la]).calibrate(x[300:600], y[300:600])
    assert ensemble.check(x[600:], y[600:]).groups[0].number == 600


def test_noise_that_depends_on_the_inputs_is_found():
    la, x, y = calibrated(
        "regression", 1, lambda x, noise: x[:, :1] + noise[:, None] * x[:, 1:2].abs()
    )
    found = la.calibrate(x[300:600], y[300:600]).check(x[600:], y[600:])
    lower, upper = la.predict(x[600:]).interval(0.9)
    inside = ((lower <= y[600:]) & (y[600:] <= upper)).double().mean().item()
    assert found.groups[0].coverage == pytest.approx(inside)
    assert 'likelihood="heteroscedastic"' in repr(found)
    even = calibrated("regression", 1, lambda x, noise: x[:, :1] + noise[:, None])
    found = even[0].calibrate(x[300:600], even[2][300:600]).check(x[600:], even[2][600:])
    assert "No group" in repr(found)
