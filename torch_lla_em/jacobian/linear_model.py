"""The linear model h(x) = J(x) w, whose features are the network's own Jacobian."""

from __future__ import annotations

import logging
import warnings
from copy import copy
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from torch_lla_em.data import Inputs
from torch_lla_em.jacobian.graph import ByGraph
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.parameters import ParameterLayout
from torch_lla_em.jacobian.probe import probe
from torch_lla_em.jacobian.recorded import by_factors
from torch_lla_em.jacobian.rows import Rows, Ways
from torch_lla_em.runtime import report

logger = logging.getLogger("torch_lla_em")

# entries of blocks that are copied into one, which takes 0.05 ms; each further product takes 0.4 ms
_COPIED = 250_000


@dataclass(eq=False, repr=False)
class LinearModel:
    """Jacobian J(x) of a network at its trained weights w_MAP, never materialised.

    ``at(x)`` returns the linear model at one batch of inputs, which pushes columns w (K, P) to
    J w and pulls u to Jᵀ u. The probe chooses how J is computed, on the first batch.
    """

    network: Network
    layout: ParameterLayout
    ways: Ways | None = None
    """The result of the probe."""

    @property
    def factored(self) -> tuple[str, ...]:
        """The parameters whose Jacobian is computed by factors: all that have an influence, or
        none."""
        return self.ways.names if self.ways else ()

    @property
    def is_last_layer(self) -> bool:
        """Whether the parameters are those of one last linear layer with Jacobian factors."""
        return self.ways is not None and bool(self.ways.names) and self.ways.is_last_layer

    @property
    def w_MAP(self) -> Tensor:
        """The trained weights, shape (P,)."""
        return self.layout.flatten(self.network.weights(self.layout.names))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of vectors in parameter space, float32 or higher."""
        weights = self.network.weights(self.layout.names).values()
        return reduce(torch.promote_types, {w.dtype for w in weights}, torch.float32)

    @property
    def rounding(self) -> float:
        """Relative rounding error of J w, from the dtype of the model or from ``Compute``."""
        dtypes = {p.dtype for p in self.network.module.parameters() if p.is_floating_point()}
        # TF32 has as many digits as float16
        lower = {"bfloat16": torch.bfloat16, "tf32": torch.float16}.get(self.network.precision)
        return max(torch.finfo(dtype).eps for dtype in dtypes | ({lower} if lower else set()))

    def probe(self, x: Inputs) -> Ways | None:
        """Check derivatives at the inputs of one batch, choose how to compute them, and log it.

        Raises an error with a remedy if no way is exact; returns None if J is zero, so that other
        inputs are needed.
        """
        with self.network.guarded(), self.network.computing("float32"), warnings.catch_warnings():
            # the first forward-mode product loads modules of torch that torch itself deprecates
            warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
            self.ways = ways = probe(self.network, self.layout, x)
        if ways is None:
            logger.info("J is zero for these examples; derivatives are checked on later ones.")
            return None
        way = "forward mode" if ways.forward else "two reverse passes"
        factors, error = f"factors of {len(ways.names)} tensors", ways.adjoint_error
        logger.info("J by %s, adjoint error %.1e.", factors if ways.names else way, error)
        return ways

    def push(self, x: Inputs, *w: Tensor) -> tuple[Tensor, Tensor]:
        """Return f(x), (B, ..., C), and J w, (K, B, ..., C), for blocks of columns w. Call it
        inside ``network.guarded()``."""
        if sum(block.numel() for block in w) <= _COPIED:
            w = (torch.cat(w),)
        rows = self.at(x, sum(map(len, w)))
        Jw = [rows.push(block) for block in w]
        return rows.f, Jw[0] if len(Jw) == 1 else torch.cat(Jw)

    def at(
        self, x: Inputs, columns: float = 1, keep: bool = False, at_once: int | None = None
    ) -> Rows:
        """Return the linear model at one batch's inputs, for use inside ``network.guarded()``.

        ``columns`` is the total number of columns, of which ``at_once`` fit into memory (None:
        all); ``keep`` is whether the result should be stored between passes, if possible.
        """
        ways = self.ways
        may = ways is not None and bool(ways.names) and not torch.is_grad_enabled()
        if ways is not None and may and (keep or columns >= ways.least_columns):
            rows = by_factors(self.network, self.layout, x, ways, keep, at_once)
            if rows is not None:
                return rows
        return self.by_autodiff(x, at_once)

    def by_autodiff(self, x: Inputs, at_once: int | None = None) -> Rows:
        """Return the linear model at a batch by ``torch.func`` and a recorded graph, for
        ``at_once`` columns."""
        ways = self.ways or Ways()
        if ways.fault:
            raise NotImplementedError(ways.fault)
        columns = ways.columns(x, at_once)
        return ByGraph(self.network, self.layout, x, columns, ways.forward)

    def steady(self, x: Inputs) -> LinearModel:
        """Return the same model for exported programs: by ``torch.func``, with all columns at once,
        for batches of any size."""
        if self.ways is None:
            self.probe(x)
        other = copy(self)
        other.ways = self.ways and self.ways._replace(names=(), example_bytes=None)
        return other

    def leave_factors(self) -> None:
        """Stop using factors after an out-of-memory error, since torch.func needs less memory."""
        report("log", "Out of memory: continuing without stored Jacobian factors.")
        self.ways = self.ways and self.ways._replace(names=())
