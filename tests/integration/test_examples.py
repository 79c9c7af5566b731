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
from tiny import known, posterior_of

import torch_lla_em
from torch_lla_em import FeatureDensity, Likelihood, Student
from torch_lla_em.mixtures import GaussianMixture
from torch_lla_em.runtime import Group

# modules beside the package itself -> the library that they need
MODULES = {"plot": None, "integrations.laplace_torch": None}
MODULES |= {f"integrations.{name}": name for name in ("botorch", "lightning", "sklearn")}
MODULES |= {"integrations.estimators": "sklearn"}
MIXTURES = "GaussianMixture", "VariationalGaussianMixture"
BRIEF = Likelihood, FeatureDensity, GaussianMixture, Student
# described by Lightning, or not at all
GIVEN = {"self", "la", "cls", "trainer", "pl_module", "stage", "state"}


def _defined(module):
    """Return the public classes and functions that a file defines."""
    path = Path(torch_lla_em.__file__).parent / f"{module.replace('.', '/')}.py"
    return re.findall(r"^(?:class|def) ([a-zA-Z]\w*)", path.read_text(), re.MULTILINE)


PUBLIC = [f".{name}" for name in torch_lla_em.__all__ if name != "NotFittedError"]
PUBLIC += [f"{module}.{name}" for module in MODULES for name in _defined(module)]
PUBLIC += ["likelihoods.compare_with_log_prob", *(f"mixtures.{name}" for name in MIXTURES)]


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

    def fitted(x, y):
        line = torch.nn.Linear(x.shape[1], 1).to(x)
        return posterior_of(line, "regression", x, y, em_steps=1)

    (case, la), (real, regression) = known(), known("regression")
    la, regression = copy(la).calibrate(case.x, case.y), copy(regression).calibrate(real.x, real.y)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(case.x, case.y), 16)
    problem, t = la._problem(loader, Group()), torch.linspace(-1, 1, 30)[:, None]
    found = {"la": la, "other": copy(la), "regression": regression, "model": case.model}
    found |= {"x": case.x, "y": case.y, "loader": loader, "torch": torch}
    found |= {"regression_x": real.x, "regression_y": real.y}
    found |= {"one_output": fitted(real.x, real.y[:, :1]), "t": t, "curve": fitted(t, t.sin())}
    found |= {"problem": problem, "probes": torch_lla_em.get_sto_samples(problem, 4)}
    names = (*torch_lla_em.__all__, "plot")
    return found | {name: getattr(torch_lla_em, name) for name in names}


def _of_lightning(names):
    """What the example of the callback uses."""
    from lightning import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = deepcopy(names["model"])

        def training_step(self, batch, _):
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-3)

    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet = {"max_epochs": 1, "accelerator": "cpu", **dict.fromkeys(off, False)}
    return {"module": Module(), "Trainer": Trainer, "quiet": quiet}


def _of_sklearn(names):
    x, y = names["x"].float().numpy(), names["y"].numpy()
    return {"X": x, "labels": y, "y": x[:, 0] + 0.1 * y}


MORE = {"lightning": _of_lightning, "sklearn": _of_sklearn, "estimators": _of_sklearn}


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
    names = names | MORE.get(module.rpartition(".")[2], dict)(names)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    runner, parser = doctest.DocTestRunner(), doctest.DocTestParser()
    for name, _, doc in _methods(public):
        runner.run(parser.get_doctest(doc or "", dict(names), name, None, 0))
    assert not runner.failures


@pytest.mark.parametrize("address", PUBLIC)
def test_every_argument_is_documented_and_there_is_an_example(address):
    """One by one; likelihoods, mixtures, students and integrations may name them in a sentence, or in that of their class."""
    missing, public = [], _found(address)
    brief = inspect.isclass(public) and issubclass(public, BRIEF)
    brief = brief or address.startswith("integrations")
    kinds = public.__mro__ if brief and inspect.isclass(public) else ()
    of_class = "".join(kind.__doc__ or "" for kind in kinds)
    for name, value, doc in _methods(public):
        if hasattr(value, "_fields") or hasattr(value, "__dataclass_fields__"):
            continue  # a docstring below each field
        for argument, parameter in inspect.signature(value).parameters.items():
            several = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            pattern = rf"\b{argument}\b" if brief else rf"^ +{argument}( \(|:)"
            known = re.search(pattern, (doc or "") + of_class, re.MULTILINE)
            if argument not in GIVEN and not several and not known:
                missing.append(f"{name}({argument})")
        missing += [] if doc else [name]
    assert not missing and ">>>" in (public.__doc__ or "")
