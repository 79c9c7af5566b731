"""Solvers of (A + I) X = B and of convex losses; they know nothing of networks."""

from torch_lla_em.solvers.block_cg import BlockCG
from torch_lla_em.solvers.block_krylov import BlockKrylov
from torch_lla_em.solvers.function_space import FunctionSpace
from torch_lla_em.solvers.newton import Newton
from torch_lla_em.solvers.sgd import SGD
from torch_lla_em.solvers.solution import DivergenceError, FaultyProductError, Solution

__all__ = [
    "BlockKrylov",
    "BlockCG",
    "FunctionSpace",
    "SGD",
    "Newton",
    "Solution",
    "DivergenceError",
    "FaultyProductError",
]
