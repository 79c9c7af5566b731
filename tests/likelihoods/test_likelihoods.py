"""Derivatives, moments and checks of every likelihood, against the density itself."""

import pytest
import torch
from tiny import LOG_PROBS, draw, likelihood_of
from torch.nn.functional import gaussian_nll_loss, one_hot
from torch.testing import assert_close

from torch_lla_em import (
    Bernoulli,
    BradleyTerry,
    Classification,
    HeteroscedasticRegression,
    Likelihood,
    Poisson,
    Regression,
)

NAMES = list(LOG_PROBS)


def example(name):
    f = draw(5, 3)
    y = torch.tensor([0, 2, 1, 1, 0]) if name == "classification" else (f > 0).double()
    return likelihood_of(name), f, y


@pytest.mark.parametrize("name", NAMES)
def test_derivatives_equal_those_of_the_density(name):
    likelihood, f, y = example(name)
    gradient = torch.stack([-torch.func.grad(LOG_PROBS[name])(a, b) for a, b in zip(f, y)])
    H = torch.stack([-torch.func.hessian(LOG_PROBS[name])(a, b) for a, b in zip(f, y)])
    assert_close(likelihood.gradient(f, y), gradient)
    basis = torch.eye(3).double()[:, None].expand(3, 5, 3)
    assert_close(likelihood.hessian_product(f, basis), H.movedim(1, 0))
    root = likelihood.hessian_sqrt_product(f, basis)  # the columns of S
    assert_close(torch.einsum("kni,knj->nij", root, root), H)
    samples = torch.stack([f, 2 * f])
    expected = torch.stack([LOG_PROBS[name](a, b) for s in samples for a, b in zip(s, y)])
    assert_close(likelihood.log_prob(samples, y), expected.view(2, 5))


def test_heteroscedastic_density_and_fisher_information():
    likelihood, f, y = HeteroscedasticRegression(), draw(5, 4), draw(5, 2, seed=1)
    mu, s = f.chunk(2, -1)
    loss = gaussian_nll_loss(mu, y, s.exp(), full=True, reduction="none").sum(1)
    assert_close(likelihood.log_prob(f, y), -loss)
    assert_close(likelihood.gradient(f, y), Likelihood.gradient(likelihood, f, y))
    # the Hessian is quadratic in y, so that three Gauss-Hermite nodes give its expectation
    basis, expected, f = torch.eye(4).double()[:, None], 0, f[:1]
    mu, s = f.chunk(2, -1)
    for node, weight in ((-(3**0.5), 1 / 6), (0, 2 / 3), (3**0.5, 1 / 6)):
        y = mu + node * (0.5 * s).exp()
        hessian = torch.func.hessian(lambda f, y=y: -likelihood.log_prob(f[None], y).sum())
        expected = expected + weight * hessian(f[0])
    assert_close(likelihood.hessian_product(f, basis)[:, 0], expected)
    root = likelihood.hessian_sqrt_product(f, basis)[:, 0]
    assert_close(root.T @ root, expected)


@pytest.mark.parametrize("classes", [2, 15, 16])
def test_probabilities_are_a_softmax_of_any_number_of_classes(classes):
    f = draw(4, 5, classes)
    powers = f.exp()
    assert_close(Classification().mean(f), powers / powers.sum(-1, keepdim=True))
    assert_close(Classification().log_mean(f), f - powers.sum(-1, keepdim=True).log())


@pytest.mark.parametrize("margin", [1.0, 20.0, 60.0, 400.0])
def test_certain_softmax_keeps_its_digits(margin):
    """Where p is near 1, H u, S ε and the gradient are as exact as their entries, in float32."""
    f, u = torch.randn(2, 50, 4, generator=torch.Generator().manual_seed(0))
    f[torch.arange(50), torch.arange(50) % 4] += margin
    y, likelihood, at = torch.arange(50) % 4, Classification(), torch.arange(50)
    p = f.double().softmax(-1)
    rest = p.scatter(-1, y[:, None], 0).sum(-1, keepdim=True)  # 1 - p without a difference
    v = (u - u.gather(-1, y[:, None])).double()
    tiny = 1e-37  # below it float32 underflows
    Hu = p * (v - (p * v).sum(-1, keepdim=True))
    assert_close(likelihood.hessian_product(f, u).double(), Hu, rtol=1e-4, atol=tiny)
    gradient = p.scatter(-1, y[:, None], -rest)
    assert_close(likelihood.gradient(f, y).double(), gradient, rtol=1e-4, atol=tiny)
    S = likelihood.hessian_sqrt_product(f[:, None], torch.eye(4).expand(50, 4, 4)).double()
    H = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    H[at, y, y] = (p.gather(-1, y[:, None]) * rest)[:, 0]
    assert_close(S.mT @ S, H, rtol=1e-3, atol=max(tiny, 1e-6 * rest.max().item()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["classification", "regression", "bernoulli", "poisson"])
def test_samples_have_the_stated_mean(name):
    likelihood, f, _ = example(name)
    y = likelihood.sample(f[:1].expand(40000, 3), torch.Generator().manual_seed(0))
    y = one_hot(y, 3).double() if name == "classification" else y.double()
    error = y.std(0) / len(y) ** 0.5
    assert ((y.mean(0) - likelihood.mean(f[0])).abs() < 5 * error).all()


def test_heteroscedastic_samples_have_mean_and_deviation():
    f = torch.tensor([0.5, -1.0, 2.0, 0.0]).double().expand(20000, 4)
    y = HeteroscedasticRegression().sample(f, torch.Generator().manual_seed(0))
    mu, sigma = f[0, :2], (0.5 * f[0, 2:]).exp()
    assert ((y.mean(0) - mu).abs() < 5 * sigma / 20000**0.5).all()
    assert ((y.std(0) - sigma).abs() < 5 * sigma / 40000**0.5).all()


@pytest.mark.parametrize(
    "method", ["log_prob", "hessian_sqrt_product", "mean", "variance", "sample", "smoothed_mean"]
)
def test_missing_methods_are_named(method):
    count = 2 if method in ("log_prob", "hessian_sqrt_product", "smoothed_mean") else 1
    with pytest.raises(NotImplementedError, match=f"Likelihood must define {method}"):
        getattr(Likelihood(), method)(*[torch.zeros(1, 1)] * count)


@pytest.mark.parametrize(
    "likelihood, f, y, message",
    [
        (Classification(), (2, 1), torch.zeros(2).long(), "bernoulli"),
        (Classification(), (2, 3), torch.tensor([0, 3]), "outside of 0 to 2"),
        (Classification(), (2, 3), torch.tensor([0, -1]), "outside of 0 to 2"),
        (Classification(), (2, 3), torch.zeros(2, 1).long(), r"integers of shape \(2,\)"),
        (BradleyTerry(), (2, 2), torch.tensor([0, 2]), "outside of 0 to 1"),
        (Regression(), (2, 1), torch.zeros(2), "reshape the targets"),
        (Regression(), (2, 1), torch.tensor([[0.0], [float("nan")]]), "NaN"),
        (Regression(torch.ones(2)), (2, 3), torch.zeros(2, 3), "2 values"),
        (Bernoulli(), (2, 1), torch.full((2, 1), 2.0), "0 or 1"),
        (Poisson(), (2, 1), torch.full((2, 1), 0.5), "counts"),
        (Poisson(), (2, 1), torch.full((2, 1), -1.0), "counts"),
        (HeteroscedasticRegression(), (3, 3), torch.zeros(3, 1), "twice as many outputs"),
        (HeteroscedasticRegression(), (3, 2), torch.zeros(3, 2), "twice as many outputs"),
        (HeteroscedasticRegression(), (3, 4), torch.zeros(3, 1), "twice as many outputs"),
        (HeteroscedasticRegression(), (1, 2), torch.tensor([[float("nan")]]), "finite"),
    ],
)
def test_unsuitable_targets_raise(likelihood, f, y, message):
    with pytest.raises(ValueError, match=message):
        likelihood.check(torch.zeros(f), y)


def test_targets_of_other_types_raise():
    for y in (torch.zeros(2), torch.zeros(2).bool()):
        with pytest.raises(TypeError, match="integers"):
            Classification().check(torch.zeros(2, 3), y)
    with pytest.raises(TypeError, match="real"):
        Regression().check(torch.zeros(2, 1), torch.zeros(2, 1, dtype=torch.complex64))


@pytest.mark.parametrize("sigma", [0.0, -1.0, float("inf"), [[1.0]]])
def test_noise_must_be_positive(sigma):
    with pytest.raises(ValueError, match="sigma_noise"):
        Regression(torch.tensor(sigma))
