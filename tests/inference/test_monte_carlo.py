"""What is truly random, once: two thousand samples against the dense posterior."""

import pytest
import torch
from dense import dense_fixed_point, dense_step
from tiny import fitted

from torch_lla_em import LinearisedLaplace

pytestmark = pytest.mark.slow
COUNT = 2000


def fit(name, **options):
    options = {"num_samples": COUNT, "tolerance": 1e-8, "curvature": "network", **options}
    return fitted(name, **options)


@pytest.mark.parametrize("name", ["classification", "regression", "bernoulli", "poisson"])
@pytest.mark.parametrize("g_prior", [False, True])
def test_functions_have_the_dense_covariance(name, g_prior):
    case, la = fit(name, g_prior=g_prior, em_steps=0, prior_precision=30.0 if g_prior else 2.0)
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


def bounds(la, exact, precision, sigma, layout):
    """How far log λ and log σ may end from the fixed point x = F(x): |(I − F')⁻¹| e.

    e is what a step may be off by: five standard errors of γ in γ / |w|² and in
    residual / (outputs − γ), and the move of λ below which EM stops.
    """
    x = torch.stack([precision.log()] + ([] if sigma is None else [sigma.log()]))

    def step(x):
        given = x[1].exp() if len(x) > 1 else None
        new, new_sigma, _, _ = dense_step(exact, x[0].exp(), given, layout, False)
        return torch.stack([new.log()] + ([new_sigma.log()] if len(x) > 1 else []))

    moves = 1e-4 * torch.eye(len(x)).double()
    slopes = torch.stack([(step(x + move) - step(x - move)) / 2e-4 for move in moves], 1)
    gamma, error = la.effective_dim, 5 * la.effective_dim_error
    stop = (COUNT * gamma).rsqrt().clamp_min(0.01)
    off = torch.stack([error / gamma, error / (exact.f.numel() - gamma) / 2])[: len(x)] + stop
    return torch.linalg.inv(torch.eye(len(x)).double() - slopes).abs() @ off


@pytest.mark.parametrize("name", ["classification", "regression", "bernoulli"])
@pytest.mark.parametrize("g_prior", [False, True])
def test_em_finds_the_dense_fixed_point(name, g_prior):
    case, la = fit(name, g_prior=g_prior, tolerance=1e-4, em_steps=60)
    exact, layout = case.exact(la.scale), case.layout
    start = torch.tensor(2.0).double(), la.sigma_noise
    precision, sigma, _ = dense_fixed_point(exact, *start, layout, False)
    allowed = bounds(la, exact, precision, sigma, layout)
    assert (la.prior_precision / precision).log().abs() < allowed[0]
    if sigma is not None:
        assert (la.sigma_noise / sigma).log().abs() < allowed[1]


def test_noise_per_output_is_learnt():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
    ).double()
    x = torch.linspace(-2, 2, 400).double()[:, None]
    sigma = torch.tensor([0.1, 0.5]).double()
    y = model(x).detach() + sigma * torch.randn(400, 2).double()
    la = LinearisedLaplace(model, "regression", sigma_noise=torch.ones(2), num_samples=64)
    la.fit([(x, y)], progress_bar=False)
    residual = (y - la.predict(x, mean="linear").mean).square().mean(0).sqrt()
    # σ² = |residual|² / (N − γ of this output), up to the step at which EM stops
    ratio = (la.sigma_noise / residual).square()
    most = 400 / (400 - la.effective_dim - 5 * la.effective_dim_error)
    assert (ratio > 0.98).all() and (ratio < 1.02 * most).all()
    assert ((la.sigma_noise / sigma).log().abs() < 0.02 + 5 / 800**0.5).all()


@pytest.mark.parametrize(
    "name", ["classification", "regression", "bernoulli", "poisson", "binomial"]
)
@pytest.mark.parametrize("prior", ["scalar", "layerwise"])
def test_evidence_is_the_dense_one(name, prior):
    case, la = fit(name, prior=prior, em_steps=0, prior_precision=40.0, num_samples=500)
    value, error = la.log_marginal_likelihood()
    assert (value - case.exact(la.scale).log_evidence(la.prior_precision.mean())).abs() < 5 * error
