"""The variational Gaussian mixture: its ELBO in closed form, its posterior, its errors."""

import pytest
import torch
from clusters import draw
from torch.distributions import MultivariateNormal

from torch_lla_em.mixtures import ConjugatePrior, NormalWishart, VariationalGaussianMixture

STRUCTURES = "full", "diagonal"


def test_the_bound_of_diagonal_covariances_is_the_sum_over_columns():
    """With one component the columns are independent; scikit-learn's bound is right for one column."""
    x = draw(n=40)
    scale = torch.tensor([0.5, 3.0, 90.0], dtype=torch.float64)

    def bound(x, scale):
        prior = ConjugatePrior(1.0, x.mean(0) + 1, 0.5, 6.0, scale)
        mixture = VariationalGaussianMixture(1, covariance="diagonal", prior=prior).fit(x)
        return mixture.history[-1].lower_bound

    each = [bound(x[:, i : i + 1], scale[i : i + 1]) for i in range(3)]
    assert bound(x, scale) == pytest.approx(sum(each), rel=1e-9)


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
        ({"concentration": torch.tensor([1.0, 0.0])}, "concentration .* must be above 0"),
        ({"strength": torch.tensor([1.0, -1.0])}, "strength of the parameters must be above 0"),
        ({"dof": torch.tensor([4.0, 1.0])}, "dof above 1"),
        ({"dof": torch.tensor([4.0])}, r"have shape \(1,\), not \(2,\)"),
        ({"scale": -torch.eye(2).expand(2, 2, 2)}, "scale of the .* must be positive definite"),
    ],
)
def test_a_start_is_checked(change, message):
    ones, scale = torch.ones(2), torch.eye(2).expand(2, 2, 2)
    start = NormalWishart(ones, torch.zeros(2, 2), ones, 4 * ones, scale)
    with pytest.raises(ValueError, match=message):
        VariationalGaussianMixture(2).fit(draw(dim=2), start=start._replace(**change))


def test_the_prior_is_checked():
    with pytest.raises(ValueError, match="concentration .* must be above 0"):
        VariationalGaussianMixture(2, prior=ConjugatePrior(0.0)).fit(draw())
