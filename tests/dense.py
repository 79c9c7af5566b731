"""MacKay's iteration on dense matrices."""

import torch

from torch_lla_em.exact import gaussian_log_prob


def dense_step(exact, precision, sigma, layout, layerwise, start=None):
    """One step of MacKay's iteration on dense matrices; also return γ of every weight, and the mode."""
    if sigma is not None:
        exact = exact.at_noise(gaussian_log_prob(sigma))
    per_weight = layout.expand(precision) if layerwise else precision
    covariance = exact.covariance(per_weight)
    gamma, w = exact.effective_dims(per_weight), exact.mode(per_weight, start)
    total = layout.block_sums if layerwise else torch.sum
    new = total(gamma) / total((w / exact.scale) ** 2)
    if sigma is not None:
        error = (exact.y - exact.J @ w).square().sum(0)
        dims = torch.einsum("ncp,pq,ncq->c", exact.J, covariance, exact.J) / sigma**2
        if sigma.dim():
            sigma = (error / (len(exact.y) - dims)).sqrt()
        else:
            sigma = (error.sum() / (exact.y.numel() - dims.sum())).sqrt()
    return new, sigma, gamma, w


def dense_fixed_point(exact, precision, sigma, layout, layerwise):
    """MacKay's iteration on dense matrices to convergence, by secants where λ is all there is."""
    w, before = None, None
    for _ in range(300):
        new, new_sigma, gamma, w = dense_step(exact, precision, sigma, layout, layerwise, w)
        moved = new.log() - precision.log()
        if moved.abs().max() < 1e-7:
            break
        here, step = precision, moved
        if sigma is None and before is not None:
            slope = (moved - before[1]) / (precision.log() - before[0].log())
            if slope < 0:
                step = (-moved / slope).clamp(-2, 2)
        precision, sigma, before = (here.log() + step).exp(), new_sigma, (here, moved)
    return precision, sigma, gamma
