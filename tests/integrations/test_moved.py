"""Names of earlier versions are importable for one version, with a warning."""

import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["botorch", "lightning", "sklearn"])
def test_former_modules_are_the_new_ones(name, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(name)
        new = import_module(f"torch_lla_em.integrations.{name}")
    monkeypatch.delitem(sys.modules, f"torch_lla_em.{name}", raising=False)
    with pytest.warns(DeprecationWarning, match=f"torch_lla_em.integrations.{name} instead"):
        assert import_module(f"torch_lla_em.{name}") is new


def test_former_names_of_compat_are_the_new_ones_or_name_what_to_use(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch_lla_em.compat", raising=False)
    with pytest.warns(DeprecationWarning, match="instead of torch_lla_em.compat"):
        compat = import_module("torch_lla_em.compat")
    for name, home in {"Laplace": "laplace_torch", "posterior": "estimators"}.items():
        new = import_module(f"torch_lla_em.integrations.{home}")
        assert getattr(compat, name) is getattr(new, name)
    # names of the former submodules, too
    for module, name, home in (
        ("laplace", "Laplace", "laplace_torch"),
        ("estimators", "EstimatorPosterior", "estimators"),
    ):
        new = import_module(f"torch_lla_em.integrations.{home}")
        for former in (import_module(f"torch_lla_em.compat.{module}"), getattr(compat, module)):
            assert getattr(former, name) is getattr(new, name)
    for line, match in (
        ("from torch_lla_em.compat import answers", "recipes/language_answers.py"),
        ("from torch_lla_em.compat import AverageHeads", "recipes/tabular_networks.py"),
        ("from torch_lla_em.compat import marglik_training", "optimize_prior_precision"),
        ("from torch_lla_em.compat.answers import answers", "recipes/language_answers.py"),
        ("from torch_lla_em.compat.marglik import marglik_training", "optimize_prior_precision"),
        ("from torch_lla_em.compat.pytabkit import of_pytabkit", "recipes/tabular_networks.py"),
        ("from torch_lla_em.compat.enums import PredType", "pass strings"),
        (
            "from torch_lla_em.compat.torch_uncertainty import LaplacePostProcessing",
            "recipes/torch_uncertainty_routine.py",
        ),
        ("from torch_lla_em.compat import nothing", "cannot import name 'nothing'"),
    ):
        with pytest.raises(ImportError, match=match):
            exec(line)
    recipes = Path(compat.__file__).parents[1] / "examples" / "recipes"
    former = set(compat._RECIPES.values())
    assert {path.stem for path in recipes.glob("*.py")} == {*former, "linear_measurements"}
