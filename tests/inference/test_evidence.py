"""The log marginal likelihood against the dense one, and MacKay's fixed point as its top."""

from dataclasses import replace

import pytest
import torch
from daily import daily
from steps import posterior_at, span_e_step
from tiny import basis_noise, tiny

from torch_lla_em.exact import gaussian_log_prob
from torch_lla_em.inference.evidence import log_dets, sigma_of
from torch_lla_em.inference.mackay import Hyperparameters
from torch_lla_em.inference.stochastic_prior import get_sto_samples

LIKELIHOODS = ["classification", "regression", "bernoulli", "poisson", "binomial"]


def setting(name, draw=None):
    problem = tiny(name).problem(7, 18)
    return problem, basis_noise(problem, True, False) if draw is None else get_sto_samples(
        problem, draw
    )


def hyper_of(problem, precision):
    return Hyperparameters(torch.tensor(precision, dtype=torch.float64), sigma_of(problem))


@pytest.mark.parametrize("name", LIKELIHOODS)
@pytest.mark.parametrize("precision", [0.3, 10.0])
def test_the_evidence_is_the_dense_one(name, precision):
    problem, noise = setting(name)
    ours = posterior_at(problem, noise, hyper_of(problem, precision)).log_evidence.value
    exact = tiny(name).exact(noise.prior.scale).log_evidence(torch.tensor(precision).double())
    torch.testing.assert_close(ours, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["classification", "regression"])
def test_the_log_det_of_blocks_is_the_dense_one(name):
    tiny_problem = tiny(name)
    problem = tiny_problem.problem(7, 18)
    noise = basis_noise(problem, True, True)
    precision = torch.tensor([0.5, 3.0, 10.0, 1.0]).double()
    per_weight = tiny_problem.layout.expand(precision)
    root = noise.prior.scale * per_weight.rsqrt()
    G = tiny_problem.exact().ggn
    exact = torch.logdet(torch.eye(len(G)).to(G) + root[:, None] * G * root)
    torch.testing.assert_close(log_dets(problem, noise, precision).mean(), exact)


@pytest.mark.parametrize("name", daily(*LIKELIHOODS[:2], rest=LIKELIHOODS[2:]))
def test_mackays_fixed_point_is_where_the_slope_vanishes(name):
    """With H held at the network's outputs, d log p(y | λ) / d log λ = ½ (γ - λ ‖w_lin‖²)."""
    problem, noise = setting(name)
    e_step = span_e_step(problem, noise)
    over = e_step.over
    q = over.first(3.0)
    for _ in range(400):
        hyper = hyper_of(problem, q.precision)
        new = q.effective_dims.mean() / q.mean.square().sum()
        q = over.at(q.curved, hyper._replace(precision=new), q.mean)
        if abs(new / hyper.precision - 1) < 1e-10:
            break
    precision, gamma = q.precision, q.effective_dims.mean()
    exact, step = tiny(name).exact(noise.prior.scale), 1e-4

    def slope(at):
        ends = (torch.tensor(at).double().log() + torch.tensor([step, -step])).exp()
        high, low = (exact.log_evidence(end) for end in ends)
        return ((high - low) / (2 * step)).item()

    assert slope(precision) == pytest.approx(0.0, abs=1e-4 * max(1.0, float(gamma)))
    assert slope(0.5 * precision) > 0 > slope(2 * precision)


@pytest.mark.slow
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_random_noise_is_within_five_standard_errors(name):
    problem, noise = setting(name, draw=200)
    value, error = posterior_at(problem, noise, hyper_of(problem, 2.0)).log_evidence
    exact = tiny(name).exact(noise.prior.scale).log_evidence(torch.tensor(2.0).double())
    assert abs(value - exact) < 5 * error


def test_another_noise_needs_no_new_directions():
    problem, noise = setting("regression")
    e_step = span_e_step(problem, noise)
    q, columns = e_step.over.first(2.0), problem.cost.columns
    sigma = torch.tensor(0.9, dtype=torch.float64)
    hyper = hyper_of(problem, 2.0)._replace(sigma=sigma)
    ours = e_step.over.at(q.curved, hyper, q.mean).bound
    assert problem.cost.columns == columns
    exact = tiny("regression").exact(noise.prior.scale).at_noise(gaussian_log_prob(sigma))
    exact = replace(exact, scale=noise.prior.scale).log_evidence(hyper.precision)
    assert ours == pytest.approx(exact.item(), rel=1e-6)
