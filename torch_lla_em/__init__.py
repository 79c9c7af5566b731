"""Uncertainty estimates for trained PyTorch networks, by sampling-based linearised Laplace with EM.

``LinearisedLaplace`` is the main class. To read the code, start with the lowest level: ``runtime``,
``data``, ``solvers``, ``likelihoods``, ``jacobian``, ``problem``, ``inference``, ``checkpoint``,
``prediction``, ``distil``, ``laplace``, ``ensemble``. ``mixtures`` uses EM for mixtures and for densities of
features.
"""

from torch_lla_em.distil import Student
from torch_lla_em.ensemble import LaplaceEnsemble
from torch_lla_em.inference import (
    function_space_Mackay_update,
    get_sto_samples,
    optimise_MAP,
    optimise_samples,
)
from torch_lla_em.laplace import LinearisedLaplace
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
    NotFittedError,
    Prediction,
    RiskControl,
    compare,
    temperature_of_neighbours,
)
from torch_lla_em.runtime import Adapter, Compute
from torch_lla_em.solvers import SGD, BlockCG, Newton

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
    "Newton",
    "NotFittedError",
    "Poisson",
    "Prediction",
    "Regression",
    "RiskControl",
    "Student",
    "compare",
    "function_space_Mackay_update",
    "get_sto_samples",
    "optimise_MAP",
    "optimise_samples",
    "temperature_of_neighbours",
]

_REMOVED = {
    "BlockKrylov": "The default solver stores a span of directions; limit it by compute=Compute(span_memory=bytes).",
    "FunctionSpace": "Use BlockCG(), which a fit with a layerwise prior takes by default.",
}


def __getattr__(name: str) -> object:
    if name in _REMOVED:
        raise ImportError(f"torch_lla_em.{name} was removed. {_REMOVED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
