"""The linear model h(x) = J(x) w, whose features are the network's own Jacobian."""

from __future__ import annotations

import logging
import warnings
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.data import map_tensors
from torch_lla_em.jacobian.by_factors import ByFactors
from torch_lla_em.jacobian.factors import Factored
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.parameters import ParameterLayout
from torch_lla_em.jacobian.probe import Report, probe
from torch_lla_em.jacobian.rows import ByAutodiff, Path, Rows, Weights
from torch_lla_em.runtime import report

logger = logging.getLogger("torch_lla_em")

# the certificate does not include this error: above it, it would dominate the error of the samples
_PRECISION_ERROR = 0.05


class LinearModel:
    """Jacobian J(x) of a network at its trained weights w_MAP, never materialised.

    ``at(x)`` returns the linear model at one batch of inputs, which pushes columns w (K, P) to
    J w and pulls u to Jᵀ u. The probe chooses how J is computed, on the first batch.
    """

    def __init__(self, network: Network, layout: ParameterLayout):
        self.network, self.layout = network, layout
        self.weights = Weights(network, layout)
        self.forget()

    def forget(self) -> None:
        """Discard the result of the probe, which may not hold for other weights or another device."""
        self._path: Path | None = Path(forward=self.weights.allow_forward)
        self._report: Report | None = None
        self._probed: tuple | None = None
        self._examples: Any = None
        """The inputs that were probed."""

        self.precision_error = 0.0
        """Relative error of J w compared with float32, if ``Compute`` selects a lower precision."""

        self.factored: Factored | None = None
        """The weights whose Jacobian is computed by factors."""

        self._has_left_factors = False
        """Whether memory has run out with factors, so that a later probe does not use them again."""

    @property
    def report(self) -> Report | None:
        """The result of the probe; None until it has run on the current device and dtype."""
        return self._report if self._probed == (self.network.device, self.dtype) else None

    @property
    def path(self) -> Path:
        """How torch.func computes the products, if it is known."""
        return self._path or Path(forward=self.weights.allow_forward)

    @path.setter
    def path(self, path: Path) -> None:
        self._path = path

    @property
    def w_MAP(self) -> Tensor:
        """The trained weights, shape (P,)."""
        return self.layout.flatten(self.weights.values())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of vectors in parameter space, float32 or higher."""
        dtypes = {weight.dtype for weight in self.weights.values().values()}
        return reduce(torch.promote_types, dtypes, torch.float32)

    @property
    def rounding(self) -> float:
        """Relative rounding error of J w, from the dtype of the model or from ``Compute``."""
        dtypes = {p.dtype for p in self.network.module.parameters() if p.is_floating_point()}
        return max([self.precision_error, *(torch.finfo(dtype).eps for dtype in dtypes)])

    def probe(self, x: Any, needs_path: bool = True) -> Report | None:
        """Check derivatives at the inputs of one batch, choose how to compute them, and log it.

        Raises an error that names the submodule and a remedy if no way is exact. Returns None if J is
        zero at these inputs, so that other inputs are needed. Without ``needs_path``, torch.func is
        tried only when it is needed, because torch loads much code for its first forward-mode
        product. The model, its buffers and the random state are not changed.
        """
        where = self.network.device, self.dtype
        if self._probed not in (None, where):
            self.forget()
        with self.network.guarded(), warnings.catch_warnings():
            # torch's first forward-mode product loads parts of its own that it deprecates
            warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
            with self.network.computing("float32"):
                found = probe(self.weights, x, needs_path)
            if found is None:
                logger.info("J is zero for these examples; derivatives are checked on later ones.")
                return None
            self._path, self._examples = found.path, x
            self.factored = None if self._has_left_factors else found.factored
            if self.network.precision != "float32":
                self._measure_precision(x)
        if found.unbatched:
            report("log", str(found))
        else:
            logger.info("%s", found)
        self._report, self._probed = found, where
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
        words = (
            f"In {self.network.precision}, the relative error of J w is {self.precision_error:.1e}."
        )
        if self.precision_error > _PRECISION_ERROR:
            report("log", words)
        else:
            logger.info("%s", words)

    def at(
        self, x: Any, columns: float = 1, keep: bool = False, at_once: int | None = None
    ) -> Rows:
        """Return the linear model at one batch's inputs, for use inside ``network.guarded()``.

        ``columns`` is the total number of columns; ``keep`` is whether the result should be stored
        between passes, if possible. ``at_once`` is the number of columns that fit into memory; None:
        all.
        """
        factored = self.factored
        if factored is not None and not torch.is_grad_enabled():
            terms = factored.run(x, keep) if keep or columns >= factored.least_columns else None
            if terms is not None:
                return ByFactors(self.weights, terms, at_once)
        return self.by_autodiff(x, at_once)

    def by_autodiff(self, x: Any, at_once: int | None = None) -> ByAutodiff:
        """Return the linear model at a batch by ``torch.func``."""
        if self._path is None:  # not needed until now; a copy has no examples yet
            self.probe(map_tensors(Tensor.detach, x) if self._examples is None else self._examples)
        return ByAutodiff(self.weights, x, self.path.within(at_once))

    def steady(self, x: Any, by_factors: bool) -> LinearModel:
        """Return the same model that computes as many columns at once for any batch as for x."""
        other, columns = copy(self), self.by_autodiff(x).pushed
        other._path = self.path._replace(columns=columns, example_bytes=None)
        keeps = by_factors and self.factored is not None
        other.factored = replace(self.factored, example_bytes=None) if keeps else None
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Leave data out of copies and pickles."""
        return {**self.__dict__, "_examples": None}

    def outputs(self, x: Any) -> Tensor:
        """Return f(x), shape (B, ..., C)."""
        return self.network.function(x)(self.weights.values())

    def activations(self, x: Any) -> int:
        """Return the bytes that a forward pass stores for its derivatives."""
        sizes: dict[int, int] = {}

        def see(tensor: Tensor) -> Tensor:
            if tensor.layout == torch.strided and type(tensor) is Tensor:
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        rows = ByAutodiff(self.weights, x, Path())
        # torch.func inside a network allows no hooks: then it is not known
        with suppress(RuntimeError), torch.autograd.graph.saved_tensors_hooks(see, lambda t: t):
            rows.forward()
        for parameter in self.network.module.parameters():  # are in memory in any case
            if parameter.layout == torch.strided:
                sizes.pop(parameter.untyped_storage().data_ptr(), None)
        return sum(sizes.values())

    @property
    def is_last_layer(self) -> bool:
        """Whether the parameters are those of one linear layer with Jacobian factors."""
        return self.factored is not None and len(self.layout.names) <= 2

    def leave_factors(self) -> None:
        """Use no factors any more after an out-of-memory error: torch.func needs less memory."""
        if self.factored is not None:
            report("log", "Out of memory: continuing without stored Jacobian factors.")
            self.factored, self._has_left_factors = None, True
