"""Likelihoods of discrete targets: classes, preferences among candidates, labels and counts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus

from torch_lla_em.data import (
    Inputs,
    Tree,
    default_forward,
    default_targets,
    is_sequence,
    tensors_in,
)
from torch_lla_em.likelihoods.base import ElementwiseLikelihood, Labels, sum_rows


class Classification(Labels):
    """Softmax over the last axis of the outputs; targets are class indices, shape (B, *sites).

    Args:
        ignore_index (int): Label of sites that do not count, as in PyTorch's losses. Default -100.
            Change it if your data mark missing labels differently; segmentation data often use 255.

    Raises:
        TypeError: In ``fit``, if labels are not integers.
        ValueError: In ``fit``, if there is only one class, or labels have the wrong shape or range.

    Example:
        >>> la = LinearisedLaplace(model, Classification(ignore_index=255), class_dim=1)
    """

    is_softmax = True

    def __init__(self, ignore_index: int = -100):
        self.ignore_index = ignore_index

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        kept, index = self._chosen(f, y)
        chosen = Classification.log_mean(self, f).gather(-1, index).squeeze(-1)
        return sum_rows(chosen.where(kept, 0), y)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        kept, index = self._chosen(f, y)
        others = Classification.mean(self, f).scatter(-1, index, 0)
        return others.scatter(-1, index, -others.sum(-1, keepdim=True)) * kept.unsqueeze(-1)

    def hessian_product(self, f: Tensor, u: Tensor) -> Tensor:
        p = Classification.mean(self, f)
        # H annihilates constants; relative to the likeliest class nothing cancels where p is near 1
        u = u - u.gather(-1, f.argmax(-1, keepdim=True).expand(*u.shape[:-1], 1))
        pu = p * u
        return pu - p * pu.sum(-1, keepdim=True)

    def expected_hessian(self, f: Tensor) -> Tensor:
        # products of small blocks with strides take ten times as long
        p = Classification.mean(self, f).movedim(0, -1).contiguous()
        blocks = p @ (p.mT / -len(f))
        # H annihilates constants, and a sum of the other classes does not cancel where p is near 1
        blocks.diagonal(dim1=-2, dim2=-1).zero_()
        blocks.diagonal(dim1=-2, dim2=-1).copy_(-blocks.sum(-1))
        return blocks

    def hessian_sqrt_product(self, f: Tensor, noise: Tensor) -> Tensor:
        log_p, shape = (
            Classification.log_mean(self, f),
            torch.broadcast_shapes(f.shape, noise.shape),
        )
        root_noise, p = (0.5 * log_p).exp() * noise, log_p.exp()
        likeliest = f.argmax(-1, keepdim=True).expand(*shape[:-1], 1)
        of_likeliest = root_noise.gather(-1, likeliest)
        others = root_noise.scatter(-1, likeliest, 0).sum(-1, keepdim=True)
        product = root_noise - p * (of_likeliest + others)
        # there √p ε - p √p ε = √p ε Σ p of the other classes, computed without a difference
        p = p.expand(shape)
        rest = p.scatter(-1, likeliest, 0).sum(-1, keepdim=True)
        return product.scatter(
            -1, likeliest, of_likeliest * rest - p.gather(-1, likeliest) * others
        )

    # on a CPU, softmax over few classes is faster along the first axis than the last

    def mean(self, f: Tensor) -> Tensor:
        if f.shape[-1] >= 16:
            return f.softmax(-1)
        return f.movedim(-1, 0).softmax(0).movedim(0, -1)

    def log_mean(self, f: Tensor) -> Tensor:
        if f.shape[-1] >= 16:
            return f.log_softmax(-1)
        return f.movedim(-1, 0).log_softmax(0).movedim(0, -1)

    def entropy_of(self, p: Tensor) -> Tensor:
        entropy: Tensor = torch.special.entr(p).sum(-1)
        return entropy

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        p = f.softmax(-1)
        return torch.multinomial(p.flatten(0, -2), 1, generator=generator).view(p.shape[:-1])

    def mask(self, y: Tensor) -> Tensor:
        return y != self.ignore_index

    def check(self, f: Tensor, y: Tensor) -> None:
        if f.dim() < 2 or f.shape[-1] < 2:
            raise ValueError(
                "Classification needs two classes or more, but the outputs have shape "
                f'{tuple(f.shape)}. For one logit with 0/1 targets use likelihood="bernoulli"; '
                "for classes on another axis pass class_dim."
            )
        is_integer = not (y.is_floating_point() or y.is_complex() or y.dtype == torch.bool)
        if not is_integer or y.shape != f.shape[:-1]:
            raise (ValueError if is_integer else TypeError)(
                f"Class labels must be integers of shape {tuple(f.shape[:-1])} for outputs of "
                f"shape {tuple(f.shape)} (classes last), but are {y.dtype} of shape "
                f"{tuple(y.shape)}. Pass one class index per example or site: y.long(), or for "
                'one-hot labels y.argmax(-1). For several 0/1 labels use likelihood="bernoulli"; '
                "if axis 1 of the outputs holds the classes, pass class_dim=1."
            )
        is_logit = ~((f >= 0) & (f <= 1)).all() | ((f.sum(-1) - 1).abs() >= 1e-3).any()
        beyond = self.mask(y) & ((y < 0) | (y >= f.shape[-1]))
        is_logit, is_beyond = torch.stack([is_logit, beyond.any()]).tolist()  # one GPU sync
        if not is_logit and f[..., 0].numel() >= 4:  # fewer may sum to 1 by chance
            raise ValueError(
                "The outputs are probabilities: all lie between 0 and 1, and those of an example "
                "sum to 1. Classification needs logits. Leave out the last softmax, or pass "
                "adapter=Adapter(lambda model, x: model(x).log()), since log probabilities are "
                "logits."
            )
        if is_beyond:
            kept = y[self.mask(y)]
            raise ValueError(
                f"Class labels are between {kept.min()} and {kept.max()}, outside of 0 to "
                f"{f.shape[-1] - 1}: the network needs as many outputs as there are classes. If "
                "a number marks missing labels, pass it as Classification(ignore_index=...)."
            )

    def _chosen(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return which sites count, and the index of their classes in f."""
        kept = self.mask(y)
        return kept, y.where(kept, 0).expand(f.shape[:-1]).unsqueeze(-1)


class BradleyTerry(Classification):
    """Preferences among candidates: outputs are rewards, targets the preferred indices, shape (B,).

    p(first is preferred) = sigmoid(r_1 - r_2) for two candidates, and the softmax of the rewards
    for more (Luce's choice axiom). The network returns one reward per example. The inputs of a
    batch are a tuple of candidates, or a dict {"chosen": ..., "rejected": ...}. A single candidate
    has a reward, with mean and variance, but no probability.

    Args:
        ignore_index (int): Index of examples that do not count. Default -100.

    Raises:
        ValueError: In ``fit`` or for probabilities, if there are fewer than two candidates.

    Example:
        >>> reward_model = torch.nn.Linear(2, 1)
        >>> first, second = torch.randn(20, 2), torch.randn(20, 2)
        >>> preferred_index = torch.zeros(20, dtype=torch.long)
        >>> la = LinearisedLaplace(reward_model, BradleyTerry())  # or "reward_modeling"
        >>> la = la.fit([((first, second), preferred_index)], progress_bar=False)
        >>> variance = la.predict(first).f_variance
    """

    def mean(self, f: Tensor) -> Tensor:
        if f.shape[-1] == 1:
            raise ValueError(
                "One candidate has a reward but no probability of being preferred: use "
                "la.predict(x).f_mean, .f_variance and .samples, or pass several candidates."
            )
        return super().mean(f)

    def check(self, f: Tensor, y: Tensor) -> None:
        if f.dim() != 2 or f.shape[-1] < 2:
            raise ValueError(
                "Rewards must have shape (B, candidates), with two candidates or more, but have "
                f"shape {tuple(f.shape)}. Let each batch's inputs be a tuple of candidates, "
                "((first, second), preferred), and the network return one reward per example."
            )
        super().check(f, y)


class Bernoulli(Labels, ElementwiseLikelihood):
    """Independent 0/1 targets with logits f, for binary or multi-label classification.

    Raises:
        ValueError: In ``fit``, if targets are not 0 or 1, or do not have the shape of the outputs.

    Example:
        >>> la = LinearisedLaplace(torch.nn.Linear(2, 3), "bernoulli")
        >>> la = la.fit(torch.randn(20, 2), torch.ones(20, 3), progress_bar=False)
    """

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

    def mistaken(self, f: Tensor, y: Tensor) -> tuple[Tensor, str] | None:
        if not ((f >= 0) & (f <= 1)).all():
            return None
        p = f.double().clamp(1e-9, 1 - 1e-9)
        return sum_rows(torch.where(y > 0.5, p, 1 - p).log(), y), (
            "The outputs look like probabilities: all lie between 0 and 1, and as probabilities "
            'they predict better. "bernoulli" needs logits: leave out the last sigmoid, or '
            "pass adapter=Adapter(lambda model, x: model(x).logit(1e-6))."
        )

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

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return sum_rows(y * f - f.exp() - torch.lgamma(y.to(f) + 1), y)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return f.exp() - y

    def mean(self, f: Tensor) -> Tensor:
        return f.exp()

    curvature = variance = mean

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.poisson(f.exp(), generator=generator)

    def mistaken(self, f: Tensor, y: Tensor) -> tuple[Tensor, str] | None:
        if not (f >= 0).all():
            return None
        return Poisson.log_prob(self, f.double().clamp_min(1e-9).log(), y.double()), (
            "The outputs look like rates: none is negative, and as rates they predict the targets "
            'better. "poisson" needs log rates: train without the last exp or softplus, or pass '
            "adapter=Adapter(lambda model, x: model(x).log())."
        )

    def check(self, f: Tensor, y: Tensor) -> None:
        super().check(f, y)
        if ((y < 0) | (y != y.round())).any():
            raise ValueError("Poisson targets must be counts: 0, 1, 2, ...")


def rewards(model: nn.Module, inputs: Inputs) -> Tensor:
    """Return one reward per candidate: (B, n) for a tuple of n candidates, (B, 1) for one.

    A dict {"chosen": ..., "rejected": ...} counts as the tuple of the two.
    """
    if isinstance(inputs, Mapping) and {"chosen", "rejected"} <= inputs.keys():
        inputs = inputs["chosen"], inputs["rejected"]
    candidates = inputs if is_sequence(inputs) else (inputs,)
    columns = []
    for outputs in (default_forward(model, each) for each in candidates):
        if outputs.dim() > 2 or outputs.shape[1:] not in ((), (1,)):
            raise ValueError(
                "A reward is one number per example, shape (B,) or (B, 1), but the network "
                f"returned {tuple(outputs.shape)}. Pass adapter=Adapter(lambda model, candidates: "
                "...) that returns (B, candidates)."
            )
        columns.append(outputs.view(-1, 1))
    return torch.cat(columns, dim=-1)


def preferred(batch: Tree) -> Tensor:
    """Return the index of the preferred candidate: the batch's targets, or 0 for "chosen"."""
    if isinstance(batch, Mapping) and "chosen" in batch and "labels" not in batch:
        first: Tensor = tensors_in(batch["chosen"])[0]
        return torch.zeros(len(first), dtype=torch.long, device=first.device)
    targets: Tensor = default_targets(batch)
    return targets
