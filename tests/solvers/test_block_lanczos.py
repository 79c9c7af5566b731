"""Block Lanczos against dense matrices: Q orthonormal, T = Q G Qᵀ, and what T alone gives."""

import logging

import pytest
import torch

from torch_lla_em.solvers import DivergenceError, FaultyProductError, Operator, Space, Spectrum
from torch_lla_em.solvers.block_lanczos import BlockLanczos, KrylovPosterior

P, K = 30, 3


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def matrix(spectrum):
    Q = torch.linalg.qr(randn(P, P, seed=9)).Q
    return Q @ torch.diag(torch.as_tensor(spectrum, dtype=torch.float64)) @ Q.T


@pytest.fixture(params=["smooth", "clustered", "rank 4"])
def G(request):
    spectra = {
        "smooth": torch.logspace(2, -3, P),
        "clustered": torch.cat([torch.full((20,), 7.0), torch.linspace(10, 50, 10)]),
        "rank 4": torch.cat([torch.linspace(1, 9, 4), torch.zeros(P - 4)]),
    }
    return matrix(spectra[request.param])


def run(G, start, steps, **options):
    lanczos = BlockLanczos(Operator(lambda x: x @ G), start, **options)
    for _ in range(steps):
        if not lanczos.exhausted:
            lanczos.extend()
    return lanczos


def dense_roots(G):
    """η that makes averages over a basis exact: rows of a root of G."""
    values, vectors = torch.linalg.eigh(G)
    return values.clamp_min(0).sqrt()[:, None] * vectors.T


def test_the_basis_is_orthonormal_and_T_is_its_projection(G):
    lanczos = run(G, randn(K, P), 4)
    Q = torch.cat(lanczos.basis[: lanczos.num_steps])
    torch.testing.assert_close(Q @ Q.T, torch.eye(len(Q)).to(Q))
    torch.testing.assert_close(lanczos.tridiagonal(), Q @ G @ Q.T)


@pytest.mark.parametrize("steps", [1, 3])
def test_going_on_equals_starting_anew(G, steps):
    lanczos = run(G, randn(K, P), steps)
    lanczos.extend()
    assert lanczos.num_steps == steps + 1 or lanczos.exhausted
    torch.testing.assert_close(lanczos.eigenvalues, run(G, randn(K, P), steps + 1).eigenvalues)


def test_an_exhausted_space_is_invariant(G):
    lanczos = run(G, randn(K, P), P)
    assert lanczos.exhausted and lanczos.num_steps < P
    Q = torch.cat(lanczos.basis)
    torch.testing.assert_close(Q @ G, lanczos.tridiagonal() @ Q, atol=1e-8, rtol=1e-8)


def test_dependent_and_zero_rows_leave_the_start():
    G = matrix(torch.logspace(2, -3, P))
    rows = randn(K, P)
    start = torch.cat([rows, rows[:1] + rows[1:2], torch.zeros(1, P).double(), 3 * rows[2:]])
    lanczos = run(G, start, 2)
    assert [len(block) for block in lanczos.basis] == [K, K, K]
    torch.testing.assert_close(lanczos.start @ lanczos.basis[0], start)


def test_rows_leave_one_by_one_when_their_spaces_close():
    """One row sees 2 eigenvectors only, one 5, the third all."""
    values, vectors = torch.linalg.eigh(matrix(torch.logspace(2, -1, P)))
    few, some = randn(1, 2) @ vectors.T[-2:], randn(1, 5, seed=1) @ vectors.T[10:15]
    G = vectors @ torch.diag(values) @ vectors.T
    lanczos = run(G, torch.cat([few, some, randn(1, P, seed=2)]), P)
    sizes = [len(block) for block in lanczos.basis]
    assert sizes[:3] == [3, 3, 2] and sorted(sizes, reverse=True) == sizes
    assert lanczos.exhausted and sum(sizes) <= P


def test_nothing_to_start_from_is_exhausted():
    lanczos = BlockLanczos(Operator(lambda x: x), torch.zeros(2, P).double())
    assert lanczos.exhausted


def krylov_of_a_basis(G, steps=P):
    """Noise that is a basis: P rows of ξ and no η, then no ξ and P rows of η."""
    zeros = torch.zeros(P, P, dtype=torch.float64)
    xi = torch.cat([torch.eye(P).to(G), zeros])
    eta = torch.cat([zeros, dense_roots(G)])
    krylov = KrylovPosterior(BlockLanczos(Operator(lambda x: x @ G), torch.cat([xi, eta])), 2 * P)
    for _ in range(steps):
        if not krylov.lanczos.exhausted:
            krylov.lanczos.extend()
    return krylov


@pytest.mark.parametrize("precision", [0.03, 1.0, 40.0])
@pytest.mark.parametrize("noise", [1.0, 0.5, 3.0])
def test_dims_and_log_det_of_any_shift_are_the_dense_ones(G, precision, noise):
    spectrum = krylov_of_a_basis(G).spectrum.at_noise(noise)
    A = G / noise**2
    gamma = torch.linalg.solve(A + precision * torch.eye(P).to(G), A).trace()
    torch.testing.assert_close(spectrum.effective_dims(precision).sum(), gamma)
    log_det = torch.logdet(torch.eye(P).to(G) + A / precision)
    torch.testing.assert_close(spectrum.log_dets(precision).sum(), log_det)


@pytest.mark.parametrize("precision", [0.03, 1.0, 40.0])
def test_samples_have_the_posterior_covariance(G, precision):
    krylov = krylov_of_a_basis(G)
    w = krylov.samples(precision)
    covariance = torch.linalg.inv(G + precision * torch.eye(P).to(G))
    torch.testing.assert_close(w.T @ w, covariance, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("precision", [0.03, 1.0, 40.0])
def test_early_certificates_are_the_true_residuals_and_tight(precision):
    G = matrix(torch.logspace(2, -3, P))
    xi, eta = randn(K, P), randn(K, P, seed=1) @ dense_roots(G)
    krylov = KrylovPosterior(BlockLanczos(Operator(lambda x: x @ G), torch.cat([xi, eta])), K)
    H = G + precision * torch.eye(P).to(G)
    b = precision**0.5 * xi + eta
    for _ in range(3):
        krylov.lanczos.extend()
        w = krylov.samples(precision)
        residual = b - w @ H
        certificate = krylov.certificates(precision)
        torch.testing.assert_close(certificate, residual.norm(dim=1) / precision**0.5)
        error = w - torch.linalg.solve(H, b.T).T
        true = ((error @ H) * error).sum(1).sqrt()
        assert (true <= certificate * (1 + 1e-9) + 1e-12).all()
        assert (certificate <= 30 * true + 1e-12).all()
        assert krylov.error(precision) == pytest.approx(
            (
                certificate.square().mean()
                / krylov.spectrum.effective_dims(precision).mean().clamp_min(1)
            )
            .sqrt()
            .item()
        )


def test_the_slope_of_the_log_det_is_minus_gamma():
    spectrum = Spectrum(torch.logspace(-6, 3, 20).double(), randn(K, 20), randn(K, 20, seed=1))
    log_precision = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    precision = log_precision.exp()
    total = spectrum.log_dets(precision).sum()
    (slope,) = torch.autograd.grad(total, log_precision)
    torch.testing.assert_close(slope, -spectrum.effective_dims(precision.detach()).sum())


def test_directions_without_curvature_count_as_prior():
    spectrum = Spectrum(torch.zeros(4).double(), randn(K, 4), torch.zeros(K, 4).double())
    assert not spectrum.log_dets(2.0).any() and not spectrum.effective_dims(2.0).any()


def test_without_room_for_the_basis_T_is_the_same(caplog):
    G = matrix(torch.logspace(2, -3, P))
    start = randn(2 * K, P)
    full = run(G, start, 3)
    with caplog.at_level(logging.INFO, "torch_lla_em"):
        lean = run(G, start, 3, memory=3 * start.nbytes - 1)
    assert full.has_basis and not lean.has_basis and len(lean.basis) == 2
    assert "outgrown" in caplog.text
    torch.testing.assert_close(lean.eigenvalues, full.eigenvalues)


def test_float32_keeps_the_basis_orthonormal():
    G = matrix(torch.logspace(4, -4, P)).float()
    lanczos = run(G, randn(K, P).float(), 6)
    Q = torch.cat(lanczos.basis).double()
    assert (Q @ Q.T - torch.eye(len(Q)).double()).abs().max() < 1e-5


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_float32_reaches_a_certificate_of_a_thousandth(device):
    G = matrix(torch.logspace(3, -4, P)).float().to(device)
    start = torch.cat([randn(K, P), randn(K, P, seed=1) @ dense_roots(G.cpu().double())])
    krylov = KrylovPosterior(BlockLanczos(Operator(lambda x: x @ G), start.float().to(device)), K)
    while not krylov.lanczos.exhausted and (
        not krylov.lanczos.num_steps or krylov.error(1.0) > 1e-3
    ):
        krylov.lanczos.extend()
    w = krylov.samples(1.0).double().cpu()
    H = G.double().cpu() + torch.eye(P).double()
    residual = start[:K] + start[K:] - w @ H
    assert (
        residual.norm() / K**0.5 <= 2e-3 * krylov.spectrum.effective_dims(1.0).mean().sqrt().cpu()
    )


def test_faulty_products_are_refused():
    start = randn(K, P)
    with pytest.raises(FaultyProductError, match="not symmetric.*Fix the model or the loader"):
        run(randn(P, P), start, 1)
    with pytest.raises(FaultyProductError, match="negative curvature"):
        run(-matrix(torch.ones(P)), start, 1)
    with pytest.raises(DivergenceError, match="not finite"):
        run(matrix(torch.ones(P)) * float("nan"), start, 1)


def test_rounding_does_not_turn_a_basis():
    """A run that another number of ranks goes on with must find the same basis."""
    generator, orthonormalise = torch.Generator().manual_seed(0), Space().orthonormalise
    rows = torch.randn(9, 40, generator=generator, dtype=torch.float64)
    nearly = orthonormalise(rows)[0]
    for block in (rows, nearly, torch.cat([rows, rows[:2] + rows[2:4]])):
        noise = 1e-14 * torch.randn(block.shape, generator=generator, dtype=torch.float64)
        one, other = orthonormalise(block)[0], orthonormalise(block + noise)[0]
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_overlaps_in_float32_are_as_exact_as_its_rows():
    a, b = randn(3, 10_000).float(), randn(2, 10_000, seed=1).float()
    lengths = torch.outer(a.double().norm(dim=1), b.double().norm(dim=1))
    off = Space().overlap(a, b) - a.double() @ b.double().T
    assert (off.abs() <= torch.finfo(torch.float32).eps * lengths).all()


def test_a_float32_basis_stays_orthonormal():
    spectrum = torch.logspace(4, -4, 300)
    G = Operator(lambda x: x * spectrum)
    lanczos = BlockLanczos(G, randn(4, 300).float())
    for _ in range(20):
        lanczos.extend()
    Q = torch.cat(lanczos.basis).double()
    off = Q @ Q.T - torch.eye(len(Q), dtype=torch.float64)
    assert off.abs().max() < 100 * torch.finfo(torch.float32).eps
