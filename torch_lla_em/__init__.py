"""Sampling-based linearised Laplace with EM: error bars for trained networks.

Reading order, lowest level first: ``parameters``, ``likelihoods``, ``data``, ``network``,
``linear_model``, ``problem``, ``prior``, ``stochastic_prior``, ``solvers``,
``linear_mode``, ``posterior_samples``, ``mackay``, ``evidence``, ``expectation``,
``empirical_bayes``, ``fitting``, ``predictive``, ``laplace``. Beside them, the same EM for
densities over features: ``em``, ``mixture``, ``feature_density``.
"""

from torch_lla_em.compute import Compute
from torch_lla_em.curve import Curve, plot_curve
from torch_lla_em.feature_density import FeatureDensity
from torch_lla_em.laplace import LinearisedLaplace, NotFittedError
from torch_lla_em.likelihoods import (
    Bernoulli,
    BradleyTerry,
    Classification,
    HeteroscedasticRegression,
    Likelihood,
    LinearOperator,
    LinearOperatorRegression,
    Poisson,
    Regression,
)
from torch_lla_em.linear_mode import optimise_MAP
from torch_lla_em.mackay import function_space_Mackay_update
from torch_lla_em.posterior_samples import optimise_samples
from torch_lla_em.predictive import Prediction
from torch_lla_em.solvers import SGD, BlockCG, BlockKrylov, FunctionSpace, Newton
from torch_lla_em.stochastic_prior import get_sto_samples
from torch_lla_em.weight_decay import prior_precision_from_weight_decay

__version__ = "0.1.0"

__all__ = [
    "LinearisedLaplace",
    "Compute",
    "Prediction",
    "Curve",
    "plot_curve",
    "NotFittedError",
    "Likelihood",
    "Classification",
    "Regression",
    "HeteroscedasticRegression",
    "LinearOperatorRegression",
    "LinearOperator",
    "Bernoulli",
    "Poisson",
    "BradleyTerry",
    "BlockKrylov",
    "BlockCG",
    "FunctionSpace",
    "SGD",
    "Newton",
    "get_sto_samples",
    "optimise_MAP",
    "optimise_samples",
    "function_space_Mackay_update",
    "prior_precision_from_weight_decay",
    "FeatureDensity",
]
