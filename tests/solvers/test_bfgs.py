"""BFGS corrects a first inverse that lacks curvature."""

import torch
from tiny import draw
from torch.testing import assert_close

from torch_lla_em.solvers import BFGS


def test_steps_along_all_directions_give_the_inverse():
    root = draw(6, 6)
    A, steps = root @ root.T + torch.eye(6).double(), torch.eye(6).double()
    inverse = BFGS(lambda g: g)
    for _ in range(6):  # exact line searches make the steps conjugate
        gradient = A @ steps[0]
        step = -inverse.times(gradient)
        step = -(step @ gradient) / (step @ A @ step) * step
        inverse.learn(step, A @ step)
        steps[0] += step
    product = inverse.times(draw(6, seed=1))
    assert_close(A @ product, draw(6, seed=1))


def test_it_learns_nothing_from_negative_curvature():
    inverse = BFGS(lambda g: 2 * g)
    inverse.learn(torch.ones(3), -torch.ones(3))
    assert_close(inverse.times(torch.ones(3)), 2 * torch.ones(3))


def quartic(point):
    """A convex function with a curvature that the first inverse does not know."""
    weights = torch.arange(1, 6, dtype=torch.float64)
    residual = point - 1
    value = (weights * residual.square()).sum() + residual.pow(4).sum()
    return value.item(), 2 * weights * residual + 4 * residual.pow(3)


def test_a_minimum_is_found_from_a_wrong_curvature():
    calls = []

    def objective(point):
        calls.append(point)
        return quartic(point)

    start, inverse = torch.full((5,), 4.0, dtype=torch.float64), BFGS(lambda g: 10 * g)
    found = inverse.minimum(
        objective, start, lambda point, slope, square: square < 1e-20, 200, torch.float64
    )
    torch.testing.assert_close(found, torch.ones(5, dtype=torch.float64))
    assert len(calls) < 40


def test_a_search_ends_after_its_evaluations():
    inverse, start = BFGS(lambda g: 0.01 * g), torch.full((5,), 4.0, dtype=torch.float64)
    found = inverse.minimum(quartic, start, lambda *_: False, 3, torch.float64)
    assert quartic(found)[0] < quartic(start)[0] and (found - 1).norm() > 1e-3
