"""The linear model h(x) = J(x) w, whose features are the network's own Jacobian."""

from __future__ import annotations

import logging
import warnings
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.jacobian.autodiff import ByAutodiff, Path
from torch_lla_em.jacobian.by_factors import ByFactors
from torch_lla_em.jacobian.factors import Factored
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.parameters import ParameterLayout
from torch_lla_em.jacobian.probe import Report, probe
from torch_lla_em.jacobian.rows import Rows, Weights

logger = logging.getLogger("torch_lla_em")

# the certificate does not see it: beyond this it would rule the error of the samples
_PRECISION_ERROR = 0.05


class LinearModel:
    """Jacobian J(x) of a network at its trained weights w_MAP, never materialised.

    ``at(x)`` returns the linear model at one batch of inputs, which pushes columns w (K, P) to
    J w and pulls u to Jᵀ u. How J is taken is chosen by the probe, on the first batch.
    """

    def __init__(self, network: Network, layout: ParameterLayout):
        self.network, self.layout = network, layout
        self.weights = Weights(network, layout)
        self.columns: int | None = None
        """How many columns fit into memory at once; None: all."""

        self.forget()

    def forget(self) -> None:
        """Forget what the probe has found, which may not hold of other weights or elsewhere."""
        # of a tied embedding, reverse mode leaves out the padding row in one use only
        self.path = Path(forward=None not in self.weights.padding.values())
        self._report: Report | None = None
        self._probed: tuple | None = None
        self.precision_error = 0.0
        """How far J w is from float32, relative, where ``Compute`` asks for less."""

        self.factored: Factored | None = None
        """The weights whose Jacobian is taken by factors."""

    @property
    def report(self) -> Report | None:
        """What the probe found; None until it has run where the weights are, in their dtype."""
        return self._report if self._probed == (self.network.device, self.dtype) else None

    @property
    def w_MAP(self) -> Tensor:
        """The trained weights, shape (P,)."""
        return self.layout.flatten(self.weights.values())

    @property
    def dtype(self) -> torch.dtype:
        """That of vectors in weight space: single precision at least."""
        dtypes = {weight.dtype for weight in self.weights.values().values()}
        return reduce(torch.promote_types, dtypes, torch.float32)

    @property
    def rounding(self) -> float:
        """How far J w may be from exact, relative: by the model's own dtype, or by ``Compute``."""
        dtypes = {p.dtype for p in self.network.module.parameters() if p.is_floating_point()}
        return max([self.precision_error, *(torch.finfo(dtype).eps for dtype in dtypes)])

    def probe(self, x: Any) -> Report | None:
        """Check derivatives at one batch's inputs, choose how to take them, and log it.

        Raises where neither direction is right, with the submodule and the remedy; None where
        J is zero at these inputs, and others have to tell. The model, its buffers and the
        random state stay as they are.
        """
        where = self.network.device, self.dtype
        if self._probed not in (None, where):
            self.forget()
        with self.network.guarded(), warnings.catch_warnings():
            # torch's first forward-mode product loads parts of its own that it deprecates
            warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
            with self.network.computing("float32"):
                report = probe(self.weights, x, self.path)
            if report is None:
                logger.info("J is zero on these rows: derivatives are checked on later ones.")
                return None
            self.path, self.factored = report.path, report.factored
            if self.network.precision != "float32":
                self._measure_precision(x)
        logger.log(logging.WARNING if report.unbatched else logging.INFO, "%s", report)
        self._report, self._probed = report, where
        return report

    def _measure_precision(self, x: Any) -> None:
        """Log by how much the products differ from those in float32."""
        generator = torch.Generator("cpu").manual_seed(0)
        w = torch.randn(2, self.layout.size, generator=generator, device="cpu")
        w = w.to(self.network.device)
        low = self.by_autodiff(x, pulls=False).push(w)
        with self.network.computing("float32"):
            exact = self.by_autodiff(x, pulls=False).push(w)
        self.precision_error = ((low - exact).norm() / exact.norm().clamp_min(1e-300)).item()
        logger.log(
            logging.WARNING if self.precision_error > _PRECISION_ERROR else logging.INFO,
            "In %s, J w is off by %.1e of its size.",
            self.network.precision,
            self.precision_error,
        )

    def at(self, x: Any, columns: float = 1, keep: bool = False, pulls: bool = True) -> Rows:
        """Return the linear model at one batch's inputs, for use inside ``network.guarded()``.

        ``columns``: how many will be taken, in all; ``keep``: whether the result is to be kept
        from pass to pass, if it can be; ``pulls``: whether Jᵀ u will be needed.
        """
        factored = self.factored
        if factored is not None and not torch.is_grad_enabled():
            terms = factored.run(x, keep) if keep or columns >= factored.least_columns else None
            if terms is not None:
                rest = self.by_autodiff(x, factored.others) if factored.others else None
                return ByFactors(self.weights, terms, rest, self.columns)
        return self.by_autodiff(x, pulls=pulls)

    def by_autodiff(
        self, x: Any, names: tuple[str, ...] | None = None, pulls: bool = True
    ) -> ByAutodiff:
        """Return the linear model at a batch, of all weights or the named ones, by ``torch.func``."""
        return ByAutodiff(self.weights, x, self.path.within(self.columns), names, pulls)

    def outputs(self, x: Any) -> Tensor:
        """Return f(x), shape (B, ..., C)."""
        return self.network.function(x)(self.weights.values())

    def leave_factors(self) -> None:
        """Take no more factors after an out-of-memory error: torch.func can do with less."""
        if self.factored is not None:
            logger.warning("Out of memory: from now on J is taken without factors.")
            self.factored = None
