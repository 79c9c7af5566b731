"""One compiled function for a batch's share of G w: forward, J w, H and Jᵀ together."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.batch import Batch
from torch_lla_em.checks import distance
from torch_lla_em.last_layer import HeadCall
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.linear_model import LinearModel
from torch_lla_em.network import Network

logger = logging.getLogger("torch_lla_em")

_BACKEND = "inductor"
# in float32; compiled kernels sum in another order
_AGREEMENT = 1e-3
_TRIALS = 3

Share = Callable[[Tensor], Tensor]
"""Columns (k, P) to their products with one batch's JᵀHJ, by eager means."""


class CompiledShare:
    """J_bᵀ H_b J_b w of a batch, compiled; given up, with one line, where it does not help.

    ``torch.compile`` goes outermost, around all derivatives; columns come in blocks of one
    width, filled up with zeros, since every new shape is compiled anew.
    """

    def __init__(self, linear_model: LinearModel, likelihood: Likelihood):
        self._linear_model, self._likelihood = linear_model, likelihood
        self._call = _Call(linear_model.network)
        self._function = torch.compile(self._share, dynamic=False, backend=_BACKEND)
        self._trial = _Trial()

    def at(self, likelihood: Likelihood) -> CompiledShare:
        """Return the same of another likelihood; only its numbers differ, so nothing is compiled.

        Another noise is an input of the graph, and what was found out holds for it as well.
        """
        if type(likelihood) is not type(self._likelihood):
            return CompiledShare(self._linear_model, likelihood)
        other = copy.copy(self)
        other._likelihood = likelihood
        other._function = torch.compile(other._share, dynamic=False, backend=_BACKEND)
        return other

    @property
    def alive(self) -> bool:
        """Whether it is still worth asking."""
        return self._trial.alive

    def __call__(
        self, batch: Batch, at: Tensor | None, w: Tensor, eager: Share
    ) -> tuple[Tensor, Tensor] | None:
        """Return f and the share for columns w (k, P), or None where eager means are to be used."""
        if not self.alive or len(w) == 1:
            return None
        if isinstance(batch.inputs, HeadCall) or not self._linear_model.path.forward:
            return self._give_up("this model's products are not of one forward pass")
        if not self._trial.width:
            if _has_two_names(self._linear_model.network.module):
                # torch.func.functional_call would leave substitutes in place of the weights
                return self._give_up("the model has a module or a weight under two names")
            self._trial.width = min(len(w), self._linear_model.path.jvp_columns or len(w))
        try:
            with torch.compiler.set_stance("default"):
                result = self._in_blocks(batch, at, w)
                if len(batch.rows) not in self._trial.sizes:
                    self._trial.sizes.add(len(batch.rows))
                    self._compare(batch, at, w, eager)
        except Exception as error:  # whatever a compiler does not know
            return self._give_up(f"{type(error).__name__}: {str(error).strip()[:120]}")
        return result if self.alive else None

    def _in_blocks(self, batch: Batch, at: Tensor | None, w: Tensor) -> tuple[Tensor, Tensor]:
        total, width = torch.zeros_like(w), self._trial.width
        for start in range(0, len(w), width):
            block = w[start : start + width]
            filled = torch.zeros(width, w.shape[1], dtype=w.dtype, device=w.device)
            filled[: len(block)] = block
            weights, tangents = self._linear_model.weights_and_tangents(filled)
            f, grads = self._function(weights, batch.inputs, tangents, at, batch.targets)
            grads = {name: g.reshape(len(g), -1)[: len(block)] for name, g in grads.items()}
            self._linear_model.layout.add_(total[start : start + len(block)], grads)
        return f, total

    def _share(
        self,
        weights: dict[str, Tensor],
        x: Any,
        tangents: dict[str, Tensor],
        at: Tensor | None,
        targets: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        def function(weights: dict[str, Tensor]) -> Tensor:
            named = {f"module.{name}": weight for name, weight in weights.items()}
            return torch.func.functional_call(self._call, named, (x,))

        def push(tangent: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            return torch.func.jvp(function, (weights,), (tangent,))

        f, Jw = torch.vmap(push, out_dims=(None, 0))(tangents)
        u = self._likelihood.hessian_product(f if at is None else at, Jw)
        mask = self._likelihood.mask(targets)
        u = u if mask is None else u * mask.unsqueeze(-1)
        _, pull = torch.func.vjp(function, weights)
        return f, torch.vmap(lambda column: pull(column)[0])(u)

    def _compare(self, batch: Batch, at: Tensor | None, w: Tensor, eager: Share) -> None:
        """Give up where compiled and eager products differ, or the compiled take longer."""
        block, device = w[: self._trial.width], self._linear_model.network.device
        expected, found = eager(block), self._in_blocks(batch, at, block)[1]
        error = distance(found, expected)
        if not error <= _AGREEMENT:
            self._give_up(f"its products differ from eager ones by {error:.1e} of their size")
            return
        ours = _seconds(lambda: self._in_blocks(batch, at, block), device)
        theirs = _seconds(lambda: eager(block), device)
        if ours >= theirs:
            self._give_up(f"it takes {ours / theirs:.2f} times as long as eager products")
        else:
            logger.info("Compiled products take %.2f of the time of eager ones.", ours / theirs)

    def _give_up(self, why: str) -> None:
        self._trial.alive = False
        logger.warning("torch.compile is left: %s.", why)


@dataclass
class _Trial:
    """What has been found out of compiled products, for every noise."""

    alive: bool = True
    width: int = 0
    """Columns of a block."""

    sizes: set[int] = field(default_factory=set)
    """Rows of the batches that were compared."""


class _Call(nn.Module):
    """A network's call as a module, so that its weights can be exchanged inside a graph."""

    def __init__(self, network: Network):
        super().__init__()
        self.module = network.module
        self._network = network

    def forward(self, x: Any) -> Tensor:
        outputs = self._network.forward_fn(self.module, x)
        outputs = outputs.float() if self._network.precision == "bfloat16" else outputs
        return outputs.movedim(self._network.class_dim, -1)


def _has_two_names(module: nn.Module) -> bool:
    counts = [
        (sum(1 for _ in named(remove_duplicate=False)), sum(1 for _ in named()))
        for named in (module.named_modules, module.named_parameters, module.named_buffers)
    ]
    return any(every != once for every, once in counts)


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Return the least time of a few runs."""
    times = []
    for _ in range(_TRIALS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times)
