"""G w by torch.func alone: one vmapped jvp, the softmax's H, one vmapped vjp; nothing of ours."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap


def plain_product(model: nn.Module, names: list[str], x: Tensor) -> Callable[[Tensor], Tensor]:
    """Return w -> G w on one batch, (K, P), for a classifier and its random weights by name."""
    weights = {name: model.get_parameter(name).detach() for name in names}
    sizes = [p.numel() for p in weights.values()]

    def output(weights: dict[str, Tensor]) -> Tensor:
        return functional_call(model, weights, (x,))

    def apart(w: Tensor) -> dict[str, Tensor]:
        pieces = w.split(sizes, dim=-1)
        return {n: part.view(len(w), *p.shape) for (n, p), part in zip(weights.items(), pieces)}

    @torch.no_grad()
    def product(w: Tensor) -> Tensor:
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # it has no forward mode
        try:
            f, pull = vjp(output, weights)
            Jw = vmap(lambda tangent: jvp(output, (weights,), (tangent,))[1])(apart(w))
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
        p = f.detach().softmax(-1)
        u = p * Jw - p * (p * Jw).sum(-1, keepdim=True)
        (gradients,) = vmap(pull)(u)
        return torch.cat([g.flatten(1) for g in gradients.values()], dim=1)

    return product
