"""The linear model h(x) = J(x) w, whose features are the network's own Jacobian."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.jacobian import products
from torch_lla_em.jacobian.factored import Factored, Factors
from torch_lla_em.jacobian.faults import padding_rows, refuse_scripted
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.parameters import ParameterLayout
from torch_lla_em.jacobian.probe import choose_path
from torch_lla_em.jacobian.products import Report
from torch_lla_em.jacobian.row_squares import row_squares
from torch_lla_em.runtime import Interrupted, is_shortage, words_of

logger = logging.getLogger("torch_lla_em")

# the certificate does not see it: beyond this it would rule the error of the samples
_PRECISION_ERROR = 0.05

_ALL = 1 << 30
AddPullback = Callable[[Tensor, Tensor], None]


class LinearModel:
    """Jacobian J(x) of a network at its trained weights w_MAP, never materialised.

    Both products follow ``torch.func``: next to the product they return the outputs
    f(x), which the same forward pass yields for free. Weights w carry a leading
    sample axis, so that one pass serves all K samples; data are never vmapped over.
    Call both inside ``network.guarded()``. Inside ``torch.enable_grad()`` as well, J w is
    differentiable in x.
    """

    def __init__(self, network: Network, layout: ParameterLayout):
        self.network = network
        self.layout = layout
        refuse_scripted(network, layout)
        self._padding = padding_rows(network, layout)
        self.columns: int | None = None
        """How many columns fit at once, where memory ends; None: all."""

        self.forget()

    def forget(self) -> None:
        """Forget what the probe has found, which may not hold of other weights or elsewhere."""
        # of a tied embedding, reverse mode leaves out the padding row in one use only
        self.path = products.Path(forward=None not in self._padding.values())
        self._report: Report | None = None
        self._probed: tuple | None = None
        self.precision_error = 0.0
        """How far J w is from float32, relative, where ``Compute`` asks for less."""

        self.factored: Factored | None = None
        """The weights whose Jacobian is taken by factors where that is faster."""

        self.rows_probed = 0
        """How many rows the probe saw: of one it cannot be told what has factors."""

        self.known_factors: Factored | None = None
        """The weights that have factors, also where products are faster without."""

    @property
    def report(self) -> Report | None:
        """What the probe found; None until it has run where the weights are, in their dtype."""
        return self._report if self._probed == self._where() else None

    def _where(self) -> tuple:
        return self.network.device, self.dtype

    @property
    def w_MAP(self) -> Tensor:
        """The trained weights, shape (P,)."""
        return self.layout.flatten(self._weights())

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
        if self._probed not in (None, self._where()):
            self.forget()
        with self.network.guarded(), warnings.catch_warnings():
            # torch's first forward-mode product loads parts of its own that it deprecates
            warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
            with self.network.computing("float32"):
                report = choose_path(self, x)
            if report is None:
                logger.info("J is zero on these rows: derivatives are checked on later ones.")
                return None
            if self.network.precision != "float32":
                self._measure_precision(x)
        logger.log(logging.WARNING if report.unbatched else logging.INFO, "%s", report)
        self._report, self._probed = report, self._where()
        return report

    def _measure_precision(self, x: Any) -> None:
        """Log by how much the products differ from those in float32."""
        generator = torch.Generator("cpu").manual_seed(0)
        w = torch.randn(2, self.layout.size, generator=generator, device="cpu").to(
            self.network.device
        )
        _, low = self.jvp(x, w)
        with self.network.computing("float32"):
            _, exact = self.jvp(x, w)
        self.precision_error = ((low - exact).norm() / exact.norm().clamp_min(1e-300)).item()
        level = logging.WARNING if self.precision_error > _PRECISION_ERROR else logging.INFO
        logger.log(
            level,
            "In %s, J w is off by %.1e of its size.",
            self.network.precision,
            self.precision_error,
        )

    @property
    def columns_at_once(self) -> int:
        """How many columns a product takes at once, at most, on either side."""
        sides = self.path.jvp_columns, self.path.vjp_columns
        widest = max(side or _ALL for side in sides)
        return min(widest, self.columns or _ALL)

    @property
    def dtype(self) -> torch.dtype:
        """That of vectors in weight space: single precision at least."""
        dtypes = {weight.dtype for weight in self._weights().values()}
        return reduce(torch.promote_types, dtypes, torch.float32)

    def way(self) -> list[Any]:
        """Return how products are taken, as plain values that ``take_way`` takes."""
        known = self.known_factors
        factors = None if known is None else list(vars(known).values())[1:]
        return [list(self.path), list(self.report)[1:], factors]

    def take_way(self, way: list[Any]) -> None:
        """Take products as another process has found that they are to be taken."""
        path, (error, forward, unbatched, words), factors = way
        self.path = products.Path(*path)
        self._report = Report(self.path, error, forward, tuple(unbatched), words)
        self._probed = self._where()
        if factors is not None:
            known = self.known_factors = Factored(self.network, tuple(factors[0]), *factors[1:])
            self.factored = known if known.pays else None

    def prepare(self, x: Any, columns: int, keep: bool = False) -> Any:
        """Do once a batch what several products at x share; pass the result to them.

        That is the Jacobian's factors, where as many columns as will be taken pay for them, or
        where the result is to be kept over passes (it then has ``nbytes``).
        """
        factored = self.factored
        if factored is None or torch.is_grad_enabled():
            return x
        if not keep and columns < factored.least_columns:
            return x
        factors = factored.run(x, keep)
        return x if factors is None else factors

    def leave_factors(self) -> None:
        """Take no more factors where memory ends: torch.func can do with less."""
        if self.factored is not None:
            logger.warning("Out of memory: from now on J is taken without factors.")
            self.factored = None

    def outputs(self, x: Any) -> Tensor:
        """Return f(x), shape (B, ..., C)."""
        return x.f if isinstance(x, Factors) else self.network.function(x)(self._weights())

    def jvp(self, x: Any, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return f(x), shape (B, ..., C), and J(x) w, shape (K, B, ..., C)."""
        if isinstance(x, Factors):
            return x.f, self._push_by_factors(x, w)
        path = self.path._replace(jvp_columns=self._at_once(self.path.jvp_columns))
        return products.jvp(self.network.function(x), self._weights(), self._tangents(w), path)

    def vjp(self, x: Any) -> tuple[Tensor, AddPullback]:
        """Return f(x), shape (B, ..., C), and the map (u, total): total += J(x)ᵀ u.

        u has shape (K, B, ..., C), total (K, P).
        """
        if isinstance(x, Factors):
            return x.f, self._adding(self._pull_by_factors(x), x.columns_at_once)
        f, pullback = products.vjp(self.network.function(x), self._weights())
        return f, self._adding(pullback)

    def jvp_and_vjp(self, x: Any, w: Tensor) -> tuple[Tensor, Tensor, AddPullback]:
        """Return f(x), J(x) w and the map of ``vjp``; one column takes one forward pass."""
        if self.path.shared and len(w) == 1 and not isinstance(x, Factors):
            function, weights = self.network.function(x), self._weights()
            f, Jw, pullback = products.jvp_and_vjp(function, weights, self._tangents(w))
            return f, Jw, self._adding(pullback)
        _, Jw = self.jvp(x, w)
        f, add_pullback = self.vjp(x)
        return f, Jw, add_pullback

    def pulled(self, u: Tensor, add_pullback: AddPullback) -> Iterator[tuple[slice, Tensor]]:
        """Yield columns and their Jᵀ u, (k, P), in as many at once as are taken."""
        step = self._at_once(self.path.vjp_columns) or len(u)
        for start in range(0, len(u), step):
            columns = slice(start, min(len(u), start + step))
            size = columns.stop - start, self.layout.size
            with after_columns(start):
                total = torch.zeros(size, dtype=self.dtype, device=self.network.device)
                add_pullback(u[columns], total)
            yield columns, total

    def row_squares(self, x: Any, u: Tensor) -> tuple[Tensor, tuple[str, ...]]:
        """Return Σ_n Σ_k (J_nᵀ u_nk)², shape (P,), of the weights that have factors; and their names.

        u has shape (K, B, ..., C). Of other weights only sums over rows are known.
        """
        factors = x if isinstance(x, Factors) else None
        if factors is None and self.known_factors is not None:
            factors = self.known_factors.run(x)
        total = torch.zeros(self.layout.size, dtype=self.dtype, device=self.network.device)
        if factors is None:
            return total, ()
        self.layout.add_(total, row_squares(factors, u))
        return total, tuple(factors.weights)

    def _pull_by_factors(self, x: Factors) -> products.Pullback:
        rest = {n: weight for n, weight in self._weights().items() if n not in x.weights}
        if not rest:
            return x.pull
        _, others = products.vjp(self.network.function(x.x), rest, some=True)
        return lambda u: {**x.pull(u), **others(u)}

    def _push_by_factors(self, x: Factors, w: Tensor) -> Tensor:
        weights, tangents = self._weights(), self._tangents(w)
        rest = {name: weight for name, weight in weights.items() if name not in x.weights}
        own = {name: tangents[name].to(weights[name]) for name in x.weights}
        step = self._at_once(x.columns_at_once) or len(w)
        chunks = (slice(start, start + step) for start in range(0, len(w), step))
        Jw = torch.cat([x.push({name: t[chunk] for name, t in own.items()}) for chunk in chunks])
        if rest:
            function = self.network.function(x.x)
            tangents = {name: tangents[name] for name in rest}
            Jw = Jw + products.jvp(function, rest, tangents, self.path)[1]
        return Jw

    def _adding(self, pullback: products.Pullback, columns: int | None = None) -> AddPullback:
        """Return the map (u, total): total += Jᵀ u, in as many columns at once as are taken."""

        def add_pullback(u: Tensor, total: Tensor) -> None:
            step = self._at_once(columns or self.path.vjp_columns) or len(u)
            for start in range(0, len(u), step):
                chunk = slice(start, start + step)
                with after_columns(start):
                    grads = pullback(u[chunk])
                    # whatever takes memory is done before the first number is added
                    flat = {name: grad.reshape(len(grad), -1) for name, grad in grads.items()}
                    flat = {name: grad.to(total.device, total.dtype) for name, grad in flat.items()}
                self.layout.add_(total[chunk], flat)

        return add_pullback

    def _at_once(self, side: int | None) -> int | None:
        """Return how many columns one side takes at once."""
        known = [columns for columns in (side, self.columns) if columns is not None]
        return min(known, default=None)

    def _weights(self) -> dict[str, Tensor]:
        return self.network.weights(self.layout.names)

    def _tangents(self, w: Tensor) -> dict[str, Tensor]:
        weights, tangents = self._weights(), self.layout.unflatten(w)
        tangents = {name: tangents[name] for name in weights}
        if self.path.forward:  # reverse mode leaves the padding rows out by itself
            for name, rows in self._padding.items():
                for row in rows or ():
                    at = torch.full((1,), row, device=tangents[name].device)  # no copy to a card
                    tangents[name] = tangents[name].index_fill(-2, at, 0)
        return tangents


@contextmanager
def after_columns(done: int) -> Iterator[None]:
    """Say after how many columns memory ended, if it does."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        more = error.columns_done if isinstance(error, Interrupted) else 0
        raise Interrupted(words_of(error), done + more) from error
