"""The examples in the docstrings of the public interface run, and every argument is documented."""

import doctest
import inspect
import logging
import re
import warnings
from copy import copy, deepcopy
from importlib import import_module
from pathlib import Path

import pytest
import torch
from tiny import known

import torch_lla_em
from torch_lla_em import FeatureDensity, Likelihood, LinearisedLaplace, Student
from torch_lla_em.mixtures import Mixture
from torch_lla_em.runtime import Group

# modules beside the package itself, whose names are those of __all__ -> the library that they need
MODULES = {
    "plot": None,
    "integrations.botorch": "botorch",
    "integrations.estimators": "sklearn",
    "integrations.laplace_torch": None,
    "integrations.lightning": "lightning",
    "integrations.sklearn": "sklearn",
}
MORE = {
    "likelihoods": ["compare_with_log_prob"],
    "mixtures": ["GaussianMixture", "Mixture", "VariationalGaussianMixture"],
}
BRIEF = Likelihood, FeatureDensity, Mixture, Student
GIVEN = {
    "self",
    "cls",
    "trainer",
    "pl_module",
    "stage",
    "state",
}  # described by Lightning, or not at all


def _defined(module):
    """Return the public classes and functions that a file defines."""
    path = Path(torch_lla_em.__file__).parent / f"{module.replace('.', '/')}.py"
    text = path.read_text()
    return re.findall(r"^(?:class|def) ([a-zA-Z]\w*)", text, re.MULTILINE)


PUBLIC = [f".{name}" for name in torch_lla_em.__all__ if name != "NotFittedError"]
PUBLIC += [f"{module}.{name}" for module in MODULES for name in _defined(module)]
PUBLIC += [f"{module}.{name}" for module, names in MORE.items() for name in names]


def _found(address):
    """Return a public class or function; skip if the library that its module needs is missing."""
    module, name = address.rsplit(".", 1)
    if MODULES.get(module):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytest.importorskip(MODULES[module])
    return getattr(import_module(f"torch_lla_em.{module}".strip(".")), name)


@pytest.fixture(scope="module")
def names():
    """What the examples use: posteriors of two networks and of a regression, and data."""
    (case, la), (real, regression) = known(), known("regression")
    la, regression = copy(la).calibrate(case.x, case.y), copy(regression).calibrate(real.x, real.y)
    line = torch.nn.Linear(real.x.shape[1], 1).double()
    one_output = LinearisedLaplace(line, "regression", num_samples=4)
    one_output.fit(real.x, real.y[:, :1], em_steps=1, progress_bar=False)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(case.x, case.y), 16)
    names = {name: getattr(torch_lla_em, name) for name in torch_lla_em.__all__}
    names |= {"la": la, "other": copy(la), "regression": regression, "one_output": one_output}
    problem = la._problem(loader, Group())
    names |= {"problem": problem, "noise": torch_lla_em.get_sto_samples(problem, 4)}
    names |= {"regression_x": real.x, "regression_y": real.y}
    t, line = torch.linspace(-1, 1, 30)[:, None], torch.nn.Linear(1, 1)
    curve = LinearisedLaplace(line, "regression", num_samples=4)
    names |= {"t": t, "curve": curve.fit(t, t.sin(), em_steps=1, progress_bar=False)}
    names |= {"torch": torch, "plot": torch_lla_em.plot, "model": case.model}
    return names | {"x": case.x, "y": case.y, "loader": loader}


def _of_lightning(names):
    """What the example of the callback uses."""
    from lightning import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = deepcopy(names["model"])

        def training_step(self, batch, _):
            x, y = batch
            return torch.nn.functional.cross_entropy(self.net(x), y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-3)

    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet = {"max_epochs": 1, "accelerator": "cpu", "enable_model_summary": False, **off}
    return {"module": Module(), "Trainer": Trainer, "quiet": quiet}


def _of_sklearn(names):
    x, y = names["x"].float().numpy(), names["y"].numpy()
    return {"X": x, "labels": y, "y": x[:, 0] + 0.1 * y}


def _methods(public):
    """Yield (name, function or class, docstring) of a class and its methods, or of a function."""
    inits = public.__init__.__doc__ or "" if inspect.isclass(public) else ""
    yield public.__qualname__, public, f"{public.__doc__ or ''}\n{inits}"
    for name in dir(public) if inspect.isclass(public) else ():
        value = inspect.getattr_static(public, name)
        value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if name[0] != "_" and getattr(value, "__module__", "").startswith("torch_lla_em"):
            # methods of a subclass inherit the docstring
            yield f"{public.__qualname__}.{name}", value, inspect.getdoc(getattr(public, name))


@pytest.mark.slow
@pytest.mark.parametrize("address", PUBLIC)
@pytest.mark.filterwarnings("ignore")
def test_examples_run(address, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    public, module = _found(address), address.rsplit(".", 1)[0]
    if module:
        names = names | vars(import_module(f"torch_lla_em.{module}"))
    names = names | {
        "lightning": _of_lightning,
        "sklearn": _of_sklearn,
        "estimators": _of_sklearn,
    }.get(module.rpartition(".")[2], dict)(names)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    runner, parser = doctest.DocTestRunner(), doctest.DocTestParser()
    for name, _, doc in _methods(public):
        runner.run(parser.get_doctest(doc or "", dict(names), name, None, 0))
    assert not runner.failures


@pytest.mark.parametrize("address", PUBLIC)
def test_every_argument_is_documented(address):
    """One by one; likelihoods, mixtures and students may name them in a sentence, or in that of their class."""
    missing, public = [], _found(address)
    brief = inspect.isclass(public) and issubclass(public, BRIEF)
    of_class = "".join(kind.__doc__ or "" for kind in public.__mro__) if brief else ""
    for name, value, doc in _methods(public):
        if not doc:
            missing.append(name)
            continue
        if hasattr(value, "_fields") or hasattr(value, "__dataclass_fields__"):
            continue  # a docstring below each field
        for argument, parameter in inspect.signature(value).parameters.items():
            several = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            is_documented = re.search(rf"^ +{argument} \(|^ +{argument}:", doc, re.MULTILINE)
            if brief:
                is_documented = re.search(rf"\b{argument}\b", doc + of_class)
            if argument not in GIVEN and not several and not is_documented:
                missing.append(f"{name}({argument})")
    assert not missing


def test_public_classes_and_functions_have_an_example():
    assert not {address for address in PUBLIC if ">>>" not in (_found(address).__doc__ or "")}
