"""Deprecated names of ``torch_lla_em.integrations.laplace_torch`` and ``.estimators``."""

import sys
import warnings
from importlib import import_module
from typing import Any

_HOMES = {"posterior": "estimators", "EstimatorPosterior": "estimators"}
_RECIPES = {
    "AverageHeads": "tabular_networks",
    "Answers": "language_answers",
    "answers": "language_answers",
    "LaplacePostProcessing": "torch_uncertainty_routine",
    "of_pytabkit": "tabular_networks",
}
_MODULES = (
    "answers at_precision enums estimators evidence laplace links marglik networks options pytabkit "
    "torch_uncertainty"
).split()
_ENUMS = (
    "SubsetOfWeights HessianStructure Likelihood PredType LinkApprox TuningMethod PriorStructure "
    "FunctionalApproximation"
).split()

warnings.warn(
    "Import from torch_lla_em.integrations.laplace_torch or .estimators instead of torch_lla_em.compat.",
    DeprecationWarning,
    stacklevel=2,
)
for _former in _MODULES:
    sys.modules[f"{__name__}.{_former}"] = sys.modules[__name__]


def __getattr__(name: str) -> Any:
    """Return a name from where it is now, or raise an error that says what to use."""
    if name in _RECIPES:
        raise ImportError(
            f"{name} is a recipe now: copy it from examples/recipes/{_RECIPES[name]}.py."
        )
    if name in _ENUMS:
        raise ImportError(
            f"{name}: pass strings, such as pred_type='glm', or the enums of laplace-torch."
        )
    if name in _MODULES:
        return sys.modules[__name__]
    home = _HOMES.get(name, "laplace_torch")
    return getattr(import_module(f"torch_lla_em.integrations.{home}"), name)
