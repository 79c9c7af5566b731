"""What is kept of every EM step, and what the progress bar shows of it."""

from __future__ import annotations

from typing import Any

import torch

from torch_lla_em.inference import EMState


def record_of(state: EMState, data_passes: int) -> dict[str, Any]:
    """Return what ``history`` keeps of a step: plain numbers, and lists where there are blocks."""
    sigma = state.hyper.sigma
    return {
        "step": state.step,
        "prior_precision": state.hyper.precision.tolist(),
        "sigma_noise": None if sigma is None else sigma.tolist(),
        "effective_dim": state.effective_dim.value.tolist(),
        "effective_dim_error": state.effective_dim.standard_error.tolist(),
        "squared_norm": state.squared_norm.tolist(),
        "loss": state.loss,
        "mode_residual": state.mode_error,
        "sample_residual": state.sample_error,
        "log_evidence": state.log_evidence.value.item(),
        "log_evidence_error": state.log_evidence.standard_error.item(),
        "data_passes": data_passes,
        "columns": state.columns,
        "seconds": state.seconds,
    }


def summary_of(record: dict[str, Any]) -> dict[str, str]:
    """Return what the progress bar shows of a record; of blocks, the sum of γ and the mean log λ."""
    precision, gamma, error = (
        torch.tensor(record[name])
        for name in ("prior_precision", "effective_dim", "effective_dim_error")
    )
    shown = {"λ": f"{precision.log().mean().exp().item():.3g}"}
    if record["sigma_noise"] is not None:
        shown["σ"] = f"{torch.tensor(record['sigma_noise']).mean().item():.3g}"
    shown["γ"] = f"{gamma.sum().item():.1f}±{error.square().sum().sqrt().item():.1f}"
    shown["residual"] = f"{max(record['sample_residual'], record['mode_residual']):.0e}"
    shown["passes"] = str(record["data_passes"])
    return shown
