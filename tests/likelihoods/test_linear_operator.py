"""Linear measurements of an image, a recipe: the likelihood and its posterior against dense matrices."""

import runpy
from pathlib import Path

import torch
from dense import ExactLaplace
from tiny import draw, posterior_of
from torch import nn
from torch.distributions import MultivariateNormal, Normal
from torch.testing import assert_close

from torch_lla_em import LinearisedLaplace

RECIPE = Path(__file__).parents[2] / "examples" / "recipes" / "linear_measurements.py"
LinearOperatorRegression = runpy.run_path(str(RECIPE))["LinearOperatorRegression"]
SIDE, MEASURED, SIGMA = 12, 40, 0.3
SHAPE = 1, SIDE, SIDE
A = draw(MEASURED, SIDE**2) / SIDE


def test_a_fit_learns_noise_and_predicts_image_and_measurements(tmp_path):
    """Of a network from image to image, one image, and its measurements."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 1, 3, padding=1))
    model, x = model.double(), draw(1, *SHAPE, seed=1)
    y = model(x).detach().flatten(1) @ A.T + SIGMA * draw(1, MEASURED, seed=2)
    likelihood = LinearOperatorRegression(lambda f: f.flatten(1) @ A.T, SHAPE, 1.0)
    options = {"prior": "isotropic", "num_samples": 400, "tolerance": 1e-8}
    la = posterior_of(model, likelihood, [(x, y)], **options)

    def log_prob(f, y):
        return Normal(A @ f, la.sigma_noise, validate_args=False).log_prob(y).sum()

    exact = ExactLaplace.of(model, x, y, log_prob, [name for name, _ in model.named_parameters()])
    J, covariance = exact.J[0], exact.covariance(la.prior_precision)
    gamma, w_lin = exact.effective_dims(la.prior_precision).sum(), exact.mode(la.prior_precision)
    residual = (y[0] - A @ J @ w_lin).square().sum()
    assert_close(la.w_lin, w_lin, rtol=1e-5, atol=1e-6)
    # fixed points of EM, up to the error of γ over samples and the step at which EM stops
    error, stop = 5 * la.effective_dim_error, (400 * gamma).rsqrt().clamp_min(0.01)
    found, fixed = la.sigma_noise**2, residual / (MEASURED - gamma)
    assert (found / fixed).log().abs() < error / (MEASURED - gamma) + 2 * stop
    found, fixed = la.prior_precision, gamma / w_lin.square().sum()
    assert (found / fixed).log().abs() < error / gamma + stop
    p, spread = la.predict(x), 5 * (2 / 400) ** 0.5
    image = (J @ covariance * J).sum(1).view(SHAPE)
    assert_close(p.f_mean, (J @ w_lin).view(1, *SHAPE), rtol=1e-5, atol=1e-6)
    assert (p.f_variance[0] - image).abs().max() < spread * image.max()
    mean, variance = la(x)
    measured = torch.einsum("mp,pq,mq->m", A @ J, covariance, A @ J)
    assert_close(mean[0], A @ p.f_mean.flatten())
    assert (variance[0] - measured - la.sigma_noise**2).abs().max() < spread * measured.max()
    # log probabilities are of measurements
    marginal = Normal(mean, variance.sqrt()).log_prob(y).sum(1)
    assert_close(p.log_prob(y), marginal)
    apart = (p.samples - p.f_mean).flatten(1) @ A.T
    covariance = apart.T @ apart / 400 + la.sigma_noise**2 * torch.eye(MEASURED)
    assert_close(p.joint_log_prob(y), MultivariateNormal(mean[0], covariance).log_prob(y[0]))
    la.save(tmp_path / "la.pt")
    again = LinearisedLaplace.load(tmp_path / "la.pt", model, likelihood=likelihood)
    assert_close(again.predict(x).log_prob(y), p.log_prob(y))
