"""EM for mixtures of exponential families: log p(x, component k) = θ_k · φ(x).

For any distribution q over the components z of the examples,

    log p(X | θ) = L(q, θ) + KL(q ‖ p(z | X, θ)),   L(q, θ) = E_q[log p(X, z | θ) − log q(z)].

The E-step makes the divergence zero and the M-step raises the bound L, so log p(X | θ) never falls.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from torch_lla_em.mixtures.data import Examples

CHUNK = {"cpu": 1 << 18, "cuda": 1 << 26}
"""How many numbers to compute with at once: on a CPU they should stay in the cache."""

ROUNDING = 1e-8
"""The relative fall of the bound that rounding may explain."""

Tensors = tuple[Tensor, ...]


class BoundWarning(UserWarning):
    """The lower bound, which should never fall, has fallen or is not a number."""


class Family(ABC):
    """One kind of mixture: θ, φ and the M-step, in the coordinates of the fit.

    θ is a tuple of tensors: a constant for each component (K,), the coefficients of x (K, D), and
    those of the rest of φ = (1, x, ...). Sums of φ are a tuple of the same shapes.
    """

    num_components: int
    """K."""

    width: int
    """About how many numbers are computed for each example."""

    @abstractmethod
    def columns(self, x: Tensor) -> Tensor:
        """Return examples (n, D) as columns (D, n) in the coordinates of the fit, in float64."""

    def log_joint(self, natural: Tensors, columns: Tensor) -> Tensor:
        """Return θ_k · φ(x_n), which is log p(x_n, k) in the user's coordinates, shape (K, n)."""
        return torch.addmm(natural[0][:, None], natural[1], columns)

    def sums(self, r: Tensor, columns: Tensor) -> Tensors:
        """Return Σ_n r_kn φ(x_n) for responsibilities r, shape (K, n)."""
        return r.sum(1), r @ columns.T

    @abstractmethod
    def natural(self, parameters: Any) -> Tensors:
        """Return θ."""

    @abstractmethod
    def maximise(self, sums: Tensors, old: Any) -> Any:
        """Return the parameters that maximise the bound; ``old`` is None at the start of EM."""

    @abstractmethod
    def log_prior(self, parameters: Any) -> Tensor:
        """Return what the objective adds to log p(X | θ), shape ()."""

    @abstractmethod
    def enter(self, parameters: Any) -> Any:
        """Return the user's parameters in the coordinates of the fit, after checking them."""

    @abstractmethod
    def leave(self, parameters: Any) -> Any:
        """Return parameters in the user's coordinates."""


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
    """Whether the bound per example changed by no more than the tolerance."""


@dataclass(frozen=True)
class EM:
    """EM for one family on one data set."""

    family: Family
    batches: Iterable[Examples]
    tolerance: float
    """How much of a change of the bound, over all examples, counts as convergence."""

    classes: Tensor | None = None
    """The label of each component, shape (K,): examples belong to components of their label."""

    def states(self, parameters: Any, max_steps: int) -> Iterator[MixtureState]:
        """Yield the state after each step from these parameters, until the bound converges."""
        state = MixtureState(parameters, self.family.natural(parameters))
        for number in range(1, max_steps + 1):
            before, state = state.lower_bound, self.step(state)
            # the negation is true for NaN
            if not state.lower_bound >= before - ROUNDING * max(1.0, abs(before)):
                warnings.warn(
                    f"The lower bound fell in step {number}, from {before:.10g} to "
                    f"{state.lower_bound:.10g}, which EM excludes. Check that every pass sees the "
                    "same data.",
                    BoundWarning,
                    stacklevel=3,
                )
            yield state
            if state.converged:
                return

    def step(self, state: MixtureState) -> MixtureState:
        """Return the state after an E-step and an M-step."""
        log_evidence, sums = self.expectation(state.natural)
        parameters = self.family.maximise(sums, state.parameters)
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
        for x, labels in chunks(self.batches, self.family, natural[0].device):
            columns = self.family.columns(x)
            r = self.family.log_joint(natural, columns)
            if self.classes is not None:
                r.masked_fill_(self.classes[:, None] != labels, -torch.inf)
            log_prob = r.logsumexp(0)
            r.sub_(log_prob).exp_()
            sums = [total + part for total, part in zip(sums, self.family.sums(r, columns))]
            log_evidence += log_prob.sum()
        return log_evidence, tuple(sums)

    def start(self, generator: torch.Generator) -> Any:
        """Return parameters to begin with, from a k-means clustering of the (few) data."""
        (sample,) = self.batches
        columns, num_components = self.family.columns(sample.x), self.family.num_components
        x, member = columns.T.contiguous(), torch.zeros_like(sample.x[:, 0], dtype=torch.long)
        if self.classes is None:
            member = kmeans(x, num_components, generator)
        else:
            for label in self.classes.unique():
                own, rows = (self.classes == label).nonzero()[:, 0], sample.labels == label
                member[rows] = own[kmeans(x[rows], len(own), generator)]
        size = _chunk_size(self.family, x.device)
        parts = [
            self.family.sums(one_hot(k, num_components).T.to(x), part)
            for part, k in zip(columns.split(size, 1), member.split(size))
        ]
        sums = tuple(torch.stack(tensors).sum(0) for tensors in zip(*parts))
        return self.family.maximise(sums, None)


def _chunk_size(family: Family, device: torch.device) -> int:
    """Return how many examples to compute with at once, 256 at least."""
    return max(256, CHUNK.get(device.type, CHUNK["cpu"]) // family.width)


def chunks(batches: Iterable[Examples], family: Family, device: torch.device) -> Iterator[Examples]:
    """Yield the examples on the device, in small chunks."""
    for batch in batches:
        yield from batch.each(lambda part: part.to(device)).split(_chunk_size(family, device))


def _inner(natural: Tensors, sums: Tensors) -> Tensor:
    """Return Σ θ · Σ_n r φ; components of weight 0, whose constant is −∞, add nothing."""
    constant, *others = natural
    constant = constant.where(constant != -torch.inf, 0.0)
    return torch.stack([(a * b).sum() for a, b in zip((constant, *others), sums)]).sum()


def kmeans(x: Tensor, num_clusters: int, generator: torch.Generator, max_steps: int = 20) -> Tensor:
    """Return the cluster of each row of x (n, D), shape (n,), by k-means++ and Lloyd's iteration."""
    centres = plus_plus(x, num_clusters, generator)
    for _ in range(max_steps):
        nearest = torch.cdist(x, centres).argmin(1)
        members = one_hot(nearest, num_clusters).to(x)
        sizes, before = members.sum(0)[:, None], centres
        centres = torch.where(sizes > 0, members.T @ x / sizes.clamp(min=1), centres)
        if torch.equal(before, centres):
            break
    return nearest


def plus_plus(x: Tensor, num_clusters: int, generator: torch.Generator) -> Tensor:
    """Return rows of x as centres (k-means++): odds grow with squared distance to earlier ones."""
    centres, distance = x[:0], x.new_full((len(x),), torch.inf)
    for _ in range(num_clusters):
        # of the first centre, or if every row is a centre already, all odds are equal
        odds = distance if 0 < distance.sum() < torch.inf else torch.ones_like(distance)
        drawn = torch.multinomial(odds.to(generator.device), 1, generator=generator)
        centre = x[drawn.to(x.device)]
        centres = torch.cat([centres, centre])
        distance = torch.minimum(distance, (x - centre).square().sum(1))
    return centres
