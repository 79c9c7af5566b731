"""The four stages of the method, and the EM algorithm that repeats them."""

from torch_lla_em.inference.em import Step
from torch_lla_em.inference.fit import (
    Progress,
    has_memory,
    learn,
    settings_of,
    takes_features,
)
from torch_lla_em.inference.linear_problem import LinearProblem
from torch_lla_em.inference.mackay import function_space_Mackay_update
from torch_lla_em.inference.map import optimise_MAP
from torch_lla_em.inference.result import Estimate, FitResult, record
from torch_lla_em.inference.samples import optimise_samples
from torch_lla_em.inference.state import FitOptions, State
from torch_lla_em.inference.sto_samples import get_sto_samples

__all__ = [
    "Estimate",
    "FitOptions",
    "FitResult",
    "LinearProblem",
    "Progress",
    "State",
    "Step",
    "function_space_Mackay_update",
    "get_sto_samples",
    "has_memory",
    "learn",
    "optimise_MAP",
    "optimise_samples",
    "record",
    "settings_of",
    "takes_features",
]
