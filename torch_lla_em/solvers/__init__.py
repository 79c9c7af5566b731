"""Solvers of (A + I) X = B and of convex losses; they know nothing of networks."""

from torch_lla_em.solvers.block_cg import BlockCG
from torch_lla_em.solvers.block_krylov import BlockKrylov
from torch_lla_em.solvers.block_lanczos import BlockLanczos, KrylovPosterior
from torch_lla_em.solvers.deflation import (
    DeflatedCG,
    FeaturePreconditioner,
    nystrom_features,
)
from torch_lla_em.solvers.function_space import FunctionSpace
from torch_lla_em.solvers.newton import Minimum, Newton
from torch_lla_em.solvers.operator import Operator, Product
from torch_lla_em.solvers.sgd import SGD
from torch_lla_em.solvers.solution import (
    DivergenceError,
    FaultyProductError,
    Solution,
    relative_error,
)
from torch_lla_em.solvers.space import Space, add_combined, combine
from torch_lla_em.solvers.spectrum import Spectrum

__all__ = [
    "SGD",
    "BlockCG",
    "BlockKrylov",
    "BlockLanczos",
    "DeflatedCG",
    "DivergenceError",
    "FaultyProductError",
    "FeaturePreconditioner",
    "FunctionSpace",
    "KrylovPosterior",
    "Minimum",
    "Newton",
    "Operator",
    "Product",
    "Solution",
    "Space",
    "Spectrum",
    "add_combined",
    "combine",
    "nystrom_features",
    "relative_error",
]
