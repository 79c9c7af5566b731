"""The default prior knows neither units of inputs and targets nor how a network splits a factor between its layers."""

import copy
import math

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
    assert_same(known, found)


def in_units(model, columns, rows):
    """The same function of inputs and outputs in other units, as if it had been trained in them."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.div_(columns)
        other[2].weight.mul_(rows[:, None])
        other[2].bias.mul_(rows)
    return other


def assert_same(known, found, unit=1.0):
    for name in ("prior_precision", "effective_dim"):
        assert_close(getattr(found[0], name), getattr(known[0], name), rtol=1e-4, atol=0)
    for value, expected in zip(found[1:], known[1:], strict=True):
        atol = 1e-4 * expected.abs().max().item()
        assert_close(value / unit, expected, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("column, row", [(1e3, 1.0), (1e-4, 1.0), (1.0, 1e3), (1e5, 1e-3)])
def test_single_columns_and_outputs_have_other_units(column, row):
    """The σ from which EM starts has no unit then, and the prior must not take it for one."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double(), draw(60, 3)
    y, ones = TARGETS["regression"](model(x).detach()), torch.ones(2).double()
    columns, rows = x.new_tensor([1.0, 1.0, column]), x.new_tensor([1.0, row])
    known = fit_of(model, Regression(ones), x, y)
    found = fit_of(in_units(model, columns, rows), Regression(ones), x * columns, y * rows)
    # EM ends after another number of steps, since it starts elsewhere
    assert_close(found[0].effective_dim, known[0].effective_dim, rtol=0.02, atol=0)
    assert_close(found[1] / rows, known[1], rtol=0, atol=0.01)
    assert_close(found[0].sigma_noise / rows, known[0].sigma_noise, rtol=0.02, atol=0)


@pytest.mark.parametrize("unit", [1e-3, 1e3])
def test_a_heteroscedastic_network_has_learnt_another_unit(unit):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double(), draw(60, 3)
    y = TARGETS["heteroscedastic"](model(x).detach())
    other = in_units(model, torch.ones(3), x.new_tensor([unit, 1.0]))
    other[2].bias.data[1] += 2 * math.log(unit)
    known = fit_of(model, "heteroscedastic", x, y)
    found = fit_of(other, "heteroscedastic", x, unit * y)
    assert_close(found[0].effective_dim, known[0].effective_dim, rtol=0.02, atol=0)
    size = known[1][:, 0].std().item()
    assert_close(found[1][:, 0] / unit, known[1][:, 0], rtol=0, atol=0.02 * size)


@pytest.mark.parametrize("factor, unit", [(1e3, 1.0), (1e-3, 1.0), (1.0, 1e-6), (1.0, 1e12)])
def test_float32_rounds_each_tensor_on_its_scale(factor, unit):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)), draw(60, 3).float()
    y = TARGETS["regression"](model(x).detach()).float()
    other = copy.deepcopy(model)
    for layer, scale in ((0, factor), (2, unit)):
        other[layer].weight.data *= scale
        other[layer].bias.data *= scale
    other[2].weight.data /= factor
    known, found = fit_of(model, "regression", x, y), fit_of(other, "regression", x, unit * y)
    assert ((found[0].scale == 0) == (known[0].scale == 0)).all()
    assert_close(found[0].effective_dim, known[0].effective_dim, rtol=1e-3, atol=0)
    assert_close(found[1] / unit, known[1], rtol=0, atol=1e-3)


def test_a_tensor_of_rounding_alone_is_left_out():
    """The bias of keys moves no output, since softmax is invariant; what rounding leaves of it is not scaled up."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))
            self.head = nn.Linear(4, 1)

        def forward(self, x):
            scores = self.query(x) @ self.key(x).mT
            return self.head((scores.softmax(-1) @ self.value(x)).mean(1))

    torch.manual_seed(0)
    x = draw(40, 5, 4).float()
    model = Attention()
    la = fit_of(model, "regression", x, TARGETS["regression"](model(x).detach()))[0]
    scales = la.scale.split([p.numel() for p in model.parameters()])
    names = [name for name, _ in model.named_parameters()]
    left_out = [n for n, scale in zip(names, scales, strict=True) if (scale == 0).all()]
    assert left_out == ["key.bias"]


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
    assert_same(known, found, unit)
    assert_close(found[0].sigma_noise / unit, known[0].sigma_noise, rtol=1e-4, atol=0)
