"""A family of mixtures, log p(x, component k) = θ_k · φ(x), and the EM that fits it."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torch_lla_em.inference import iterate
from torch_lla_em.mixtures.kmeans import kmeans
from torch_lla_em.mixtures.rows import Batch

CHUNK = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Numbers in one chunk of rows and their features: on a CPU they should stay in cache."""


class Features(Protocol):
    """A matrix Φ of features, (P, n), that a family may leave unformed."""

    def dot(self, natural: Tensor) -> Tensor:
        """Return θ Φ, shape (K, n), for θ of shape (K, P)."""

    def sum(self, r: Tensor) -> Tensor:
        """Return r Φᵀ, shape (K, P), for r of shape (K, n)."""


class FeatureMatrix(NamedTuple):
    """Features in a matrix."""

    phi: Tensor
    """Φ, shape (P, n)."""

    def dot(self, natural: Tensor) -> Tensor:
        """Return θ Φ."""
        return natural @ self.phi

    def sum(self, r: Tensor) -> Tensor:
        """Return r Φᵀ."""
        return r @ self.phi.T


class Family(ABC):
    """θ, φ and the M-step of one kind of mixture, in the coordinates of the fit."""

    num_components: int
    """K."""

    width: int
    """About how many numbers one row of data becomes on its way through a step."""

    @abstractmethod
    def columns(self, x: Tensor) -> Tensor:
        """Return rows x (n, D) as columns (D, n) in the coordinates of the fit, in doubles."""

    @abstractmethod
    def features(self, columns: Tensor) -> Features:
        """Return φ of every column; its first entry is 1."""

    @abstractmethod
    def natural(self, parameters: Any) -> Tensor:
        """Return θ, shape (K, P): log p(x, k) = θ_k · φ(x) in the data's coordinates."""

    @abstractmethod
    def maximise(self, sums: Tensor, old: Any) -> Any:
        """Return the parameters that maximise the bound, given Σ_n r_nk φ(x_n)."""

    @abstractmethod
    def first(self, sums: Tensor) -> Any:
        """Return parameters to begin with, given hard assignments."""

    @abstractmethod
    def log_prior(self, parameters: Any) -> Tensor:
        """Return what the objective has beside log p(X | θ), shape ()."""

    @abstractmethod
    def enter(self, parameters: Any) -> Any:
        """Return the user's parameters in the coordinates of the fit."""

    @abstractmethod
    def leave(self, parameters: Any) -> Any:
        """Return parameters in the user's coordinates."""


class State(NamedTuple):
    """What one EM step hands to the next, and the answer after the last."""

    parameters: Any
    """Of the mixture, in the coordinates of the fit."""

    natural: Tensor
    """θ, shape (K, P)."""

    objective: float
    """log p(X | θ) of the parameters that the step began with, plus log p(θ) for MAP."""

    lower_bound: float
    """The objective at the step's new parameters, bounded from below by its own q.

    It lies between this step's ``objective`` and the next one's, which exceeds it by
    the divergence KL(q ‖ p) that the M-step opened.
    """


class Problem(NamedTuple):
    """A family, and the rows to fit it to."""

    family: Family
    batches: Iterable[Batch]
    count: int  # type: ignore[assignment]
    """N, the number of rows."""

    classes: Tensor | None
    """The label of each component, shape (K,): rows then belong to their own label's only."""

    def expectation(self, natural: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p(X | θ), shape (), and Σ_n r_nk φ(x_n), shape (K, P), from one pass."""
        sums = torch.zeros_like(natural)
        log_evidence = natural.new_zeros(())
        for x, labels in chunks(self.batches, self.family, natural.device):
            features = self.family.features(self.family.columns(x))
            r = features.dot(natural)
            if self.classes is not None:
                r.masked_fill_(self.classes[:, None] != labels.to(r.device), -torch.inf)
            highest = r.amax(0)
            r.sub_(highest).exp_()
            total = r.sum(0)
            sums += features.sum(r.div_(total))
            log_evidence += total.log_().add_(highest).sum()
        return log_evidence, sums

    def step(self, state: State) -> State:
        """Return the state after an E-step and an M-step."""
        log_evidence, sums = self.expectation(state.natural)
        parameters = self.family.maximise(sums, state.parameters)
        natural = self.family.natural(parameters)
        # L(q, θ) − log p(X | θ_old) is the change of E_q log p(X, z | θ), linear in θ.
        gain = _inner(natural, sums) - _inner(state.natural, sums)
        objective = log_evidence + self.family.log_prior(state.parameters)
        lower_bound = log_evidence + gain + self.family.log_prior(parameters)
        return State(parameters, natural, float(objective), float(lower_bound))

    def states(self, parameters: Any, max_steps: int, tolerance: float) -> Iterator[State]:
        """Yield the states of EM from these parameters."""
        unknown = -float("inf")
        return iterate(
            self.step,
            State(parameters, self.family.natural(parameters), unknown, unknown),
            max_steps=max_steps,
            settled=lambda old, new: self.settled(old, new, tolerance),
            objective=lambda state: state.lower_bound,
            rounding=1e-8,
        )

    def settled(self, old: State, new: State, tolerance: float) -> bool:
        """Whether the bound per row has changed by no more than the tolerance."""
        return abs(new.lower_bound - old.lower_bound) <= tolerance * self.count

    def draw(self, sample: Batch, generator: torch.Generator) -> Any:
        """Return parameters to begin with: clusters of the sample, by k-means."""
        columns = self.family.columns(sample.x)
        x = columns.T.contiguous()
        if self.classes is None:
            member = kmeans(x, self.family.num_components, generator)
        else:
            member = torch.zeros(len(x), dtype=torch.long, device=x.device)
            labels = sample.labels.to(x.device)
            for label in self.classes.unique():
                own, rows = (self.classes == label).nonzero()[:, 0], labels == label
                if rows.any():
                    member[rows] = own[kmeans(x[rows], len(own), generator)]
        size, parts = rows_per_chunk(self.family, x.device), []
        for part, k in zip(columns.split(size, 1), member.split(size), strict=True):
            belongs = torch.nn.functional.one_hot(k, self.family.num_components).T.to(x)
            parts.append(self.family.features(part).sum(belongs))
        return self.family.first(torch.stack(parts).sum(0))


def rows_per_chunk(family: Family, device: torch.device) -> int:
    """Return how many rows to take at a time: their numbers fit a cache, 256 at least."""
    return max(256, CHUNK.get(device.type, CHUNK["cpu"]) // family.width)


def chunks(batches: Iterable[Batch], family: Family, device: torch.device) -> Iterator[Batch]:
    """Yield the batches' rows on the device, in chunks that stay small."""
    size = rows_per_chunk(family, device)
    for batch in batches:
        yield from batch._replace(x=batch.x.detach().to(device)).chunks(size)


def _inner(natural: Tensor, sums: Tensor) -> Tensor:
    """Return Σ θ · Σ_n r φ; components of weight 0, log −∞, count for nothing."""
    return (natural * sums).where(natural[:, :1] != -torch.inf, 0.0).sum()
