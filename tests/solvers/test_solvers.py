"""Solvers of (A + I) X = B against dense solves, and the faults they must find."""

import pytest
import torch
from tiny import draw
from torch.testing import assert_close

from torch_lla_em.solvers import (
    SGD,
    BlockCG,
    BlockKrylov,
    DivergenceError,
    FaultyProductError,
    FunctionSpace,
    Newton,
    Operator,
)

P, K = 40, 5
SOLVERS = [BlockCG, FunctionSpace]


class Dense(Operator):
    """A = RᵀR as solvers see it, with its products counted."""

    def __init__(self, R, batches=1):
        self.R, self.batches, self.passes = R, batches, 0

    def __call__(self, x):
        self.passes += 1
        return x @ self.R.T @ self.R

    def rows(self):
        self.passes += 1
        return self.R.clone()

    def minibatches(self):
        self.passes += 1
        for part in self.R.chunk(self.batches):
            yield lambda x, part=part: x @ part.T @ part

    def num_steps(self):
        return None

    @property
    def matrix(self):
        return self.R.T @ self.R


def rooted(spectrum, seed=1, batches=1):
    """A with the given eigenvalues and random eigenvectors."""
    spectrum = torch.as_tensor(spectrum, dtype=torch.float64)
    Q = torch.linalg.qr(draw(P, P, seed=seed)).Q[: len(spectrum)]
    return Dense(spectrum.sqrt()[:, None] * Q, batches)


@pytest.fixture(params=["flat", "decaying", "rank 6", "zero"])
def A(request):
    spectra = {
        "flat": torch.linspace(1, 30, P),
        "decaying": torch.logspace(4, -4, P),
        "rank 6": torch.linspace(1, 100, 6),
        "zero": torch.zeros(3),
    }
    return rooted(spectra[request.param])


def exact(A, b):
    return torch.linalg.solve(A.matrix + torch.eye(P).to(b), b.T).T


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("tolerance", [1e-10, 1e-2, 0.1])
def test_the_solution_is_the_dense_one_up_to_its_certificate(solver, tolerance, A):
    b = draw(K, P)
    solution = solver(tolerance=tolerance).solve(A, b)
    assert solution.converged and solution.error <= tolerance and solution.passes == A.passes
    x, error = solution.x, solution.x - exact(A, b)
    residual = b - x - x @ A.matrix
    assert_close(solution.certificate, residual.norm(dim=1), rtol=1e-5, atol=1e-10)
    assert_close(solution.energy, (x @ A.matrix * x).sum(1), rtol=1e-5, atol=1e-10)
    # the largest error of any input and output, in posterior standard deviations
    true = ((error @ (A.matrix + torch.eye(P).to(b))) * error).sum(1).sqrt()
    assert (true <= solution.certificate + 1e-11).all()
    if tolerance == 1e-10:
        assert_close(x, exact(A, b))


@pytest.mark.parametrize("decay", [1, 2, 3])
def test_the_certificate_is_within_a_factor_of_30_of_the_truth(decay):
    A, b = rooted(torch.logspace(decay, -2, P)), draw(K, P)
    solution = BlockCG(tolerance=0.1).solve(A, b)
    error = solution.x - exact(A, b)
    true = ((error @ (A.matrix + torch.eye(P).to(b))) * error).sum(1).sqrt()
    assert (solution.certificate <= 30 * true).all()


@pytest.mark.parametrize("solver", SOLVERS)
def test_dependent_duplicate_and_zero_columns(solver, A):
    b = draw(3, P)
    b = torch.cat([b, b[:1], torch.zeros(1, P).double(), 2 * b[1:2] - b[2:3]])
    solution = solver(tolerance=1e-10).solve(A, b)
    assert solution.converged
    assert_close(solution.x, exact(A, b))
    nothing = solver().solve(A, torch.zeros_like(b))
    assert nothing.converged and not nothing.x.any()


def test_columns_of_very_different_sizes_converge_together():
    A = rooted(torch.logspace(3, -1, P))
    eigenvectors = torch.linalg.eigh(A.matrix).eigenvectors.T
    easy = eigenvectors[-1:]  # one product suffices
    b = torch.cat([1e-6 * draw(1, P), easy, 1e3 * draw(1, P, seed=3), draw(2, P, seed=4)])
    solution = BlockCG(tolerance=1e-9).solve(A, b)
    assert solution.converged
    assert_close(solution.x, exact(A, b), atol=1e-8, rtol=1e-7)


def test_a_start_is_left_alone_and_saves_products(A):
    b = draw(K, P)
    start, truth = exact(A, b), exact(A, b)
    solution = BlockCG(tolerance=1e-6).solve(A, b, start)
    assert solution.converged and solution.passes == 1
    assert_close(start, truth)
    start[2:] += draw(K - 2, 1, seed=3) * draw(1, P, seed=4)  # which leaves a residual of low rank
    solution = BlockCG(tolerance=1e-10).solve(A, b, start)
    assert solution.converged
    assert_close(solution.x, truth)


def test_more_columns_need_fewer_passes():
    A = rooted(torch.logspace(4, -4, P))
    passes = [BlockCG(tolerance=1e-3).solve(A, draw(k, P)).passes for k in (1, 4, 16)]
    assert passes[0] > passes[1] > passes[2]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_float32_reaches_a_certificate_of_a_thousandth(solver, device):
    A = rooted(torch.logspace(4, -4, P))
    truth = exact(A, draw(K, P))
    A.R = A.R.float().to(device)
    solution = solver(tolerance=1e-3).solve(A, draw(K, P).float().to(device))
    assert solution.converged and solution.error <= 1e-3
    assert solution.x.dtype == torch.float32 and solution.x.device.type == device
    error = solution.x.cpu().double() - truth
    R = A.R.cpu().double()
    assert (error @ R.T).norm() <= 2e-3 * (truth @ R.T).norm()


@pytest.mark.parametrize("solver", [SGD, BlockCG])
def test_too_few_passes_are_told_not_hidden(solver):
    A, b = rooted(torch.logspace(5, -1, P)), draw(1, P)
    options = {"epochs": 3} if solver is SGD else {"max_passes": 3}
    solution = solver(tolerance=1e-8, **options).solve(A, b)
    assert not solution.converged and solution.error > 1e-8
    if solver is not SGD:
        assert solution.passes <= 4


def test_block_cg_ends_where_it_stagnates():
    A = rooted(torch.logspace(6, 0, P))
    A.R = A.R.float()
    solution = BlockCG(tolerance=1e-12, max_passes=2000).solve(A, draw(K, P).float())
    assert not solution.converged and solution.passes < 2000


def test_a_product_that_changes_from_call_to_call_is_not_believed():
    """Dropout left on: each call is another A, symmetric or not."""
    generator = torch.Generator().manual_seed(0)

    def product(x):
        kept = torch.rand(P, generator=generator) < 0.5
        return 50 * (x * kept).flip(1)

    with pytest.raises(FaultyProductError, match="changes? from call to call"):
        BlockCG(tolerance=1e-6).solve(Operator(product), draw(K, P))


POSITIVE = rooted(torch.linspace(1, 50, P)).matrix
FAULTS = {
    "not symmetric": (
        draw(P, P),
        FaultyProductError,
        "not symmetric.*Correct the model or the loader",
    ),
    "negative": (-POSITIVE, FaultyProductError, "negative curvature"),
    "NaN": (float("nan") * POSITIVE, DivergenceError, "[Cc]heck"),
    "infinite": (float("inf") * torch.eye(P).double(), DivergenceError, "[Cc]heck"),
}


@pytest.mark.parametrize("kind, columns", [*((kind, K) for kind in FAULTS), ("negative", 1)])
def test_faulty_products_are_refused(kind, columns):
    matrix, error, message = FAULTS[kind]
    with pytest.raises(error, match=message):
        BlockCG().solve(Operator(lambda x: x @ matrix), draw(columns, P))


def test_growth_is_found_before_it_is_nan():
    """Each product is ten times the last: the error grows though every number is finite."""
    calls = iter(range(10_000))
    A = rooted(torch.linspace(1, 30, P)).matrix
    with pytest.raises((DivergenceError, FaultyProductError)):
        BlockCG(tolerance=1e-9).solve(Operator(lambda x: 10.0 ** next(calls) * (x @ A)), draw(K, P))


def test_sgd_comes_near_the_dense_solution():
    A, b = rooted(torch.linspace(1, 30, P), batches=3), draw(K, P)
    solution = SGD(epochs=300, learning_rate=1e-2).solve(A, b)
    assert solution.error < 0.3 and solution.passes == A.passes - 1  # sizes need no product
    error = (solution.x - exact(A, b)) @ A.R.T
    assert error.norm() <= solution.error * (exact(A, b) @ A.R.T).norm() * 1.01


def test_sgd_finds_a_step_size_and_starts_no_further_than_the_solution_can_be():
    A, b = rooted(torch.linspace(1, 30, P), batches=2), draw(K, P)
    assert SGD(epochs=300).solve(A, b).error < 0.1
    A, solver = rooted(torch.linspace(1, 30, P)), SGD(epochs=2, learning_rate=1e-3)
    solution = solver.solve(A, b, exact(A, b))
    assert solution.converged
    assert_close(solution.x, exact(A, b))
    assert_close(solver.solve(A, b, 100 * b).x, solver.solve(A, b).x)


def test_sgd_divergence_is_found_while_finite():
    A, b = rooted(torch.linspace(1, 30, P)), draw(K, P)
    with pytest.raises(DivergenceError, match="Lower its learning_rate"):
        SGD(epochs=5, learning_rate=1.0).solve(A, b)


@pytest.mark.parametrize(
    "solver, options",
    [
        (BlockCG, {"tolerance": 0}),
        (BlockCG, {"max_passes": 0}),
        (BlockKrylov, {"tolerance": -1}),
        (BlockKrylov, {"memory": 0}),
        (FunctionSpace, {"tolerance": 0}),
        (Newton, {"tolerance": 0}),
        (Newton, {"max_passes": 0}),
        (SGD, {"epochs": 0}),
        (SGD, {"learning_rate": -1.0}),
    ],
)
def test_options_are_checked_where_they_enter(solver, options):
    with pytest.raises(
        ValueError, match=f"{solver.__name__}: {next(iter(options))} must be above 0"
    ):
        solver(**options)


def test_a_limit_of_memory_changes_nothing_for_one_precision():
    assert BlockKrylov.solve is BlockCG.solve and BlockKrylov.roughly is BlockCG.roughly
