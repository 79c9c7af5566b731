"""The four stages of the method, and the EM algorithm that repeats them."""

from torch_lla_em.inference.em import (
    function_space_Mackay_update,
    optimise_MAP,
    optimise_samples,
)
from torch_lla_em.inference.fit import FitOptions, Progress, learn
from torch_lla_em.inference.prior import get_sto_samples
from torch_lla_em.inference.result import Estimate, FitResult

__all__ = [
    "Estimate",
    "FitOptions",
    "FitResult",
    "Progress",
    "function_space_Mackay_update",
    "get_sto_samples",
    "learn",
    "optimise_MAP",
    "optimise_samples",
]
