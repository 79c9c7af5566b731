"""Linear measurements of an image: the likelihood and its posterior against dense matrices."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from dense import ExactLaplace
from measurements import LinearOperatorRegression
from tiny import basis_noise, draw, problem_of
from torch import nn
from torch.testing import assert_close

from torch_lla_em import (
    BlockCG,
    BlockKrylov,
    FunctionSpace,
    LinearisedLaplace,
)
from torch_lla_em.inference.linear_mode import optimise_MAP
from torch_lla_em.inference.posterior_samples import optimise_samples
from torch_lla_em.solvers.newton import Newton

SIDE, MEASURED, SIGMA = 12, 40, 0.3
SHAPE = 1, SIDE, SIDE


def measured_by(A, sigma=SIGMA):
    return LinearOperatorRegression(lambda f: f.flatten(1) @ A.T, SHAPE, sigma)


@pytest.fixture
def matrix():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(MEASURED, SIDE**2, generator=generator, dtype=torch.float64) / SIDE


@pytest.fixture
def likelihood(matrix):
    return measured_by(matrix)


@pytest.fixture
def setting(matrix):
    """A network from image to image, one image, and its measurements."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 1, 3, padding=1))
    model, x = model.double(), torch.randn(1, *SHAPE, dtype=torch.float64)
    with torch.no_grad():
        y = model(x).flatten(1) @ matrix.T
    return model, x, y + SIGMA * torch.randn(1, MEASURED).double()


def dense_log_prob(A, sigma):
    def log_prob(f, y):
        return torch.distributions.Normal(A @ f, sigma, validate_args=False).log_prob(y).sum()

    return log_prob


@pytest.mark.parametrize("solver", [BlockCG(1e-10), BlockKrylov(1e-10), FunctionSpace(1e-10)])
@pytest.mark.parametrize("g_prior", [False, True])
def test_posterior_is_the_dense_one(setting, likelihood, matrix, solver, g_prior):
    model, x, y = setting
    problem = problem_of(model, likelihood, [(x, y)])
    noise = basis_noise(problem, g_prior, layerwise=False)
    log_prob = dense_log_prob(matrix, SIGMA)
    exact = ExactLaplace.of(model, x, y, log_prob, list(problem.linear_model.layout.names))
    exact = replace(exact, scale=noise.prior.scale)
    precision = torch.tensor(2.5).double()
    samples = optimise_samples(problem, noise, precision, solver)
    assert_close(samples.w.T @ samples.w / len(samples.w), exact.covariance(precision))
    mode = optimise_MAP(problem, noise.prior, precision, Newton(1e-10), problem.zeros(1)[0])
    assert_close(mode.w, exact.mode(precision))


def test_fit_learns_noise_and_predicts_image_and_measurements(setting, matrix):
    model, x, y = setting
    likelihood = measured_by(matrix, 1.0)
    la = LinearisedLaplace(model, likelihood, g_prior=False, num_samples=400, tolerance=1e-8)
    la.fit([(x, y)], progress_bar=False)
    names = [name for name, _ in model.named_parameters()]
    exact = ExactLaplace.of(model, x, y, dense_log_prob(matrix, la.sigma_noise), names)
    covariance = exact.covariance(la.prior_precision)
    gamma = exact.effective_dims(la.prior_precision).sum()
    w_lin = exact.mode(la.prior_precision)
    residual = (y[0] - matrix @ exact.J[0] @ w_lin).square().sum()
    assert_close(la.w_lin, w_lin, rtol=1e-5, atol=1e-6)
    # fixed points of EM, up to the error of γ over samples and the step at which EM stops
    error, stop = 5 * la.effective_dim_error, (400 * gamma).rsqrt().clamp_min(0.01)
    found, fixed = la.sigma_noise**2, residual / (MEASURED - gamma)
    assert (found / fixed).log().abs() < error / (MEASURED - gamma) + 2 * stop
    found, fixed = la.prior_precision, gamma / w_lin.square().sum()
    assert (found / fixed).log().abs() < error / gamma + stop
    prediction = la.predict(x)
    J = exact.J[0]
    image = (J @ covariance * J).sum(1).view(SHAPE)
    assert prediction.mean.shape == prediction.variance.shape == (1, *SHAPE)
    assert_close(prediction.mean, (J @ w_lin).view(1, *SHAPE), rtol=1e-5, atol=1e-6)
    spread = (2 / 400) ** 0.5 * image.max()
    assert (prediction.variance[0] - image).abs().max() < 5 * spread
    mean, variance = la(x)
    measured = torch.einsum("mp,pq,mq->m", matrix @ J, covariance, matrix @ J)
    assert mean.shape == variance.shape == (1, MEASURED)
    assert_close(mean[0], matrix @ prediction.mean.flatten())
    expected = measured + la.sigma_noise**2
    assert ((variance[0] - expected).abs() < 5 * (2 / 400) ** 0.5 * measured.max()).all()


def test_log_probabilities_are_those_of_measurements(setting, matrix):
    model, x, y = setting
    la = LinearisedLaplace(model, measured_by(matrix), num_samples=5)
    la.fit([(x, y)], em_steps=0, prior_precision=3.0, progress_bar=False)
    prediction = la.predict(x)
    mean, variance = prediction.expectation, prediction.predictive_variance
    marginal = torch.distributions.Normal(mean, variance.sqrt()).log_prob(y).sum(1)
    assert_close(prediction.log_prob(y), marginal)
    deviations = (prediction.samples - prediction.mean).flatten(1) @ matrix.T
    covariance = deviations.T @ deviations / 5 + SIGMA**2 * torch.eye(MEASURED)
    joint = torch.distributions.MultivariateNormal(mean[0], covariance).log_prob(y[0])
    assert_close(prediction.joint_log_prob(y), joint)


def test_a_posterior_is_saved_and_loaded_with_its_operator(setting, likelihood, tmp_path):
    model, x, y = setting
    la = LinearisedLaplace(model, likelihood, num_samples=3).fit([(x, y)], progress_bar=False)
    la.save(tmp_path / "la.pt")
    again = LinearisedLaplace.load(tmp_path / "la.pt", model, likelihood=likelihood)
    assert_close(again.predict(x).log_prob(y), la.predict(x).log_prob(y))


class OutsideOfTorch(torch.autograd.Function):
    """A map of NumPy arrays whose adjoint is known."""

    A = np.arange(6.0).reshape(2, 3)

    @staticmethod
    def forward(f):
        return torch.from_numpy(f.numpy() @ OutsideOfTorch.A.T)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, v):
        return torch.from_numpy(v.numpy() @ OutsideOfTorch.A)


def test_operators_outside_of_torch_have_a_backward():
    f, u, y = draw(5, 3), draw(4, 5, 3, seed=1), draw(5, 2, seed=2)
    own = LinearOperatorRegression(OutsideOfTorch.apply, (3,), SIGMA)
    A = torch.from_numpy(OutsideOfTorch.A)
    own.check(f, y)
    assert_close(own.gradient(f, y), (f @ A.T - y) @ A / SIGMA**2)
    assert_close(own.hessian_product(f, u), u @ A.T @ A / SIGMA**2)


def test_samples_of_measurements_have_the_noise(likelihood):
    f = torch.zeros(500, *SHAPE).double()
    y = likelihood.sample(f, torch.Generator().manual_seed(0))
    assert y.shape == (500, MEASURED) and abs(y.std() - SIGMA) < 5 * SIGMA / (2 * y.numel()) ** 0.5


def test_unsuitable_operators_and_measurements_raise(likelihood, matrix):
    f, y = torch.zeros(2, *SHAPE).double(), torch.zeros(2, MEASURED).double()
    likelihood.check(f, y)
    with pytest.raises(ValueError, match="The operator takes outputs of shape"):
        likelihood.check(f[:, 0], y)
    with pytest.raises(ValueError, match="flatten what belongs to one output"):
        likelihood.check(f, y[:, :, None])
    with pytest.raises(ValueError, match="complex, NaN or infinite"):
        likelihood.check(f, y / 0)
    with pytest.raises(ValueError, match="one number for all measurements"):
        measured_by(matrix, torch.ones(3))
    tall = torch.randn(200, SIDE**2).double()
    with pytest.raises(ValueError, match="let forward_fn return A f"):
        measured_by(tall).check(f, torch.zeros(2, 200).double())
    right = likelihood.operator
    for wrong in (lambda f: right(f) + 1, lambda f: right(f).abs(), lambda f: right(f.detach())):
        with pytest.raises(ValueError, match="not linear, or not differentiable"):
            LinearOperatorRegression(wrong, SHAPE).check(f, y)
    with pytest.raises(ValueError, match=r"must return \(n, M\)"):
        LinearOperatorRegression(lambda f: right(f).unflatten(1, (4, -1)), SHAPE).check(f, y)
