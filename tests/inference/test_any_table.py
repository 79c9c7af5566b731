"""Default fits of tables of every kind: in other units, without noise, or without anything to learn."""

import copy
import warnings

import pytest
import torch
from daily import daily
from models import trained
from tiny import posterior_of
from torch import nn
from torch.nn import functional as F


def network(outputs, layers=1):
    hidden = [part for _ in range(layers - 1) for part in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), *hidden, nn.Linear(8, outputs))


def table(n=40, noise=0.1):
    torch.manual_seed(0)
    x = torch.randn(n, 3)
    return x, x[:, :1].sin() + noise * (1 + x[:, 1:2].abs()) * torch.randn(n, 1)


def quiet_fit(model, x, y, likelihood="regression", **options):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        la = posterior_of(model, likelihood, x, y, num_samples=8, **options)
    return la, told


def test_targets_without_noise_are_fitted_in_few_steps_with_one_warning():
    x = torch.linspace(-1, 1, 60)[:, None].expand(-1, 3).contiguous()
    y = (3 * x[:, :1]).sin()
    la, told = quiet_fit(trained(network(1, 2), x, y, 200, 1e-2, F.mse_loss), x, y)
    assert len(la.history) < 8 and la.effective_dim <= len(y) and la.accuracy.error < 0.03
    p = la.predict(x, mean="linear")
    assert (p.f_mean - y).abs().max() < 2e-3 and p.f_variance.max() < 2e-6
    assert ["lost to rounding" in str(one.message) for one in told] == [True]


def test_precise_targets_give_the_same_fit_in_float32_and_float64():
    x, _ = table(300)
    y = (x[:, :1] + 0.3 * x[:, 1:2]).sin() + 1e-3 * torch.randn(300, 1)
    model = trained(network(1, 2), x, y, 300, 1e-2, F.mse_loss)
    fits = [
        quiet_fit(m, *t)[0]
        for m, t in ((model, (x, y)), (copy.deepcopy(model).double(), (x.double(), y.double())))
    ]
    assert max(la.accuracy.error for la in fits) < 0.03
    for name in ("prior_precision", "sigma_noise", "effective_dim"):
        low, high = (getattr(la, name) for la in fits)
        torch.testing.assert_close(low, high, rtol=0.02, atol=0)


def tables(x, y):
    """Tables of finite numbers at which a fit could stumble."""
    outlier = torch.zeros_like(y)
    outlier[0] = 1
    return {
        "constant": (x, torch.full_like(y, 3.7)),
        "zero": (x, 0 * y),
        "constant and large": (x, torch.full_like(y, 1e7)),
        "one differs": (x, outlier),
        "one example": (x[:1], y[:1]),
        "two examples": (x[:2], y[:2]),
        "equal inputs": (0 * x + 1, y),
        "zero inputs": (0 * x, y),
        "twice": (x[:5].repeat(8, 1), y[:5].repeat(8, 1)),
        "collinear": (x[:, :1] * torch.tensor([1.0, 2, -1]), y),
        "an outlier": (x, y + 1e6 * outlier),
        "an outlier in x": (x * (1 + 1e4 * outlier), y),
        "tiny": (x, 1e-12 * y),
        "huge": (x, 1e12 * y),
        "far away": (x, y + 1e6),
        "huge inputs": (1e8 * x, y),
        "tiny inputs": (1e-8 * x, y),
        "an idle output": (x, torch.cat([y, 0 * y + 2], 1)),
    }


TABLES = tables(*table())
FORMS = {  # outputs and targets of each likelihood
    "regression": lambda y: y,
    "heteroscedastic": lambda y: y[:, :1],
    "classification": lambda y: (y[:, 0] > 0).long(),
    "bernoulli": lambda y: (y[:, :1] > 0).float(),
    "poisson": lambda y: y[:, :1].abs().round(),
}


OF_LABELS = "constant|one differs|one example|equal inputs|twice|huge inputs|tiny inputs".split("|")
STUMBLES = [(name, form) for name in TABLES for form in ("regression", "heteroscedastic")]
STUMBLES += [(name, form) for name in OF_LABELS for form in ("classification", "bernoulli")]
STUMBLES += [(name, "poisson") for name in ("zero", "one differs")]
LONG = [(name, "heteroscedastic") for name in ("an outlier", "constant and large", "zero", "twice")]
LONG += [("huge", "heteroscedastic"), ("constant and large", "poisson")]  # fits of many steps
STUMBLES = daily(*(case for case in STUMBLES if case not in LONG), rest=LONG)


@pytest.mark.parametrize("name, likelihood", STUMBLES)
def test_no_table_of_finite_numbers_ends_a_fit(name, likelihood):
    x, y = TABLES[name][0], FORMS[likelihood](TABLES[name][1])
    outputs = y.shape[1] if likelihood == "regression" else 1 + (likelihood[0] in "hc")
    torch.manual_seed(1)
    la, _ = quiet_fit(network(outputs), x, y, likelihood)
    found = la(x) if isinstance(la(x), tuple) else (la(x),)
    assert all(part.isfinite().all() for part in found)
    assert la.effective_dim <= outputs * len(y)


@pytest.mark.slow
@pytest.mark.parametrize("is_trained", [True, False])
def test_a_large_table_whose_noise_is_a_thousandth_of_the_spread_is_fitted(is_trained):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12_000, 8, generator=generator)
    # with few values, a heavy tail, and two columns that are nearly the same
    x[:, 0], x[:, 1], x[:, 3] = x[:, 0].round(), x[:, 1].exp(), x[:, 2] + 1e-3 * x[:, 3]
    x = (x - x.mean(0)) / x.std(0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    with torch.no_grad():
        y = net(x)
        y = (y - y.mean()) / y.std() + 1e-3 * torch.randn(12_000, 1, generator=generator)
        net[-1].weight /= net(x).std()
        net[-1].bias -= (net(x) - y).mean()
        for p in () if is_trained else net.parameters():  # not to the end
            p += 0.02 * p.abs().mean() * torch.randn(p.shape, generator=generator)
    la, told = quiet_fit(net, x, y)
    error = (la.predict(x).f_mean - y).square().mean().sqrt()
    assert error < 3e-3 if is_trained else error < 0.1
    assert 0.3 * error < la.sigma_noise < 3 * error and la.accuracy.is_reached
