"""Mixtures of Bernoulli columns."""

import pytest
import torch
from torch.distributions import Bernoulli, Beta, Dirichlet

from torch_lla_em.mixtures import BernoulliMixture, Bernoullis


def draw(seed=0, n=200, dim=5, num_components=2):
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(num_components, dim, generator=generator)
    owner = torch.randint(num_components, (n,), generator=generator)
    return (torch.rand(n, dim, generator=generator) < p[owner]).double()


def log_joint(x, parameters):
    weights, p = parameters
    return Bernoulli(p).log_prob(x[:, None]).sum(-1) + weights.log()


def log_posterior(x, parameters):
    two = torch.full((2,), 2.0, dtype=torch.float64)
    return (
        log_joint(x, parameters).logsumexp(1).sum()
        + Dirichlet(two).log_prob(parameters.weights)
        + Beta(*two).log_prob(parameters.means).sum()
    )


def test_map_ends_at_the_mode_of_the_posterior():
    """The objective is the log posterior up to a constant, whose gradient vanishes at the end."""
    x = draw()
    mixture = BernoulliMixture(2, prior=True, tolerance=1e-14, max_steps=5000)
    heights = [log_posterior(x, mixture.parameters) for _ in mixture.steps(x)]
    objective = torch.tensor(mixture.history, dtype=torch.float64)[1:, 0]
    torch.testing.assert_close(objective.diff(), torch.stack(heights)[:-1].diff())
    weights, p = mixture.parameters
    leaves = [weights.log().requires_grad_(), p.logit().requires_grad_()]
    value = log_posterior(x, Bernoullis(leaves[0].softmax(0), leaves[1].sigmoid()))
    for gradient in torch.autograd.grad(value, leaves):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.uint8])
def test_any_type_of_zeros_and_ones(dtype):
    x = draw()
    mixture = BernoulliMixture(2, max_steps=500, sample_size=50).fit(x.to(dtype).split(30))
    torch.testing.assert_close(
        mixture.log_prob(x.to(dtype)).double(), mixture.log_prob(x), rtol=1e-5, atol=1e-5
    )


def test_degenerate_data_give_finite_densities():
    for x in (torch.zeros(10, 3), torch.ones(10, 3), torch.eye(3), torch.ones(3, 1)):
        for prior in (False, True):
            mixture = BernoulliMixture(3, prior=prior, max_steps=500).fit(x)
            assert torch.isfinite(mixture.log_prob(1 - x)).all()


def test_unsuitable_data_and_options_raise():
    with pytest.raises(ValueError, match="zeros and ones only. Binarise"):
        BernoulliMixture(2).fit(draw() * 0.5)
    with pytest.raises(ValueError, match="min_probability must be between 0 and 0.5"):
        BernoulliMixture(2, min_probability=0.5)
