"""Whether factors give the Jacobian that torch.func gives, and how soon."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.data import tensors_in
from torch_lla_em.jacobian.factored import Factored
from torch_lla_em.jacobian.factors import Terms
from torch_lla_em.jacobian.faults import distance, worst_block
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.rows import Rows
from torch_lla_em.runtime import is_shortage

# by the clock only where it is plain: a run that is taken up again has to choose alike
_SLOWER = 1.5


def find_factors(model: Any, x: Any, largest: int | None) -> Factored | None:
    """Return how to take J by factors where that agrees with torch.func; also if it is slower.

    ``largest``: bytes of the largest output of a layer, on a CPU.
    """
    network, names = model.network, model.layout.names
    if network.precision == "bfloat16":
        return None
    try:
        factored = Factored.find(model.weights, names, x)
        terms = None if factored is None else _made(factored, x, largest)
    except Exception as error:  # whatever a network does that has no factors
        if is_shortage(error):
            raise
        return None
    if terms is None:
        return None
    generator = torch.Generator("cpu").manual_seed(1)
    w = torch.randn(2, model.layout.size, generator=generator, device="cpu").to(model.w_MAP)
    u = torch.randn(2, *terms.f.shape, generator=generator, device="cpu").to(terms.f)

    def product(rows: Rows) -> tuple[float, Tensor, Tensor]:
        total, start = torch.zeros_like(w), _now(network)
        Jw = rows.push(w)
        rows.pull(u, total)
        return (_now(network) - start) / len(w), Jw, total

    otherwise, Jw, total = product(model.by_autodiff(x))
    factors = model.by_factors(factored, terms, x)
    try:
        seconds, again, pulled = product(factors)
    except RuntimeError as error:  # of dtypes, as of a layer that computes in another one
        if is_shortage(error):
            raise
        return None
    eps = max(
        torch.finfo(t.dtype).eps for t in (terms.f, *model.weights.values(factored.names).values())
    )
    if distance(again, Jw) > eps**0.5 or worst_block(model.layout, pulled, total, eps):
        return None
    if seconds > _SLOWER * otherwise:  # or the process was held up
        seconds = min(seconds, product(factors.part(slice(None), x))[0])
        otherwise = min(otherwise, product(model.by_autodiff(x))[0])
    factored.pays = seconds <= _SLOWER * otherwise
    factored.seconds = seconds, otherwise
    is_free = terms.dense is None and all(term.b is None for term in terms.outer)
    passes = 0 if is_free else terms.f[0].numel()
    factored.least_columns = max(1, passes * (2 if len(factored.names) < len(names) else 1))
    return factored


def _made(factored: Factored, x: Any, largest: int | None) -> Terms | None:
    """Return the factors at x, and settle how many backward passes are taken at once."""
    rows = next((len(tensor) for tensor in tensors_in(x) if tensor.dim()), 1)
    factored.example_bytes = None if largest is None else -(-largest // max(rows, 1))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns of what it takes one by one
            return factored.run(x)
    except Exception as error:  # an operation whose backward cannot be batched
        if is_shortage(error):
            raise
    factored.can_batch = False
    return factored.run(x)


def words_of(model: Any) -> str:
    """Return what a report says of a model's factors."""
    if model.factored is None:
        return ""
    of = dict(zip(model.layout.names, model.layout.sizes))
    number = sum(of[name] for name in model.factored.names)
    seconds, otherwise = model.factored.seconds
    return (
        f"{number} of {model.layout.size} weights have factors, by which a column takes "
        f"{seconds:.1e} s, {otherwise:.1e} s without"
    )


def _now(network: Network) -> float:
    """Return the seconds of work so far; on a CPU those of others do not count."""
    if network.device.type == "cpu":
        return time.process_time()
    torch.accelerator.synchronize(network.device)
    return time.perf_counter()
