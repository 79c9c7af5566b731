"""What ``history`` keeps of an EM step, and what the progress bar shows of it."""

from __future__ import annotations

from typing import Any

import torch

from torch_lla_em.inference.em import Info


def record_of(info: Info, data_passes: int) -> dict[str, Any]:
    """Return what ``history`` keeps of a step: plain numbers, and lists where there are blocks."""
    sigma = info.hyper.sigma
    return {
        "step": info.step,
        "prior_precision": info.hyper.precision.tolist(),
        "sigma_noise": None if sigma is None else sigma.tolist(),
        "effective_dim": info.effective_dim.value.tolist(),
        "effective_dim_error": info.effective_dim.standard_error.tolist(),
        "squared_norm": info.squared_norm.tolist(),
        "loss": info.loss,
        "mode_residual": info.mode_error,
        "sample_residual": info.sample_error,
        "log_evidence": info.log_evidence.value.item(),
        "log_evidence_error": info.log_evidence.standard_error.item(),
        "data_passes": data_passes,
        "columns": info.columns,
        "seconds": info.seconds,
    }


def summary_of(record: dict[str, Any]) -> dict[str, str]:
    """Return what the progress bar shows of a record; of blocks, the sum of γ and the mean log λ."""
    precision, gamma, error = (
        torch.tensor(record[name], device="cpu")
        for name in ("prior_precision", "effective_dim", "effective_dim_error")
    )
    shown = {"λ": f"{precision.log().mean().exp().item():.3g}"}
    if record["sigma_noise"] is not None:
        shown["σ"] = f"{torch.tensor(record['sigma_noise'], device='cpu').mean().item():.3g}"
    shown["γ"] = f"{gamma.sum().item():.1f}±{error.square().sum().sqrt().item():.1f}"
    shown["residual"] = f"{max(record['sample_residual'], record['mode_residual']):.0e}"
    return shown
