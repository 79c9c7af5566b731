"""Likelihoods with an independent discrete target for each output, whose H is diagonal."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from torch_lla_em.likelihoods.base import Labels, Likelihood, average, require_real, sum_rows

_MOST_COUNTS = 100_000


class ElementwiseLikelihood(Likelihood):
    """Base class for independent targets, whose H is diagonal; ``check`` requires y of the shape of f.

    A subclass defines ``log_prob``, ``curvature`` and ``mean``.
    """

    elementwise = True

    def curvature(self, f: Tensor) -> Tensor:
        """Return the diagonal of H(f), in the shape of f."""
        raise NotImplementedError

    def hessian_product(self, f: Tensor, u: Tensor) -> Tensor:
        return self.curvature(f) * u

    def hessian_sqrt_product(self, f: Tensor, noise: Tensor) -> Tensor:
        return self.curvature(f).sqrt() * noise

    def check(self, f: Tensor, y: Tensor) -> None:
        if y.shape != f.shape:
            raise ValueError(
                f"Targets have shape {tuple(y.shape)}, but the outputs {tuple(f.shape)}. They "
                "must be equal, as broadcasting would pair every target with every output: "
                "reshape the targets, for example with y[:, None]."
            )
        require_real(y)


class Bernoulli(Labels, ElementwiseLikelihood):
    """Independent 0/1 targets with logits f, for binary or multi-label classification.

    Raises:
        ValueError: In ``fit``, if targets are not 0 or 1, or do not have the shape of the outputs.

    Example:
        >>> la = LinearisedLaplace(torch.nn.Linear(2, 3), "bernoulli")
        >>> la = la.fit(torch.randn(20, 2), torch.ones(20, 3), progress_bar=False)
    """

    monotone = True

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return sum_rows(y * f - softplus(f), y)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return f.sigmoid() - y

    def curvature(self, f: Tensor) -> Tensor:
        return f.sigmoid() * (-f).sigmoid()

    def mean(self, f: Tensor) -> Tensor:
        return f.sigmoid()

    def log_mean(self, f: Tensor) -> Tensor:
        return logsigmoid(f)

    def entropy_of(self, p: Tensor) -> Tensor:
        entropy: Tensor = torch.special.entr(p) + torch.special.entr(1 - p)
        return entropy

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.bernoulli(f.sigmoid(), generator=generator)

    def check(self, f: Tensor, y: Tensor) -> None:
        super().check(f, y)
        if ((y != 0) & (y != 1)).any():
            raise ValueError("Bernoulli targets must be 0 or 1, of the shape of the outputs.")


class Poisson(ElementwiseLikelihood):
    """Counts with a Poisson distribution whose rate is exp(f).

    Raises:
        ValueError: In ``fit``, if targets are not counts, or do not have the shape of the outputs.

    Example:
        >>> la = LinearisedLaplace(torch.nn.Linear(2, 1), "poisson")
        >>> la = la.fit(torch.randn(20, 2), torch.ones(20, 1), progress_bar=False)
    """

    monotone = True

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return sum_rows(y * f - f.exp() - torch.lgamma(y.to(f) + 1), y)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return f.exp() - y

    def curvature(self, f: Tensor) -> Tensor:
        return f.exp()

    def mean(self, f: Tensor) -> Tensor:
        return f.exp()

    def variance(self, f: Tensor) -> Tensor:
        return f.exp()

    def entropy(self, f: Tensor, weights: Tensor | None = None) -> Tensor:
        # -Σ p(y) log p(y) of the mixture, summed over all counts that can occur
        rates = f.exp()
        largest = rates.max().item()
        last = largest + 12 * largest**0.5 + 30
        if not last < _MOST_COUNTS:
            raise ValueError(
                f"The entropy at a rate of {largest:.3g} is a sum over too many counts: use "
                ".aleatoric and .epistemic, the two parts of Var[y]."
            )
        total = torch.zeros_like(f[0])
        for y in torch.arange(int(last) + 1, dtype=f.dtype, device=f.device):
            p = average((y * f - rates - torch.lgamma(y + 1)).exp(), weights)
            total += torch.special.entr(p)
        return total

    def smoothed_mean(self, f: Tensor, variance: Tensor) -> Tensor:
        return (f + 0.5 * variance).exp()

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.poisson(f.exp(), generator=generator)

    def check(self, f: Tensor, y: Tensor) -> None:
        super().check(f, y)
        if ((y < 0) | (y != y.round())).any():
            raise ValueError("Poisson targets must be counts: 0, 1, 2, ...")
