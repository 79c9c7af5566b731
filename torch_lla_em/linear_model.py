"""The linear model h(x) = J(x) w, whose features are the network's own Jacobian."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.network import Network
from torch_lla_em.parameters import ParameterLayout


class LinearModel:
    """Jacobian J(x) of a network at its trained weights w_MAP, never materialised.

    Both products follow ``torch.func``: next to the product they return the outputs
    f(x), which the same forward pass yields for free. Weights w carry a leading
    sample axis, so that one pass serves all K samples; data are never vmapped over.
    Call both inside ``network.guarded()``.
    """

    def __init__(self, network: Network, layout: ParameterLayout):
        self.network = network
        self.layout = layout

    @property
    def w_MAP(self) -> Tensor:
        """The trained weights, shape (P,)."""
        return self.layout.flatten(self.network.weights(self.layout.names))

    def prepare(self, x: Any) -> Any:
        """Do once a batch what several products at x share; pass the result to them."""
        return x

    def outputs(self, x: Any) -> Tensor:
        """Return f(x), shape (B, ..., C)."""
        return self.network.function(x, self.layout.names)(self._weights())

    def jvp(self, x: Any, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return f(x), shape (B, ..., C), and J(x) w, shape (K, B, ..., C)."""
        forward, weights = self.network.function(x, self.layout.names), self._weights()

        def push(tangent: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            return torch.func.jvp(forward, (weights,), (tangent,))

        if len(w) == 1:
            f, Jw = push(self._tangents(w[0]))
            return f, Jw[None]
        return torch.vmap(push, out_dims=(None, 0))(self._tangents(w))

    def vjp(self, x: Any) -> tuple[Tensor, Callable[[Tensor, Tensor], None]]:
        """Return f(x), shape (B, ..., C), and the map (u, total): total += J(x)ᵀ u.

        u has shape (K, B, ..., C), total (K, P).
        """
        forward = self.network.function(x, self.layout.names)
        f, pullback = torch.func.vjp(forward, self._weights())

        def add_pullback(u: Tensor, total: Tensor) -> None:
            u = u.to(f)
            if len(u) == 1:
                self.layout.add_(total[0], pullback(u[0])[0])
            else:
                self.layout.add_(total, torch.vmap(pullback)(u)[0])

        return f, add_pullback

    def _weights(self) -> dict[str, Tensor]:
        return self.network.weights(self.layout.names)

    def _tangents(self, w: Tensor) -> dict[str, Tensor]:
        weights, tangents = self._weights(), self.layout.unflatten(w)
        return {name: tangents[name].to(weights[name]) for name in weights}
