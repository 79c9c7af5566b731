"""J by its definition: the derivative of f(x; w) with respect to the parameters w in the posterior,
at the trained weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torch_lla_em.data import Inputs
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.parameters import ParameterLayout
from torch_lla_em.jacobian.rows import Rows


@dataclass(eq=False)
class Intercepted(TorchFunctionMode):
    """Passes every torch function of a forward pass, with its arguments, to another function."""

    call: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self.call(func, args, kwargs or {})


def as_in_training(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Remove the derivative of the padding row of a table: it gets no gradient in training, but
    forward mode would give it one. Copy inputs of linear layers that are not contiguous.

    For other layouts of (B, L, E), such as the transposed outputs of attention, ``torch.func``
    takes a product, and a gradient of the weight's size, for each of B or L entries: four to six
    times as long for a ViT.
    """
    # the functions that multi-head attention calls do not come here
    count = {F.linear: 1, F.multi_head_attention_forward: 3}.get(func, 0)
    copies: dict[int, Tensor] = {}  # equal arguments stay one tensor
    for tensor in args[:count]:
        if tensor.dim() > 2 and not tensor.is_contiguous():
            copies.setdefault(id(tensor), tensor.contiguous())
    args = tuple(copies.get(id(arg), arg) for arg in args)
    z = func(*args, **kwargs)
    padding = kwargs.get("padding_idx", args[2] if len(args) > 2 else None)
    if func is not F.embedding or padding is None:
        return z
    ids, table = args[0], args[1]
    return torch.where((ids == padding % len(table))[..., None], z.detach(), z)


class Linearised(Rows):
    """The linear model at a batch by ``torch.func.jvp`` and ``vjp`` of ``functional_call``, vmapped
    over columns.

    Vectors in parameter space are flat; a network takes them as tensors by name. The other ways are
    compared with this.
    """

    def __init__(
        self, network: Network, layout: ParameterLayout, x: Inputs, columns: int | None = None
    ):
        """``columns`` is the largest number of columns at once (None: all)."""
        self.layout, self.columns = layout, columns
        self._of_weights, self._leaves = partial(network.outputs, x), network.leaves(layout.names)
        self._w_MAP = {name: w.detach() for name, w in self._leaves.items()}
        self._f: Tensor | None = None

    def _function(self, weights: dict[str, Tensor]) -> Tensor:
        """Return f(x; w), shape (B, ..., C)."""
        with Intercepted(as_in_training):
            return self._of_weights(weights)

    @property
    def f(self) -> Tensor:
        """f(x), shape (B, ..., C)."""
        if self._f is None:
            self._f = self._function(self._w_MAP)
        return self._f

    def _push(self, directions: dict[str, Tensor]) -> Tensor:
        # forward mode copies views that do not start at the beginning of their memory
        columns = {name: directions[name].to(w, copy=True) for name, w in self._w_MAP.items()}
        jvp = partial(torch.func.jvp, self._function, (self._w_MAP,))
        Jw: Tensor
        if len(next(iter(columns.values()))) == 1:
            self._f, Jw = jvp(({name: column[0] for name, column in columns.items()},))[:2]
            return Jw[None]
        both: Any = (None, 0)  # torch declares these as numbers
        self._f, Jw = torch.vmap(jvp, out_dims=both)((columns,))[:2]
        return Jw

    def _pull(self, u: Tensor) -> dict[str, Tensor]:
        f, vjp = torch.func.vjp(self._function, self._w_MAP)[:2]
        pulled: dict[str, Tensor] = torch.vmap(lambda column: vjp(column)[0])(u.to(f))
        return pulled
