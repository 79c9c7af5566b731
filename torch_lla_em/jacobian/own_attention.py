"""Attention whose derivatives take one softmax for all columns, and few copies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.forward_ad import UnpackedDualTensor as Dual
from torch.nn import functional as F

from torch_lla_em.jacobian.own_tangents import OwnTangents, columns_first, have_columns

# below these, of a layer and of the scores of a head, a rule takes longer to call than it saves
_LEAST_WIDTH = 128
_LEAST_SCORES = 2**12


class OwnAttention:
    """Attention of one network, by the rules of its ``OwnTangents``.

    Outputs are computed in one way throughout, whether or not they have tangents.
    """

    def __init__(self, rules: OwnTangents):
        self._rules = rules

    def forward_of(self, layer: nn.Module) -> Callable[..., Any] | None:
        """Return what a layer in eval mode may take for its ``forward``, or None without a rule."""
        if type(layer) is not nn.MultiheadAttention or "forward" in vars(layer):
            return None
        plain = layer._qkv_same_embed_dim and layer.bias_k is None and not layer.add_zero_attn
        return partial(self._forward, layer) if plain and layer.embed_dim >= _LEAST_WIDTH else None

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return what ``torch.nn.functional.scaled_dot_product_attention`` does."""
        y, kind = None, F.scaled_dot_product_attention
        if self._rules.in_use() and kwargs.keys() <= set(Dots._fields):
            dots = Dots(*args, **kwargs)
            if dots.are_plain() and dots.scores() >= _LEAST_SCORES:
                ours = _Attended(dots)
                y = self._rules.with_tangent(kind, ours.value, ours.tangent, *dots[:4])
        return kind(*args, **kwargs) if y is None else y

    def _forward(self, layer: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Any:
        x = None if layer.training or not self._rules.in_use() else _of_itself(*args, **kwargs)
        if x is None:
            return nn.MultiheadAttention.forward(layer, *args, **kwargs)
        x = x if layer.batch_first else x.transpose(0, 1)
        packed = self._rules.linear(x, layer.in_proj_weight, layer.in_proj_bias)
        heads = packed.unflatten(-1, (3, layer.num_heads, -1)).permute(2, 0, 3, 1, 4).contiguous()
        y = self(*heads.unbind()).transpose(1, 2).flatten(-2)
        y = self._rules.linear(y, layer.out_proj.weight, layer.out_proj.bias)
        return y if layer.batch_first else y.transpose(0, 1), None


def _of_itself(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, need_weights: bool = True, **others: Any
) -> Tensor | None:
    """Return the input of a multi-head attention to itself without masks, or None of another."""
    plain = query is key is value and query.dim() == 3 and not query.is_nested
    masked = any(others.get(name) is not None for name in ("key_padding_mask", "attn_mask"))
    plain = plain and not (args or need_weights or masked or others.get("is_causal"))
    return query if plain else None


class Dots(NamedTuple):
    """The arguments of ``torch.nn.functional.scaled_dot_product_attention``."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def are_plain(self) -> bool:
        """Whether nothing is dropped, and heads are as many of all three."""
        tensors = self.query, self.key, self.value
        if self.dropout_p or self.enable_gqa or (self.is_causal and self.attn_mask is not None):
            return False
        if any(t.is_nested or t.dim() < 3 for t in tensors):
            return False
        return len({t.shape[:-2] for t in tensors}) == 1

    def scores(self) -> int:
        """Return how many scores a head has."""
        return self.query.shape[-2] * self.key.shape[-2]


class _Attended:
    """One call, whose weights the outputs and their tangents share."""

    def __init__(self, dots: Dots):
        self._dots = dots
        self._scale = dots.query.shape[-1] ** -0.5 if dots.scale is None else dots.scale

    def value(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        self._query = query * self._scale
        self._weights = self._softmax(self._query @ key.mT, mask)
        return self._weights @ value

    def tangent(self, y: Tensor, query: Dual, key: Dual, value: Dual, mask: Dual) -> Tensor:
        query_t = None if query.tangent is None else query.tangent * self._scale
        primals = self._query, key.primal, value.primal
        tangents = query_t, key.tangent, value.tangent, mask.tangent
        tensors = self._weights, *(t if t is None else t.to(y.dtype) for t in (*primals, *tangents))
        if not have_columns(*tensors):
            return _push(*tensors)
        return _AttentionTangent.apply(*tensors).detach()  # a Function enables gradients

    def _softmax(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if self._dots.is_causal:
            past = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            return scores.masked_fill(~past, -torch.inf).softmax(-1)
        if mask is None:
            return scores.softmax(-1)
        masked = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if masked else scores + mask
        return torch._safe_softmax(scores, -1)  # 0 where all are masked


class _AttentionTangent(Function):
    """The tangent of attention, from its weights, (scaled) queries, keys and values.

    After these come the tangents of queries, keys, values and of what is added to the scores.
    """

    @staticmethod
    def forward(weights: Tensor, *tensors: Tensor | None) -> Tensor:
        return _push(weights, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        """Keep nothing: it is not differentiated."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *tensors: Any) -> tuple:
        if any(dim is not None for dim in in_dims[:4]):
            return torch.vmap(_push, in_dims)(*tensors), 0
        columns = [columns_first(info.batch_size, *each) for each in zip(tensors[4:], in_dims[4:])]
        pushed = []
        for k in range(info.batch_size):  # one by one: large tangents stay in a CPU's cache
            column = (t if t is None else t[k] for t in columns)
            pushed.append(_push(*tensors[:4], *column))
        return torch.stack(pushed), 0


def _push(weights: Tensor, *tensors: Tensor | None) -> Tensor:
    """Return the tangent of weights @ value, shape (..., L, E)."""
    *tensors, added_t = tensors
    shape, weights = weights.shape, weights.flatten(0, -3)
    query, key, value, *tangents = (t if t is None else t.flatten(0, -3) for t in tensors)
    query_t, key_t, value_t = tangents
    y = scores_t = None
    if key_t is not None:
        scores_t = torch.bmm(query, key_t.mT)
    if query_t is not None:
        scores_t = _plus_bmm(scores_t, query_t, key.mT)
    if added_t is not None:
        scores_t = added_t if scores_t is None else scores_t.view(shape) + added_t
        scores_t = scores_t.expand(shape).flatten(0, -3)
    if scores_t is not None:
        scores_t = scores_t.to(weights.dtype)
        weights_t = torch._softmax_backward_data(scores_t, weights, -1, weights.dtype)
        y = torch.bmm(weights_t.to(value.dtype), value)
    if value_t is not None:
        y = _plus_bmm(y, weights.to(value.dtype), value_t)
    return y.view(*shape[:-1], -1)


def _plus_bmm(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b) if total is None else total.baddbmm_(a, b)
