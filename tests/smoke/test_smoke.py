"""Whole fits of tiny networks in seconds: run them first after a change."""

import pytest
import torch
from tiny import tiny
from torch import nn

from torch_lla_em import LinearisedLaplace


@pytest.mark.parametrize(
    "name, prior",
    [
        ("classification", "scalar"),
        ("classification", "layerwise"),
        ("regression", "scalar"),
        ("regression", "layerwise"),
        ("bernoulli", "scalar"),
        ("poisson", "scalar"),
    ],
)
def test_a_fit_is_the_dense_posterior(name, prior):
    case = tiny(name)
    options = {"prior": prior, "num_samples": 64, "tolerance": 1e-5, "curvature": "network"}
    la = LinearisedLaplace(case.model, name, **options)
    la.fit([(case.x[:17], case.y[:17]), (case.x[17:], case.y[17:])], progress_bar=False)
    precision, layout = la.prior_precision, la._linear_model.layout
    if precision.dim():
        precision = layout.expand(precision)
    exact = case.exact(la.scale)
    if name == "regression":
        sigma = la.sigma_noise
        exact = exact.at_noise(
            lambda f, y: (-0.5 * ((y - f) / sigma) ** 2 - sigma.log() - 0.9189385332046727).sum()
        )
    torch.testing.assert_close(
        la.w_lin, exact.mode(precision, start=la.w_lin), rtol=1e-3, atol=1e-4
    )
    gamma, error = la.effective_dim.sum(), la.effective_dim_error.square().sum().sqrt()
    assert (gamma - exact.effective_dims(precision).sum()).abs() < 5 * error + 1e-3
    fixed_point = gamma / (precision * (la.w_lin / la.scale).square()).sum()
    assert 0.7 < fixed_point < 1.4


def test_predictions_and_files(tmp_path):
    torch.manual_seed(0)
    x, y = torch.randn(60, 2), torch.randint(3, (60,))
    model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
    la = LinearisedLaplace(model, "classification", num_samples=8)
    la.fit([(x, y)], progress_bar=False, checkpoint=tmp_path / "folder")
    probs = la(x)
    assert probs.shape == (60, 3) and torch.allclose(probs.sum(1), torch.ones(60))
    la.save(tmp_path / "posterior.pt")
    loaded = LinearisedLaplace.load(tmp_path / "posterior.pt", model)
    assert torch.equal(loaded(x), probs)
    again = LinearisedLaplace(model, "classification", num_samples=8)
    again.fit([(x, y)], progress_bar=False, checkpoint=tmp_path / "folder")
    assert torch.equal(again.w_samples, la.w_samples)
    before = la.predict(x).log_prob(y).mean()
    assert la.calibrate([(x, y)]).predict(x).log_prob(y).mean() >= before - 0.05
