"""Sampling-based linearised Laplace with EM: error bars for trained networks.

Reading order, lowest level first: ``parameters``, ``likelihoods``, ``data``, ``network``,
``linear_model``, ``problem``, ``prior``, ``stochastic_prior``, ``solvers``,
``linear_mode``, ``posterior_samples``, ``mackay``, ``evidence``, ``expectation``,
``empirical_bayes``, ``fitting``, ``predictive``, ``laplace``.
"""

from torch_lla_em.laplace import LinearisedLaplace, NotFittedError
from torch_lla_em.likelihoods import (
    Bernoulli,
    Classification,
    Likelihood,
    Poisson,
    Regression,
)
from torch_lla_em.linear_mode import optimise_MAP
from torch_lla_em.mackay import function_space_Mackay_update
from torch_lla_em.posterior_samples import optimise_samples
from torch_lla_em.predictive import Prediction
from torch_lla_em.solvers import SGD, BlockCG, BlockKrylov, FunctionSpace, Newton
from torch_lla_em.stochastic_prior import get_sto_samples

__version__ = "0.1.0"

__all__ = [
    "LinearisedLaplace",
    "Prediction",
    "NotFittedError",
    "Likelihood",
    "Classification",
    "Regression",
    "Bernoulli",
    "Poisson",
    "BlockKrylov",
    "BlockCG",
    "FunctionSpace",
    "SGD",
    "Newton",
    "get_sto_samples",
    "optimise_MAP",
    "optimise_samples",
    "function_space_Mackay_update",
]
