"""Deflation by one Krylov basis: never above G, the same posterior, in fewer passes."""

import pytest
import torch
from steps import iterative_e_step
from tiny import basis_noise, tiny

from torch_lla_em.inference.evidence import sigma_of
from torch_lla_em.inference.iterative_e_step import Deflation, make_e_step
from torch_lla_em.inference.mackay import Hyperparameters
from torch_lla_em.inference.options import FitOptions
from torch_lla_em.inference.posterior_samples import Start, optimise_samples
from torch_lla_em.inference.stochastic_prior import get_sto_samples
from torch_lla_em.solvers import BlockCG, Operator
from torch_lla_em.solvers.block_lanczos import BlockLanczos
from torch_lla_em.solvers.deflation import (
    DeflatedCG,
    FeaturePreconditioner,
    nystrom_features,
)

P, K = 40, 4


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


class Whitened(Operator):
    """D G D with its products counted."""

    def __init__(self, G, deviation):
        self.G, self.deviation, self.passes = G, deviation, 0

    def __call__(self, x):
        self.passes += 1
        return x * self.deviation @ self.G * self.deviation

    @property
    def matrix(self):
        return self.deviation[:, None] * self.G * self.deviation


@pytest.fixture
def G():
    Q = torch.linalg.qr(randn(P, P, seed=9)).Q
    return Q @ torch.diag(torch.logspace(4, -2, P).double()) @ Q.T


@pytest.fixture
def features(G):
    lanczos = BlockLanczos(Operator(lambda x: x @ G), randn(2 * K, P))
    lanczos.extend()
    lanczos.extend()
    return nystrom_features(lanczos)


@pytest.fixture
def A(G):
    """Two blocks of weights under very different priors."""
    return Whitened(G, torch.cat([torch.full((15,), 3.0), torch.full((P - 15,), 0.1)]).double())


def exact(A, b):
    return torch.linalg.solve(A.matrix + torch.eye(P).to(b), b.T).T


def test_nystrom_never_exceeds_G_and_is_it_on_the_krylov_space(G):
    lanczos = BlockLanczos(Operator(lambda x: x @ G), randn(2 * K, P))
    for steps in (1, 2):
        lanczos.extend()
        F = nystrom_features(lanczos)
        gap = G - F.T @ F
        assert torch.linalg.eigvalsh(gap)[0] > -1e-8
        Q = torch.cat(lanczos.basis[:steps])
        assert (Q @ gap).abs().max() < 1e-7 < gap.abs().max()


@pytest.mark.parametrize("power", [-1.0, -0.5, 0.5])
def test_powers_of_the_preconditioner_are_the_dense_ones(A, features, power):
    M = torch.eye(P).double() + (features * A.deviation).T @ (features * A.deviation)
    values, vectors = torch.linalg.eigh(M)
    rows = randn(3, P, seed=2)
    dense = rows @ (vectors * values**power) @ vectors.T
    known = FeaturePreconditioner(features, A.deviation)
    torch.testing.assert_close(known.power(rows, power), dense)


def test_features_of_rank_zero_and_repeated_ones_are_harmless(features):
    rows = randn(3, P, seed=2)
    M = FeaturePreconditioner(torch.zeros(2, P).double(), torch.ones(P).double())
    torch.testing.assert_close(M.power(rows, -1), rows)
    twice = FeaturePreconditioner(torch.cat([features, features]), torch.ones(P).double())
    torch.testing.assert_close(twice.power(twice.power(rows, -0.5), 0.5), rows)


@pytest.mark.parametrize("tolerance", [0.1, 1e-3, 1e-9])
def test_the_solution_is_the_dense_one_and_the_certificate_bounds_it(A, features, tolerance):
    b = randn(K, P, seed=3)
    solution = DeflatedCG(FeaturePreconditioner(features, A.deviation), tolerance).solve(A, b)
    assert solution.converged and solution.passes == A.passes and solution.error <= tolerance
    x, error = solution.x, solution.x - exact(A, b)
    assert (error @ A.matrix * error).sum() <= (tolerance**2 + 1e-15) * (x @ A.matrix * x).sum()
    true = ((error @ (A.matrix + torch.eye(P).to(b))) * error).sum(1).sqrt()
    assert (true <= solution.certificate + 1e-9).all()
    assert (solution.certificate <= 30 * true + 1e-9).all()
    torch.testing.assert_close(solution.image, x @ A.matrix, rtol=1e-6, atol=1e-6)


def test_energies_are_those_of_the_problem_not_of_the_preconditioned_one(A, features):
    solution = DeflatedCG(FeaturePreconditioner(features, A.deviation), 1e-9).solve(
        A, randn(K, P, seed=3)
    )
    energy = (solution.x @ A.matrix * solution.x).sum(1)
    torch.testing.assert_close(solution.energy, energy, rtol=1e-6, atol=1e-8)


def test_it_takes_fewer_passes_than_plain_block_cg(A, features):
    b = randn(K, P, seed=3)
    plain, deflated = (
        BlockCG(1e-3).solve(A, b),
        DeflatedCG(FeaturePreconditioner(features, A.deviation), 1e-3).solve(A, b),
    )
    assert deflated.passes < plain.passes


@pytest.mark.parametrize("deflated", [False, True])
def test_a_start_whose_image_is_known_saves_a_product(A, features, deflated):
    solver = (
        DeflatedCG(FeaturePreconditioner(features, A.deviation), 1e-4)
        if deflated
        else BlockCG(1e-4)
    )
    b = randn(K, P, seed=3)
    start = exact(A, b)
    assert solver.solve(A, b, start).passes == 1
    assert solver.solve(A, b, start, start @ A.matrix).passes == 0
    start = start + 0.01 * randn(K, P, seed=4)
    known = solver.solve(A, b, start, start @ A.matrix)
    torch.testing.assert_close(known.x, exact(A, b), rtol=1e-4, atol=1e-4)


def test_float32_keeps_the_bound(A, features):
    b = randn(K, P, seed=3)
    truth, exact_matrix = exact(A, b), A.matrix
    A.G, A.deviation = A.G.float(), A.deviation.float()
    solution = DeflatedCG(FeaturePreconditioner(features.float(), A.deviation), 1e-3).solve(
        A, b.float()
    )
    error = solution.x.double() - truth
    true = ((error @ (exact_matrix + torch.eye(P).to(b))) * error).sum(1).sqrt()
    assert solution.converged and (true <= 1.1 * solution.certificate + 1e-5).all()


@pytest.mark.parametrize("option", ["tolerance", "max_passes"])
def test_options_are_checked(features, option):
    with pytest.raises(ValueError, match=f"DeflatedCG: {option} must be above 0"):
        DeflatedCG(None, **{option: 0})


def hyper_of(problem, *precisions):
    return Hyperparameters(torch.tensor(precisions, dtype=torch.float64), sigma_of(problem))


@pytest.mark.parametrize("name", ["classification", "regression", "poisson"])
def test_the_e_step_is_that_of_plain_solves(name):
    problem = tiny(name).problem(7, 18)
    noise = basis_noise(problem, True, True)
    plain = iterative_e_step(problem, noise, BlockCG(max_passes=2000))
    first = torch.tensor([1.0, 30.0, 5.0, 2.0]).double()
    deflated = iterative_e_step(problem, noise, BlockCG(max_passes=2000), deflated_at=first)
    for precisions in ((1.0, 30.0, 5.0, 2.0), (3.0, 9.0, 50.0, 1.0)):
        hyper = hyper_of(problem, *precisions)
        if name == "regression":
            hyper = hyper._replace(sigma=0.2 * hyper.sigma * precisions[0])
        ours, theirs = (e.expect(hyper, 1e-9, 1e-9) for e in (deflated, plain))
        torch.testing.assert_close(ours.effective_dims, theirs.effective_dims, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.squared_norm, theirs.squared_norm, rtol=1e-5, atol=1e-6)
    ours, theirs = (e.posterior(hyper, 1e-9) for e in (deflated, plain))
    torch.testing.assert_close(ours.w_lin, theirs.w_lin, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.w_samples, theirs.w_samples, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.log_evidence, theirs.log_evidence)


@pytest.mark.parametrize("precision", [0.5, 20.0])
def test_going_on_at_another_precision_needs_no_product_for_its_residual(precision):
    problem = tiny("classification").problem(7, 18)
    noise = get_sto_samples(problem, 3, layerwise=True)
    first = torch.tensor([2.0, 5.0, 1.0, 9.0]).double()
    earlier = optimise_samples(problem, noise, first, BlockCG(1e-9))
    torch.testing.assert_close(earlier.Gw, problem.ggn_product(earlier.w), rtol=1e-6, atol=1e-6)
    there = precision * first
    known = optimise_samples(problem, noise, there, BlockCG(1e-9), Start(earlier.w, earlier.Gw))
    asked = optimise_samples(problem, noise, there, BlockCG(1e-9), earlier.w)
    assert known.passes == asked.passes - 1
    torch.testing.assert_close(known.w, asked.w, rtol=1e-6, atol=1e-7)


def test_without_room_for_a_basis_solves_are_plain(monkeypatch):
    monkeypatch.setattr("torch_lla_em.problem.plan.free_memory", lambda device: 4.0)
    problem = tiny("classification").problem(7, 18)
    noise = get_sto_samples(problem, 3, layerwise=True)
    hyper = hyper_of(problem, 1.0, 3.0, 5.0, 2.0)
    assert Deflation.of(problem, noise, hyper.precision) is None


@pytest.mark.parametrize(
    "name, deflate, deflates",
    [
        ("classification", True, True),
        ("classification", False, False),
        ("regression per output", True, False),
    ],
)
def test_layerwise_fits_deflate_where_noise_only_scales_G(name, deflate, deflates):
    problem = tiny(name).problem(7, 18)
    noise = get_sto_samples(problem, 3, layerwise=True)
    solver = BlockCG(deflate=deflate)
    options = FitOptions(3, layerwise=True, solver=solver, curvature="network")
    e_step = make_e_step(problem, noise, options, hyper_of(problem, 1.0, 3.0, 5.0, 2.0))
    assert (e_step._deflation is not None) == deflates
