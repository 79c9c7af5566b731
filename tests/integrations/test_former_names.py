"""Names of earlier versions are importable for one version, with a warning."""

import sys
import warnings
from importlib import import_module

import pytest


@pytest.mark.parametrize("name", ["botorch", "lightning", "sklearn", "compat"])
def test_former_names_are_the_new_ones_or_say_what_to_use(name, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name != "compat":
            pytest.importorskip(name)
    monkeypatch.delitem(sys.modules, f"torch_lla_em.{name}", raising=False)
    with pytest.warns(DeprecationWarning, match="torch_lla_em.integrations.* instead"):
        former = import_module(f"torch_lla_em.{name}")
    if name != "compat":
        assert former is import_module(f"torch_lla_em.integrations.{name}")
        return
    for name, home in {"Laplace": "laplace_torch", "posterior": "estimators"}.items():
        new = import_module(f"torch_lla_em.integrations.{home}")
        assert getattr(former, name) is getattr(new, name)
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from torch_lla_em.compat import nothing")
