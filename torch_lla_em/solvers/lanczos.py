"""Log determinants from conjugate gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_lla_em.solvers.solution import Product
from torch_lla_em.solvers.space import dots


def log_dets(
    product: Product, b: Tensor, preconditioner: Product, error: float = 0.003, most: int = 100
) -> Tensor:
    """Estimate log det M^½ (A + I) M^½ for a preconditioner M from each row of b ~ N(0, A + I),
    (K,).

    The log determinant is the expectation of ⟨M^½ b, f M^½ b⟩, where f is the function log(t) / t
    of that matrix. It is computed by Lanczos' tridiagonal matrix, whose entries follow from the
    steps of conjugate gradients. These end at a residual of ``error``.
    """
    residual, conditioned = b, preconditioner(b)
    direction, rho = conditioned, dots(b, conditioned)
    start, ratios = rho, [torch.zeros_like(rho)]
    lengths: list[Tensor] = []
    while not lengths or (len(lengths) < most and rho.mean() > error**2 * start.mean()):
        image = direction + product(direction)
        lengths.append(rho / dots(direction, image))
        residual = residual - lengths[-1][:, None].to(b) * image
        conditioned = preconditioner(residual)
        last, rho = rho, dots(residual, conditioned)
        ratios.append(rho / last)
        direction = conditioned + ratios[-1][:, None].to(b) * direction
    inverse, ratio = 1 / torch.stack(lengths, 1), torch.stack(ratios[:-1], 1)
    diagonal, beside = inverse.clone(), ratio[:, 1:].sqrt() * inverse[:, :-1]
    diagonal[:, 1:] += ratio[:, 1:] * inverse[:, :-1]
    T = diagonal.diag_embed() + beside.diag_embed(1) + beside.diag_embed(-1)
    values, vectors = torch.linalg.eigh(T)
    values = values.clamp_min(1e-12)
    dets: Tensor = start * (vectors[:, 0].square() * values.log() / values).sum(1)
    return dets
