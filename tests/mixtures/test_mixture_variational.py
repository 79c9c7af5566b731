"""The variational Gaussian mixture: its ELBO in closed form, its posterior, its errors."""

import pytest
import torch
from clusters import draw, steps_from
from torch.distributions import MultivariateNormal

from torch_lla_em.mixtures import VariationalGaussianMixture

STRUCTURES = "full", "diagonal"


def test_the_bound_of_diagonal_covariances_is_the_sum_over_columns():
    """With one component the columns are independent; scikit-learn's bound is right for one column."""
    x = draw(n=40)

    def bound(x):
        mixture = VariationalGaussianMixture(1, covariance="diagonal").fit(x)
        return mixture.history[-1].lower_bound

    assert bound(x) == pytest.approx(sum(bound(x[:, i : i + 1]) for i in range(3)), rel=1e-9)


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
    again = VariationalGaussianMixture(3, **options)
    bound = steps_from(mixture.parameters, again, x)[0].lower_bound
    assert 0 <= bound - mixture.history[-1].lower_bound <= 1e-4 * len(x)


def test_options_of_maximum_likelihood_are_refused():
    with pytest.raises(TypeError, match="min_variance"):
        VariationalGaussianMixture(2, min_variance=0.1)
