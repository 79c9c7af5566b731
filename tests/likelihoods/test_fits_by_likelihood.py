"""Fits with predicted noise, preferences, one weight for all, and the prior of weight decay."""

import pytest
import torch
from models import gaussian_nll, trained
from tiny import draw, posterior_of, tiny
from torch import nn
from torch.testing import assert_close

from torch_lla_em import Adapter, BradleyTerry, Compute, LinearisedLaplace, Regression
from torch_lla_em.likelihoods import preferred, rewards
from torch_lla_em.prediction import functions_of

FIXED = {"em_steps": 0, "prior_precision": 20.0, "progress_bar": False}
EXACT = {"curvature": "network", "num_samples": 4, "prior": "isotropic"}
EXACT |= {"compute": Compute(tolerance=1e-9)}


def net(inputs, outputs, hidden=4):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()


def noisy(count, seed=0):
    x = draw(count, 1, seed=seed)
    return x, (2 * x).sin() + (0.1 + 0.5 * x.abs()) * draw(count, 1, seed=seed + 2)


@pytest.fixture(scope="module")
def heteroscedastic():
    """A network trained to predict mean and log variance, and its data."""

    x, y = noisy(40)
    return trained(net(1, 2, hidden=5), x, y, 300, loss=gaussian_nll), x, y


@pytest.mark.parametrize("curvature", ["network", "variational"])
def test_fits_with_predicted_noise(heteroscedastic, curvature):
    model, x, y = heteroscedastic
    la = posterior_of(model, "heteroscedastic", [(x, y)], num_samples=16, curvature=curvature)
    mean, variance = la(x)
    assert mean.shape == variance.shape == (40, 1) and mean.isfinite().all()
    if curvature != "variational":
        assert_close(mean, model(x)[:, :1])
    prediction = la.predict(x)
    assert_close(variance, prediction.aleatoric + prediction.epistemic)
    assert variance[x[:, 0].abs() > 1].mean() > 2 * variance[x[:, 0].abs() < 0.3].mean()
    assert torch.isfinite(la.predict(x).joint_log_prob(y))
    fresh = noisy(200, seed=7)
    before = la.predict(fresh[0]).log_prob(fresh[1]).sum()
    assert la.calibrate([fresh]).predict(fresh[0]).log_prob(fresh[1]).sum() >= before


def test_means_and_log_variances_may_be_channels():
    torch.manual_seed(0)
    model, x, y = nn.Conv2d(1, 4, 3, padding=1).double(), draw(6, 1, 4, 4), draw(6, 2, 4, 4, seed=1)
    options = {"curvature": "network", "num_samples": 3, "class_dim": 1}
    la = LinearisedLaplace(model, "heteroscedastic", **options).fit([(x, y)], **FIXED)
    mean, variance = la(x)
    assert mean.shape == variance.shape == (6, 2, 4, 4)
    assert_close(mean, model(x)[:, :2])
    assert torch.isfinite(la.predict(x).log_prob(y)).all()


@pytest.fixture(scope="module")
def preferences():
    """A reward model, candidates a and b, which is preferred, and the posterior."""
    model, a, b = net(3, 1), draw(30, 3), draw(30, 3, seed=1)
    y = (b.sum(1) > a.sum(1)).long()
    la = LinearisedLaplace(model, BradleyTerry(), **EXACT).fit([((a, b), y)], **FIXED)
    return model, a, b, y, la


def test_preferences_are_bernoulli_in_the_difference_of_rewards(preferences, tmp_path):
    model, a, b, y, la = preferences
    adapter = Adapter(outputs=lambda model, pair: model(pair[1]) - model(pair[0]))
    difference = EXACT | {"adapter": adapter}
    other = posterior_of(model, "bernoulli", [((a, b), y[:, None].double())], **difference, **FIXED)
    assert_close(la.w_lin, other.w_lin, rtol=1e-5, atol=1e-7)
    pair = la.predict((a, b))
    assert_close(pair.f_mean.diff(dim=1), model(b) - model(a))
    functions, _ = functions_of(pair)
    assert_close(la((a, b))[:, 1:], functions.diff(dim=-1).sigmoid().mean(0))
    # a single reward has a variance
    assert_close(la.predict(a).f_mean, model(a))
    assert la.predict(a).f_variance.shape == (30, 1)
    assert_close(la.functional_samples((a, b))[..., :1], la.functional_samples(a))
    # chosen and rejected are a pair, and there may be several candidates
    every = {"chosen": a, "rejected": b}, ((a, b), torch.zeros(30).long())
    how = model, "reward_modeling"
    assert_close(*(posterior_of(*how, [batch], **EXACT, **FIXED).w_lin for batch in every))
    assert torch.equal(preferred((a, torch.ones(2))), torch.ones(2))
    la = LinearisedLaplace(model, "reward_modeling", num_samples=4)
    la.fit([((a, b, a + b), y)], progress_bar=False).save(tmp_path / "posterior.pt")
    assert_close(la((a, b, a + b)).sum(1), torch.ones(30).double())
    loaded = LinearisedLaplace.load(tmp_path / "posterior.pt", model)
    assert_close(loaded((a, b)), la((a, b)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_directions_without_data_keep_their_size(dtype, preferences):
    """The last bias moves all rewards alike: up to rounding it has no feature."""
    a, b, y = (part.to(dtype) if part.is_floating_point() else part for part in preferences[1:4])
    la = posterior_of(net(3, 1).to(dtype), "reward_modeling", [(a, b, y)], num_samples=8)
    assert la._linear_model.layout.unflatten(la.scale)["2.bias"] == 0
    spread = la.predict(a).f_variance.sqrt().mean()
    assert spread < 100 * la.predict((a, b)).f_variance.sqrt().mean()


def test_rewards_are_single_numbers(preferences):
    _, a, b, y, la = preferences
    single = LinearisedLaplace(net(3, 1), "reward_modeling")
    for words, call in (
        ("several candidates", lambda: la(a)),
        ("one number per example", lambda: rewards(net(3, 2), (a, b))),
        ("tuple of candidates", lambda: single.fit([(a, y)], **FIXED)),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    assert rewards(lambda x: x[:, 0], (a, b)).shape == (30, 2)


def test_one_weight_for_all_is_a_scale_at_another_precision():
    """(w G + Λ)⁻¹ = (G + Λ / w)⁻¹ / w."""
    case, w = tiny("classification"), 4.0
    given = case.model, "classification", case.x, case.y
    cold = posterior_of(*given, at=20.0, weights=w, **EXACT)
    plain = posterior_of(*given, at=5.0, **EXACT)
    assert_close(cold.w_samples, w**-0.5 * plain.w_samples, rtol=1e-5, atol=1e-8)
    assert_close(cold.w_lin, plain.w_lin, rtol=1e-5, atol=1e-7)
    assert_close(cold.effective_dim, plain.effective_dim)
    p = cold.predict(case.x)  # whose likelihood is as it is
    assert_close(p.probs, functions_of(p)[0].softmax(-1).mean(0))


@pytest.mark.parametrize("kind", ["cross-entropy", "mse", "bce"])
def test_weight_decay_is_a_prior_precision(kind):
    """Training a linear model with weight decay ends at the mode under that precision."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2, bias=False).double(), draw(25, 3)
    n, C, wd, sigma = 25, 2, 0.02, 0.7
    real = draw(25, 2, seed=1)
    real -= real.mean(0)  # which a fit does too
    y, loss, likelihood, precision = {  # the formulas of docs/method.md
        "cross-entropy": ((x[:, 0] > 0).long(), nn.CrossEntropyLoss(), "classification", n * wd),
        "mse": (real, nn.MSELoss(), Regression(sigma), n * C * wd / (2 * sigma**2)),
        "bce": ((x[:, :2] > 0).double(), nn.BCEWithLogitsLoss(), "bernoulli", n * C * wd),
    }[kind]
    optimiser = torch.optim.SGD(model.parameters(), 0.5, weight_decay=wd)
    for _ in range(1000):
        optimiser.zero_grad()
        loss(model(x), y).backward()
        optimiser.step()
    la = LinearisedLaplace(model, likelihood, **{**EXACT, "compute": Compute(tolerance=1e-7)})
    la.fit([(x, y)], em_steps=0, prior_precision=precision, progress_bar=False)
    assert_close(la.w_lin, model.weight.detach().flatten(), rtol=1e-4, atol=1e-6)


def test_p_values_of_padded_sequences_are_right():
    """Padded positions have no label, and are the same in validation set and inputs."""

    def sequences(n, seed):
        x, length = draw(n, 6, 3, seed=seed), 2 + torch.arange(n) % 5
        y = (x[..., 0] > 0).long() + (x[..., 1] > 1).long()
        is_padded = torch.arange(6) >= length[:, None]
        x[is_padded], y[is_padded] = 0, -100
        return x, y

    la = LinearisedLaplace(net(3, 3), "classification", num_samples=4)
    la.fit(*sequences(40, 0), **FIXED).calibrate(*sequences(300, 1))
    p = la.predict(sequences(600, 2)[0]).p_value
    error = (0.2 * 0.8 * (1 / 150 + 1 / 600)) ** 0.5
    assert p.shape == (600,) and abs((p <= 0.2).double().mean() - 0.2) < 3 * error
