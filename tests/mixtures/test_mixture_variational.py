"""The variational Gaussian mixture: its ELBO in closed form, its posterior, its errors."""

import math

import pytest
import torch
from clusters import draw
from torch.distributions import Dirichlet, MultivariateNormal, StudentT, Wishart

from torch_lla_em.mixtures import ConjugatePrior, Posterior, VariationalGaussianMixture
from torch_lla_em.mixtures.blocks import STRUCTURES, Blocks

torch.set_num_threads(1)


def student(x, dof, mean, shape):
    """log t(x | dof, mean, shape), for x (D,)."""
    dim = len(x)
    root = torch.linalg.cholesky(shape)
    z = torch.linalg.solve_triangular(root, (x - mean)[:, None], upper=False)
    half = torch.tensor([(dof + dim) / 2, dof / 2], dtype=torch.float64).lgamma()
    return (
        half[0]
        - half[1]
        - dim / 2 * math.log(dof * math.pi)
        - root.diagonal().log().sum()
        - (dof + dim) / 2 * torch.log1p(z.square().sum() / dof)
    )


def log_marginal_likelihood(x, structure, mean, strength, dof, scale):
    """One row after another, each predicted from those before: log ∏ p(x_n | x_1 … x_{n−1})."""
    dim, total = x.shape[1], torch.zeros((), dtype=torch.float64)
    for row in x:
        grown, deviation = strength + 1, row - mean
        if structure in ("full", "tied"):
            degrees = dof - dim + 1
            total += student(row, degrees, mean, scale * grown / (strength * degrees))
            dof = dof + 1
        elif structure == "diagonal":
            width = (scale.diagonal() * grown / (strength * dof)).sqrt()
            total += StudentT(dof, mean, width).log_prob(row).sum()
            dof = dof + 1
        else:
            identity = torch.eye(dim, dtype=torch.float64)
            width = scale.diagonal().mean() * grown / (strength * dof)
            total += student(row, dof, mean, width * identity)
            dof = dof + dim
        step = strength / grown * torch.outer(deviation, deviation)
        # A spherical scale holds the sum over columns: its mean diagonal grows D-fold.
        scale = scale + (step * dim if structure == "spherical" else step)
        mean, strength = mean + deviation / grown, grown
    return total


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_bound_of_one_component_is_the_log_marginal_likelihood(structure):
    """With K = 1 nothing is hidden, so q is the posterior and the ELBO is tight."""
    x = draw(n=40)
    mean = torch.tensor([6.0, 7.0, 8.0], dtype=torch.float64)
    scale = torch.diag(torch.tensor([0.5, 3.0, 90.0], dtype=torch.float64))
    prior = ConjugatePrior(1.0, mean, 0.5, 6.0, scale)
    mixture = VariationalGaussianMixture(1, covariance=structure, prior=prior).fit(x)
    expected = log_marginal_likelihood(x, structure, mean, 0.5, 6.0, scale)
    assert mixture.history[-1].lower_bound == pytest.approx(float(expected), rel=1e-9)
    assert mixture.history[-1].objective == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_divergence_is_zero_only_at_the_prior(structure):
    blocks = Blocks(structure, 3, 2)
    prior = standard(ConjugatePrior(), blocks)
    assert prior.divergence(prior, blocks) == 0
    posterior = prior.updated(blocks.moments(data_sums(blocks)), blocks)
    assert posterior.divergence(prior, blocks) > 0
    assert prior.divergence(posterior, blocks) > 0


def standard(prior, blocks):
    """The prior of the components for columns of mean 0 and variance 1."""
    return prior.of_components(blocks, 0.5, torch.zeros(2).double(), torch.ones(2).double())


def data_sums(blocks):
    x = draw(n=30, dim=2).T - 7
    r = torch.eye(3, dtype=torch.float64)[torch.arange(30) % 5 % 3].T
    return r.sum(1), r @ x.T, blocks.second_moments(r, x)


@pytest.mark.slow
@pytest.mark.parametrize("structure", STRUCTURES)
def test_expectations_and_divergence_against_draws(structure):
    """E log π, E log|Λ|, E Λ and KL(q ‖ p) against draws from q, at five standard errors."""
    blocks = Blocks(structure, 3, 2)
    prior = standard(ConjugatePrior(1.5, strength=0.7, dof=5.0), blocks)
    q = prior.updated(blocks.moments(data_sums(blocks)), blocks)
    torch.manual_seed(0)
    weights = Dirichlet(q.concentration).sample((20_000,))
    precision = draw_wishart(q, 20_000)
    spread = precision.expand(20_000, 3, 2 // blocks.size, *precision.shape[3:])
    full = torch.stack([torch.block_diag(*b) for b in spread[:50].flatten(0, 1)])
    full = full.unflatten(0, (50, 3))
    means = normal(q, full).sample()
    close = [
        (weights.log(), q.expected_log_weights()),
        (precision.logdet(), q.expected_log_dets(blocks)),
        (precision, q.expected_precision()),
    ]
    for draws, expected in close:
        error = (draws.mean(0) - expected).abs()
        assert (error < 5 * draws.std(0) / math.sqrt(len(draws)) + 1e-12).all()
    ratio = (
        Dirichlet(q.concentration).log_prob(weights[:50])
        - Dirichlet(prior.concentration).log_prob(weights[:50])
        + (wishart(q).log_prob(precision) - wishart(prior).log_prob(precision))[:50].sum((1, 2))
        + (normal(q, full).log_prob(means) - normal(prior, full).log_prob(means)).sum(1)
    )
    error = (ratio.mean() - q.divergence(prior, blocks)).abs()
    assert error < 5 * ratio.std() / math.sqrt(len(ratio))


def wishart(q):
    return Wishart(q.dof[:, None].expand(q.scale.shape[:2]), precision_matrix=q.scale.contiguous())


def draw_wishart(q, num_draws):
    """A Wishart matrix with whole degrees of freedom is a sum of so many outer products."""
    root = torch.linalg.cholesky(q.scale.inverse())
    dof = q.dof[:, None].expand(q.scale.shape[:2])
    noise = torch.randn(num_draws, *dof.shape, int(dof.max()), root.shape[-1]).double()
    kept = torch.arange(int(dof.max())) < dof[..., None]
    vectors = (noise * kept[..., None]) @ root.mT
    return vectors.mT @ vectors


def normal(q, precision):
    return MultivariateNormal(q.means, precision_matrix=q.strength[:, None, None] * precision)


def test_superfluous_components_shrink():
    x = draw(n=600, dim=2, num_components=2)
    mixture = VariationalGaussianMixture(8, max_steps=2000, tolerance=1e-6).fit(x)
    torch.testing.assert_close(mixture.parameters.concentration.sum().item(), 600.0 + 8 * (1 / 8))
    weights = mixture.parameters.expected().weights
    assert (weights > 0.02).sum() <= 5
    assert torch.isfinite(mixture.log_prob(x)).all()


def test_the_expected_mixture_approaches_the_density_with_many_examples():
    x = draw(n=4000)
    mixture = VariationalGaussianMixture(2, max_steps=500).fit(x)
    weights, means, covariances = mixture.parameters.expected()
    plain = MultivariateNormal(means, covariances).log_prob(x[:, None]) + weights.log()
    assert (mixture.log_prob(x) <= plain.logsumexp(1)).all()
    torch.testing.assert_close(mixture.log_prob(x), plain.logsumexp(1), atol=0.02, rtol=0)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_fit_continues_from_a_posterior(structure):
    x = draw()
    options = {"covariance": structure, "max_steps": 500}
    mixture = VariationalGaussianMixture(3, **options).fit(x)
    again = VariationalGaussianMixture(3, **options).use(mixture.parameters)
    torch.testing.assert_close(again.log_prob(x), mixture.log_prob(x))
    steps = VariationalGaussianMixture(3, **options).steps(x, start=mixture.parameters)
    bound = next(steps).lower_bound
    assert 0 <= bound - mixture.history[-1].lower_bound <= 1e-4 * len(x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"concentration": torch.tensor([1.0, 0.0])}, "and the strength must be above 0"),
        ({"strength": torch.tensor([1.0, -1.0])}, "must be above 0"),
        ({"dof": torch.tensor([4.0, 1.0])}, "dof must be above 1"),
        ({"dof": torch.tensor([4.0])}, r"dof have shape \(1,\), not \(2,\)"),
        ({"scale": -torch.eye(2).expand(2, 2, 2)}, "scale must be positive definite"),
    ],
)
def test_a_start_is_checked(change, message):
    ones, scale = torch.ones(2), torch.eye(2).expand(2, 2, 2)
    start = Posterior(ones, torch.zeros(2, 2), ones, 4 * ones, scale)
    with pytest.raises(ValueError, match=message):
        VariationalGaussianMixture(2).fit(draw(dim=2), start=start._replace(**change))


def test_options_are_checked():
    with pytest.raises(ValueError, match="covariance='round' is not known"):
        VariationalGaussianMixture(2, covariance="round")
    with pytest.raises(ValueError, match="weight_concentration must be above 0, not 0"):
        VariationalGaussianMixture(2, prior=ConjugatePrior(0.0))
