"""The table that ``print(la)`` shows."""

from __future__ import annotations

from torch import Tensor

from torch_lla_em.prediction.calibration import Calibration
from torch_lla_em.prediction.parts import MODE, NETWORK, SCALE, WEIGHT
from torch_lla_em.prediction.posterior import StoredPosterior
from torch_lla_em.prediction.tables import Lines

_PARAMETERS = "parameters in the posterior"


def of_fit(la: StoredPosterior) -> tuple[str, Lines]:
    """Return a title, and the name and value of each result of the fit."""
    layout, module = la._linear_model.layout, la._linear_model.network.module
    title = f"{type(la).__name__} of {type(module).__name__}"
    rows: Lines = [("likelihood", type(la.likelihood).__name__)]
    random = f"{layout.size:,} of {sum(p.numel() for p in module.parameters()):,}"
    if la.w_samples is None:
        rows += [(_PARAMETERS, random), ("posterior", "none yet: call la.fit(loader)")]
        return title, rows
    gamma, error = la.effective_dim.sum(), la.effective_dim_error.norm()
    rows += [
        (_PARAMETERS, f"{random}, {len(la.w_samples)} samples"),
        ("training examples", f"{la.num_data:,}"),
        ("prior precision λ", _several(la.prior_precision)),
        ("effective dimension γ", f"{gamma:.4g} ± {error:.2g}"),
    ]
    if la.sigma_noise is not None:
        rows.append(("observation noise σ", _several(la.sigma_noise)))
    evidence, spread = la._log_evidence.tolist()
    rows += [
        ("log evidence", f"{evidence:.6g} ± {spread:.2g}"),
        ("largest solver error", f"{la.certificate.max():.2g} posterior standard deviations"),
        ("predictions", _parts(la.mixture)),
    ]
    rows += _of_calibration(la.calibration)
    if la.conformal_unusual is not None:
        count = f"{len(la.conformal_unusual):,} validation examples"
        rows.append(("reference of p-values and sets", count))
    if la.history:
        last = la.history[-1]
        spent = [seconds for seconds, _ in last.get("stages", {}).values()]
        seconds = f", {sum(spent):.3g} s" if spent else ""
        rows.append(("EM", f"{last['step']} steps, {last['data_passes']} passes{seconds}"))
    rows += [("plan", plan) for plan in la.said[:1]]
    rows += [("warning", words) for words in la.said[1:]]
    return title, rows


def _of_calibration(found: Calibration | None) -> Lines:
    if found is None:
        return []
    kept = "" if found.applied else "; not applied"
    return [("validation NLL", f"{found}, {found.num_rows:,} examples{kept}")]


def _parts(table: Tensor) -> str:
    words = []
    for row in table.tolist():
        around = [
            name if abs(row[i] - 1) < 1e-9 else f"{name} × {row[i]:.3g}"
            for name, i in (("linear mode", MODE), ("network", NETWORK))
            if row[i]
        ]
        posterior = f"posterior (τ = {row[SCALE]:.3g}) around " if row[SCALE] else ""
        weight = f"{row[WEIGHT]:.0%} " if len(table) > 1 else ""
        words.append(f"{weight}{posterior}{' + '.join(around)}")
    return ", ".join(words)


def _several(values: Tensor) -> str:
    if not values.dim():
        return f"{values:.4g}"
    return f"{values.min():.3g} to {values.max():.3g} ({len(values)} of them)"
