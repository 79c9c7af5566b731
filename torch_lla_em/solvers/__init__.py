"""Solvers of (A + I) X = B and of convex losses, independent of networks."""

from torch_lla_em.solvers.bfgs import BFGS
from torch_lla_em.solvers.block_cg import BlockCG
from torch_lla_em.solvers.eigen import Eigen
from torch_lla_em.solvers.lanczos import log_dets
from torch_lla_em.solvers.newton import Newton
from torch_lla_em.solvers.sgd import SGD
from torch_lla_em.solvers.solution import (
    Batched,
    ConvexLoss,
    DivergenceError,
    FaultyProductError,
    Minimum,
    Operator,
    Product,
    Search,
    Solution,
    Solver,
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
    "BFGS",
    "SGD",
    "Batched",
    "BlockCG",
    "ConvexLoss",
    "DivergenceError",
    "Eigen",
    "FaultyProductError",
    "Minimum",
    "Newton",
    "Operator",
    "Product",
    "Search",
    "Solution",
    "Solver",
    "add_combined",
    "dot",
    "dots",
    "gram",
    "is_accurate",
    "log_dets",
    "norm",
    "orthonormalise",
    "overlap",
    "relative_error",
    "require_finite",
]
