"""Newton's method with conjugate gradients inside, against dense minima."""

import pytest
import torch
from torch.nn.functional import softplus

from torch_lla_em.solvers import DivergenceError, FaultyProductError, Newton, Operator

N, P = 60, 12


class Loss:
    rounding = 0.0


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


def test_the_gradient_vanishes_and_bounds_the_error(loss):
    exact = Newton(1e-10).minimise(loss, zeros())
    assert exact.converged and exact.passes == loss.passes
    gradient = loss.value_and_gradient(exact.x)[1] + exact.x
    assert gradient.norm() <= 1e-10 * exact.x.norm()
    assert exact.loss == loss.value_and_gradient(exact.x)[0]
    rough = Newton(0.1).minimise(loss, zeros())
    assert (rough.x - exact.x).norm() <= rough.error * rough.x.norm()
    assert rough.converged and rough.error <= 0.1


def test_a_quadratic_takes_one_step():
    A = torch.diag(torch.logspace(0, 3, P, dtype=torch.float64))
    b = torch.ones(P, dtype=torch.float64)
    minimum = Newton(1e-12, forcing=0.0).minimise(Quadratic(A, b), zeros())
    torch.testing.assert_close(minimum.x, b / (A.diagonal() + 1))


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
    with pytest.raises(DivergenceError, match="cannot decrease the loss"):
        Newton(1e-6).minimise(loss, zeros())


def test_negative_curvature_is_refused(loss):
    loss.curvature = lambda x: -100 * torch.eye(P, dtype=torch.float64)
    with pytest.raises(FaultyProductError, match="negative curvature"):
        Newton().minimise(loss, zeros())
