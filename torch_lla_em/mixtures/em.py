"""The data of a mixture, and EM for exponential families: log p(x, component k) = θ_k · φ(x).

For any distribution q over the components z of the examples,

    log p(X | θ) = L(q, θ) + KL(q ‖ p(z | X, θ)),   L(q, θ) = E_q[log p(X, z | θ) − log q(z)].

The E-step makes the divergence zero and the M-step raises the bound L, so log p(X | θ) never falls.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_lla_em.mixtures.gaussian import Family, Tensors

_IGNORED = -100
"""The label that PyTorch's losses ignore."""

_NUMBERS = {"cpu": 1 << 18, "cuda": 1 << 26}
"""How many numbers to compute with at once: on a CPU they should stay in the cache."""


class Examples:
    """The checked examples of batches, as tensors; without labels, all have the label 0."""

    def __init__(self, data: Tensor | Iterable[Any], by_label: bool = False):
        if isinstance(data, Iterator):
            raise TypeError(
                f"The data are an iterator ({type(data).__name__}), which ends after one pass, but "
                "EM needs several. Pass tensors, a list of batches or a DataLoader."
            )
        self.batches = [data] if isinstance(data, (Tensor, np.ndarray)) else data
        self.by_label = by_label

    def pieces(self, width: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a few examples (n, D) and labels (n,), to compute with ``width`` (or D) numbers for each."""
        for batch in self.batches:
            x, *others = batch if isinstance(batch, (tuple, list)) else (batch,)
            x = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
            if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] == 0:
                shape = tuple(x.shape) if isinstance(x, Tensor) else None
                raise ValueError(
                    f"A batch holds a {type(x).__name__} of shape {shape}. Pass tensors with one "
                    "row per example, shape (n, D); a single column is x[:, None]."
                )
            labels = self._labels(x, others)
            kept = labels != _IGNORED
            x, labels = (x.detach(), labels) if kept.all() else (x.detach()[kept], labels[kept])
            numbers = _NUMBERS.get(x.device.type, _NUMBERS["cpu"])
            size = max(256, numbers // (width or x.shape[1]))
            yield from zip(x.split(size), labels.split(size))

    def _labels(self, x: Tensor, others: list[Any]) -> Tensor:
        if not self.by_label:
            return torch.zeros(len(x), dtype=torch.long, device=x.device)
        labels = torch.as_tensor(others[0], device=x.device) if others else None
        if labels is None or labels.shape != x.shape[:1] or labels.is_floating_point():
            found = "none" if labels is None else f"{labels.dtype} {tuple(labels.shape)}"
            raise ValueError(
                "A fit by label needs batches (x, labels) with one integer per example, but "
                f"the labels are {found}. Pass [(x, labels)] or a loader."
            )
        return labels


class Survey(NamedTuple):
    """Statistics of the data, from the first pass: examples with each label, moments, and a uniform sample.

    The sample has all examples if they are few enough.
    """

    counts: Counter[int]
    mean: Tensor
    variance: Tensor
    x: Tensor
    labels: Tensor

    @property
    def num_examples(self) -> int:
        """N."""
        return sum(self.counts.values())


def survey(examples: Examples, sample_size: int, generator: torch.Generator) -> Survey:
    """Count, average and sample the examples in one pass; refuse what no mixture can fit."""
    count, mean, squares = 0, torch.zeros((), device="cpu"), torch.zeros((), device="cpu")
    counts: Counter[int] = Counter()
    sample: list[tuple[Tensor, ...]] = []
    for x, labels in examples.pieces():
        n = len(x)
        if n == 0:
            continue
        variance, centre = torch.var_mean(x.double(), 0, correction=0)
        if not torch.isfinite(variance).all():
            bad = int((~torch.isfinite(x)).any(1).sum())
            raise ValueError(
                f"A batch has {bad} examples with NaN or infinity, or values too large "
                "to square. Remove, impute or rescale them."
            )
        delta, count = centre - mean.to(centre), count + n
        squares = squares.to(centre) + n * variance + delta.square() * (n * (count - n) / count)
        mean = mean.to(centre) + delta * (n / count)
        counts.update(dict(zip(*(t.tolist() for t in labels.unique(return_counts=True)))))
        keys = torch.rand(n, generator=generator, device=generator.device).to(centre.device)
        sample.append((keys, x, labels))
        if sum(len(keys) for keys, *_ in sample) > 2 * sample_size:
            sample = [_with_largest_keys(sample, sample_size)]
    if count == 0:
        raise ValueError(
            "The data hold no examples. Is the loader empty or used up, or are all labels "
            f"{_IGNORED}, which are left out?"
        )
    _, x, labels = _with_largest_keys(sample, sample_size)
    return Survey(counts, mean, squares / count, x, labels)


def _with_largest_keys(sample: list[tuple[Tensor, ...]], size: int) -> tuple[Tensor, ...]:
    """Return a uniform sample: the examples with the largest random keys, in their order."""
    keys, *others = (torch.cat(parts) for parts in zip(*sample))
    chosen = keys.topk(min(size, len(keys))).indices.sort().values
    return tuple(tensor[chosen] for tensor in (keys, *others))


class MixtureState(NamedTuple):
    """The result of one EM step, from which the next begins."""

    parameters: Any
    """The parameters of the mixture, in the coordinates of the fit."""

    natural: Tensors
    """θ."""

    objective: float = -float("inf")
    """log p(X | θ) of the parameters that the step began with, plus log p(θ) for MAP."""

    lower_bound: float = -float("inf")
    """A lower bound of the objective at the step's new parameters.

    It lies between this step's ``objective`` and that of the next step, which is higher by the
    divergence KL(q ‖ p) that the M-step left.
    """

    converged: bool = False
    """Whether the bound changed by no more than the tolerance."""


@dataclass(frozen=True)
class EM:
    """EM for one family on one data set."""

    family: Family
    examples: Examples
    classes: Tensor
    """The label of each component, shape (K,): examples belong to components of their label."""

    tolerance: float
    """How much of a change of the bound, over all examples, counts as convergence."""

    weight: float = 1.0
    """How many examples each of these stands for."""

    def states(self, parameters: Any, max_steps: int) -> Iterator[MixtureState]:
        """Yield the state after each step from these parameters, until the bound converges."""
        state = MixtureState(parameters, self.family.natural(parameters))
        for _ in range(max_steps):
            state = self.step(state)
            yield state
            if state.converged:
                return

    def last(self, parameters: Any, max_steps: int) -> MixtureState:
        """Return the last of these states."""
        *_, state = self.states(parameters, max_steps)
        return state

    def step(self, state: MixtureState) -> MixtureState:
        """Return the state after an E-step and an M-step."""
        log_evidence, sums = self.expectation(state.natural)
        parameters = self.family.maximise(sums)
        natural = self.family.natural(parameters)
        # L(q, θ) − log p(X | θ_old) is the change of E_q log p(X, z | θ), which is linear in θ
        gain = _inner(natural, sums) - _inner(state.natural, sums)
        objective = float(log_evidence + self.family.log_prior(state.parameters))
        bound = float(log_evidence + gain + self.family.log_prior(parameters))
        converged = abs(bound - state.lower_bound) <= self.tolerance
        return MixtureState(parameters, natural, objective, bound, converged)

    def expectation(self, natural: Tensors) -> tuple[Tensor, Tensors]:
        """Return log p(X | θ), shape (), and Σ_n r_kn φ(x_n), from one pass over the data."""
        sums, log_evidence = [torch.zeros_like(t) for t in natural], natural[0].new_zeros(())
        is_by_label = bool((self.classes != self.classes[0]).any())
        for x, labels in self.examples.pieces(self.family.width):
            columns = self.family.columns(x.to(log_evidence.device))
            r = self.family.log_joint(natural, columns)
            if is_by_label:
                r.masked_fill_(self.classes[:, None] != labels.to(r.device), -torch.inf)
            log_prob = r.logsumexp(0)
            r.sub_(log_prob).exp_()
            sums = [total + part for total, part in zip(sums, self.family.sums(r, columns))]
            log_evidence += log_prob.sum()
        return self.weight * log_evidence, tuple(self.weight * total for total in sums)


def _inner(natural: Tensors, sums: Tensors) -> Tensor:
    """Return Σ θ · Σ_n r φ; components of weight 0, whose constant is −∞, add nothing."""
    constant, *others = natural
    constant = constant.where(constant != -torch.inf, 0.0)
    return torch.stack([(a * b).sum() for a, b in zip((constant, *others), sums)]).sum()
