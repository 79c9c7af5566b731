"""The data of a mixture, and EM for exponential families: log p(x, component k) = θ_k · φ(x).

For any distribution q over the components z of the examples,

    log p(X | θ) = L(q, θ) + KL(q ‖ p(z | X, θ)),   L(q, θ) = E_q[log p(X, z | θ) − log q(z)].

The E-step makes the divergence zero and the M-step raises the bound L, so log p(X | θ) never falls.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.mixtures.gaussian import Family, Tensors

_ROWS = 1024
"""How many examples to compute with at once. Half and twice as many take as long, within a fifth, for 20 to 256 columns."""


def examples_of(data: Tensor | Iterable[Any], by_label: bool = False) -> tuple[Tensor, Tensor]:
    """Return all examples of a tensor or batches, (N, D), and their labels, (N,), 0 without labels."""
    batches = [data] if isinstance(data, Tensor) else data
    parts = [_batch(batch, by_label) for batch in batches]
    x, labels = map(torch.cat, zip(*parts)) if parts else torch.zeros(2, 0, 1, device="cpu")
    kept = labels != -100  # which PyTorch's losses ignore
    x, labels = x[kept], labels[kept]
    if not len(x):
        raise ValueError(
            "The data hold no examples. Is the loader empty or used up, or are all labels -100?"
        )
    if not x.double().square().sum(1).isfinite().all():
        bad = int((~torch.isfinite(x)).any(1).sum())
        raise ValueError(
            f"The data have {bad} examples with NaN or infinity, or values too large to square. Remove or rescale them."
        )
    return x, labels


def _batch(batch: Any, by_label: bool) -> tuple[Tensor, Tensor]:
    """Return the examples and labels of one batch."""
    x, *others = batch if isinstance(batch, (tuple, list)) else (batch,)
    if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] == 0:
        raise ValueError(
            f"A batch holds a {type(x).__name__} of shape {tuple(getattr(x, 'shape', ()))}. Pass tensors with "
            "one row per example, shape (n, D); a single column is x[:, None]."
        )
    if not by_label:
        return x.detach(), torch.zeros(len(x), dtype=torch.long, device=x.device)
    labels = torch.as_tensor(others[0], device=x.device) if others else None
    if labels is None or labels.shape != x.shape[:1] or labels.is_floating_point():
        found = "none" if labels is None else f"{labels.dtype} {tuple(labels.shape)}"
        raise ValueError(
            "A fit by label needs batches (x, labels) with one integer per example, but "
            f"the labels are {found}. Pass [(x, labels)] or a loader."
        )
    return x.detach(), labels


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield a few rows of tensors at a time."""
    return zip(*(tensor.split(_ROWS) for tensor in tensors))


class MixtureState(NamedTuple):
    """The result of one EM step, from which the next begins: parameters in the coordinates of the fit, and θ.

    ``lower_bound`` is L(q, θ) plus the log prior of θ, and has ``converged`` if it changed by no more than the tolerance.
    """

    parameters: Any
    natural: Tensors
    lower_bound: float = -float("inf")
    converged: bool = False


@dataclass(frozen=True)
class EM:
    """EM for one family on one data set; examples belong to the components of their label, ``classes`` (K,)."""

    family: Family
    x: Tensor
    labels: Tensor
    classes: Tensor
    tolerance: float
    weight: float = 1.0  # how many examples each of these stands for

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
        bound = float(log_evidence + gain + self.family.log_prior(parameters))
        room = self.tolerance * self.weight * len(self.x)
        converged = abs(bound - state.lower_bound) <= room
        return MixtureState(parameters, natural, bound, converged)

    def expectation(self, natural: Tensors) -> tuple[Tensor, Tensors]:
        """Return log p(X | θ), shape (), and Σ_n r_kn φ(x_n), from one pass over the data."""
        sums, log_evidence = [torch.zeros_like(t) for t in natural], natural[0].new_zeros(())
        is_by_label = bool((self.classes != self.classes[0]).any())
        for x, labels in pieces(self.x, self.labels):
            columns = self.family.columns(x)
            r = self.family.log_joint(natural, columns)
            if is_by_label:
                r.masked_fill_(self.classes[:, None] != labels, -torch.inf)
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
