"""The default prior knows neither the unit of the targets nor how a network splits a factor between its layers."""

import copy

import pytest
import torch
from tiny import draw
from torch import nn
from torch.testing import assert_close

from torch_lla_em import LinearisedLaplace, Regression

TARGETS = {
    "regression": lambda f: f + 0.1 * draw(*f.shape, seed=3),
    "classification": lambda f: f.argmax(1),
    "bernoulli": lambda f: (f > 0).double(),
    "poisson": lambda f: (3 * f).exp().round(),
    "heteroscedastic": lambda f: f[:, :1] + 0.1 * draw(len(f), 1, seed=3),
}


def fit_of(model, likelihood, x, y, **options):
    la = LinearisedLaplace(model, likelihood, num_samples=8, **options)
    la.fit(x, y, progress_bar=False)
    mean, deviations = la.predict(x).f_mean, la.functional_samples(x) - la.predict(x).f_mean
    return la, mean, deviations


@pytest.mark.parametrize(
    "likelihood, curvature",
    [*((name, None) for name in TARGETS), ("classification", "network"), ("poisson", "network")],
)
def test_a_factor_moves_from_one_layer_to_the_next(likelihood, curvature):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    model, x = model.double(), draw(40, 3)
    model[2].bias.data.zero_()
    y = TARGETS[likelihood](model(x).detach())
    moved = copy.deepcopy(model)
    for layer, factor in ((0, 50.0), (2, 0.002), (4, 10.0)):
        moved[layer].weight.data *= factor
    moved[0].bias.data *= 50
    moved[2].bias.data *= 0.1
    assert_close(moved(x), model(x))
    known, found = (fit_of(each, likelihood, x, y, curvature=curvature) for each in (model, moved))
    assert_close(found[0].prior_precision, known[0].prior_precision, rtol=1e-4, atol=0)
    assert_close(found[0].effective_dim, known[0].effective_dim, rtol=1e-4, atol=0)
    for value, expected in zip(found[1:], known[1:]):
        assert_close(value, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("sigma", [None, torch.tensor([0.1, 0.1])])
@pytest.mark.parametrize("unit", [1e-6, 1e5])
def test_the_last_layer_has_learnt_another_unit(unit, sigma):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    x = draw(60, 3)
    y = TARGETS["regression"](model(x).detach())
    other = copy.deepcopy(model)
    other[2].weight.data *= unit
    other[2].bias.data *= unit
    known = fit_of(model, Regression(sigma), x, y)
    found = fit_of(other, Regression(None if sigma is None else unit * sigma), x, unit * y)
    assert_close(found[0].prior_precision, known[0].prior_precision, rtol=1e-4, atol=0)
    assert_close(found[0].sigma_noise / unit, known[0].sigma_noise, rtol=1e-4, atol=0)
    for value, expected in zip(found[1:], known[1:]):
        atol = 1e-4 * expected.abs().max().item()
        assert_close(value / unit, expected, rtol=1e-4, atol=atol)
