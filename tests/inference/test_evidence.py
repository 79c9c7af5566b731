"""The log marginal likelihood, and γ and samples at any λ, against dense linear algebra."""

from dataclasses import replace

import pytest
import torch
from daily import daily
from dense import gaussian_log_prob
from steps import complete_span
from tiny import basis_noise, draw, tiny
from torch.testing import assert_close

from torch_lla_em.inference.em import e_step, m_step
from torch_lla_em.inference.span_problem import log_dets

LIKELIHOODS = ["classification", "regression", "bernoulli", "poisson", "binomial"]
P = 30
SPECTRA = {
    "smooth": torch.logspace(2, -3, P),
    "clustered": torch.cat([torch.full((20,), 7.0), torch.linspace(10, 50, 10)]),
    "rank 4": torch.cat([torch.zeros(P - 4), torch.linspace(1, 9, 4)]),
}


@pytest.mark.parametrize("shape", SPECTRA)
@pytest.mark.parametrize("precision", [0.03, 1.0, 40.0])
def test_any_shift_is_the_dense_one(shape, precision):
    theta, zeros = SPECTRA[shape].double(), torch.zeros(P, P).double()
    # noise that is a basis: P rows of ξ and no η, then no ξ and a root of G
    xi = torch.cat([torch.eye(P).double(), zeros])
    eta = torch.cat([zeros, theta.sqrt().diag()])
    shifted = theta.diag() + precision * torch.eye(P)
    log_det = torch.logdet(shifted / precision)
    assert_close(log_dets(theta, xi, eta, precision).sum(), log_det)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_a_span_is_a_linear_problem_whose_products_are_dense(name):
    """Every method of the protocol, with H at the network's outputs, and any vectors as coordinates."""
    case, problem = tiny(name), tiny(name).problem(7, 18)
    noise = basis_noise(problem, True, False)
    over, _ = complete_span(problem, noise)
    found, V = (
        e_step(over, over.first(2.0)).span.problem,
        over.span.scaled(torch.eye(problem.size).double()),
    )
    exact, w = case.exact(noise.prior.scale), draw(3, problem.size)
    of_weights = noise.prior.scale * (w @ V)
    (product,) = found.minibatch_products()
    for times_G in (found.ggn_product, product):
        assert_close(times_G(w), of_weights @ exact.ggn @ (noise.prior.scale * V).T)
    loss, gradient = found.loss_and_gradient(w[0])
    assert loss == pytest.approx(exact.loss(of_weights[0]).item())
    slope = torch.func.grad(exact.loss)(of_weights[0])
    assert_close(gradient, (noise.prior.scale * V) @ slope)
    assert found.zeros(2).shape == (2, problem.size) and found.num_steps == 1
    assert found.dtype == torch.float64 and found.with_curvature_at(w[0]) is found


@pytest.mark.parametrize("name", daily(*LIKELIHOODS[:2], rest=LIKELIHOODS[2:]))
def test_mackays_fixed_point_is_where_the_slope_vanishes(name):
    """With H held at the network's outputs, d log p(y | λ) / d log λ = ½ (γ - λ ‖w_lin‖²)."""
    problem = tiny(name).problem(7, 18)
    noise = basis_noise(problem, True, False)
    over, _ = complete_span(problem, noise)
    q = e_step(over, over.first(3.0))
    for _ in range(400):
        last, (new, _) = q.precision, m_step(over, q)
        q = e_step(over, over.moved(q, new, q.sigma, None))
        if abs(new / last - 1) < 1e-10:
            break
    precision, gamma = q.precision.item(), q.gamma.mean()
    exact, step = tiny(name).exact(noise.prior.scale), 1e-4

    def slope(at):
        ends = (torch.tensor(at).double().log() + torch.tensor([step, -step])).exp()
        high, low = (exact.log_evidence(end) for end in ends)
        return ((high - low) / (2 * step)).item()

    assert slope(precision) == pytest.approx(0.0, abs=1e-4 * max(1.0, float(gamma)))
    assert slope(0.5 * precision) > 0 > slope(2 * precision)


def test_another_noise_needs_no_new_directions():
    problem = tiny("regression").problem(7, 18)
    noise = basis_noise(problem, True, False)
    over, _ = complete_span(problem, noise)
    q, columns = e_step(over, over.first(2.0)), problem.sweep.columns
    sigma, precision = torch.tensor([0.9, 2.0], dtype=torch.float64)
    ours = e_step(over, over.moved(q, precision, sigma, None)).bounds.mean().item()
    assert problem.sweep.columns == columns
    exact = tiny("regression").exact(noise.prior.scale).at_noise(gaussian_log_prob(sigma))
    exact = replace(exact, scale=noise.prior.scale).log_evidence(precision)
    assert ours == pytest.approx(exact.item(), rel=1e-6)
