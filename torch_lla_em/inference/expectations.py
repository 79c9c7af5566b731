"""The expectations of the loss, its slope and H of examples over the posterior of their outputs.

The outputs of an example are h_n ~ N(m_n, Σ_k d_nk d_nkᵀ / K), where d_nk are the outputs J_n w_k
of the posterior samples: m_n + Σ_k d_nk ε_k / √K is a draw, so no covariance is ever factorised.
Every example has its own ε, so that a fit cannot adapt to errors that all examples share, and every
draw has a mirror image.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_lla_em.data import Share
from torch_lla_em.problem import AtOutputs, Blocks, Diagonal, Draws, Hessian, Loss, functions


class Expectations:
    """E[loss], E[∇loss] and E[H] of this rank's examples; without draws, their values at the
    mean."""

    def __init__(self, like: Tensor, share: Share, seed: int, number: int, many: bool = False):
        self.share, self.number, self.many = share, number, many
        """``number`` is the number of draws for each example; 0: H is fixed at the network's
        outputs."""

        self._shape, self._seed, self._noise = like.shape, seed, like.new_zeros(0)

    def H(self, loss: Loss, mean: Tensor, deviations: Tensor | None) -> Hessian:
        """Return H for means (N, ..., C), averaged over deviations (S, N, ..., C)."""
        if not self.number:
            return AtOutputs(mean, loss)
        values = mean[:0]
        for rows, f in functions(mean, deviations):
            if self.many:
                f = f.expand(2 * self.number, *f.shape[1:])
                part = loss.part(rows).roots_of_probabilities(f)
            else:
                part = loss.part(rows).expected_hessian(f)
            if not len(values):
                values = part.new_empty(len(mean), *part.shape[1:])
            values[rows] = part
        form = Draws if self.many else Diagonal if loss.likelihood.elementwise else Blocks
        moved: Hessian = form(values)
        return moved

    def loss_and_slope(
        self, loss: Loss, mean: Tensor, deviations: Tensor | None
    ) -> tuple[float, Tensor]:
        """Return Σ E[-log p(y | h)] of all ranks, and its slope in the mean of this rank's
        examples."""
        total, slopes = mean.new_zeros((), dtype=torch.float64), [mean[:0]]
        for rows, f in functions(mean, deviations):
            part = loss.part(rows)
            total += part.value(f).double() / len(f)
            slopes.append(part.gradient(f).mean(0))
        return self.share.group.sum(total).item(), torch.cat(slopes)

    def deviations(self, pushed: Tensor, rows: slice = slice(None)) -> Tensor:
        """Return draws of the outputs minus their mean, (S, n, ..., C), for J w_k (n, ..., C, K) of
        these examples.

        If an example has many draws for each column, the draws are transformed so that their second
        moments are those of the columns. Then E[loss] and E[H] are consistent, and the bound is
        highest at the fixed point of MacKay's update; otherwise, the λ of 30 examples depended on
        its start by 15 %. With few draws this would make the tails too light: with 20 draws for 16
        columns, the λ of a CNN rose to 1.6 times that of many draws.
        """
        K = pushed.shape[-1]
        if self._noise.shape[-2:] != (K, self.number):
            # numbers of this rank's examples, (N, ..., K, S), the same on every device and for any
            # number of ranks
            generator = torch.Generator("cpu").manual_seed(self._seed)
            shape = *self._shape[1:-1], K, self.number
            blocks = [pushed.new_zeros(0, *shape)]
            for numbers in torch.arange(self.share.total, device="cpu").split(1 << 12):
                size = len(numbers), *shape
                drawn = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")
                drawn = drawn[self.share.find(numbers)[0]]
                if self.number >= 8 * K:
                    drawn = self.number**0.5 * torch.linalg.qr(drawn.mT).Q.mT
                blocks.append(drawn.to(pushed).div_(K**0.5))
            self._noise = torch.cat(blocks)
        return (pushed @ self._noise[rows]).movedim(-1, 0).contiguous()
