"""The memory that a fit will take, expected from the sizes of the network and the data before the fit.

The number of passes depends on the spectrum of the GGN, which is not known before the fit. The constants were
measured on fits of perceptrons, CNNs and transformers (``benchmarks/forecast.py --memory``): of 13 fits whose peaks were 20 MB to 1.6 GB,
expectations are .89 to 1.63 of the peak.
"""

from __future__ import annotations

import math

from torch_lla_em.data import tensors_in
from torch_lla_em.inference.expectations import entries_of, takes_draws
from torch_lla_em.inference.options import FitOptions, has_too_large_blocks
from torch_lla_em.problem import KEPT_OUTPUTS, Memory, Plan, Problem

_PASSES = {True: (2.0, 2.5), False: (3.4, 4.25)}
"""Passes until the samples are accurate, if H moves and if it is fixed: a constant, and a factor of
log(error / tolerance)."""

_FIRST_ERROR = 3.0
"""Error of the samples after the first pass, in posterior standard deviations."""

_LARGEST = 5.0
"""Passes for the upper bound, relative to those that are expected; none of those fits had more than 2.5."""

_BASE = 1.5e7
"""Bytes for everything else."""


def memory_of(problem: Problem, options: FitOptions, plan: Plan, rows: float) -> Memory:
    """Return the peak memory of a fit to so many examples, beyond what is held before it."""
    model, itemsize, P, K = (
        problem.linear_model,
        problem.dtype.itemsize,
        plan.size,
        plan.num_samples,
    )
    first, limits = problem.data.first(), problem.sweep.limits
    joined = max(len(first.rows), problem.data.merge_rows)
    at_once = min(rows, joined, limits.batch_rows, limits.rows)
    of_batches = (
        rows
        * sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(first.tensors()))
        / len(first.rows)
    )
    each, classes = plan.example.outputs, plan.example.classes
    activations, of_factors = plan.example.activations, plan.example.nbytes
    outputs = min(rows * each, KEPT_OUTPUTS) if each > classes else rows * each
    # activations if there are no factors, else two copies of a batch's factors while they are computed
    of_batch = (4 * activations if of_factors == math.inf else 2 * of_factors) * at_once
    kept = 0.0 if of_factors == math.inf else min(plan.factors, rows * of_factors)
    rest = min(plan.batches, of_batches) + kept + of_batch + _BASE
    if options.against_span:
        return Memory(0.5 * plan.vectors + rest, plan.vectors + 2 * rest)
    quadratic, too_large = (
        problem.likelihood.is_quadratic,
        has_too_large_blocks(problem.likelihood, classes),
    )
    moves = not too_large and not quadratic and options.allows_variational
    room = options.memory_of_span(plan.free)

    def of_span(size: float) -> float:
        if not model.is_last_layer:  # directions, and two copies of J V
            return size * (P + 2 * outputs) * itemsize
        # weights, their products with features up to a limit, and numbers for each sample and output
        products = min(size * outputs, room / 2 / itemsize)
        return (size * 3 * P + products + 6 * K * outputs) * itemsize

    constant, factor = _PASSES[moves]
    size = (constant + factor * max(0.0, math.log(_FIRST_ERROR / options.tolerance))) * (K + 1)
    many = takes_draws(problem.likelihood, classes, outputs * itemsize, room)
    entries = entries_of(problem.likelihood, classes, outputs / classes, many)
    blocks = 3 * outputs * entries * itemsize if moves else 0.0
    expected, largest = (min(room, of_span(min(P, n))) for n in (size, _LARGEST * size))
    expected += 0.5 * plan.vectors + blocks + rest
    return Memory(expected, max(expected, largest + plan.vectors + 2 * (blocks + rest)))
