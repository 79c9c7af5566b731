"""Likelihoods of a choice among classes: softmax, and preferences between candidates."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from torch_lla_em.likelihoods.base import Labels, sum_rows

# classes over which, where they are the last axis, a CPU takes softmax a number at a time
_FEW = 16


class Classification(Labels):
    """Softmax over the last axis; y are class indices, (B, *sites)."""

    def __init__(self, ignore_index: int = -100):
        self.ignore_index = ignore_index

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        kept, index = self._chosen(f, y)
        chosen = _log_softmax(f).gather(-1, index).squeeze(-1)
        return sum_rows(chosen.where(kept, 0), y)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        kept, index = self._chosen(f, y)
        others = _softmax(f).scatter(-1, index, 0)
        return others.scatter(-1, index, -others.sum(-1, keepdim=True)) * kept.unsqueeze(-1)

    def hessian_product(self, f: Tensor, u: Tensor) -> Tensor:
        p = _softmax(f)
        # H has no constant part; against the likeliest class nothing cancels where p is near 1
        u = u - u.gather(-1, f.argmax(-1, keepdim=True).expand(*u.shape[:-1], 1))
        pu = p * u
        return pu - p * pu.sum(-1, keepdim=True)

    def hessian_sqrt_product(self, f: Tensor, noise: Tensor) -> Tensor:
        log_p, shape = _log_softmax(f), torch.broadcast_shapes(f.shape, noise.shape)
        root_noise, p = (0.5 * log_p).exp() * noise, log_p.exp()
        likeliest = f.argmax(-1, keepdim=True).expand(*shape[:-1], 1)
        own = root_noise.gather(-1, likeliest)
        others = root_noise.scatter(-1, likeliest, 0).sum(-1, keepdim=True)
        product = root_noise - p * (own + others)
        # there √p ε - p √p ε = √p ε Σ p of the others, without a difference
        p = p.expand(shape)
        rest = p.scatter(-1, likeliest, 0).sum(-1, keepdim=True)
        return product.scatter(-1, likeliest, own * rest - p.gather(-1, likeliest) * others)

    def mean(self, f: Tensor) -> Tensor:
        return _softmax(f)

    def log_mean(self, f: Tensor) -> Tensor:
        return _log_softmax(f)

    def entropy_of(self, p: Tensor) -> Tensor:
        """Return -Σ p log p over the last axis."""
        return torch.special.entr(p).sum(-1)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        p = f.softmax(-1)
        return torch.multinomial(p.flatten(0, -2), 1, generator=generator).view(p.shape[:-1])

    def mask(self, y: Tensor) -> Tensor:
        return y != self.ignore_index

    def check(self, f: Tensor, y: Tensor) -> None:
        if f.dim() < 2 or f.shape[-1] < 2:
            raise ValueError(
                f"Classification needs two classes or more, but the outputs have shape "
                f'{tuple(f.shape)}. For one logit with 0/1 targets use likelihood="bernoulli"; '
                "for classes on another axis pass class_dim."
            )
        if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            raise TypeError(
                f"Class labels must be integers, not {y.dtype}: {_remedy(f, y) or _TO_INTEGERS}"
            )
        if y.shape != f.shape[:-1]:
            maps = f.dim() > 2 and y.shape == f.shape[:1] + f.shape[2:]
            remedy = " Where the classes come before the places, pass class_dim=1." * maps
            remedy = f" {_remedy(f, y)}" if _remedy(f, y) else remedy
            raise ValueError(
                f"Class labels have shape {tuple(y.shape)}, but the outputs "
                f"{tuple(f.shape)} (classes last) ask for {tuple(f.shape[:-1])}.{remedy}"
            )
        beyond = self.mask(y) & ((y < 0) | (y >= f.shape[-1]))
        inside = (f >= 0).all() & (f <= 1).all() & ((f.sum(-1) - 1).abs() < 1e-3).all()
        # together: the host waits for it
        looks_like_probabilities, is_beyond = torch.stack([inside, beyond.any()]).tolist()
        if looks_like_probabilities and f.numel():
            warnings.warn(
                "The outputs look like probabilities: they lie between 0 and 1, and their sums are "
                "1. Classification takes logits, before the softmax: leave it out of the network.",
                stacklevel=2,
            )
        if is_beyond:
            kept, outside, remedy = y[self.mask(y)], y[beyond].unique(), ""
            if len(outside) == 1:
                mark = f"ignore_index={outside.item()}"
                remedy = f" If that marks what has no label, pass Classification({mark})."
            raise ValueError(
                f"Class labels lie in [{kept.min()}, {kept.max()}], outside of 0 to "
                f"{f.shape[-1] - 1}; give the network as many outputs as there are classes.{remedy}"
            )

    def _chosen(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return which sites count, and the places of their classes in f."""
        kept = self.mask(y)
        return kept, y.where(kept, 0).expand(f.shape[:-1]).unsqueeze(-1)


class BradleyTerry(Classification):
    """Which of several candidates is preferred: outputs are their rewards, y the index, (B,).

    p(first beats second) = sigmoid(r_1 - r_2); with more than two, the softmax of rewards
    (Luce's choice). One candidate alone has a reward, with mean and variance, but no
    probability.
    """

    def mean(self, f: Tensor) -> Tensor:
        if f.shape[-1] == 1:
            raise ValueError(
                "One candidate has a reward but no probability of being preferred: read "
                "la.predict(x).mean, .variance and .samples, or pass several candidates."
            )
        return super().mean(f)

    def check(self, f: Tensor, y: Tensor) -> None:
        if f.dim() != 2 or f.shape[-1] < 2:
            raise ValueError(
                f"Rewards must be (B, candidates), two or more, but have shape {tuple(f.shape)}: "
                "let each batch's inputs be a tuple of candidates, ((first, second), preferred), "
                "and the network return one reward per row."
            )
        super().check(f, y)


_TO_INTEGERS = (
    'convert them with .long(), or use likelihood="bernoulli" for 0/1 targets of several labels.'
)


def _remedy(f: Tensor, y: Tensor) -> str:
    """Return what to do with labels that are one-hot, or nothing."""
    if y.shape != f.shape or y.dtype == torch.bool:
        return ""
    one_hot = ((y == 0) | (y == 1)).all() and (y.sum(-1) == 1).all()
    return "For one-hot labels pass y.argmax(-1), the class indices." if one_hot else ""


def _softmax(f: Tensor) -> Tensor:
    return f.softmax(-1) if f.shape[-1] >= _FEW else f.movedim(-1, 0).softmax(0).movedim(0, -1)


def _log_softmax(f: Tensor) -> Tensor:
    if f.shape[-1] >= _FEW:
        return f.log_softmax(-1)
    return f.movedim(-1, 0).log_softmax(0).movedim(0, -1)
