"""Options of a fit, the choices that depend on the problem, and the memory that a fit will take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torch_lla_em.data import tensors_in
from torch_lla_em.inference.expectations import form_of_H
from torch_lla_em.problem import KEPT_OUTPUTS, Plan, Problem

PASSES, LARGEST = 15.0, 5.0
"""Passes of a usual fit, and those for the upper bound relative to them; of 13 fits none had more than 2.5."""

BASE = 1.5e7
"""Bytes of a fit apart from what grows with the network and the data."""


@dataclass(frozen=True)
class FitOptions:
    """Options of a fit."""

    num_samples: int = 32
    seed: int = 0
    g_prior: bool | None = None
    layerwise: bool = False
    solver: Any = None
    tolerance: float = 0.03
    """Largest error of the final samples and mode, in posterior standard deviations."""

    curvature: str | None = None
    span_memory: float | None = None
    """Largest size of the span in bytes; None: half of the free memory."""

    em_steps: int = 20
    """Largest number of steps of λ; 0 keeps λ fixed."""

    prior_precision: Tensor | None = None
    """Initial λ; None: chosen from the data."""


def memory_of(
    problem: Problem, options: FitOptions, plan: Plan, rows: float
) -> tuple[float, float]:
    """Return the peak memory of usual and of long fits to so many examples, beyond what is held before it.

    The number of directions depends on the spectrum of the GGN, which is not known before the fit.
    """
    model, itemsize, P = problem.linear_model, problem.dtype.itemsize, plan.size
    first = problem.data.first()
    joined = max(len(first.rows), problem.data.merge_rows)
    at_once = min(rows, joined, plan.rows)
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(first.tensors()))
    each, classes = plan.example.outputs, plan.example.classes
    activations, of_factors = plan.example.activations, plan.example.nbytes
    outputs = min(rows * each, KEPT_OUTPUTS) if each > classes else rows * each
    # activations if there are no factors, else two copies of a batch's factors while they are computed
    of_batch = (4 * activations if of_factors == math.inf else 2 * of_factors) * at_once
    kept = 0.0 if of_factors == math.inf else min(plan.factors, rows * of_factors)
    rest = min(plan.batches, rows * held / len(first.rows)) + kept + of_batch + BASE
    if options.layerwise or options.solver is not None:
        return 0.5 * plan.vectors + rest, plan.vectors + 2 * rest
    likelihood, room = problem.likelihood, min(plan.free / 2, options.span_memory or plan.free / 2)
    moves = options.curvature != "network" and not likelihood.is_quadratic

    each_direction = P + 2 * outputs  # with two copies of J V
    rest_of_span = 0.0
    if model.is_last_layer:
        # weights, the products with features of a few examples, and numbers for each sample and output
        each_direction, rest_of_span = 3.0 * P, 6.0 * plan.num_samples * outputs
    of_H = form_of_H(likelihood, classes, outputs / classes, outputs * itemsize, room)[2]
    blocks = 3 * outputs * of_H * itemsize if moves else 0.0
    size, found = PASSES * (plan.num_samples + 1), []
    for directions in (min(P, size), min(P, LARGEST * size)):
        products = 2 * min(directions * outputs, 1 << 24) if model.is_last_layer else 0.0
        nbytes = (directions * each_direction + products + rest_of_span) * itemsize
        found.append(min(room, nbytes))
    expected = found[0] + 0.5 * plan.vectors + blocks + rest
    return expected, max(expected, found[1] + plan.vectors + 2 * (blocks + rest))
