"""The posterior over a span with H fixed: as by solves and as the dense one, and what it costs."""

from dataclasses import replace

import pytest
import torch
from steps import iterative_e_step, posterior_at, span_e_step, states_of_em
from tiny import LOG_PROBS, basis_noise, likelihood_of, tiny

from torch_lla_em import BlockCG, BlockKrylov, LinearisedLaplace
from torch_lla_em.data import Data
from torch_lla_em.inference.evidence import Modes, curve, sigma_of
from torch_lla_em.inference.linear_mode import first_mode
from torch_lla_em.inference.mackay import Hyperparameters
from torch_lla_em.inference.stochastic_prior import get_sto_samples
from torch_lla_em.jacobian import LinearModel, Network, ParameterLayout, select_parameters
from torch_lla_em.problem.operators import WhitenedLoss
from torch_lla_em.problem.outputs import outputs, pull_back
from torch_lla_em.problem.problem import Problem
from torch_lla_em.solvers import Spectrum

LIKELIHOODS = ["classification", "regression", "bernoulli", "poisson", "binomial"]


def hyper_of(problem, precision):
    return Hyperparameters(torch.tensor(precision, dtype=torch.float64), sigma_of(problem))


def setting(name, noise_of=get_sto_samples, *of_noise):
    problem = tiny(name).problem(7, 18)
    return problem, noise_of(problem, *of_noise)


def test_what_is_said_of_all_examples_is_the_dense_jacobian():
    case = tiny("classification")
    problem, _ = setting("classification", get_sto_samples, 4)
    J, w = case.exact().J, torch.randn(2, problem.size).double()
    said = outputs(problem, w)
    torch.testing.assert_close(said.f, case.model(case.x).detach())
    torch.testing.assert_close(said.Jw, torch.einsum("ncp,kp->knc", J, w))
    assert torch.equal(said.targets, case.y)
    u = torch.randn(2, *said.f.shape).double()
    g, f = pull_back(problem, u)
    torch.testing.assert_close(g, torch.einsum("ncp,knc->kp", J, u))
    torch.testing.assert_close(f, said.f.flatten())


@pytest.mark.parametrize("name", LIKELIHOODS)
@pytest.mark.parametrize("precision", [0.5, 20.0])
def test_the_posterior_equals_that_by_solves(name, precision):
    problem, noise = setting(name, basis_noise, True, False)
    hyper = hyper_of(problem, precision)
    theirs = iterative_e_step(problem, noise, BlockCG(max_passes=2000)).posterior(hyper, 1e-8)
    ours = posterior_at(problem, noise, hyper, 1e-8)
    torch.testing.assert_close(ours.w_lin, theirs.w_lin, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.w_samples, theirs.w_samples, rtol=1e-5, atol=1e-6)
    evidences = ours.log_evidence.value, theirs.log_evidence.value
    torch.testing.assert_close(*evidences, rtol=1e-5, atol=1e-6)
    dims = ours.effective_dim.value, theirs.effective_dim.value
    torch.testing.assert_close(*dims, rtol=1e-6, atol=1e-6)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)


@pytest.mark.parametrize("name", list(LOG_PROBS)[:-1])
def test_the_mode_is_the_dense_one(name):
    if name == "regression per output":  # which takes solves
        return
    problem, noise = setting(name, get_sto_samples, 4)
    exact = tiny(name).exact(noise.prior.scale)
    for precision in (3.0, 30.0):
        hyper = hyper_of(problem, precision)
        found, truth = posterior_at(problem, noise, hyper, 1e-7), exact.mode(hyper.precision)
        torch.testing.assert_close(found.w_lin, truth, rtol=1e-4, atol=1e-5)
        assert found.loss == pytest.approx(exact.loss(truth).item(), rel=1e-6)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_em_comes_to_the_same_precision_as_by_solves(name):
    problem, noise = setting(name, get_sto_samples, 8)
    ends = []
    for e_step in (span_e_step(problem, noise, 0.03), iterative_e_step(problem, noise, BlockCG())):
        states = states_of_em(problem, noise.prior, e_step, hyper_of(problem, 10.0), max_steps=60)
        ends.append([state.hyper for state in states][-1])
    assert ends[0].precision.item() == pytest.approx(ends[1].precision.item(), rel=0.03)
    if ends[0].sigma is not None:
        assert ends[0].sigma.item() == pytest.approx(ends[1].sigma.item(), rel=0.03)


def test_a_narrow_span_restarts_and_finds_the_same_posterior():
    results = []
    for directions in (1000, 16):
        problem, noise = setting("classification", get_sto_samples, 2)
        bytes_ = 8 * directions * (2 * problem.size + 3 * problem.data.num_outputs)
        solver = BlockKrylov(memory=bytes_)
        e_step = span_e_step(problem, noise, 1e-6, em_steps=0, solver=solver)
        hyper = hyper_of(problem, 20.0)
        *_, last = states_of_em(problem, noise.prior, e_step, hyper, max_steps=0)
        assert (last.own.restarts > 0) == (directions == 16)
        results.append(e_step.posterior(last))
    for name in ("w_lin", "w_samples", "effective_dim"):
        whole, narrow = (getattr(found, name) for found in results)
        torch.testing.assert_close(narrow, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["classification", "bernoulli", "poisson"])
def test_the_first_mode_is_nearer_than_nothing(name):
    problem, noise = setting(name, get_sto_samples, 4)
    for precision in (1e-3, 1.0, 1e3):
        precision = torch.tensor(precision, dtype=torch.float64)
        start = first_mode(problem, noise.prior, precision)
        loss = WhitenedLoss(problem, noise.prior.deviation(precision))

        def objective(w, loss=loss, precision=precision):
            x = noise.prior.whitened(w, precision)
            return loss.value_and_gradient(x)[0] + 0.5 * x.square().sum().item()

        assert objective(start) <= objective(torch.zeros_like(start)) * 1.05
    assert not first_mode(tiny("regression").problem(), noise.prior, precision).any()


def test_modes_near_the_last_precision_are_known():
    problem, noise = setting("classification", basis_noise, True, False)
    found = posterior_at(problem, noise, hyper_of(problem, 5.0), 1e-3)
    logs = found.modes[0]
    assert logs[0] < torch.log(torch.tensor(5 * 0.32)) and logs[-1] > torch.log(torch.tensor(15.8))
    modes = Modes(*found.modes)
    _, evidence = curve(found.spectrum, modes, torch.tensor([2.0, 5.0, 15.0]).double())
    assert torch.isfinite(evidence.value).all()


@pytest.mark.parametrize("precision", [0.3, 30.0])
def test_float32_networks_reach_a_certificate_of_a_thousandth(precision):
    case = tiny("classification")
    case.model.float()
    problem = replace(case, x=case.x.float()).problem(7, 18)
    found = posterior_at(problem, get_sto_samples(problem, 3), hyper_of(problem, precision), 1e-3)
    assert found.w_samples.dtype == torch.float32
    gamma = found.effective_dim.value.clamp_min(1).sqrt()
    assert found.certificate.square().mean().sqrt() <= 1e-3 * gamma


@pytest.mark.parametrize("name", LIKELIHOODS)
@pytest.mark.parametrize("precision", [1.0, 10.0])
def test_the_certificate_bounds_any_output_and_is_not_trivial(name, precision):
    case, (problem, noise) = tiny(name), setting(name, get_sto_samples, 3)
    e_step = span_e_step(problem, noise, 0.5, em_steps=0)
    hyper = hyper_of(problem, precision)
    *_, last = states_of_em(problem, noise.prior, e_step, hyper, max_steps=0)
    found = e_step.posterior(last)
    covariance = case.exact(noise.prior.scale).covariance(hyper.precision)
    root = hyper.precision.sqrt() / noise.prior.scale
    error = found.w_samples - (noise.xi * root + noise.eta) @ covariance
    x = 3 * torch.randn(40, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    y = case.y[:1].expand(40, *case.y.shape[1:])
    J = replace(case, x=x, y=y).exact().J.flatten(0, 1)
    deviations = ((J @ covariance) * J).sum(1).sqrt()
    bound = found.certificate[:, None] * deviations
    assert ((error @ J.T).abs() <= bound + 1e-9).all()
    true = ((error @ torch.linalg.inv(covariance)) * error).sum(1).sqrt()
    assert (true <= found.certificate + 1e-9).all()
    assert (found.certificate <= 30 * true + 1e-9).all()


def test_the_log_det_is_known_to_a_part_of_its_standard_error():
    """Of a span that is narrower than the weights: passes for √λ ξ - η make it so."""
    torch.manual_seed(0)
    x, model = (
        torch.randn(300, 6),
        torch.nn.Sequential(torch.nn.Linear(6, 60), torch.nn.Tanh(), torch.nn.Linear(60, 2)),
    )
    y = torch.stack([x[:, 0].sin(), x[:, 1] * x[:, 2]], 1) + 0.1 * torch.randn(300, 2)
    la = LinearisedLaplace(model.double(), "regression", num_samples=8, sigma_noise=0.1)
    la.fit([(x.double(), y.double())], em_steps=0, prior_precision=300.0, progress_bar=False)
    layout = ParameterLayout.of(model, select_parameters(model))
    data = Data([(x.double(), y.double())], torch.device("cpu"))
    gaussian = likelihood_of("regression").at_noise(torch.tensor(0.1).double())
    problem = Problem(LinearModel(Network(model), layout), gaussian, data)
    noise = get_sto_samples(problem, 8)
    values, vectors = torch.linalg.eigh(
        (problem.rows() * noise.prior.scale).T @ (problem.rows() * noise.prior.scale)
    )
    exact = Spectrum(
        values.clamp_min(0), noise.xi @ vectors, (noise.prior.scale * noise.eta) @ vectors
    )
    ours = Spectrum(la._eigenvalues, la._xi_coordinates, la._eta_coordinates)
    assert len(la._eigenvalues) < 0.5 * problem.size
    for precision in (300.0, 3000.0):
        dets = exact.log_dets(precision)
        off = ours.log_dets(precision).mean() - dets.mean()
        assert off.abs() < 0.2 * dets.std() / 8**0.5


def problem_of(model, name, loader):
    layout = ParameterLayout.of(model, select_parameters(model))
    linear = LinearModel(Network(model), layout)
    return Problem(linear, likelihood_of(name), Data(loader, torch.device("cpu")))


def test_examples_of_several_shapes_take_solves(caplog):
    case = tiny("classification")
    x, y = case.x, case.y
    ragged = [(x[:8].view(4, 2, 2), y[:8].view(4, 2)), (x[8:12].view(4, 1, 2), y[8:12].view(4, 1))]
    problem = problem_of(case.model, "classification", ragged)
    assert outputs(problem, problem.w_MAP[None]) is None
    la = LinearisedLaplace(case.model, "classification", num_samples=2, curvature="network")
    la.fit(ragged, progress_bar=False)
    assert "goes on by products with G" in caplog.text and la.certificate.max() < 1


@pytest.mark.parametrize("precision", [1e6, 1e12])
def test_an_effective_dimension_far_below_one_is_not_lost_to_rounding(precision):
    case = tiny("classification")
    dense = case.exact()
    options = {"num_samples": 64, "g_prior": False, "curvature": "network"}
    la = LinearisedLaplace(case.model.float(), "classification", **options)
    la.fit([(case.x.float(), case.y)], em_steps=0, prior_precision=precision, progress_bar=False)
    truth = dense.effective_dims(torch.tensor(precision).double()).sum().item()
    error = la.effective_dim_error.item()
    assert 0 < error < 0.2 * truth and abs(la.effective_dim.item() - truth) < 5 * error
