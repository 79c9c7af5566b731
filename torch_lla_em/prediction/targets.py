"""Log-probabilities of single labels, and their number."""

from __future__ import annotations

from torch import Tensor

from torch_lla_em.likelihoods import Likelihood, require_labels
from torch_lla_em.prediction.gaussians import log_mean_exp
from torch_lla_em.prediction.prediction import Prediction


def label_log_prob(prediction: Prediction, y: Tensor) -> Tensor:
    """Return log p(y | x) of each label by itself, (B, labels): of a site, or of an output that has
    a target of its own.

    Where outputs are independent given x it is that of all of them together, (B, 1).

    Args:
        prediction: The prediction.
        y (Tensor): Targets with the outputs last.
    """
    likelihood, mixture = prediction.likelihood, prediction._mixture
    is_gaussian = likelihood.observation_noise is not None
    if y[:1].numel() <= 1 or (is_gaussian and len(mixture.components) == 1):
        return mixture.log_density(y)[:, None]
    if is_gaussian:
        return mixture.gaussians().log_prob(y).flatten(1)

    def take(f: Tensor, weights: Tensor | None, rows: slice) -> Tensor:
        require_labels(likelihood, f[:1].detach(), y[rows])
        return log_mean_exp(likelihood.label_log_prob(f, y[rows]), weights)

    return mixture.over_rows(take)


def count_labels(likelihood: Likelihood, y: Tensor) -> int:
    """Return the number of labels that count."""
    mask = likelihood.mask(y)
    return y.numel() if mask is None else int((mask != 0).sum())
