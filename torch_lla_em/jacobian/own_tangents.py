"""Forward-mode rules of common layers that go over memory less often than torch's own.

Of many columns at once, torch takes the tangent of a linear layer or of a norm in separate
products, copies and sums, each as large as all columns together. These take fewer, to the
same numbers but for rounding, and can keep tangents out of a graph that is recorded for Jᵀ u.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import _functorch as functorch
from torch._functorch import eager_transforms
from torch.autograd import Function
from torch.autograd.forward_ad import UnpackedDualTensor as Dual
from torch.autograd.forward_ad import make_dual, unpack_dual
from torch.nn import functional as F

Forward = Callable[[Tensor], Tensor]

# weights of a linear layer, below which calling its rule takes longer than it saves; batches do
# not enter, so that all of them are computed in the way that the probe has seen
_LEAST = 2**18


class OwnTangents:
    """The rules of one network, and whether they are in use."""

    def __init__(self) -> None:
        self.allowed = True
        """Off where they are at fault."""

        self.used: set[Any] = set()
        """The kinds of layers, and functions, of which they have been."""

        self._final = False

    @contextmanager
    def final(self) -> Iterator[None]:
        """Use the rules where gradients are enabled as well: nothing differentiates tangents."""
        self._final = True
        try:
            yield
        finally:
            self._final = False

    def forward_of(self, layer: nn.Module) -> Forward | None:
        """Return what a layer in eval mode may take for its ``forward``, or None without a rule."""
        rule = _RULES.get(type(layer))
        if rule is None or "forward" in vars(layer) or getattr(layer, "running_mean", 0) is None:
            return None
        if type(layer) is nn.Linear and not _pays(layer.weight):
            return None
        return partial(self._forward, rule, layer)

    def in_use(self) -> bool:
        """Whether layers may be called otherwise than torch does."""
        return self.allowed and not torch.compiler.is_compiling()

    def with_tangent(
        self,
        kind: Any,
        value: Callable[..., Tensor],
        tangent: Callable[..., Tensor],
        *tensors: Tensor | None,
    ) -> Tensor | None:
        """Return value(*tensors), its tangent by a rule, or None where torch's is to be used."""
        if not self.in_use():
            return None
        duals = [Dual(None, None) if t is None else unpack_dual(t) for t in tensors]
        if all(dual.tangent is None for dual in duals):
            return value(*tensors)
        if self._differentiated():
            return None
        self.used.add(kind)
        y = value(*(dual.primal for dual in duals))
        with torch.no_grad():
            y_t = tangent(y, *duals).to(y.dtype)
            if y_t.shape != y.shape:
                y_t = y_t.expand_as(y).clone()  # of a view nothing is changed in place
        # make_dual's is a view, of which a change in place would cost copies in the backward pass
        return torch.ops.aten._unsafe_view(make_dual(y, y_t), y.shape)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x Wᵀ + b."""
        y, tensors = None, (x, weight, bias)
        if _pays(weight):
            y = self.with_tangent(nn.Linear, F.linear, _linear_tangent, *tensors)
        return F.linear(*tensors) if y is None else y

    def _forward(self, rule: Rule, layer: Any, input: Tensor) -> Tensor:
        y, kind = None, type(layer)
        if not layer.training:
            rules = partial(rule.value, layer), partial(rule.tangent, layer)
            y = self.with_tangent(kind, *rules, input, layer.weight, layer.bias)
        return kind.forward(layer, input) if y is None else y

    def _differentiated(self) -> bool:
        # in a network that takes derivatives itself, tangents have tangents
        nested = getattr(eager_transforms, "JVP_NESTING", 2) > 1
        return nested or (torch.is_grad_enabled() and not self._final)


def _pays(weight: Tensor) -> bool:
    return weight.numel() >= _LEAST


class Rule(NamedTuple):
    """How a kind of layer is computed."""

    value: Callable[..., Tensor]
    """(layer, x, weight, bias) -> y."""

    tangent: Callable[[Any, Tensor, Dual, Dual, Dual], Tensor]
    """(layer, y, x, weight, bias) -> the tangent of y, or what expands to it."""


def _linear_tangent(y: Tensor, x: Dual, weight: Dual, bias: Dual) -> Tensor:
    if weight.tangent is not None:
        tensors = x.primal, weight.primal, x.tangent, weight.tangent, bias.tangent
        tensors = [t if t is None else t.to(y.dtype) for t in tensors]
        if not have_columns(*tensors):
            return _LinearTangent.forward(*tensors)
        return _LinearTangent.apply(*tensors).detach()  # a Function enables gradients
    if x.tangent is not None:
        return F.linear(x.tangent, weight.primal, bias.tangent)
    return bias.tangent


def _fixed_norm(layer: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    layer._check_input_dim(x)
    statistics = layer.running_mean, layer.running_var
    return F.batch_norm(x, *statistics, weight, bias, eps=layer.eps)


def _fixed_norm_tangent(layer: Any, y: Tensor, x: Dual, weight: Dual, bias: Dual) -> Tensor:
    scale, channels = (layer.running_var + layer.eps).rsqrt(), (-1, *[1] * (y.dim() - 2))
    slope = scale if weight.primal is None else scale * weight.primal
    slope_t = None if weight.tangent is None else scale * weight.tangent
    shift_t = _plus_product(bias.tangent, slope_t, -layer.running_mean)
    slope, slope_t, shift_t = (
        t if t is None else t.view(channels) for t in (slope, slope_t, shift_t)
    )
    return _plus_product(_plus_product(shift_t, x.primal, slope_t), x.tangent, slope)


def _layer_norm(layer: nn.LayerNorm, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.layer_norm(x, layer.normalized_shape, weight, bias, layer.eps)


def _layer_norm_tangent(
    layer: nn.LayerNorm, y: Tensor, x: Dual, weight: Dual, bias: Dual
) -> Tensor:
    value, x_t, shape = x.primal.to(y.dtype), x.tangent, layer.normalized_shape
    z, *statistics = torch.native_layer_norm(value, shape, None, None, layer.eps)
    if x_t is not None:
        # the derivative of z in x is symmetric
        x_t = x_t.to(y.dtype), value, shape, *statistics, None, None, (True, False, False)
        x_t = torch.ops.aten.native_layer_norm_backward(*x_t)[0]
    if weight.primal is None:
        return x_t
    return _plus_product(_plus_product(bias.tangent, z, weight.tangent), x_t, weight.primal)


def _plus_product(total: Tensor | None, a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return total + a b, where None is 0."""
    if a is None or b is None:
        return total
    return a * b if total is None else torch.addcmul(total, a, b)


class _LinearTangent(Function):
    """ẋ Wᵀ + x Ẇᵀ + ḃ, with Ẇ and perhaps the others; two products for all columns."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, *tangents: Tensor | None) -> Tensor:
        return _push_linear(x, weight, *(t if t is None else t[None] for t in tangents))[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        """Keep nothing: it is not differentiated."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, weight: Tensor, *tangents: Any) -> tuple:
        if in_dims[0] is None and in_dims[1] is None:
            columns = map(partial(columns_first, info.batch_size), tangents, in_dims[2:])
            return _push_linear(x, weight, *columns), 0
        return torch.vmap(_LinearTangent.forward, in_dims)(x, weight, *tangents), 0


def have_columns(*tensors: Tensor | None) -> bool:
    """Whether tensors are mapped over."""
    for t in tensors:
        while t is not None and functorch.is_functorch_wrapped_tensor(t):
            if functorch.is_batchedtensor(t):
                return True
            t = functorch.get_unwrapped(t)
    return False


def columns_first(count: int, tangent: Tensor | None, dim: int | None) -> Tensor | None:
    """Return a tangent with its columns first."""
    if tangent is None:
        return None
    return tangent.expand(count, *tangent.shape) if dim is None else tangent.movedim(dim, 0)


def _push_linear(
    x: Tensor, weight: Tensor, x_t: Tensor | None, weight_t: Tensor, bias_t: Tensor | None
) -> Tensor:
    """Return the tangents (K, ...) of ``_LinearTangent`` from those of its arguments, (K, ...)."""
    rows = x.reshape(-1, x.shape[-1]).expand(len(weight_t), -1, -1)
    if bias_t is None:
        y = torch.bmm(rows, weight_t.mT)
    else:
        y = torch.baddbmm(bias_t[:, None], rows, weight_t.mT)
    if x_t is not None:
        y.view(-1, y.shape[-1]).addmm_(x_t.reshape(-1, x_t.shape[-1]), weight.t())
    return y.view(len(y), *x.shape[:-1], -1)


_NORM = Rule(_fixed_norm, _fixed_norm_tangent)
_RULES = {
    nn.Linear: Rule(
        lambda layer, *tensors: F.linear(*tensors), lambda layer, *duals: _linear_tangent(*duals)
    ),
    nn.BatchNorm1d: _NORM,
    nn.BatchNorm2d: _NORM,
    nn.BatchNorm3d: _NORM,
    nn.LayerNorm: Rule(_layer_norm, _layer_norm_tangent),
}
