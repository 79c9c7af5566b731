"""EM on one factorisation: the same posterior as by solves, and what it says when it cannot."""

import warnings
from dataclasses import replace

import pytest
import torch
from steps import iterative_e_step, krylov_e_step, states_of_em
from tiny import basis_noise, tiny

from torch_lla_em import LinearisedLaplace
from torch_lla_em.inference.evidence import curve, sigma_of
from torch_lla_em.inference.linear_mode import first_mode
from torch_lla_em.inference.mackay import Hyperparameters
from torch_lla_em.inference.stochastic_prior import get_sto_samples
from torch_lla_em.problem.operators import WhitenedLoss
from torch_lla_em.solvers import BlockCG, BlockKrylov, Operator
from torch_lla_em.solvers.block_krylov import Shift
from torch_lla_em.solvers.block_lanczos import BlockLanczos

LIKELIHOODS = ["classification", "regression", "bernoulli", "poisson", "binomial"]


def hyper_of(problem, precision):
    return Hyperparameters(torch.tensor(precision, dtype=torch.float64), sigma_of(problem))


def e_steps(name, noise_of=basis_noise, **options):
    problem = tiny(name).problem(7, 18)
    noise = noise_of(problem, True, False)
    krylov = krylov_e_step(problem, noise, BlockKrylov(**options))
    return problem, krylov, iterative_e_step(problem, noise, BlockCG(max_passes=2000))


@pytest.mark.parametrize("name", LIKELIHOODS)
@pytest.mark.parametrize("precision", [0.5, 20.0])
def test_expectations_equal_those_by_solves(name, precision):
    problem, krylov, iterative = e_steps(name)
    hyper = hyper_of(problem, precision)
    ours, theirs = (e.expect(hyper, 1e-9, 1e-9) for e in (krylov, iterative))
    torch.testing.assert_close(ours.effective_dims, theirs.effective_dims, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        ours.squared_norm, theirs.squared_norm.new_tensor(float(ours.squared_norm))
    )
    assert float(ours.squared_norm) == pytest.approx(float(theirs.squared_norm), rel=1e-5)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
    if ours.residual is not None:
        torch.testing.assert_close(ours.residual, theirs.residual, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_last_step_equals_that_by_solves(name):
    problem, krylov, iterative = e_steps(name)
    hyper = hyper_of(problem, 5.0)
    (mode, samples, log_dets), (mode2, samples2, log_dets2) = (
        e.finish(hyper, 1e-8) for e in (krylov, iterative)
    )
    torch.testing.assert_close(mode.w, mode2.w, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(samples.w, samples2.w, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(log_dets.mean(), log_dets2.mean(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_em_comes_to_the_same_precision(name):
    ends = []
    for kind in (1, 2):
        parts = e_steps(name, noise_of=lambda problem, *_: get_sto_samples(problem, 8))
        problem, e_step = parts[0], parts[kind]
        prior = get_sto_samples(problem, 8).prior
        states = states_of_em(problem, prior, e_step, hyper_of(problem, 10.0), max_steps=60)
        ends.append([state.hyper for state in states][-1])
    assert ends[0].precision.item() == pytest.approx(ends[1].precision.item(), rel=0.03)
    if ends[0].sigma is not None:
        assert ends[0].sigma.item() == pytest.approx(ends[1].sigma.item(), rel=0.03)


def test_a_new_precision_costs_no_sample_pass():
    problem, krylov, _ = e_steps("regression", max_passes=50)
    krylov.expect(hyper_of(problem, 1.0), 1e-6, 1e-6)
    columns = problem.cost.columns
    for precision in (1.0, 3.0, 30.0, 300.0):
        krylov.expect(hyper_of(problem, precision), 1e-6, 1e-6)
    assert problem.cost.columns == columns


def test_without_room_for_the_basis_nothing_changes_but_the_samples_cost():
    results = []
    for memory in (None, 1.0):
        problem = tiny("classification").problem(7, 18)
        noise = get_sto_samples(problem, 2)
        krylov = krylov_e_step(problem, noise, BlockKrylov(memory=memory))
        hyper = hyper_of(problem, 20.0)
        expectation = krylov.expect(hyper, 1e-3, 1e-9)
        assert krylov.krylov.lanczos.has_basis == (memory is None)
        mode, samples, log_dets = krylov.finish(hyper, 1e-6)
        results.append((expectation.effective_dims, log_dets, mode.w, samples.w))
    for full, lean in zip(*results):
        torch.testing.assert_close(lean, full, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["classification", "regression"])
def test_missing_the_certificate_is_told_once_with_the_remedy(name):
    problem = tiny(name).problem(7, 18)
    krylov = krylov_e_step(problem, get_sto_samples(problem, 1), BlockKrylov(max_passes=1))
    with pytest.warns(UserWarning, match="effective dimension is known.*Raise max_passes") as seen:
        for precision in (1e-2, 2e-2):
            krylov.expect(hyper_of(problem, precision), 1e-6, 0.1)
    assert len(seen) == 1


@pytest.mark.parametrize("name", ["classification", "bernoulli", "poisson"])
def test_the_first_mode_is_nearer_than_nothing(name):
    problem = tiny(name).problem()
    noise = get_sto_samples(problem, 4)
    for precision in (1e-3, 1.0, 1e3):
        precision = torch.tensor(precision, dtype=torch.float64)
        start = first_mode(problem, noise.prior, precision)
        loss = WhitenedLoss(problem, noise.prior.deviation(precision))

        def objective(w, loss=loss, precision=precision):
            x = noise.prior.whitened(w, precision)
            return loss.value_and_gradient(x)[0] + 0.5 * x.square().sum().item()

        assert objective(start) <= objective(torch.zeros_like(start)) * 1.05
    assert not first_mode(tiny("regression").problem(), noise.prior, precision).any()


def test_modes_near_the_last_precision_are_visited():
    problem, krylov, _ = e_steps("classification")
    hyper = hyper_of(problem, 5.0)
    krylov.finish(hyper, 1e-3)
    modes = krylov.modes(hyper)
    logs = modes.log_precisions
    assert logs[0] < torch.log(torch.tensor(5 * 0.32)) and logs[-1] > torch.log(torch.tensor(15.8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, evidence = curve(krylov.spectrum(hyper), modes, torch.tensor([2.0, 5.0, 15.0]).double())
    assert torch.isfinite(evidence.value).all()


def test_going_on_costs_the_new_passes_alone():
    problem, krylov, _ = e_steps("classification", noise_of=lambda p, *_: get_sto_samples(p, 2))
    width = 2 * 2  # columns of a product: ξ and η of two samples
    before = problem.cost.columns
    krylov.expect(hyper_of(problem, 100.0), 0.3, 10.0)
    first = krylov.krylov.lanczos.num_steps
    krylov.expect(hyper_of(problem, 0.5), 1e-4, 10.0)
    steps = krylov.krylov.lanczos.num_steps
    assert steps > first >= 1
    modes = [mode.passes for mode in krylov._search.visited.values()]
    spent = problem.cost.columns - before - sum(modes)
    assert width * (steps - 1) <= spent <= width * steps


def test_T_stays_in_float64():
    problem = tiny("classification")
    problem.model.float()
    single = replace(problem, x=problem.x.float()).problem(7, 18)
    krylov = krylov_e_step(single, get_sto_samples(single, 2), BlockKrylov())
    krylov.krylov.lanczos.extend()
    lanczos = krylov.krylov.lanczos
    assert lanczos.basis[0].dtype == torch.float32
    assert lanczos.tridiagonal().dtype == lanczos.eigenvalues.dtype == torch.float64


@pytest.mark.parametrize("precision", [0.3, 30.0])
def test_float32_networks_reach_a_certificate_of_a_thousandth(precision):
    setting = tiny("classification")
    setting.model.float()
    problem = replace(setting, x=setting.x.float()).problem(7, 18)
    krylov = krylov_e_step(problem, get_sto_samples(problem, 3), BlockKrylov())
    _, samples, _ = krylov.finish(hyper_of(problem, precision), 1e-3)
    assert samples.w.dtype == torch.float32 and samples.converged
    gamma = samples.effective_dims.mean().clamp_min(1).sqrt()
    assert samples.certificate.square().mean().sqrt() <= 1e-3 * gamma


@pytest.mark.parametrize("name", LIKELIHOODS)
@pytest.mark.parametrize("precision", [1.0, 10.0])
def test_the_certificate_bounds_any_output_and_is_not_trivial(name, precision):
    setting = tiny(name)
    problem = setting.problem(7, 18)
    noise = get_sto_samples(problem, 3)
    krylov = krylov_e_step(problem, noise, BlockKrylov())
    hyper = hyper_of(problem, precision)
    shift = krylov.shift(hyper)
    for _ in range(2):
        krylov.krylov.lanczos.extend()
    w = noise.prior.scale * krylov.krylov.samples(shift)
    covariance = setting.exact(noise.prior.scale).covariance(hyper.precision)
    root = hyper.precision.sqrt() / noise.prior.scale
    error = w - (noise.xi * root + noise.eta) @ covariance
    x = 3 * torch.randn(40, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    y = setting.y[:1].expand(40, *setting.y.shape[1:])
    J = replace(setting, x=x, y=y).exact().J.flatten(0, 1)
    deviations = ((J @ covariance) * J).sum(1).sqrt()
    certificate = krylov.krylov.certificates(shift)
    assert ((error @ J.T).abs() <= certificate[:, None] * deviations + 1e-9).all()
    true = ((error @ torch.linalg.inv(covariance)) * error).sum(1).sqrt()
    assert (true <= certificate + 1e-9).all() and (certificate <= 30 * true + 1e-9).all()


def test_what_rounding_takes_away_is_in_the_certificate():
    generator = torch.Generator().manual_seed(0)
    P, precision = 400, 3.0
    eigenvalues = torch.logspace(8, -1, P, dtype=torch.float64)
    Q = torch.linalg.qr(torch.randn(P, P, generator=generator, dtype=torch.float64)).Q
    G = Q @ (eigenvalues[:, None] * Q.T)
    noise = torch.randn(8, P, generator=generator, dtype=torch.float64)
    xi, eta = noise[:4], (noise[4:] * eigenvalues.sqrt()) @ Q.T
    krylov = BlockKrylov().factorise(
        Operator(lambda w: w @ G.float()), torch.cat([xi, eta]).float(), 4
    )
    while not krylov.lanczos.exhausted:
        krylov.lanczos.extend()
    shift = Shift(precision)
    b = precision**0.5 * xi + eta
    residual = b - krylov.samples(shift).double() @ (G + precision * torch.eye(P).double())
    truth = (residual.square().sum(1) / precision).sqrt()
    gamma = (eigenvalues / (eigenvalues + precision)).sum()
    assert truth.max() > 0.1 * gamma**0.5  # a λ that float32 does not reach
    assert krylov.error(shift) > 0.1


def test_a_basis_in_bfloat16_costs_passes_and_no_exactness():
    case = tiny("classification")
    model, x = case.model.float(), case.x.float()
    fits = {}
    for storage in (None, torch.bfloat16):
        solver = BlockKrylov(storage=storage)
        options = {"num_samples": 3, "solver": solver, "tolerance": 1e-2}
        la = LinearisedLaplace(model, "classification", **options)
        fits[storage] = la.fit([(x, case.y)], progress_bar=False)
    exact, stored = fits.values()
    assert stored.prior_precision.item() == pytest.approx(exact.prior_precision.item(), rel=1e-2)
    assert stored.certificate.max() < 0.05
    torch.testing.assert_close(stored.w_samples, exact.w_samples, rtol=0.05, atol=0.02)


def test_blocks_that_are_stored_in_bfloat16_keep_the_basis_orthogonal():
    generator = torch.Generator().manual_seed(0)
    R = torch.randn(120, 2000, generator=generator) * torch.logspace(0, -3, 120)[:, None]
    start = torch.randn(8, 2000, generator=generator)
    lanczos = BlockLanczos(Operator(lambda w: w @ R.T @ R), start, storage=torch.bfloat16)
    for _ in range(8):
        lanczos.extend()
    assert [block.dtype for block in lanczos.basis[-3:]] == [torch.bfloat16] + 2 * [torch.float32]
    Q = torch.cat([block.double() for block in lanczos.basis])
    overlap = Q @ Q.T - torch.eye(len(Q))
    assert overlap.fill_diagonal_(0).abs().max() < 1e-3
    exact = torch.linalg.svdvals(R.double())[:20].square()
    found = lanczos.eigenvalues.flip(0)[:20]
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("precision", [1e6, 1e12])
def test_an_effective_dimension_far_below_one_is_not_lost_to_rounding(precision):
    case = tiny("classification")
    dense = case.exact()
    la = LinearisedLaplace(case.model.float(), "classification", num_samples=64, g_prior=False)
    la.fit([(case.x.float(), case.y)], em_steps=0, prior_precision=precision, progress_bar=False)
    truth = dense.effective_dims(torch.tensor(precision).double()).sum().item()
    error = la.effective_dim_error.item()
    assert 0 < error < 0.2 * truth and abs(la.effective_dim.item() - truth) < 5 * error
