"""Whether factors give the Jacobian that torch.func gives, and whether they are worth it."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.jacobian.factored import Factored
from torch_lla_em.jacobian.factors import Terms
from torch_lla_em.jacobian.faults import distance, worst_block
from torch_lla_em.jacobian.rows import Rows
from torch_lla_em.runtime import is_shortage


def find_factors(model: Any, x: Any) -> Factored | None:
    """Return how to take J by factors where that agrees with torch.func, and is not slower."""
    network, names = model.network, model.layout.names
    if network.precision == "bfloat16":
        return None
    try:
        factored = Factored.find(model.weights, names, x)
        terms = None if factored is None else _made(factored, x, model.path.example_bytes)
    except Exception as error:  # whatever a network does that has no factors
        if is_shortage(error):
            raise
        return None
    if terms is None or terms.is_slow:
        return None
    generator = torch.Generator("cpu").manual_seed(1)
    w = torch.randn(2, model.layout.size, generator=generator, device="cpu").to(model.w_MAP)
    u = torch.randn(2, *terms.f.shape, generator=generator, device="cpu").to(terms.f)

    def products(rows: Rows) -> tuple[Tensor, Tensor]:
        total, Jw = torch.zeros_like(w), rows.push(w)
        rows.pull(u, total)
        return Jw, total

    Jw, total = products(model.by_autodiff(x))
    try:
        again, pulled = products(model.by_factors(factored, terms, x))
    except RuntimeError as error:  # of dtypes, as of a layer that computes in another one
        if is_shortage(error):
            raise
        return None
    eps = max(
        torch.finfo(t.dtype).eps for t in (terms.f, *model.weights.values(factored.names).values())
    )
    if distance(again, Jw) > eps**0.5 or worst_block(model.layout, pulled, total, eps):
        return None
    is_free = terms.dense is None and all(term.b is None for term in terms.outer)
    passes = 0 if is_free else terms.f[0].numel()
    factored.least_columns = max(1, passes * (2 if len(factored.names) < len(names) else 1))
    return factored


def _made(factored: Factored, x: Any, example_bytes: int | None) -> Terms | None:
    """Return the factors at x, and settle whether backward passes can be taken at once."""
    factored.example_bytes = example_bytes
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns of what it takes one by one
            return factored.run(x)
    except Exception as error:  # an operation whose backward cannot be batched
        if is_shortage(error):
            raise
    factored.can_batch = False
    return factored.run(x)
