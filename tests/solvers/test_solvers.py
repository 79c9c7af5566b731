"""Solvers of (A + I) X = B, Newton's method and BFGS against dense algebra, and the faults they must find."""

import math
from types import SimpleNamespace

import pytest
import torch
from tiny import draw
from torch.nn.functional import softplus
from torch.testing import assert_close

from torch_lla_em.solvers import (
    BFGS,
    SGD,
    BlockCG,
    DivergenceError,
    Eigen,
    FaultyProductError,
    Newton,
    orthonormalise,
    overlap,
)

P, K = 40, 5


class Operator:
    """A product as solvers see it."""

    rounding = 0.0

    def __init__(self, product):
        self.product = product

    def __call__(self, x):
        return self.product(x)


class Dense(Operator):
    """A = RᵀR as solvers see it, with its products counted."""

    def __init__(self, R, batches=1):
        self.R, self.batches, self.passes = R, batches, 0

    def __call__(self, x):
        self.passes += 1
        return x @ self.R.T @ self.R

    def minibatches(self):
        parts = self.R.chunk(self.batches)

        def products():
            self.passes += 1
            for part in parts:
                yield lambda x, part=part: x @ part.T @ part

        return len(parts), products()

    @property
    def matrix(self):
        return self.R.T @ self.R


def rooted(spectrum, seed=1, batches=1):
    """A with the given eigenvalues and random eigenvectors."""
    spectrum = torch.as_tensor(spectrum, dtype=torch.float64)
    Q = torch.linalg.qr(draw(P, P, seed=seed)).Q[: len(spectrum)]
    return Dense(spectrum.sqrt()[:, None] * Q, batches)


SPECTRA = {
    "flat": torch.linspace(1, 30, P),
    "decaying": torch.logspace(4, -4, P),
    "rank 6": torch.linspace(1, 100, 6),
    "zero": torch.zeros(3),
}


@pytest.fixture(params=SPECTRA)
def A(request):
    return rooted(SPECTRA[request.param])


def exact(A, b):
    return torch.linalg.solve(A.matrix + torch.eye(P).to(b), b.T).T


def error_of(A, x, b):
    """The largest error of any input and output, in posterior standard deviations."""
    error = x - exact(A, b)
    return ((error @ (A.matrix + torch.eye(P).to(b))) * error).sum(1).sqrt()


@pytest.mark.parametrize("tolerance", [1e-10, 1e-2, 0.1])
def test_the_solution_is_the_dense_one_up_to_its_certificate(tolerance, A):
    b = draw(K, P)
    solution = BlockCG(tolerance=tolerance).solve(A, b)
    assert solution.converged and solution.error <= tolerance and solution.passes == A.passes
    x, residual = solution.x, b - solution.x - solution.x @ A.matrix
    assert_close(solution.certificate, residual.norm(dim=1), rtol=1e-5, atol=1e-10)
    assert_close(solution.energy, (x @ A.matrix * x).sum(1), rtol=1e-5, atol=1e-10)
    assert (error_of(A, x, b) <= solution.certificate + 1e-11).all()
    relative = solution.certificate.square().mean() / solution.energy.mean().clamp_min(1)
    assert solution.error == pytest.approx(relative.sqrt().item())
    if tolerance == 1e-10:
        assert_close(x, exact(A, b))
        b = torch.cat([b[:3], b[:1], torch.zeros(1, P).double(), 2 * b[1:2] - b[2:3]])
        solution = BlockCG(tolerance=1e-10).solve(A, b)  # dependent, duplicate and zero columns
        assert solution.converged
        assert_close(solution.x, exact(A, b))
        easy = torch.linalg.eigh(A.matrix).eigenvectors.T[-1:]  # one product suffices
        b = torch.cat([1e-6 * draw(1, P), easy, 1e3 * draw(1, P, seed=3)])  # of different sizes
        assert_close(BlockCG(tolerance=1e-9).solve(A, b).x, exact(A, b), atol=1e-8, rtol=1e-7)
        nothing = BlockCG().solve(A, torch.zeros_like(b))
        assert nothing.converged and not nothing.x.any()


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


@pytest.mark.parametrize("tolerance", [1e-6, 1e-2])
def test_the_residual_of_the_recursion_is_the_true_one_up_to_rounding(tolerance, A):
    b = draw(K, P)
    solution = BlockCG(tolerance, verified=False).solve(A, b)
    assert solution.converged and solution.passes == A.passes
    residual = b - solution.x - solution.x @ A.matrix
    assert_close(solution.certificate, residual.norm(dim=1), rtol=1e-3, atol=1e-3 * tolerance)
    passes, A.passes = A.passes, 0
    assert BlockCG(tolerance).solve(A, b).passes == passes + 1
    stuck = BlockCG(1e-12, max_passes=2, verified=False).solve(A, b)
    assert not stuck.converged or stuck.certificate.max() < 1e-9  # one product may suffice


def test_more_columns_need_fewer_passes_and_too_few_passes_are_told():
    A = rooted(torch.logspace(4, -4, P))
    passes = [BlockCG(tolerance=1e-3).solve(A, draw(k, P)).passes for k in (1, 4, 16)]
    assert passes[0] > passes[1] > passes[2]
    A, b = rooted(torch.logspace(5, -1, P)), draw(1, P)
    for solver in (SGD(1e-8, epochs=3), BlockCG(1e-8, max_passes=3)):
        solution = solver.solve(A, b)
        assert not solution.converged and solution.error > 1e-8
        assert solution.passes <= 4 or isinstance(solver, SGD)
    A = rooted(torch.logspace(6, 0, P))  # it ends where it stagnates
    A.R = A.R.float()
    solution = BlockCG(tolerance=1e-12, max_passes=2000).solve(A, draw(K, P).float())
    assert not solution.converged and solution.passes < 2000


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_float32_reaches_a_certificate_of_a_thousandth(device):
    A = rooted(torch.logspace(4, -4, P))
    truth = exact(A, draw(K, P))
    A.R = A.R.float().to(device)
    solution = BlockCG(tolerance=1e-3).solve(A, draw(K, P).float().to(device))
    assert solution.converged and solution.error <= 1e-3
    assert solution.x.dtype == torch.float32 and solution.x.device.type == device
    error, R = solution.x.cpu().double() - truth, A.R.cpu().double()
    assert (error @ R.T).norm() <= 2e-3 * (truth @ R.T).norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_preconditioner_saves_products_and_changes_no_solution(dtype, A):
    """M by half of the eigenvectors, and by all of them; tolerance and certificate mean what they do without."""
    b, tolerance = draw(K, P), 1e-9 if dtype == torch.float64 else 1e-3
    values, vectors = torch.linalg.eigh(A.matrix + torch.eye(P).double())
    truth, start = exact(A, b), draw(K, P, seed=5).to(dtype)
    A.R, passes = A.R.to(dtype), []
    for kept in (0, P // 2, P):
        inverse = torch.ones(P).double()
        inverse[P - kept :] = 1 / values[P - kept :]
        M = (vectors * inverse @ vectors.T).to(dtype)
        solver = BlockCG(tolerance, preconditioner=None if not kept else lambda r, M=M: r @ M)
        A.passes = 0
        solution = solver.solve(A, b.to(dtype))
        assert solution.converged and solution.passes == A.passes
        passes.append(solution.passes)
        error = (solution.x.double() - truth) @ torch.cat([A.R.double(), torch.eye(P).double()]).T
        rounding = 1e3 * torch.finfo(dtype).eps * b.norm()
        assert (error.norm(dim=1) <= 1.01 * solution.certificate + rounding).all()
        few = torch.cat([b[:2], b[:1], 0 * b[:1], b[1:2] - 2 * b[:1]]).to(dtype)  # dependent, and 0
        assert solver.solve(A, few).converged and solver.solve(A, b.to(dtype), start).converged
    assert passes[0] >= passes[1] >= passes[2] and passes[2] <= 3


def test_a_preconditioner_that_is_not_positive_is_refused():
    with pytest.raises(FaultyProductError, match="preconditioner is not positive definite"):
        BlockCG(preconditioner=lambda r: -r).solve(rooted(SPECTRA["flat"]), draw(K, P))


POSITIVE = rooted(torch.linspace(1, 50, P)).matrix
FAULTS = {
    "not symmetric": (draw(P, P), FaultyProductError, "not symmetric.*Correct the model or the loader"),
    "negative": (-POSITIVE, FaultyProductError, "negative curvature"),
    "NaN": (float("nan") * POSITIVE, DivergenceError, "[Cc]heck"),
    "infinite": (float("inf") * torch.eye(P).double(), DivergenceError, "[Cc]heck"),
}  # fmt: skip


@pytest.mark.parametrize("kind, columns", [*((kind, K) for kind in FAULTS), ("negative", 1)])
def test_faulty_products_are_refused(kind, columns):
    matrix, error, message = FAULTS[kind]
    with pytest.raises(error, match=message):
        BlockCG().solve(Operator(lambda x: x @ matrix), draw(columns, P))


def test_products_that_change_from_call_to_call_are_not_believed():
    """Dropout left on: each call is another A, symmetric or not; or each product is larger than the last."""
    generator, calls = torch.Generator().manual_seed(0), iter(range(10_000))

    def dropping(x):
        return 50 * (x * (torch.rand(P, generator=generator) < 0.5)).flip(1)

    with pytest.raises(FaultyProductError, match="changes? from call to call"):
        BlockCG(tolerance=1e-6).solve(Operator(dropping), draw(K, P))
    growing = Operator(lambda x: 10.0 ** next(calls) * (x @ POSITIVE))
    with pytest.raises((DivergenceError, FaultyProductError)):
        BlockCG(tolerance=1e-9).solve(growing, draw(K, P))


def test_sgd_comes_near_the_dense_solution_from_a_start_no_further_than_it_can_be():
    A, b = rooted(torch.linspace(1, 30, P), batches=3), draw(K, P)
    solution = SGD(epochs=300, learning_rate=1e-2).solve(A, b)
    assert solution.error < 0.3 and solution.passes == A.passes
    error = (solution.x - exact(A, b)) @ A.R.T
    assert error.norm() <= solution.error * (exact(A, b) @ A.R.T).norm() * 1.01
    assert SGD(epochs=300).solve(rooted(torch.linspace(1, 30, P), batches=2), b).error < 0.1
    A, solver = rooted(torch.linspace(1, 30, P)), SGD(epochs=2, learning_rate=1e-3)
    solution = solver.solve(A, b, exact(A, b))
    assert solution.converged
    assert_close(solution.x, exact(A, b))
    assert_close(solver.solve(A, b, 100 * b).x, solver.solve(A, b).x)
    with pytest.raises(DivergenceError, match="Lower its learning_rate"):  # while finite
        SGD(epochs=5, learning_rate=1.0).solve(A, b)


@pytest.mark.parametrize("solver", [BlockCG, Newton, SGD])
def test_options_are_checked_where_they_enter(solver):
    for name in ("epochs", "learning_rate") if solver is SGD else ("tolerance", "max_passes"):
        with pytest.raises(ValueError, match=f"{solver.__name__}: {name} must be above 0"):
            solver(**{name: 0})


# orthonormal bases and inner products under rounding


def test_rounding_does_not_turn_a_basis():
    """A run that another number of ranks goes on with must find the same basis."""
    rows = draw(9, 40)
    for block in (rows, orthonormalise(rows)[0], torch.cat([rows, rows[:2] + rows[2:4]])):
        one, other = block, block + 1e-14 * draw(*block.shape, seed=1)
        assert_close(orthonormalise(one)[0], orthonormalise(other)[0], rtol=0, atol=1e-11)


def test_nearly_dependent_rows_in_float32_have_an_orthonormal_basis():
    for distance, due in ((1e-3, 9), (1e-5, 9), (1e-9, 6)):
        rows = draw(6, 5000).float()
        rows = torch.cat([rows, rows[:3] + distance * draw(3, 5000, seed=1).float()])
        basis, _, coefficients = orthonormalise(rows)
        assert len(basis) == due
        assert_close(basis @ basis.T, torch.eye(due), rtol=0, atol=1e-5)
        assert_close(coefficients.float() @ basis, rows, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_overlaps_are_as_exact_as_float32(dtype):
    a, b = draw(3, 10_000).float(), draw(2, 10_000, seed=1).to(dtype)
    lengths = torch.outer(a.double().norm(dim=1), b.double().norm(dim=1))
    off = overlap(a, b) - a.double() @ b.double().T
    assert (off.abs() <= torch.finfo(torch.float32).eps * lengths).all()


# Newton's method

SIZE = 12


class Logistic:
    """Σ_n log(1 + exp(⟨r_n, x⟩)) - y_n ⟨r_n, x⟩, with its passes counted."""

    rounding = 0.0

    def __init__(self, R, y):
        self.R, self.y, self.passes = R, y, 0

    def value_and_gradient(self, x):
        self.passes += 1
        z = self.R @ x
        return (softplus(z) - self.y * z).sum().item(), self.R.T @ (z.sigmoid() - self.y)

    def curvature(self, x):
        p = (self.R @ x).sigmoid()
        return self.R.T @ ((p * (1 - p))[:, None] * self.R)

    def hessian(self, x):
        matrix = self.curvature(x)

        def product(v):
            self.passes += 1
            return v @ matrix

        return Operator(product)

    def float(self):
        return Logistic(self.R.float(), self.y.float())


@pytest.fixture(params=[0.3, 3.0, 30.0])
def loss(request):
    generator = torch.Generator().manual_seed(0)
    R = request.param * torch.randn(60, SIZE, generator=generator, dtype=torch.float64)
    return Logistic(R, (torch.rand(60, generator=generator) < 0.5).double())


ZEROS = torch.zeros(SIZE, dtype=torch.float64)


def test_the_gradient_vanishes_and_bounds_the_error(loss):
    exact = Newton(1e-10).minimise(loss, ZEROS)
    assert exact.converged and exact.passes == loss.passes
    gradient = loss.value_and_gradient(exact.w)[1] + exact.w
    assert gradient.norm() <= 1e-10 * exact.w.norm()
    assert exact.loss == loss.value_and_gradient(exact.w)[0]
    rough = Newton(0.1).minimise(loss, ZEROS)
    assert (rough.w - exact.w).norm() <= rough.error * rough.w.norm()
    assert rough.converged and rough.error <= 0.1
    few = Newton(1e-10, max_passes=2).minimise(loss, ZEROS)
    assert not few.converged and few.error > 1e-10
    # float32 is enough, and stops where rounding stops it
    single = Newton(5e-3).minimise(loss.float(), ZEROS.float())
    assert single.converged and (single.w.double() - exact.w).norm() <= 5e-3 * exact.w.norm()
    single = Newton(1e-12).minimise(loss.float(), ZEROS.float())
    assert not single.converged and single.error < 5e-3
    whole = loss.value_and_gradient

    def coarse(x):  # as of many rows whose losses are small beside their outputs
        value, gradient = whole(x)
        return value + x.norm().item() % 1e-3, gradient

    loss.value_and_gradient = coarse  # a descent that rounding hides is not looked for
    found = Newton(1e-9).minimise(loss, exact.w + 1e-4)
    assert (found.w - exact.w).norm() <= 1e-3


class Quadratic:
    """½ ⟨x, A x⟩ - ⟨1, x⟩."""

    rounding, A = 0.0, torch.logspace(0, 3, SIZE, dtype=torch.float64)

    def value_and_gradient(self, x):
        return (0.5 * x @ (self.A * x) - x.sum()).item(), self.A * x - 1

    def hessian(self, x):
        return Operator(lambda v: self.A * v)


def test_a_quadratic_takes_one_step():
    minimum = Newton(1e-12, forcing=0.0).minimise(Quadratic(), ZEROS)
    assert_close(minimum.w, 1 / (Quadratic.A + 1))


def by_model(H, tolerance=1e-6, **options):
    """BFGS from a model of the loss with the Hessian H."""
    return BFGS(*torch.linalg.eigh(H), tolerance, **options)


def test_eigenvalues_solve_exactly(A):
    b = draw(K, P)
    solution = Eigen(*torch.linalg.eigh(A.matrix)).solve(A, b)
    assert_close(solution.x, exact(A, b))
    assert_close(solution.energy, (solution.x @ A.matrix * solution.x).sum(1))
    assert solution.converged and not solution.certificate.any() and not A.passes


MODELS = {
    "at the start": lambda loss: loss.curvature(ZEROS),
    "at the minimum": lambda loss: loss.curvature(Newton(1e-10).minimise(loss, ZEROS).w),
    "none": lambda loss: torch.zeros(SIZE, SIZE).double(),
    "far too steep": lambda loss: 1e4 * torch.eye(SIZE).double(),
}


@pytest.mark.parametrize("model", MODELS)
def test_bfgs_finds_the_minimum_whatever_its_model_is(model, loss):
    truth, H = Newton(1e-12).minimise(loss, ZEROS).w, MODELS[model](loss)
    for start in (ZEROS, ZEROS + 30):
        loss.passes = 0
        found = by_model(H).minimise(loss, start)
        assert found.converged and found.passes == loss.passes
        assert (found.w - truth).norm() <= 2e-6 * truth.norm()
        gradient = loss.value_and_gradient(found.w)[1] + found.w
        assert gradient.norm() <= 1.01e-6 * found.w.norm()
        assert found.error == pytest.approx((gradient.norm() / found.w.norm()).item(), rel=1e-3)
        assert found.loss == pytest.approx(loss.value_and_gradient(found.w)[0], abs=1e-10)
    rough = by_model(H, 0.1).minimise(loss, ZEROS)
    assert (rough.w - truth).norm() <= rough.error * rough.w.norm() <= 0.1 * rough.w.norm()
    few = by_model(H, max_passes=2).minimise(loss, ZEROS + 30)
    assert not few.converged and few.passes == 3
    sure = by_model(loss.curvature(truth), roughly=0.01).minimise(loss, ZEROS)
    assert (sure.w - truth).norm() <= 0.02 * truth.norm() and sure.passes <= found.passes


def test_bfgs_takes_two_steps_of_a_quadratic_loss_that_is_its_model():
    found = by_model(Quadratic.A.diag(), 0.0, is_exact=True).minimise(Quadratic(), ZEROS + 5)
    assert found.passes <= 3 and found.converged
    assert_close(found.w, 1 / (Quadratic.A + 1), rtol=1e-14, atol=0)


def test_bfgs_ends_where_rounding_hides_the_loss(loss):
    """Values are rounded to a hundred-thousandth, gradients are not: the search relies on these."""
    truth, honest = Newton(1e-12).minimise(loss, ZEROS).w, loss.value_and_gradient

    def coarse(x):
        value, gradient = honest(x)
        return value * (1 + 1e-5 * math.sin(1e6 * x.norm())), gradient

    loss.value_and_gradient, loss.rounding = coarse, 1e-5
    found = by_model(loss.curvature(ZEROS), 1e-9).minimise(loss, ZEROS)
    assert (found.w - truth).norm() <= 1e-2 * truth.norm() and found.passes < 200


def test_bfgs_does_what_the_first_rank_says(loss):
    """A second search whose numbers are rounded otherwise, given what the first one agreed on."""
    told, H = [], loss.curvature(ZEROS)
    rank = SimpleNamespace(from_first=lambda t: told.append(t.clone()) or t)
    first = by_model(H, group=rank).minimise(loss, ZEROS)
    given, honest = iter(told), loss.value_and_gradient
    loss.value_and_gradient = lambda x: (1.01 * honest(x)[0], 0.99 * honest(x)[1])
    other = SimpleNamespace(from_first=lambda t: next(given).clone())
    second = by_model(H, group=other).minimise(loss, ZEROS)
    assert next(given, None) is None and torch.equal(first.w, second.w)


class Stiff(Quadratic):
    """A loss of which a Newton step takes hundreds of products, with its passes counted."""

    A = torch.logspace(0, 12, 600, dtype=torch.float64)

    def __init__(self):
        self.passes = 0

    def value_and_gradient(self, x):
        self.passes += 1
        return super().value_and_gradient(x)

    def hessian(self, x):
        def product(v):
            self.passes += 1
            return self.A * v

        return Operator(product)


def far_away():
    """A start where H is close to 0: whole Newton steps go much too far."""
    generator = torch.Generator().manual_seed(0)
    R = 3 * torch.randn(60, SIZE, generator=generator, dtype=torch.float64)
    return Logistic(R, (torch.rand(60, generator=generator) < 0.5).double()), ZEROS + 30


def stiff():
    return Stiff(), torch.zeros_like(Stiff.A)


LIMITS = [(stiff, 0.0, most) for most in (1, 2, 3, 5, 40)]
LIMITS += [(far_away, 0.1, most) for most in (3, 4, 5, 6, 7, 12)]


@pytest.mark.parametrize("make, forcing, most", LIMITS)
def test_newton_takes_no_more_passes_than_it_may_and_returns_the_lowest_point(make, forcing, most):
    """Passes are those of products and of line searches."""
    (loss, start), seen = make(), []
    honest = loss.value_and_gradient

    def watched(x):
        value, gradient = honest(x)
        seen.append(value + 0.5 * x.square().sum().item())
        return value, gradient

    loss.value_and_gradient = watched
    found = Newton(1e-12, most, forcing).minimise(loss, start)
    assert not found.converged and found.passes == loss.passes <= most
    value, gradient = loss.value_and_gradient(found.w)
    assert found.loss == value and seen[-1] == min(seen)
    assert found.error == pytest.approx((gradient + found.w).norm() / max(found.w.norm(), 1e-300))


def test_faults_of_a_loss_are_refused(loss):
    honest, curvature = loss.value_and_gradient, loss.curvature
    loss.value_and_gradient = lambda x: (honest(x)[0], -3 * honest(x)[1])
    with pytest.raises(DivergenceError, match="cannot decrease the loss"):
        Newton(1e-6).minimise(loss, ZEROS)
    loss.value_and_gradient = honest
    loss.curvature = lambda x: -100 * torch.eye(SIZE, dtype=torch.float64)
    with pytest.raises(FaultyProductError, match="negative curvature"):
        Newton().minimise(loss, ZEROS)
    loss.curvature = curvature
    loss.R[3] = float("nan")
    for search in (Newton(), by_model(torch.eye(SIZE).double())):
        with pytest.raises(DivergenceError, match="check the model's outputs and the targets"):
            search.minimise(loss, ZEROS)
