"""Names of earlier versions are importable for one version, with a warning."""

import sys
import warnings
from importlib import import_module

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
