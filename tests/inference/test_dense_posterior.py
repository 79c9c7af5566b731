"""The posterior at a given λ, its evidence and certificate against dense linear algebra."""

from dataclasses import replace

import pytest
import torch
from daily import daily
from dense import gaussian_log_prob
from steps import complete_span, posterior_at, solved_at
from tiny import basis_noise, draw, fitted, posterior_of, tiny
from torch import nn
from torch.testing import assert_close

from torch_lla_em import BlockCG
from torch_lla_em.inference.em import e_step, m_step
from torch_lla_em.inference.span_problem import log_dets
from torch_lla_em.inference.sto_samples import get_sto_samples

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


def setting(name, num_samples=None):
    """Return a problem and its noise: a basis, or so many samples."""
    problem = tiny(name).problem(7, 18)
    if num_samples is None:
        return problem, basis_noise(problem, True, False)
    noise = get_sto_samples(problem, num_samples)
    return problem.with_targets(noise.targets), noise


@pytest.mark.parametrize("name", LIKELIHOODS)
@pytest.mark.parametrize("precision", [0.5, 20.0])
@pytest.mark.parametrize("by", ["span", "solves"])
def test_the_posterior_is_the_dense_one(name, precision, by):
    problem, noise = setting(name)
    if by == "span":
        found = posterior_at(problem, noise, precision, 1e-8)
    else:
        found = solved_at(problem, noise, precision, 1e-8, solver=BlockCG(max_passes=2000))
    exact, lam = tiny(name).exact(noise.prior.scale), torch.tensor(precision).double()
    covariance, mode, samples = exact.covariance(lam), exact.mode(lam), found.w_samples
    assert_close(found.w_lin, mode, rtol=1e-5, atol=1e-6)
    assert_close(samples.T @ samples / len(samples), covariance, rtol=1e-5, atol=1e-6)
    if by == "span":
        assert_close(found.log_evidence.value, exact.log_evidence(lam), rtol=1e-6, atol=1e-6)
    gamma = exact.effective_dims(lam).sum()
    assert_close(found.effective_dim.value, gamma, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", LIKELIHOODS)
@pytest.mark.parametrize("precision", [1.0, 10.0])
def test_the_certificate_bounds_the_error_and_is_not_trivial(name, precision):
    case, (problem, noise) = tiny(name), setting(name, 3)
    found = posterior_at(problem, noise, precision, 0.5)
    precision = torch.tensor(precision).double()
    covariance = case.exact(noise.prior.scale).covariance(precision)
    root = precision.sqrt() / noise.prior.scale
    error = found.w_samples - (noise.xi * root + noise.eta) @ covariance
    # the largest error of any output, in posterior standard deviations
    true = ((error @ torch.linalg.inv(covariance)) * error).sum(1).sqrt()
    assert (true <= found.certificate + 1e-9).all()
    assert (found.certificate <= 30 * true + 1e-9).all()


@pytest.mark.parametrize("num_samples", [4, 80])
def test_the_mode_is_accurate_if_the_network_has_no_curvature_there(num_samples):
    """H is close to 0 at the outputs of a network that is far too sure, and of no use in the search for the mode."""
    x, y, weight = draw(60, 20), torch.arange(60) % 3, 20 * draw(3, 20, seed=1)
    model = nn.Linear(20, 3).double()
    with torch.no_grad():
        model.weight.copy_(weight)
    options = {"prior": "isotropic", "curvature": "network", "num_samples": num_samples}
    la = posterior_of(model, "classification", x, y, at=0.01, tolerance=1e-7, **options)
    w = la.w_lin.clone().requires_grad_()
    f = x @ w[:60].view(3, 20).T + w[60:]
    objective = nn.functional.cross_entropy(f, y, reduction="sum") + 0.005 * w.square().sum()
    (gradient,) = torch.autograd.grad(objective, w)
    assert gradient.norm() < 1e-6 * 0.01 * w.norm()
    assert la.accuracy.is_reached and la.history[-1]["why"] == "accurate"


def test_examples_of_several_shapes_take_solves(caplog):
    case = tiny("classification")
    x, y = case.x, case.y
    ragged = [(x[:8].view(4, 2, 2), y[:8].view(4, 2)), (x[8:12].view(4, 1, 2), y[8:12].view(4, 1))]
    _, la = fitted(loader=ragged, num_samples=2, curvature="network")
    assert "uses a solver" in caplog.text and la.certificate.max() < 1


@pytest.mark.parametrize("precision, solver", [(1e6, None), (1e12, None), (1e12, BlockCG())])
def test_an_effective_dimension_far_below_one_is_not_lost_to_rounding(precision, solver):
    case = tiny("classification")
    dense = case.exact()
    options = {"num_samples": 64, "prior": "isotropic", "curvature": "network", "solver": solver}
    data = case.model.float(), "classification", case.x.float(), case.y
    la = posterior_of(*data, at=precision, **options)
    truth = dense.effective_dims(torch.tensor(precision).double()).sum().item()
    error = la.effective_dim_error.item()
    assert 0 < error < 0.2 * truth and abs(la.effective_dim.item() - truth) < 5 * error
