"""The prior N(0, Λ⁻¹): Λ = λ diag(scale)⁻², one λ for all weights or one per tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torch_lla_em.jacobian import ParameterLayout
from torch_lla_em.solvers import Space

DAMPING = 0.01
"""Share of the mean squared feature that the g-prior adds to every weight's own."""

# powers of the mean squared feature of a tensor
_POWERS = {"tensor": 0.5, "half": 0.25}


@dataclass(frozen=True)
class Prior:
    """The prior's shape; its precision λ is passed to every method."""

    layout: ParameterLayout
    scale: Tensor
    """(P,): the prior standard deviation at λ = 1; 0 for weights that move no output."""

    layerwise: bool = False

    space: Space = Space()
    """Where the weights lie."""

    def deviation(self, precision: Tensor) -> Tensor:
        """Return the prior standard deviation scale / √λ, shape (P,)."""
        return self.scale * self.per_weight(precision).rsqrt().to(self.scale)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over weights, (..., P): in all, (...), or per block, (..., blocks)."""
        return self.space.sum(self.layout.block_sums(values) if self.layerwise else values.sum(-1))

    def sum_of_squares(self, rows: Tensor) -> Tensor:
        """Sum the squares of vectors (K, P) over weights, (K,), or per block, in float64."""
        pieces = rows.split(self.layout.sizes, dim=1) if self.layerwise else (rows,)
        sums = torch.stack([Space().dots(piece, piece) for piece in pieces], dim=1)
        return self.space.sum(sums if self.layerwise else sums[:, 0])

    def squared_norm(self, w: Tensor) -> Tensor:
        """Return ‖w / scale‖², in all or per block, in float64."""
        return self.sum(self.unscaled(w).double().square())

    def num_weights(self) -> Tensor:
        """Return the number of live weights, in all or per block."""
        return self.sum((self.scale > 0).double())

    def unscaled(self, w: Tensor) -> Tensor:
        """Return w / scale, 0 for dead weights."""
        return w * _inverse(self.scale)

    def whitened(self, w: Tensor, precision: Tensor) -> Tensor:
        """Return x = Λ^{1/2} w, 0 for dead weights."""
        return w * _inverse(self.deviation(precision))

    def per_weight(self, values: Tensor) -> Tensor:
        """Return values, () or (blocks,), for every weight: () or (P,)."""
        return self.layout.expand(values) if values.dim() else values


def g_prior_scale(squares: Tensor, prior: Prior, g_prior: bool | str = True) -> Tensor:
    """Return the prior standard deviation of every weight at λ = 1, (P,), from squared features s².

    True: 1 / √(s² + 0.01 mean s²). "tensor" and "half" take the mean over the weight's own tensor,
    m², and multiply by m or by √m: with "tensor" all tensors keep the balance that they have under
    the plain prior, with "half" they are half-way between it and True. 0 where a weight moves no
    output; 1 everywhere where none does. Without the mean in the root, weights that hardly any
    example moves get prior deviations up to millions of times the others'.
    """
    live = squares > 0
    if not prior.space.sum(live.sum()):  # the curvature is 0 at every example
        return torch.ones_like(squares)
    by_tensor = replace(prior, layerwise=g_prior is not True)
    counts = by_tensor.sum(live.double()).clamp_min(1)
    mean = by_tensor.per_weight(by_tensor.sum(squares.double()) / counts).to(squares)
    scale = _inverse(torch.where(live, squares + DAMPING * mean, 0).sqrt())
    return scale if g_prior is True else scale * ((1 + DAMPING) * mean) ** _POWERS[str(g_prior)]


def prior_precision_from_weight_decay(
    weight_decay: float,
    num_data: int,
    *,
    loss: str = "nll",
    sigma_noise: float = 1.0,
    num_outputs: int = 1,
) -> float:
    """Return the λ that training with a mean loss and this weight decay has assumed.

    An optimiser that adds ``weight_decay * w`` to the gradient of the mean of N C losses
    minimises 1 / (N C) Σ loss + ½ weight_decay ‖w‖². Times N C that is a negative log
    posterior with λ = weight_decay N C where the loss is a negative log likelihood ("nll":
    cross-entropy, BCE, Poisson); a squared error ("mse") is 2 σ² of those.
    ``num_outputs`` counts the entries C over which the mean runs beside the data: 1 for
    cross-entropy of one label per datum, the tokens of a sequence, the outputs of a regression.
    """
    if loss not in ("nll", "mse"):
        raise ValueError(f"loss={loss!r} is not known: choose 'nll' or 'mse'.")
    for name, value in (("num_data", num_data), ("num_outputs", num_outputs)):
        if value < 1:
            raise ValueError(f"{name} must be 1 or more, not {value}.")
    if weight_decay < 0 or not sigma_noise > 0:
        raise ValueError(
            f"weight_decay must be 0 or more and sigma_noise above 0, not {weight_decay} and "
            f"{sigma_noise}."
        )
    precision = float(weight_decay) * num_data * num_outputs
    return precision / (2 * sigma_noise**2) if loss == "mse" else precision


def _inverse(x: Tensor) -> Tensor:
    return torch.where(x > 0, 1 / x, 0)
