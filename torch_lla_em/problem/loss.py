"""The loss of a fit: -log p(y | f) of every example, times its weight."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.runtime import report

# smallest number of targets of an output from which a mean is taken
_FEWEST = 10
# smallest share of the variance of the targets for the first σ², and for a σ² that is not learnt
_LEAST_SHARE = 1e-2
_LEAST_FIXED = 1e-6


@dataclass(frozen=True)
class Loss:
    """The loss Σ_n -w_n log p(y_n | f_n) of some examples, with its derivatives in f.

    In a fit, only this class multiplies by the weights w and by the mask of the likelihood.
    """

    likelihood: Likelihood
    targets: Tensor
    """The targets, as ``align`` returns them, (B, ...)."""

    weights: Tensor | None = None
    """One weight per example, (B,), or one per target, in the shape of the targets."""

    shift: Tensor | None = None
    """The constant that is added to all outputs, (C,) or (); None: 0."""

    def part(self, examples: slice | Tensor) -> Loss:
        """Return the loss of some of the examples."""
        weights = None if self.weights is None else self.weights[examples]
        return replace(self, targets=self.targets[examples], weights=weights)

    def value(self, f: Tensor) -> Tensor:
        """Return the total loss, shape (), in float64, for outputs (..., B, ..., C)."""
        log_prob, y, w = self.likelihood.log_prob, self.targets, self.weights
        f = self._shifted(f)
        if w is None:
            total = log_prob(f, y)
        elif w.dim() == 1:
            total = log_prob(f, y) * w.to(f.dtype)
        elif self.likelihood.elementwise:  # the same weight for all outputs
            total = log_prob(f, y) * w.flatten(1)[:, 0].to(f.dtype)
        else:  # every site counts as an example
            of_labels = log_prob(f.flatten(f.dim() - w.dim() - 1, -2), y.flatten())
            total = of_labels * w.flatten().to(f.dtype)
        return -total.sum(dtype=torch.float64)

    def gradient(self, f: Tensor) -> Tensor:
        """Return the gradient in f, in the shape of f."""
        return self._counted(self.likelihood.gradient(self._shifted(f), self.targets))

    def product(self, f: Tensor, u: Tensor) -> Tensor:
        """Return H(f) u, in the shape of u."""
        return self._counted(self.likelihood.hessian_product(self._shifted(f), u))

    def root(self, f: Tensor, epsilon: Tensor) -> Tensor:
        """Return S(f) ε with S Sᵀ = H, in the shape of ε."""
        return self._counted(
            self.likelihood.hessian_sqrt_product(self._shifted(f), epsilon), root=True
        )

    def expected_hessian(self, f: Tensor) -> Tensor:
        """Return H averaged over functions (S, B, ..., C): (B, ..., C, C), or its diagonal."""
        H = self.likelihood.expected_hessian(self._shifted(f))
        return self._counted(H, columns=not self.likelihood.elementwise)

    def roots_of_probabilities(self, f: Tensor) -> Tensor:
        """Return √(w / S) p, (B, ..., S, C), for the probabilities p of functions (S, B, ...,
        C)."""
        p = self.likelihood.mean(self._shifted(f)).movedim(0, -2)
        return self._counted(p / len(f) ** 0.5, root=True, columns=True)

    @property
    def counts(self) -> Tensor | None:
        """The weight of every site, 0 without a label, in a shape that broadcasts to the outputs;
        None: all are 1."""
        mask, y, w = self.likelihood.mask(self.targets), self.targets, self.weights
        labels = None if mask is None else mask.unsqueeze(-1)
        if w is None:
            return labels
        outputs = y.dim() if self.likelihood.elementwise else y.dim() + 1
        if w.dim() == outputs > 1:
            w = w[..., :1]
        w = w.reshape(*w.shape, *(1,) * (outputs - w.dim()))
        return w if labels is None else w * labels

    def sums_of_targets(self, f: Tensor) -> Tensor:
        """Return weighted sums of y, y², (y - E[y | f])² and 1, and the number of weights other
        than 0, (5, C) or (5,)."""
        y, counts = self.targets.double(), self.counts
        w = torch.ones_like(y) if counts is None else counts.expand_as(y).double()
        errors = (y - self.likelihood.mean(f).double()).square()
        of_targets = torch.stack([y, y.square(), errors, torch.ones_like(y)])
        terms = torch.cat([torch.where(w == 0, 0.0, w * of_targets), (w != 0).double()[None]])
        return (terms.flatten(1, -2) if y.dim() > 1 else terms).sum(1)

    def excess(self, f: Tensor) -> Tensor:
        """Return -log p(y | f) summed over labels, whatever their weights, minus that of equal
        probabilities, (); for outputs that are all 0 it is positive, despite rounding."""
        mask, y = self.likelihood.mask(self.targets), self.targets
        labels = y.numel() if mask is None else mask.sum()
        of_equal = math.log(2 if self.likelihood.elementwise else f.shape[-1])
        nll: Tensor = -self.likelihood.log_prob(f, y).double().sum()
        return nll - labels * (1 - 1e-6) * of_equal

    def labelled(self) -> Tensor:
        """Return whether each example has a label and a weight other than 0, (B,)."""
        counts = self.counts
        if counts is None:
            return torch.ones(len(self.targets), dtype=torch.bool, device=self.targets.device)
        return (counts != 0).flatten(1).any(1) if counts.dim() > 1 else counts != 0

    def check(self, f: Tensor) -> None:
        """Raise an error if targets or weights do not fit the outputs."""
        y, w = self.targets, self.weights
        several = w is not None and w.dim() > 1 and self.likelihood.elementwise
        if w is not None and several and (w.flatten(1) != w.flatten(1)[:, :1]).any():
            raise ValueError(
                "The weights of an example differ between its outputs, but one weight multiplies "
                f"the whole log-likelihood of an example: pass {len(y)} weights for these "
                f"examples, shape ({len(y)},), not {tuple(w.shape)}."
            )
        self.likelihood.check(f, y)

    def _shifted(self, f: Tensor) -> Tensor:
        return f if self.shift is None else f + self.shift.to(f)

    def _counted(self, u: Tensor, root: bool = False, columns: bool = False) -> Tensor:
        """Multiply u by the weights, or by their square roots. With ``columns``, the last axis of u
        is that of columns."""
        counts = self.counts
        if counts is not None:
            counts = counts.unsqueeze(-1) if columns else counts
            u = u * (counts.sqrt() if root else counts).to(u.dtype)
        return u


class TargetFacts(NamedTuple):
    """Facts about continuous targets from the first pass; see ``Problem.with_targets``."""

    sigma: Tensor | None = None
    """σ from which EM starts, () or (C,); None: that of the likelihood."""

    moments: Tensor | None = None
    """Mean and variance of the targets, (2, C) or (2,); None: the targets are not shifted."""

    network_noise: Tensor | None = None
    """σ of the network's residuals, in the shape of σ; None: σ is not learnt."""

    @classmethod
    def of(
        cls, sums: Tensor, likelihood: Likelihood, is_learnt: bool, dtype: torch.dtype
    ) -> TargetFacts:
        """Return the facts that follow from ``Loss.sums_of_targets`` over all examples.
        ``is_learnt`` is whether σ is learnt, and ``dtype`` that of the targets."""
        totals, given = sums.cpu(), likelihood.observation_noise
        noise = sigma = moments = None
        errors = totals[2] / totals[3]
        least, output = errors.reshape(-1).min(0)
        if given is not None and not given.dim() and least < 0.01 * errors.mean():
            report(
                "log",
                f"All outputs share sigma_noise, but the residuals of output {output} are only "
                f"{(least / errors.mean()).sqrt():.1%} of it: its intervals are far too wide. Pass "
                f"Regression(torch.ones({len(errors)})) to learn one for each.",
            )
        if is_learnt:
            noise = noise_of_residuals(totals, likelihood, is_start=False)
        if likelihood.from_data:
            sigma = noise_of_residuals(totals, likelihood, is_start=is_learnt)
        if has_offset(likelihood) and totals[4].min() >= _FEWEST:
            mean, square = sums[:2] / sums[3]
            rounded = torch.finfo(dtype).eps ** 2 * square
            variance = torch.maximum(square - mean.square(), rounded).where(square > 0, 1)
            moments = torch.stack([mean, variance])
        return cls(sigma, moments, noise)


def check_weights(likelihood: Likelihood) -> None:
    """Raise an error if a likelihood cannot be weighted."""
    if likelihood.real_valued and not likelihood.elementwise:
        raise TypeError(
            f"{type(likelihood).__name__} takes no weights: its targets do not belong to single "
            "outputs."
        )
    if likelihood.from_data:
        raise ValueError(
            "A weighted regression does not learn σ: pass LinearisedLaplace(model, "
            "Regression(sigma_noise))."
        )


def has_offset(likelihood: Likelihood) -> bool:
    """Whether the mean of continuous targets is the constant of the linear model."""
    return likelihood.offset(*torch.ones(2, 1, device="cpu")) is not None


def noise_of_residuals(sums: Tensor, likelihood: Likelihood, is_start: bool) -> Tensor:
    """Return σ of the network's residuals, or the σ from which it is learnt, () or (C,), from its
    sums on the CPU."""
    mean, square, errors = sums[:3] / sums[3]
    # per output, except for measurements of few examples, whose variance is not known
    variance = square - (mean if likelihood.elementwise else mean.mean()).square()
    noise = likelihood.observation_noise
    if noise is not None and not noise.dim():
        errors, variance = errors.mean(), variance.mean()
    if is_start and errors > variance > _LEAST_FIXED * square.mean():  # not for constant targets
        report(
            "log",
            f"The network's mean squared error on training data, {errors:.3g}, is not below the "
            f"variance of the targets, {variance:.3g}. The posterior is that of a trained network: "
            "train it before fit.",
        )
    # networks that have overfitted have residuals close to 0
    squares = torch.maximum(errors, (_LEAST_SHARE if is_start else _LEAST_FIXED) * variance)
    return squares.where(squares > 0, 1.0).sqrt()
