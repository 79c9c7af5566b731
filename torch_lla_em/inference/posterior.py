"""What a fit has found: inference returns it, storage stores it, prediction reads it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from torch_lla_em.inference.mackay import Estimate, Hyperparameters
from torch_lla_em.problem import Problem
from torch_lla_em.solvers import Spectrum


class Posterior(NamedTuple):
    """What a fit has found."""

    hyper: Hyperparameters
    w_lin: Tensor
    w_samples: Tensor
    scale: Tensor
    effective_dim: Estimate
    certificate: Tensor
    log_evidence: Estimate
    loss: float
    mode_error: float
    sample_error: float
    spectrum: Spectrum | None
    """Of scalar priors solved by block Krylov, at the final noise."""

    modes: Tensor | None
    """log λ, objective and slope of the linear mode where it is known, shape (3, M)."""

    mixture: Tensor | None = None
    """What predictions are made of, as fitted: rows of weight, share of J w_lin, share of f, and
    scale of the samples' variance, (parts, 4); None: the samples around f."""

    examples: Tensor | None = None
    """J w_k at some of the training examples, (n, K, ..., C), where they are at hand."""

    def assembled(self, problem: Problem) -> Posterior:
        """Return it with whole vectors, also where they were in slices."""
        if problem.vectors.group is None:
            return self
        whole = problem.vectors.whole
        return self._replace(
            w_lin=whole(self.w_lin[None])[0],
            w_samples=whole(self.w_samples),
            scale=whole(self.scale[None])[0],
        )
