"""Σ loss(J w, y) and G = Σ Jᵀ H J over the data, as products of one pass."""

from torch_lla_em.problem.batch_products import Cotangent
from torch_lla_em.problem.finite import OUTPUTS, is_finite
from torch_lla_em.problem.memory_plan import VECTORS, place_of_vectors, size_of
from torch_lla_em.problem.operators import WhitenedGGN, WhitenedLoss
from torch_lla_em.problem.problem import BatchProduct, EarlierRows, NoiseFeatures, Problem, State
from torch_lla_em.problem.spread import ColumnSpread, DataSpread, WeightSpread
from torch_lla_em.problem.sweeps import OtherOrderError, Rows, Work

__all__ = [
    "OUTPUTS",
    "VECTORS",
    "BatchProduct",
    "ColumnSpread",
    "Cotangent",
    "DataSpread",
    "EarlierRows",
    "NoiseFeatures",
    "OtherOrderError",
    "Problem",
    "Rows",
    "State",
    "WeightSpread",
    "WhitenedGGN",
    "WhitenedLoss",
    "Work",
    "is_finite",
    "place_of_vectors",
    "size_of",
]
