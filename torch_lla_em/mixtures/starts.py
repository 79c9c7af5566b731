"""Where EM starts: the best of several k-means clusterings, after EM steps on a sample."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from torch_lla_em.mixtures.em import EM, MixtureState, pieces

_STARTS = 10
"""Number of clusterings. With 5, mixtures of ten components end below scikit-learn's best of five."""

_SAMPLE, _PER_COMPONENT = 4000, 50
"""Most examples of which starts are made, altogether and for each component, whichever are more."""

_TRIED = 3
"""How many components to empty in turn, from that whose loss costs least, if the bound does not rise."""

_STEPS, _TOLERANCE = 100, 1e-4
"""Largest number of EM steps from each start and after a component is emptied, and the change of the
bound per example at which they end."""


def start_of(em: EM, generator: torch.Generator) -> Any:
    """Return parameters to begin with: of several starts, that with the highest bound of a sample."""
    order = torch.randperm(len(em.x), generator=generator, device=generator.device)
    rows = order.to(em.x.device)[: max(_SAMPLE, _PER_COMPONENT * len(em.classes))].sort().values
    # the number of examples decides how many components they are worth
    sample = replace(
        em, x=em.x[rows], labels=em.labels[rows], tolerance=_TOLERANCE, weight=len(em.x) / len(rows)
    )
    several, best = em.classes.unique().numel() < len(em.classes), MixtureState(None, ())
    for _ in range(_STARTS if several else 1):
        state = sample.last(_parameters(sample, generator), _STEPS)
        # of starts that reach the same optimum, rounding does not choose
        if state.lower_bound > best.lower_bound + _TOLERANCE * len(em.x):
            best = state
    return _emptied(sample, best.parameters) if em.family.variational else best.parameters


def _emptied(em: EM, parameters: Any) -> Any:
    """Return parameters with a higher bound, where superfluous components have no examples.

    EM rarely empties a component of which others could take the examples. Components are emptied one
    by one, and EM goes on without them, as long as the bound rises.
    """
    state, is_higher = em.last(parameters, _STEPS), True
    while is_higher:
        trials = sorted(_without(em, state), key=lambda trial: -trial.lower_bound)
        ends = (em.last(trial.parameters, _STEPS) for trial in trials[:_TRIED])
        higher = next((end for end in ends if end.lower_bound > state.lower_bound), None)
        state, is_higher = higher or state, higher is not None
    return state.parameters


def _without(em: EM, state: MixtureState) -> Iterator[MixtureState]:
    """Yield the state after one step without each component that could be emptied."""
    constant, *others = state.natural
    _, (counts, *_) = em.expectation(state.natural)
    used = counts > 1
    for k in used.nonzero()[:, 0].tolist():
        if (used & (em.classes == em.classes[k])).sum() > 1:
            less = constant.index_fill(0, torch.tensor([k], device=constant.device), -torch.inf)
            yield em.step(state._replace(natural=(less, *others)))


def _parameters(em: EM, generator: torch.Generator) -> Any:
    """Return the parameters of clusters, by k-means among the examples of each label."""
    x, count = em.family.columns(em.x).T.contiguous(), len(em.classes)
    member = torch.zeros_like(em.labels)
    for label in em.classes.unique():
        own, rows = (em.classes == label).nonzero()[:, 0], em.labels == label
        if rows.any():  # a sample may lack a class
            member[rows] = own[kmeans(x[rows], len(own), generator)]
    each = [
        em.family.sums(one_hot(clusters, count).T.to(piece), piece.T)
        for piece, clusters in pieces(em.family.width, x, member)
    ]
    return em.family.maximise(tuple(torch.stack(parts).sum(0) for parts in zip(*each)))


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
    """Return rows of x as centres, by greedy k-means++.

    Odds grow with the squared distance to earlier centres. Of 2 + log K rows that are drawn, the one
    is taken after which the sum of these distances is least.
    """
    trials = 2 + int(math.log(num_clusters))
    centres, distance = x[:0], x.new_full((len(x),), torch.inf)
    for _ in range(num_clusters):
        # of the first centre, or if every row is a centre already, all odds are equal
        odds = distance if 0 < distance.sum() < torch.inf else torch.ones_like(distance)
        drawn = torch.multinomial(odds.to(generator.device), trials, True, generator=generator)
        tried = x[drawn.to(x.device)]
        # with small relative errors, so that the distances of equal rows are 0
        exact = torch.cdist(tried, x, compute_mode="donot_use_mm_for_euclid_dist")
        distances = torch.minimum(distance, exact.square())
        least = distances.sum(1).argmin()
        centres, distance = torch.cat([centres, tried[least, None]]), distances[least]
    return centres
