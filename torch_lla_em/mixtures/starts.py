"""Where EM starts: the best of several k-means clusterings, after EM steps on a sample."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from torch_lla_em.mixtures.em import EM, MixtureState, pieces

_STARTS = 10
"""Number of clusterings. With 5, one of six mixtures of ten components ends .05 per example lower; 15 change nothing."""

_SAMPLE = 4000
"""Most examples of which starts are made: of 8,000, with 2,000 or 6,000 one of these six ends .05 lower, others as high."""

_STEPS, _TOLERANCE = 100, 1e-4
"""Largest number of EM steps from each start and after a component is emptied, and the change of the bound per example
at which they end. Half as many, or ten times as much or as little, change no end by more than .0005 per example."""


def start_of(em: EM, generator: torch.Generator) -> Any:
    """Return parameters to begin with: of several starts, that with the highest bound of a sample."""
    order = torch.randperm(len(em.x), generator=generator, device=generator.device)
    rows = order.to(em.x.device)[:_SAMPLE].sort().values
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
    by one, that whose loss costs least first, and EM goes on without them, as long as the bound rises.
    """
    before, state = MixtureState(None, ()), em.last(parameters, _STEPS)
    while state.lower_bound > before.lower_bound:
        before, trials = state, []
        constant, *others = before.natural
        used = em.expectation(before.natural)[1][0] > 1
        for k in used.nonzero()[:, 0]:
            if (used & (em.classes == em.classes[k])).sum() > 1:
                less = constant.index_fill(0, k, -torch.inf)
                trials.append(em.step(before._replace(natural=(less, *others))))
        if trials:
            best = max(trials, key=lambda trial: trial.lower_bound)
            state = em.last(best.parameters, _STEPS)
    return before.parameters


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
        for piece, clusters in pieces(x, member)
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
