"""The result of a fit, an entry of its history, and the facts about training examples that
predictions need."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood

if TYPE_CHECKING:
    from torch_lla_em.inference.over_head import OverHead
    from torch_lla_em.inference.over_span import OverSpan
    from torch_lla_em.inference.state import State

EXAMPLES, NUMBERS = 512, 2_000_000
"""Largest number of training examples that are stored for predictions, and of their values (8 MB).
On two tables half or twice as many changed the NLL by .0001 at most, and the AUROC of p-values by
.005 (from .987) and .017 (from .820, with 368 examples)."""

POINTS, SURE, WARMEST = 0.9, 0.15, 2.0
"""Constants of the default predictions, chosen on the ten tuning tables (docs/method.md): see
``average``."""


class Estimate(NamedTuple):
    """A Monte Carlo mean and its standard error over samples."""

    value: Tensor
    standard_error: Tensor

    @classmethod
    def of(cls, samples: Tensor) -> Estimate:
        """Return the mean over the first axis; the error is NaN for one sample."""
        if len(samples) < 2:
            return cls(samples.mean(0), torch.full_like(samples[0], float("nan")))
        return cls(samples.mean(0), samples.std(0) / math.sqrt(len(samples)))


class FitResult(NamedTuple):
    """The result of a fit, which a ``Posterior`` contains. It begins with λ, () or (blocks,), and σ
    of a regression."""

    prior_precision: Tensor
    sigma_noise: Tensor | None
    w_lin: Tensor
    w_samples: Tensor
    scale: Tensor
    """The mode, (P,), samples with mean zero, (K, P), and the prior standard deviation of every
    parameter at λ = 1, (P,)."""

    effective_dim: Estimate
    certificate: Tensor
    log_evidence: Estimate
    """γ, () or (blocks,); the numerical error of each sample in posterior standard deviations,
    (K,); and log p(y | λ, σ), NaN if it was not computed."""

    mixture: Tensor | None = None
    """The components of predictions as fitted or calibrated, (components, 4): weight, share of J
    w_lin, share of f, and scale of the posterior variance. None: a single component, the samples
    around J w_lin if σ was learnt from it, otherwise around f."""

    examples: Tensor | None = None
    leverages: Tensor | None = None
    """J w_k at some of the training examples, (n, K, ..., C), and the leverages (J w_k)ᵀ H J w_l /
    K there, (n, K, K), which measure how much each example determines its own outputs."""

    network_noise: Tensor | None = None
    """σ of the network's residuals relative to ``sigma_noise``; None if σ was not learnt from the
    residuals of J w_lin."""

    constant: Tensor | None = None
    """The constant that is added to J w_lin for continuous targets, (C,) or (); None: 0."""

    mode_error: float = 0.0
    """The error of the mode, relative to max(1, ‖w_lin‖) in the norm of the prior, which is
    comparable with that of the samples."""

    why: str = "accurate"
    """The reason why the fit ended: "accurate", "all directions", "all steps", "budget", or what
    prevented accuracy."""


def record(q: State, columns: float) -> dict[str, Any]:
    """Return the entry of a step in ``history`` as plain numbers, and lists for several blocks.
    ``columns`` is the number of columns that passes have multiplied so far."""
    gamma, evidence = Estimate.of(q.gamma), Estimate.of(q.bounds)
    return {
        "prior_precision": q.precision.tolist(),
        "sigma_noise": None if q.sigma is None else q.sigma.tolist(),
        "effective_dim": gamma.value.tolist(),
        "effective_dim_error": gamma.standard_error.tolist(),
        "squared_norm": q.norm.tolist(),
        "loss": q.loss,
        "mode_residual": q.errors[1],
        "sample_residual": q.errors[0],
        "log_evidence": evidence.value.item(),
        "log_evidence_error": evidence.standard_error.item(),
        "columns": columns,
    }


def average(likelihood: Likelihood, over: OverSpan | OverHead, q: State) -> Tensor:
    """Return the table of the components of predictions (q, its mean alone, and the network) by the
    rule of docs/method.md."""
    f, expected = over.f, over.expected
    of_q, loss = q.of_examples, over.loss_at(q.sigma)
    curved = of_q.H.product(f.reshape(-1, 1)).view(f.shape)
    of_mean, of_f = over.share.group.sum(
        torch.stack([(curved * of_q.outputs).sum(), (curved * f).sum()])
    )
    points, scale = 0.0, 1.0
    if likelihood.gives_probabilities:
        left = q.loss / max(expected.loss_and_slope(loss, 0 * f, None)[0], 1e-30)
        kept = (of_mean / of_f.clamp_min(1e-30)).clamp(0, 1).item()
        points = POINTS * kept * math.exp(-left / SURE)
        scale = min(WARMEST, max(1.0, left / SURE))
    if q.gamma.mean() < 4 / len(q.gamma):  # q has collapsed to a prior that is nearly zero
        points = 2 / 3
    parts = [[1 - points, 1, 0, scale], [points / 2, 1, 0, 0], [points / 2, 0, 1, 0]]
    return torch.tensor(parts, dtype=torch.float64, device="cpu")


def at_examples(over: OverSpan | OverHead, q: State) -> tuple[Tensor, Tensor]:
    """Return J w_k, (n, K, ..., C), and (J w_k)ᵀ H J w_l / K, (n, K, K), at some training examples
    that are spread evenly."""
    (_, *outputs), K, N = over.f.shape, len(q.samples), over.share.total
    number = min(N, EXAMPLES, NUMBERS // max(1, K * math.prod(outputs)))
    chosen = torch.linspace(0, N - 1, number, device="cpu").round().long()
    places, rows = (part.to(over.f.device) for part in over.share.find(chosen))
    Jw = over.span.push(q.samples, rows=rows)
    curved = q.of_examples.H.product(Jw.flatten(0, -2), rows).view_as(Jw)
    both = Jw.movedim(-1, 1).contiguous(), Jw.flatten(1, -2).mT @ curved.flatten(1, -2) / K
    every = [part.new_zeros(number, *part.shape[1:]).index_copy_(0, places, part) for part in both]
    examples, leverages = map(over.share.group.sum, every)
    return examples, leverages
