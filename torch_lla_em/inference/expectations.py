"""Expectations of the loss, its gradient and its H under the posterior of the outputs.

The outputs of an example are h_n ~ N(m_n, Σ_k d_nk d_nkᵀ / K), where d_nk are the outputs J_n w_k of the posterior samples:
m_n + Σ_k d_nk ε_k / √K is a draw, so no covariance is ever factorised. Every example has ε of its own, so that a fit cannot
adapt to errors that all examples share, and every draw a mirror image.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.data import Share
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.problem import AtOutputs, Blocks, Diagonal, Draws, Hessian, Loss, functions

DRAWS = 16_000
"""Draws of all examples together. With 8 of each of 2,000 the NLL was 1 % higher, with 32 the same."""


COPIES = 6
"""Copies of H that must fit into memory."""


class Expectations:
    """E[loss], E[∇loss] and E[H] of this rank's examples; without draws those at the mean."""

    def __init__(
        self,
        loss: Loss,
        like: Tensor,
        share: Share,
        seed: int = 0,
        moves: bool = False,
        many: bool = False,
    ):
        self.loss_of, self.share, self.shape, self._seed = loss, share, like.shape, seed
        self.many = many
        number = draws_for(share.total * like.shape[1:-1].numel(), self.many)
        self.number = number if moves else 0
        """Draws of every example, if H is averaged over them; 0: it is fixed at the network's outputs."""

        self._noise = like.new_zeros(0)

    def at(self, loss: Loss) -> Expectations:
        """Return those of another loss."""
        other = copy.copy(self)
        other.loss_of = loss
        return other

    def first(self, f: Tensor) -> Hessian:
        """Return the first H: at the network's outputs, or the average of that and of H at 0."""
        if self.number:
            uniform: Any = self.H(torch.zeros_like(f), None)
            average: Hessian = uniform.towards(self.H(f, None), 0.5)
            return average
        return self.H(f, None)

    def H(self, mean: Tensor, deviations: Tensor | None) -> Hessian:
        """Return H for means (N, ..., C), averaged over deviations (S, N, ..., C)."""
        if not self.number:
            return AtOutputs(mean, self.loss_of)
        parts = []
        for rows, f in functions(mean, deviations):
            loss = self.loss_of.part(rows)
            if self.many:
                f = f.expand(2 * self.number, *f.shape[1:])
                parts.append(loss.roots_of_probabilities(f))
            else:
                parts.append(loss.expected_hessian(f))
        values = torch.cat(parts)
        if self.many:
            return Draws(values)
        return Diagonal(values) if self.loss_of.likelihood.elementwise else Blocks(values)

    def loss_and_slope(self, mean: Tensor, deviations: Tensor | None) -> tuple[float, Tensor]:
        """Return Σ E[-log p(y | h)] of all ranks, and its slope in the mean of this rank's examples."""
        total, found = 0.0, [mean[:0]]
        for rows, f in functions(mean, deviations):
            loss = self.loss_of.part(rows)
            total += loss.value(f).item() / len(f)
            found.append(loss.gradient(f).mean(0))
        return self.share.add(total, mean), torch.cat(found)

    def deviations(self, pushed: Tensor) -> Tensor | None:
        """Return draws of the outputs less their mean, (S, N, ..., C), for J w_k (N, ..., C, K); None without draws."""
        if not self.number:
            return None
        *sites, _, K = pushed.shape
        if self._noise.shape[:-1] != (*sites, K):
            # numbers of this rank's examples, (N, ..., K, S), the same on every device and for any number of ranks
            generator = torch.Generator("cpu").manual_seed(self._seed)
            shape = *self.shape[1:-1], K, self.number
            found = [pushed.new_zeros(0, *shape)]
            for numbers in torch.arange(self.share.total, device="cpu").split(1 << 12):
                size = len(numbers), *shape
                drawn = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")
                own, _ = self.share.find(numbers)
                found.append(_with_unit_moments(drawn[own]).to(pushed).div_(K**0.5))
            self._noise = torch.cat(found)
        return (pushed @ self._noise).movedim(-1, 0).contiguous()


def _with_unit_moments(draws: Tensor) -> Tensor:
    """Return draws (..., K, S) whose second moments over S are the identity, if these are many for every column.

    Then E[loss] changes with the deviations as E[H] says, and the bound is highest where MacKay's update rests: otherwise λ of
    30 examples moved by 15 % with its start. Of few draws it would make the tails too light: with 20 for 16 columns λ of a CNN rose to
    1.6 times that of many draws.
    """
    K, S = draws.shape[-2:]
    return S**0.5 * torch.linalg.qr(draws.mT).Q.mT if S >= 8 * K else draws


def draws_for(sites: float, many: bool) -> int:
    """Return the number of draws for each of so many sites, of many classes or not."""
    return min(16 if many else 128, max(4, math.ceil(DRAWS / max(1, sites))))


def takes_draws(likelihood: Likelihood, classes: int, outputs: float, memory: float) -> bool:
    """Return whether H is stored as draws, since blocks for ``outputs`` bytes of outputs take too much memory."""
    if classes <= 32 or not likelihood.is_softmax:
        return False
    return COPIES * outputs * classes > memory / 2


def entries_of(likelihood: Likelihood, classes: int, sites: float, many: bool) -> float:
    """Return the entries of a moving H for each output, as draws of ``many`` classes or in blocks."""
    if likelihood.elementwise:
        return 1.0
    return 2.0 * draws_for(sites, many) if many else float(classes)
