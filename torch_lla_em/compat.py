"""Deprecated names of ``torch_lla_em.integrations.laplace_torch`` and ``.estimators``."""

import warnings
from importlib import import_module
from typing import Any

_NEW = "torch_lla_em.integrations"
warnings.warn(
    f"Import from {_NEW}.laplace_torch or .estimators instead of {__name__}.",
    DeprecationWarning,
    stacklevel=2,
)


def __getattr__(name: str) -> Any:
    """Return a name from where it is now, or raise the error of its module."""
    home = "estimators" if name in ("posterior", "EstimatorPosterior") else "laplace_torch"
    return getattr(import_module(f"{_NEW}.{home}"), name)
