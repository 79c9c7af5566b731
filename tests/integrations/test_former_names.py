"""Names of earlier versions are importable for one version, with a warning."""

import importlib

import pytest

import torch_lla_em

FORMER = [("sklearn", "LaplaceRegressor", "sklearn"), ("compat", "Laplace", "laplace_torch")]
FORMER += [("lightning", "LaplaceCallback", "lightning"), ("compat", "posterior", "estimators")]
FORMER += [("botorch", "LaplaceModel", "botorch")]


@pytest.mark.parametrize("former, name, home", FORMER)
@pytest.mark.filterwarnings("ignore")  # of these libraries
def test_former_names_are_the_new_ones_with_a_warning(former, name, home):
    if former != "compat":
        pytest.importorskip(former)
    new, found = importlib.import_module(f"torch_lla_em.integrations.{home}"), {}
    with pytest.warns(DeprecationWarning, match=rf"from torch_lla_em.integrations.{home} instead"):
        exec(f"from torch_lla_em.{former} import {name}", found)
    assert found[name] is getattr(new, name)
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec(f"from torch_lla_em.{former} import nothing")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        torch_lla_em.compat.nothing
