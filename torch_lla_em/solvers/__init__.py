"""Solvers of (A + I) X = B and of convex losses, independent of networks."""

from torch_lla_em.solvers.block_cg import BlockCG
from torch_lla_em.solvers.newton import Minimum, Newton
from torch_lla_em.solvers.sgd import SGD
from torch_lla_em.solvers.solution import (
    DivergenceError,
    FaultyProductError,
    Product,
    Solution,
    is_accurate,
    relative_error,
    require_finite,
)
from torch_lla_em.solvers.space import (
    add_combined,
    dot,
    dots,
    gram,
    norm,
    orthonormalise,
    overlap,
)

__all__ = [
    "SGD",
    "BlockCG",
    "DivergenceError",
    "FaultyProductError",
    "Minimum",
    "Newton",
    "Product",
    "Solution",
    "add_combined",
    "dot",
    "dots",
    "gram",
    "is_accurate",
    "norm",
    "orthonormalise",
    "overlap",
    "relative_error",
    "require_finite",
]
