"""Names of earlier versions are importable for one version, with a warning."""

import importlib
import warnings

import pytest

import torch_lla_em


@pytest.mark.parametrize(
    "former, name, home",
    [
        ("botorch", "LaplaceModel", "botorch"),
        ("lightning", "LaplaceCallback", "lightning"),
        ("sklearn", "LaplaceRegressor", "sklearn"),
        ("compat", "Laplace", "laplace_torch"),
        ("compat", "posterior", "estimators"),
    ],
)
def test_former_names_are_the_new_ones_with_a_warning(former, name, home):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if former != "compat":
            pytest.importorskip(former)
        new = importlib.import_module(f"torch_lla_em.integrations.{home}")
    found = {}
    with pytest.warns(DeprecationWarning, match=rf"from torch_lla_em.integrations.{home} instead"):
        exec(f"from torch_lla_em.{former} import {name}", found)
    with pytest.warns(DeprecationWarning, match="instead of"):
        exec(f"import torch_lla_em.{former}; again = torch_lla_em.{former}.{name}", found)
    assert found[name] is found["again"] is getattr(new, name)
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec(f"from torch_lla_em.{former} import nothing")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        torch_lla_em.compat.nothing
