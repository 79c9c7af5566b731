"""Where EM starts: the best of several k-means clusterings, after EM steps on a sample."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from torch_lla_em.mixtures.em import EM, Examples, MixtureState, Survey
from torch_lla_em.mixtures.gaussian import Family, Tensors

_STARTS = 10
"""Number of clusterings. With 5, mixtures of ten components end below scikit-learn's best of five."""

_ROWS = 2000
"""Smallest number of rows of the sample on which the starts are compared."""

_TRIED = 3
"""How many components to empty in turn, from that whose loss costs least, if the bound does not rise."""

_EXACT = "donot_use_mm_for_euclid_dist"
"""Distances whose relative errors are small, so that they are 0 between equal rows."""

_STEPS, _TOLERANCE = 100, 1e-4
"""Largest number of EM steps from each start and after a component is emptied, and the change of the
bound per example at which they end."""


def start_of(family: Family, seen: Survey, classes: Tensor, generator: torch.Generator) -> Any:
    """Return parameters to begin with: of several starts, that with the highest bound of the sample."""
    few, num_starts = seen, _STARTS if classes.unique().numel() < len(classes) else 1
    if (classes == classes[0]).all():
        order = torch.randperm(len(seen.x), generator=generator, device=generator.device)
        rows = order[: max(_ROWS, 50 * len(classes))].sort().values.to(seen.x.device)
        few = seen._replace(x=seen.x[rows], labels=seen.labels[rows])
    columns = family.columns(few.x).T.contiguous()
    em = EM(family, Examples([(few.x, few.labels)], True), classes, _TOLERANCE * len(few.x))
    best = MixtureState(None, ())
    for _ in range(num_starts):
        member = _clusters(columns, few.labels, classes, generator)
        state = em.last(family.maximise(_sums(family, columns, member, len(classes))), _STEPS)
        # of starts that reach the same optimum, rounding does not choose
        if state.lower_bound > best.lower_bound + em.tolerance:
            best = state
    if family.kind != "variational":
        return best.parameters
    # the number of examples decides how many components they are worth
    tolerance, each = _TOLERANCE * seen.num_examples, seen.num_examples / len(seen.x)
    every = Examples([(seen.x, seen.labels)], True)
    return _emptied(replace(em, examples=every, tolerance=tolerance, weight=each), best.parameters)


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


def _clusters(x: Tensor, labels: Tensor, classes: Tensor, generator: torch.Generator) -> Tensor:
    """Return the component of each row of x, by k-means among the examples of each label."""
    member = torch.zeros_like(labels)
    for label in classes.unique():
        own, rows = (classes == label).nonzero()[:, 0], labels == label
        if not rows.any():  # a class that the sample lacks
            continue
        member[rows] = own[kmeans(x[rows], len(own), generator)]
    return member


def _sums(family: Family, x: Tensor, member: Tensor, num_components: int) -> Tensors:
    """Return the sums of φ over each cluster."""
    sums = None
    for piece, clusters in Examples([(x, member)], True).pieces(family.width):
        part = family.sums(one_hot(clusters, num_components).T.to(piece), piece.T)
        sums = part if sums is None else tuple(a + b for a, b in zip(sums, part))
    return sums


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
        distances = torch.minimum(distance, torch.cdist(tried, x, compute_mode=_EXACT).square())
        least = distances.sum(1).argmin()
        centres, distance = torch.cat([centres, tried[least, None]]), distances[least]
    return centres
