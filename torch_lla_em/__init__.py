"""Uncertainty estimates for trained PyTorch networks, by sampling-based linearised Laplace with EM.

``LinearisedLaplace`` is the main class. To read the code, start with the lowest level: ``runtime``,
``data``, ``solvers``, ``likelihoods``, ``jacobian``, ``problem``, ``inference``, ``checkpoint``,
``prediction``, ``distil``, ``laplace``, ``ensemble``. ``mixtures`` fits Gaussian mixtures and
densities of features by EM.
"""

import sys
import warnings
from functools import partial
from importlib import import_module
from types import ModuleType

from torch_lla_em.distil import Student
from torch_lla_em.ensemble import LaplaceEnsemble
from torch_lla_em.inference import (
    function_space_Mackay_update,
    get_sto_samples,
    optimise_MAP,
    optimise_samples,
)
from torch_lla_em.laplace import LinearisedLaplace, linear_problem
from torch_lla_em.likelihoods import (
    Bernoulli,
    BradleyTerry,
    Classification,
    HeteroscedasticRegression,
    Likelihood,
    Poisson,
    Regression,
)
from torch_lla_em.mixtures import FeatureDensity
from torch_lla_em.prediction import (
    Calibration,
    Comparison,
    Monitor,
    NotFittedError,
    Prediction,
    RiskControl,
    SuspiciousTargets,
    compare,
    temperature_of_neighbours,
)
from torch_lla_em.runtime import Adapter, Compute, refuse_former
from torch_lla_em.solvers import SGD, BlockCG

__version__ = "0.4.0"

__all__ = [
    "SGD",
    "Adapter",
    "Bernoulli",
    "BlockCG",
    "BradleyTerry",
    "Calibration",
    "Classification",
    "Comparison",
    "Compute",
    "FeatureDensity",
    "HeteroscedasticRegression",
    "LaplaceEnsemble",
    "Likelihood",
    "LinearisedLaplace",
    "Monitor",
    "NotFittedError",
    "Poisson",
    "Prediction",
    "Regression",
    "RiskControl",
    "Student",
    "SuspiciousTargets",
    "compare",
    "function_space_Mackay_update",
    "get_sto_samples",
    "linear_problem",
    "optimise_MAP",
    "optimise_samples",
    "temperature_of_neighbours",
]

_REMOVED = {
    "Newton": "import it from torch_lla_em.solvers",
    "BlockKrylov": "the default solver stores a span of directions; limit it by "
    "compute=Compute(span_memory=bytes)",
    "FunctionSpace": "use BlockCG(), which a fit with a layerwise prior takes by default",
}
_MOVED = {
    "botorch": {"LaplaceModel": "botorch"},
    "lightning": {"LaplaceCallback": "lightning"},
    "sklearn": dict.fromkeys(("LaplaceClassifier", "LaplaceRegressor"), "sklearn"),
    "compat": dict.fromkeys(("posterior", "EstimatorPosterior"), "estimators")
    | {"Laplace": "laplace_torch"},
}


def _moved(module: str, name: str) -> object:
    """Return the object that had this name in a module of an earlier version, if it was public."""
    if name not in (names := _MOVED[module]):
        raise AttributeError(f"module '{__name__}.{module}' has no attribute {name!r}")
    new = f"torch_lla_em.integrations.{names[name]}"
    words = f"Import {name} from {new} instead of {__name__}.{module}."
    warnings.warn(words, DeprecationWarning, stacklevel=2)
    return getattr(import_module(new), name)


for _name in _MOVED:
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = ModuleType(f"{__name__}.{_name}")
    # it has no file, which torch asks every module for
    vars(globals()[_name]).update(__getattr__=partial(_moved, _name), __file__=None)


def __getattr__(name: str) -> None:
    refuse_former(f"module {__name__!r}", [name], _REMOVED, "name")
