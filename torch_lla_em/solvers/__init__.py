"""Solvers of (A + I) X = B and of convex losses, independent of networks."""

from torch_lla_em.solvers.block_cg import BlockCG, BlockKrylov
from torch_lla_em.solvers.function_space import FunctionSpace
from torch_lla_em.solvers.newton import Minimum, Newton
from torch_lla_em.solvers.sgd import SGD
from torch_lla_em.solvers.solution import (
    DivergenceError,
    FaultyProductError,
    Operator,
    Product,
    Solution,
    relative_error,
    symmetric,
)
from torch_lla_em.solvers.space import Space, add_combined, combine

__all__ = [
    "SGD",
    "BlockCG",
    "BlockKrylov",
    "DivergenceError",
    "FaultyProductError",
    "FunctionSpace",
    "Minimum",
    "Newton",
    "Operator",
    "Product",
    "Solution",
    "Space",
    "add_combined",
    "combine",
    "relative_error",
    "symmetric",
]
