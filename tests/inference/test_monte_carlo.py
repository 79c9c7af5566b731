"""What is truly random, once: two thousand samples against the dense posterior."""

import pytest
from tiny import fitted

COUNT = 2000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["classification", "regression", "bernoulli", "poisson"])
@pytest.mark.parametrize("g_prior", [False, True])
def test_functions_have_the_dense_covariance(name, g_prior):
    options = {"num_samples": COUNT, "tolerance": 1e-8, "curvature": "network", "em_steps": 0}
    case, la = fitted(name, g_prior=g_prior, prior_precision=30.0 if g_prior else 2.0, **options)
    exact = case.exact(la.scale)
    covariance = exact.covariance(la.prior_precision)
    J = exact.J[:4].flatten(0, 1)  # four inputs, jointly
    expected = J @ covariance @ J.T
    deviations = la.predict(case.x[:4]).deviations.flatten(1)
    products = deviations[:, :, None] * deviations[:, None, :]
    error = products.std(0) / COUNT**0.5
    assert ((products.mean(0) - expected).abs() < 5.5 * error).all()
    gamma = exact.effective_dims(la.prior_precision).sum()
    assert (la.effective_dim - gamma).abs() < 5 * la.effective_dim_error
