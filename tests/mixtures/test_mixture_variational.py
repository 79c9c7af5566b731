"""The variational Gaussian mixture: next to scikit-learn's, its density, its errors."""

import math
import warnings

import numpy as np
import pytest
import torch
from clusters import draw, steps_from
from torch.distributions import MultivariateNormal
from torch.special import gammaln

from torch_lla_em.mixtures import NormalWishart, VariationalGaussianMixture

NAMES = {"full": "full", "diagonal": "diag"}
STEPS = 25


def tensors(*arrays):
    return [torch.as_tensor(np.asarray(array), dtype=torch.float64) for array in arrays]


def fit_quietly(mixture, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mixture.fit(x.numpy())


def variational_pair(structure, x, num_components):
    """Return scikit-learn's mixture after STEPS + 1 steps, and ours from its first step."""
    sklearn_mixture = pytest.importorskip("sklearn.mixture")
    prior = prior_of(structure, x, num_components)
    theirs = sklearn_mixture.BayesianGaussianMixture(
        n_components=num_components,
        covariance_type=NAMES[structure],
        weight_concentration_prior_type="dirichlet_distribution",
        weight_concentration_prior=prior["alpha"],
        mean_precision_prior=prior["strength"],
        degrees_of_freedom_prior=prior["dof"],
        covariance_prior=(prior["scale"].diag() if structure == "full" else prior["scale"]).numpy(),
        reg_covar=0.0,
        tol=0.0,
        max_iter=1,
        warm_start=True,
        random_state=0,
    )
    fit_quietly(theirs, x)
    start = posterior(theirs, structure)
    theirs.max_iter = STEPS
    fit_quietly(theirs, x)
    options = {"covariance": structure, "max_steps": STEPS, "tolerance": 0.0}
    ours = VariationalGaussianMixture(num_components, **options)
    steps_from(start, ours, x)
    return theirs, ours


def prior_of(structure, x, num_components):
    """Return our prior: that of each column for diagonal covariances."""
    size = x.shape[1] if structure == "full" else 1
    scale = x.var(0, correction=0) * num_components ** (-2 / x.shape[1])
    return {"alpha": 1 / num_components, "strength": 0.01, "dof": size + 2, "scale": scale}


def posterior(theirs, structure):
    alpha, means, strength, dof, covariances = tensors(
        theirs.weight_concentration_,
        theirs.means_,
        theirs.mean_precision_,
        np.atleast_1d(theirs.degrees_of_freedom_),
        theirs.covariances_,
    )
    return NormalWishart(
        alpha, means, strength, dof, covariances * dof.reshape(-1, *[1] * (covariances.ndim - 1))
    )


def constant_left_out(structure, x, num_components):
    """What scikit-learn's bound lacks: the prior's normalisers and −½ N D log 2π."""
    alpha, strength, dof, scale = prior_of(structure, x, num_components).values()
    dim = x.shape[1]
    half = (dof - torch.arange(dim, dtype=torch.float64)) / 2
    wishart = dof / 2 * (scale.log().sum() - dim * math.log(2)) - gammaln(half).sum()
    concentration = torch.full((num_components,), alpha, dtype=torch.float64)
    dirichlet = gammaln(concentration.sum()) - gammaln(concentration).sum()
    means = dim / 2 * math.log(strength)
    data = -len(x) * dim / 2 * math.log(2 * math.pi)
    return float(num_components * (wishart + means) + dirichlet + data)


@pytest.mark.parametrize(
    ("structure", "dim", "num_components"),
    # with several columns, scikit-learn's update of diagonal covariances is no mean-field EM
    [("full", 3, 4), ("full", 1, 2), ("diagonal", 1, 3)],
)
def test_variational_path_and_end(structure, dim, num_components):
    x = draw(n=300, dim=dim)
    theirs, ours = variational_pair(structure, x, num_components)
    close = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(ours.parameters, posterior(theirs, structure), **close)
    path = torch.tensor([step.lower_bound for step in ours.history], dtype=torch.float64)
    (expected,) = tensors(theirs.lower_bounds_[-STEPS:])
    expected = expected + constant_left_out(structure, x, num_components)
    torch.testing.assert_close(path, expected, **close)
    (score,) = tensors(theirs.score_samples(x.numpy()))
    torch.testing.assert_close(ours.log_prob(x), score, **close)


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


def test_options_of_maximum_likelihood_are_refused():
    with pytest.raises(TypeError, match="min_variance"):
        VariationalGaussianMixture(2, min_variance=0.1)
