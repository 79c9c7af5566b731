"""Whole fits of tiny networks in seconds: run them first after a change."""

import pytest
import torch
from dense import gaussian_log_prob
from tiny import fitted


@pytest.mark.parametrize("prior", ["scalar", "layerwise"])
@pytest.mark.parametrize("name", ["classification", "regression"])
def test_a_fit_is_the_dense_posterior(name, prior):
    options = {"prior": prior, "num_samples": 64, "tolerance": 1e-5, "curvature": "network"}
    case, la = fitted(name, **options)
    precision, layout, gamma = la.prior_precision, la._linear_model.layout, la.effective_dim
    total = layout.block_sums if precision.dim() else torch.sum
    # the last step of log λ is below the Monte Carlo error of γ
    step = gamma / (precision * total((la.w_lin / la.scale).square()))
    assert (step.log().abs() <= (64 * gamma).rsqrt() + 0.01).all()
    exact = case.exact(la.scale)
    if name == "regression":
        exact = exact.at_noise(gaussian_log_prob(la.sigma_noise))
        residual = (exact.y - exact.J @ la.w_lin).square().sum()
        variance = residual / (exact.y.numel() - gamma.sum())
        assert variance.item() == pytest.approx(la.sigma_noise.item() ** 2, rel=0.02)
    precision = layout.expand(precision) if precision.dim() else precision
    mode = exact.mode(precision, start=la.w_lin)
    torch.testing.assert_close(la.w_lin, mode, rtol=1e-3, atol=1e-4)
    error = la.effective_dim_error.square().sum().sqrt()
    assert (gamma.sum() - exact.effective_dims(precision).sum()).abs() < 5 * error + 1e-3
