"""Students that all tests of this folder share."""

import pytest
import torch
from tiny import draw, fitted
from torch import nn

QUICK = {"num_inputs": 100, "steps": 40, "batch_size": 64, "progress_bar": False}


def wide():
    torch.manual_seed(0)
    first, second = nn.Linear(2, 40), nn.Linear(40, 40)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(40, 3)).double()


@pytest.fixture
def quick():
    return dict(QUICK)


@pytest.fixture(scope="session")
def classified():
    case, la = fitted()
    close = {"num_inputs": 1000, "steps": 500, "lr": 0.01, "student": wide()}
    return case, la, la.distil(draw(300, 2, seed=5), **QUICK | close)


@pytest.fixture(scope="session")
def regressed():
    case, la = fitted("regression")
    return case, la, la.distil(draw(100, 2, seed=5), validation=(case.x, case.y), **QUICK)


@pytest.fixture(params=["regressed", "classified"])
def student(request):
    """A case and a student that is calibrated on its examples."""
    case, _, student = request.getfixturevalue(request.param)
    return case, student.calibrate(case.x, case.y)
