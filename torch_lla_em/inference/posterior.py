"""The result of a fit, as a record of tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from torch_lla_em.inference.mackay import Estimate, Hyperparameters


class Posterior(NamedTuple):
    """The result of a fit."""

    hyper: Hyperparameters
    w_lin: Tensor
    w_samples: Tensor
    scale: Tensor
    effective_dim: Estimate
    certificate: Tensor
    log_evidence: Estimate
    loss: float
    mixture: Tensor | None = None
    """The components of predictions as fitted, (components, 4): weight, share of J w_lin, share of f,
    and scale of the posterior variance; None: the samples around f."""

    examples: Tensor | None = None
    """J w_k at some of the training examples, (n, K, ..., C), if they are known."""
