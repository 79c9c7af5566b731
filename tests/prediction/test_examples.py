"""The examples in the docstrings of the public interface run, and every argument is documented."""

import doctest
import inspect
import re

import pytest
import torch
from tiny import tiny

import torch_lla_em
from torch_lla_em import LaplaceEnsemble, LinearisedLaplace, compare, plot, torch_uncertainty
from torch_lla_em.prediction import Calibration, Comparison, Prediction

CLASSES = (LinearisedLaplace, LaplaceEnsemble, Prediction, Comparison, Calibration)
PUBLIC = [*CLASSES, compare, torch_uncertainty.RoutineModel]
PUBLIC += [f for f in vars(plot).values() if getattr(f, "__module__", "") == plot.__name__]
PUBLIC = [f for f in PUBLIC if f.__name__[0] != "_" and f is not plot.unfamiliarity]


@pytest.fixture(scope="module")
def names():
    """What the examples use: posteriors of two networks and of a regression, and data."""
    fit = {"em_steps": 1, "progress_bar": False}
    case, real = tiny("classification"), tiny("regression")
    la, other = (LinearisedLaplace(case.model, "classification", num_samples=4) for _ in range(2))
    regression = LinearisedLaplace(real.model, "regression", num_samples=4)
    for each in (la, other):
        each.fit(case.x, case.y, **fit).calibrate(case.x, case.y)
    regression.fit(real.x, real.y, **fit).calibrate(real.x, real.y)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(case.x, case.y), 16)
    y = {"x": case.x, "y": case.y, "model": case.model, "loader": loader}
    names = {**vars(torch_lla_em), "RoutineModel": torch_uncertainty.RoutineModel, **y}
    return {**names, "la": la, "other": other, "regression": regression}


def _methods(public):
    if not inspect.isclass(public):
        return [public]
    kept = [public]
    for name in dir(public):
        value = inspect.getattr_static(public, name)
        value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if name[0] != "_" and getattr(value, "__module__", "").startswith("torch_lla_em"):
            kept.append(value)
    return kept


@pytest.mark.parametrize("public", PUBLIC, ids=lambda public: public.__qualname__)
def test_examples_run(public, names):
    runner, parser = doctest.DocTestRunner(), doctest.DocTestParser()
    for each in _methods(public):
        test = parser.get_doctest(each.__doc__ or "", dict(names), each.__qualname__, None, 0)
        runner.run(test)
    assert not runner.failures


@pytest.mark.parametrize("public", PUBLIC, ids=lambda public: public.__qualname__)
def test_every_argument_is_documented(public):
    missing = []
    for each in _methods(public):
        if each in (Prediction, Comparison, Calibration) or not (each.__doc__ or "").strip():
            if not each.__doc__:
                missing.append(each.__qualname__)
            continue
        for name, parameter in inspect.signature(each).parameters.items():
            named = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            is_documented = re.search(rf"^ +{name} \(", each.__doc__, re.MULTILINE)
            if named and name not in ("self", "cls", "args", "kwargs") and not is_documented:
                missing.append(f"{each.__qualname__}({name})")
    assert not missing
