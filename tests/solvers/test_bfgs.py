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
