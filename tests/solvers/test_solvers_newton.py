"""Newton's method with conjugate gradients inside, against dense minima."""

import pytest
import torch
from torch.nn.functional import softplus

from torch_lla_em.solvers import DivergenceError, FaultyProductError, Newton, Operator, Space
from torch_lla_em.solvers.newton import conjugate_gradients

N, P = 60, 12


class Loss:
    space, rounding = Space(), 0.0


class Logistic(Loss):
    """Σ_n log(1 + exp(⟨r_n, x⟩)) - y_n ⟨r_n, x⟩, with its passes counted."""

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


class Quadratic(Loss):
    """½ ⟨x, A x⟩ - ⟨b, x⟩."""

    def __init__(self, A, b):
        self.A, self.b = A, b

    def value_and_gradient(self, x):
        return (0.5 * x @ self.A @ x - self.b @ x).item(), self.A @ x - self.b

    def hessian(self, x):
        return Operator(lambda v: v @ self.A)


@pytest.fixture(params=[0.3, 3.0, 30.0])
def loss(request):
    generator = torch.Generator().manual_seed(0)
    R = request.param * torch.randn(N, P, generator=generator, dtype=torch.float64)
    y = (torch.rand(N, generator=generator) < 0.5).double()
    return Logistic(R, y)


def zeros(dtype=torch.float64):
    return torch.zeros(P, dtype=dtype)


def test_the_gradient_of_the_whole_vanishes(loss):
    minimum = Newton(1e-10).minimise(loss, zeros())
    assert minimum.converged
    gradient = loss.value_and_gradient(minimum.x)[1] + minimum.x
    assert gradient.norm() <= 1e-10 * minimum.x.norm()
    assert minimum.loss == loss.value_and_gradient(minimum.x)[0]


def test_the_gradient_bounds_the_error(loss):
    exact = Newton(1e-12).minimise(loss, zeros()).x
    minimum = Newton(0.1).minimise(loss, zeros())
    error = (minimum.x - exact).norm()
    assert error <= minimum.gradient_norm
    assert minimum.error == pytest.approx(minimum.gradient_norm / minimum.x.norm().item())
    assert minimum.error <= 0.1


def test_passes_are_counted(loss):
    minimum = Newton(1e-6).minimise(loss, zeros())
    assert minimum.passes == loss.passes


def test_a_quadratic_takes_one_step():
    A = torch.diag(torch.logspace(0, 3, P, dtype=torch.float64))
    b = torch.ones(P, dtype=torch.float64)
    minimum = Newton(1e-12, forcing=0.0).minimise(Quadratic(A, b), zeros())
    torch.testing.assert_close(minimum.x, b / (A.diagonal() + 1))


def test_a_warm_start_saves_passes(loss):
    exact = Newton(1e-10).minimise(loss, zeros()).x
    cold = Newton(1e-4).minimise(loss, zeros())
    assert Newton(1e-4).minimise(loss, exact * (1 + 1e-5)).passes < cold.passes


def test_the_exact_inverse_as_preconditioner_saves_passes(loss):
    exact = Newton(1e-12).minimise(loss, zeros()).x
    inverse = torch.linalg.inv(loss.curvature(exact) + torch.eye(P).to(exact))
    start = exact * 1.05
    plain = Newton(1e-8).minimise(loss, start)
    helped = Newton(1e-8).minimise(loss, start, lambda rows: rows @ inverse)
    torch.testing.assert_close(helped.x, exact, rtol=1e-6, atol=1e-6)
    assert helped.passes < plain.passes


def test_too_few_passes_are_told(loss):
    minimum = Newton(1e-10, max_passes=2).minimise(loss, zeros())
    assert not minimum.converged and minimum.error > 1e-10


def test_float32_is_enough(loss):
    exact = Newton(1e-10).minimise(loss, zeros()).x
    single = Logistic(loss.R.float(), loss.y.float())
    minimum = Newton(5e-3).minimise(single, zeros(torch.float32))
    assert minimum.converged
    assert (minimum.x.double() - exact).norm() <= 5e-3 * exact.norm()


def test_float32_stops_where_rounding_stops_it(loss):
    single = Logistic(loss.R.float(), loss.y.float())
    minimum = Newton(1e-12).minimise(single, zeros(torch.float32))
    assert not minimum.converged and minimum.error < 5e-3


def test_a_descent_that_rounding_hides_is_not_looked_for(loss):
    exact, whole = Newton(1e-10).minimise(loss, zeros()), loss.value_and_gradient

    def coarse(x):  # as of many rows whose losses are small beside their outputs
        value, gradient = whole(x)
        return value + x.norm().item() % 1e-3, gradient

    loss.value_and_gradient = coarse
    minimum = Newton(1e-9).minimise(loss, exact.x + 1e-4)
    assert (minimum.x - exact.x).norm() <= 1e-3


def test_a_gradient_that_is_not_finite_is_refused(loss):
    loss.R[3] = float("nan")
    with pytest.raises(DivergenceError, match="check the model's outputs and the targets"):
        Newton().minimise(loss, zeros())


def test_a_gradient_of_another_loss_is_refused(loss):
    honest = loss.value_and_gradient

    def wrong(x):
        value, gradient = honest(x)
        return value, -3 * gradient

    loss.value_and_gradient = wrong
    with pytest.raises(DivergenceError, match="found no descent"):
        Newton(1e-6).minimise(loss, zeros())


def test_negative_curvature_is_refused(loss):
    loss.curvature = lambda x: -100 * torch.eye(P, dtype=torch.float64)
    with pytest.raises(FaultyProductError, match="negative curvature"):
        Newton().minimise(loss, zeros())


def test_conjugate_gradients_solve_and_stop():
    A = torch.diag(torch.arange(1.0, P + 1, dtype=torch.float64))
    b = torch.ones(P, dtype=torch.float64)
    x, passes = conjugate_gradients(Operator(lambda v: v @ A), b, lambda x, size: size < 1e-12)
    torch.testing.assert_close(x, b / (A.diagonal() + 1))
    assert passes <= P
    _, passes = conjugate_gradients(
        Operator(lambda v: v @ A), b, lambda x, size: False, max_passes=3
    )
    assert passes == 3


@pytest.mark.parametrize("name", ["tolerance", "max_passes"])
def test_options_are_checked(name):
    with pytest.raises(ValueError, match=f"Newton: {name} must be above 0"):
        Newton(**{name: 0})
