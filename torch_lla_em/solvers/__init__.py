"""Solvers of (A + I) X = B and of convex losses; they know nothing of networks."""

from torch_lla_em.solvers.block_cg import BlockCG
from torch_lla_em.solvers.block_krylov import BlockKrylov, KrylovPosterior, Shift, Spectrum
from torch_lla_em.solvers.block_lanczos import BlockLanczos
from torch_lla_em.solvers.deflation import DeflatedCG, Preconditioner, nystrom_features
from torch_lla_em.solvers.function_space import FunctionSpace
from torch_lla_em.solvers.newton import Minimum, Newton
from torch_lla_em.solvers.sgd import SGD
from torch_lla_em.solvers.slices import largest_slice, over_slices, sliced_over
from torch_lla_em.solvers.solution import DivergenceError, FaultyProductError, Solution
from torch_lla_em.solvers.space import dots, norm, own_dots

__all__ = [
    "SGD",
    "BlockCG",
    "BlockKrylov",
    "BlockLanczos",
    "DeflatedCG",
    "DivergenceError",
    "FaultyProductError",
    "FunctionSpace",
    "KrylovPosterior",
    "Minimum",
    "Newton",
    "Preconditioner",
    "Shift",
    "Solution",
    "Spectrum",
    "dots",
    "largest_slice",
    "norm",
    "nystrom_features",
    "over_slices",
    "own_dots",
    "sliced_over",
]
