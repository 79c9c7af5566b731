"""The log det of the GGN at every prior precision and noise, for the drop-in of laplace-torch."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.problem import Problem, WhitenedGGN
from torch_lla_em.runtime import normal
from torch_lla_em.solvers import block_lanczos

_DENSE = 1024
"""Largest number of parameters for which all eigenvalues of the GGN are computed."""

_PASSES = 40
"""Largest number of products with the GGN otherwise."""

_SETTLED = 1e-3
"""Relative change of the log det at which the products end."""

_STREAM = 2


class AtTheNetwork(NamedTuple):
    """What the log marginal likelihood at the trained weights needs from the data."""

    loss: Tensor
    """-Σ log p(y | f) at the network's outputs f, for a noise of 1 and without constants, ()."""

    num_targets: Tensor
    """Number of single targets, ()."""

    num_data: Tensor
    num_outputs: Tensor
    mean: Tensor
    """w_MAP of the parameters in the posterior, (P,)."""

    @classmethod
    def of(cls, problem: Problem) -> AtTheNetwork:
        """Return the sums over the data, in one pass without derivatives."""
        model, total, outputs, labelled = problem.linear_model, 0.0, 0, 0
        with torch.no_grad():
            for batch in problem.sweep.batches():
                f, loss = model.outputs(batch.inputs), problem.loss(batch.targets, batch.weights)
                total += loss.value(f).item()
                outputs, labelled = f[0].numel(), labelled + int(loss.labelled().sum())
        count = problem.data.facts.num_targets
        if problem.likelihood.real_valued:
            total -= 0.5 * count * math.log(2 * math.pi)
        tensor = problem.zeros(1).double().new_tensor
        counts = tensor(count), tensor(labelled), tensor(outputs)
        return cls(tensor(total), *counts, problem.w_MAP.clone())


class Quadrature(NamedTuple):
    """Nodes and weights with which tr h(G) = Σ_i weights_i h(nodes_i), for functions with h(0) = 0."""

    nodes: Tensor
    """Eigenvalues of G or estimates of them, (r,)."""

    weights: Tensor
    """Their multiplicities: 1 if the nodes are all eigenvalues, (r,)."""

    def log_det(self, precision: Tensor) -> Tensor:
        """Return log det(I + G / λ), which is differentiable in λ."""
        return (self.weights * torch.log1p(self.nodes / precision)).sum()


def quadrature_of(problem: Problem, precision: float, num_probes: int) -> Quadrature:
    """Return the eigenvalues of G if it is small, otherwise a quadrature from random probes.

    It is the mean of those of the probes by block Lanczos, which ends when the log det at this prior
    precision no longer changes.
    """
    P = problem.size
    if P <= _DENSE:
        G = problem.ggn_product(torch.eye(P, dtype=problem.dtype, device=problem.device)).double()
        nodes = torch.linalg.eigvalsh(0.5 * (G + G.T)).clamp_min(0)
        return Quadrature(nodes, torch.ones_like(nodes))
    row = torch.zeros(1, dtype=torch.long, device=problem.device)
    probes = [normal(0, _STREAM, k, row, P)[0].to(problem.zeros(1)) for k in range(num_probes)]
    product = WhitenedGGN(problem, torch.ones((), dtype=problem.dtype, device=problem.device))
    nothing = problem.zeros(1)[0, :0].double()
    found, last = Quadrature(nothing, nothing), 0.0
    for number, (values, there) in enumerate(block_lanczos(product, torch.stack(probes)), 1):
        found = Quadrature(values, there.square().mean(0))
        value = found.log_det(values.new_tensor(precision)).item()
        if abs(value - last) <= _SETTLED * abs(value) or number == _PASSES:
            break
        last = value
    return found
