"""The linear model h(x) = J(x) w, whose features are the network's own Jacobian."""

from __future__ import annotations

import logging
import warnings
from copy import copy
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.data import map_tensors
from torch_lla_em.jacobian.carried import carried
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.parameters import ParameterLayout
from torch_lla_em.jacobian.probe import probe
from torch_lla_em.jacobian.recorded import by_factors
from torch_lla_em.jacobian.rows import ByAutodiff, Report, Rows, num_examples
from torch_lla_em.runtime import report

logger = logging.getLogger("torch_lla_em")

# the certificate does not include this error: above it, it would dominate the error of the samples
_PRECISION_ERROR = 0.05

# entries of blocks that are copied into one, which takes 0.05 ms; each further product takes 0.4 ms
_COPIED = 2**18


class LinearModel:
    """Jacobian J(x) of a network at its trained weights w_MAP, never materialised.

    ``at(x)`` returns the linear model at one batch of inputs, which pushes columns w (K, P) to
    J w and pulls u to Jᵀ u. The probe chooses how J is computed, on the first batch.
    """

    def __init__(self, network: Network, layout: ParameterLayout):
        self.network, self.layout = network, layout
        for path, layer in network.module.named_modules():
            own = [name for name in layout.names if name.startswith(f"{path}.")]
            if own and isinstance(layer, torch.jit.ScriptModule):
                raise TypeError(
                    f"The module {path!r} is scripted or traced (torch.jit), so its weights "
                    "cannot be exchanged. Use the Python module it was made from, or leave "
                    f"{own[0]!r} out of `parameters`."
                )
        self.forget()

    def forget(self) -> None:
        """Discard the result of the probe, which may not hold for other weights or another device."""
        self._report: Report | None = None
        self._probed: tuple | None = None
        self._examples: Any = None
        """The inputs that were probed."""

        self._carries = True
        """Whether J w may be carried along with a forward pass, as far as is known."""

        self.precision_error = 0.0
        """Relative error of J w compared with float32, if ``Compute`` selects a lower precision."""

    @property
    def report(self) -> Report | None:
        """The result of the probe; None until it has run on the current device and dtype."""
        return self._report if self._probed == (self.network.device, self.dtype) else None

    @property
    def factored(self) -> tuple[str, ...]:
        """The parameters whose Jacobian is computed by factors: all that have an influence, or none."""
        return () if self._report is None else self._report.names

    @property
    def is_last_layer(self) -> bool:
        """Whether the parameters are those of one linear layer with Jacobian factors."""
        return bool(self.factored) and len(self.layout.names) <= 2

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
        return max([self.precision_error, *(torch.finfo(dtype).eps for dtype in dtypes)])

    def probe(self, x: Any) -> Report | None:
        """Check derivatives at the inputs of one batch, choose how to compute them, and log it.

        Raises an error with a remedy if no way is exact. Returns None if J is zero at these inputs, so
        that other inputs are needed. If all weights have factors, torch.func is tried only when it is
        needed, as torch loads much code for its first forward-mode product. The model, its buffers
        and the random state are not changed.
        """
        return self._probe(x, None)

    def _probe(self, x: Any, known: Report | None) -> Report | None:
        where = self.network.device, self.dtype
        if self._probed not in (None, where):
            self.forget()
        with self.network.guarded(), warnings.catch_warnings():
            # torch's first forward-mode product loads parts of its own that it deprecates
            warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
            with self.network.computing("float32"):
                found = probe(self.network, self.layout, x, known)
            if found is None:
                logger.info("J is zero for these examples; derivatives are checked on later ones.")
                return None
            self._report, self._probed, self._examples = found, where, x
            if self.network.precision != "float32":
                self._measure_precision(x)
        logger.info("%s", found)
        return found

    def _measure_precision(self, x: Any) -> None:
        """Log the relative difference of the products from those in float32."""
        generator = torch.Generator("cpu").manual_seed(0)
        w = torch.randn(2, self.layout.size, generator=generator, device="cpu")
        w = w.to(self.network.device)
        low = self.by_autodiff(x).push(w)
        with self.network.computing("float32"):
            exact = self.by_autodiff(x).push(w)
        self.precision_error = ((low - exact).norm() / exact.norm().clamp_min(1e-300)).item()
        precision, error = self.network.precision, self.precision_error
        words = f"In {precision}, the relative error of J w is {error:.1e}."
        if error > _PRECISION_ERROR:
            report("log", words)
        else:
            logger.info("%s", words)

    def push(self, x: Any, *w: Tensor) -> tuple[Tensor, Tensor]:
        """Return f(x), (B, ..., C), and J w, (K, B, ..., C), of columns in blocks, inside ``network.guarded()``."""
        count = sum(map(len, w))
        if sum(block.numel() for block in w) <= _COPIED:
            w = (torch.cat(w),)
        if self._carries and not torch.is_grad_enabled() and num_examples(x) <= count:
            found = [carried(self.network, self.layout, x, block) for block in w]
            self._carries = None not in found
            if self._carries:
                return found[0][0], torch.cat([Jw for _, Jw in found])
        rows = self.at(x, count)
        Jw = torch.cat([rows.push(block) for block in w])
        return rows.f, Jw

    def at(
        self, x: Any, columns: float = 1, keep: bool = False, at_once: int | None = None
    ) -> Rows:
        """Return the linear model at one batch's inputs, for use inside ``network.guarded()``.

        ``columns`` is the total number of columns; ``keep`` is whether the result should be stored
        between passes, if possible. ``at_once`` is the number of columns that fit into memory; None:
        all.
        """
        known = self._report
        may = known is not None and bool(known.names) and not torch.is_grad_enabled()
        if may and (keep or columns >= known.least_columns):
            rows = by_factors(self.network, self.layout, x, known, keep)
            if rows is not None:
                return rows.at_most(at_once)
        return self.by_autodiff(x, at_once)

    def by_autodiff(self, x: Any, at_once: int | None = None) -> Rows:
        """Return the linear model at a batch by ``torch.func``, for ``at_once`` columns."""
        known = self._report
        if known is not None and known.forward is None:  # it was not needed until now
            examples = map_tensors(Tensor.detach, x) if self._examples is None else self._examples
            known = self._probe(examples, known)
        known = Report() if known is None else known
        best, forward = known.at_once(num_examples(x)), bool(known.forward)
        return ByAutodiff(self.network, self.layout, x, best, forward).at_most(at_once)

    def steady(self, x: Any, by_factors: bool) -> LinearModel:
        """Return the same model for programs, which computes all columns at once for batches of any size."""
        self.by_autodiff(x)  # which probes first, where that is still needed
        return copy(self)._changed(example_bytes=None, **({} if by_factors else {"names": ()}))

    def leave_factors(self) -> None:
        """Use no factors any more after an out-of-memory error: torch.func needs less memory."""
        report("log", "Out of memory: continuing without stored Jacobian factors.")
        self._changed(names=())

    def _changed(self, **changes: Any) -> LinearModel:
        if self._report is not None:
            self._report = self._report._replace(**changes)
        return self

    def outputs(self, x: Any) -> Tensor:
        """Return f(x), shape (B, ..., C)."""
        return self.network.function(x)({})

    def __getstate__(self) -> dict[str, Any]:
        """Leave data out of copies and pickles."""
        return {**self.__dict__, "_examples": None}
