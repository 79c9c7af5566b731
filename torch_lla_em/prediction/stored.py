"""How a posterior is stored: as tensors by name, beside one record of plain values."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.data import default_forward
from torch_lla_em.inference import Estimate, FitResult
from torch_lla_em.jacobian import Network
from torch_lla_em.likelihoods import LIKELIHOODS, Likelihood, Regression, is_named, rewards
from torch_lla_em.prediction.calibration import Calibration, Correction
from torch_lla_em.prediction.neighbours import TrainingExamples
from torch_lla_em.prediction.posterior import Posterior, Setting
from torch_lla_em.prediction.reference import REFERENCE, Reference
from torch_lla_em.problem import place_of_vectors
from torch_lla_em.runtime import PRIORS, Compute, files, free_memory

State = dict[str, Tensor]

_RESULT = (
    "w_lin w_samples scale prior_precision sigma_noise mixture certificate constant network_noise"
).split()
"""Tensors of a fit's result that have the same name in files."""

_FACTS = "num_data", "num_inputs", "trained_on", "history"
"""Fields of a posterior that have the same name in the record."""

_NEEDED = {"w_lin": "P", "w_samples": "KP", "scale": "P", "certificate": "K"} | dict.fromkeys(
    ("prior_precision", "mixture", "effective_dim", "_log_evidence")
)
"""Tensors that every posterior has, with their shape if it is known."""

_TRAINING = "training_deviations", "largest_variance"
"""Tensors of the training examples that a posterior keeps."""


def options_of(state: State, network: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``LinearisedLaplace`` for a saved state and its network: the saved
    ones, and those ``given``."""
    if "options" not in state:
        raise ValueError("The file holds a state_dict: pass it to load_state_dict of a new object.")
    _refuse_other_network(state, files.fingerprint(Network(network).module))
    options = {**_saved_options(state), **given}
    needed = ["likelihood", "adapter"] if _record(state)["given"] else ["likelihood"]
    missing = [name for name in needed if name not in options]
    if missing:
        raise ValueError(
            f"The posterior was fitted with your own {' and '.join(missing)}, which a file cannot "
            f"store. Pass {', '.join(f'{name}=...' for name in missing)} to load."
        )
    return options


def likelihood_options(given: Likelihood) -> dict[str, Any]:
    """Return a likelihood as options of ``LinearisedLaplace``; empty for a custom likelihood."""
    if not is_named(given):
        return {}
    name = next(name for name, kind in LIKELIHOODS.items() if kind is type(given))
    if given.observation_noise is None or given.from_data:
        return {"likelihood": name}
    return {"likelihood": name, "sigma_noise": given.observation_noise.tolist()}


def without_prefix(state: State, prefix: str) -> State:
    """Return the tensors of a module from the state of a module that contains it."""
    return {n[len(prefix) :]: tensor for n, tensor in state.items() if n.startswith(prefix)}


def state_of(posterior: Posterior, given: Likelihood) -> State:
    """Return a posterior as tensors by name; ``given`` is its likelihood before the fit."""
    model, result = posterior.setting.linear_model, posterior.result
    layout = model.layout
    record = {name: getattr(posterior, name) for name in _FACTS}
    record |= {"said": posterior.messages, "why": result.why, "mode_error": result.mode_error}
    record |= {"tolerance": posterior.tolerance}
    record |= {"names": layout.names, "shapes": [list(shape) for shape in layout.shapes]}
    is_usual = model.network.forward_fn in (default_forward, rewards)
    record["given"] = [] if is_usual else ["adapter"]
    record["likelihood"] = type(posterior.likelihood).__name__
    record["likelihood_options"] = _attributes(given)
    tensors = {
        **{name: getattr(result, name) for name in _RESULT},
        "effective_dim": result.effective_dim.value,
        "effective_dim_error": result.effective_dim.standard_error,
        "_log_evidence": torch.stack(list(result.log_evidence)),
        "fingerprint": posterior.setting.state.fingerprint,
    }
    if (kept := posterior.training) is not None:
        tensors |= dict(zip(_TRAINING, (kept.deviations, kept.largest_variance), strict=True))
    return state_of_correction(posterior.correction, tensors, record)


def loaded(state: State, setting: Setting, given: Likelihood, compute: Compute) -> Posterior:
    """Return the record of a state, which belongs to a ``setting``."""
    record, network = _record(state), setting.linear_model.network
    _refuse_others(state, record, setting, given)
    vectors = state["w_samples"].nbytes
    place = place_of_vectors(vectors, compute, network.device, free_memory(network.device))
    tensor = partial(_tensor, state, place)
    known: dict[str, Any] = {name: tensor(name) for name in _RESULT}
    evidence, error = tensor("_log_evidence")
    result = FitResult(
        **known,
        effective_dim=Estimate(tensor("effective_dim"), tensor("effective_dim_error")),
        log_evidence=Estimate(value=evidence, standard_error=error),
        mode_error=record.get("mode_error", 0.0),
        why=record.get("why", "accurate"),
    )
    deviations, largest = (tensor(name) for name in _TRAINING)
    return Posterior(
        setting,
        given,
        result,
        training=None if deviations is None else TrainingExamples(given, deviations, largest),
        num_data=record["num_data"],
        tolerance=record.get("tolerance") or compute.tolerance,
        num_inputs=record.get("num_inputs", 0),
        trained_on=tuple(record.get("trained_on", ())),
        history=tuple(record["history"]),
        messages=tuple(record.get("said", ())),
    ).corrected(correction_of(state, place))


def state_of_correction(
    found: Correction, tensors: dict[str, Any] | None = None, record: dict[str, Any] | None = None
) -> State:
    """Return a correction as tensors by name, together with other tensors and another record."""
    own = {name: getattr(found, name) for name in ("calibration", "room", "marks")}
    tensors = {**(tensors or {}), "table": found.table, "noise": found.noise}
    if found.reference is not None:
        tensors |= dict(zip(REFERENCE, found.reference, strict=True))
    tensors["torch_lla_em_version"] = torch.tensor(files.VERSION, device="cpu")
    tensors["record"] = files.to_bytes({**(record or {}), **own})
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def correction_of(state: State, device: torch.device) -> Correction:
    """Return the correction that is stored in a state."""
    record = _record(state)
    calibration, room, marks = (record.get(name) for name in ("calibration", "room", "marks"))
    if calibration is not None:
        if not isinstance(calibration[4], bool):  # version 0.3.0 stored coverages at this place
            calibration = [*calibration[:4], calibration[-1]]
        given: list[Any] = [tuple(v) if isinstance(v, list) else v for v in calibration]
        # earlier versions stored fewer fields
        calibration = Calibration(**dict(zip(Calibration._fields, given, strict=False)))
    tensor = partial(_tensor, state, device)
    fields: dict[str, Any] = {
        field: tensor(name) for field, name in zip(Reference._fields, REFERENCE, strict=True)
    }
    known = None if fields["table"] is None else Reference(**fields)
    table, noise = tensor("table"), tensor("noise")
    return Correction(table, noise, known, calibration, room or 0.0, tuple(marks or ()))


def _tensor(state: State, device: torch.device, name: str) -> Any:
    """Return a copy of a tensor of a state, or None."""
    return state[name].to(device, copy=True) if name in state else None


def _record(state: State) -> dict[str, Any]:
    """Return the record in a state of this version, or of 0.3 and 0.4."""
    record: dict[str, Any] = files.from_bytes(state["record"])
    # whether a function calls the network; version 0.4 stored further options here
    given = [name for name in record.get("given", ()) if name in ("forward_fn", "adapter")]
    return {**record, "given": given}


def _saved_options(state: State) -> dict[str, Any]:
    """Return the options in a file of this version, or of 0.3 and 0.4."""
    options: dict[str, Any] = files.from_bytes(state["options"])
    former = "g_prior", "sigma_noise", "temperature", "precision", "tolerance"
    scaling, sigma, _, precision, tolerance = (options.pop(name, None) for name in former)
    if "layerwise" not in options:
        options["layerwise"] = options["prior"] == "layerwise"
        options["prior"] = next(
            (name for name, kind in PRIORS.items() if kind is scaling), "scalar"
        )
    if sigma is not None:
        sigma = torch.as_tensor(sigma, dtype=torch.float64, device="cpu")
        options["likelihood"] = Regression(sigma)
    options["compute"] = Compute(precision=precision or "float32", tolerance=tolerance)
    return options


def _refuse_other_network(state: State, fingerprint: Tensor) -> None:
    if not torch.equal(fingerprint, state["fingerprint"].cpu()):
        raise ValueError(
            "The network's weights or buffers are not those that the posterior was fitted to: "
            "load the checkpoint of that network first, or fit again."
        )


def _attributes(given: Likelihood) -> str | None:
    """Return the attributes of a custom likelihood, by which another likelihood is recognised."""
    return None if is_named(given) else files.plain(vars(given))


def _refuse_others(
    state: State, record: dict[str, Any], setting: Setting, given: Likelihood
) -> None:
    """Raise an error if a state belongs to another network, posterior or likelihood, or is
    damaged."""
    layout, network = setting.linear_model.layout, setting.linear_model.network
    has_adapter = network.forward_fn is not default_forward
    _refuse_other_network(state, setting.state.fingerprint)
    attributes = record.get("likelihood_options")
    own = _attributes(given) if attributes is not None else None
    shapes = [list(shape) for shape in layout.shapes]
    for name, saved, here in (
        ("parameters", (record["names"], record["shapes"]), (list(layout.names), shapes)),
        ("adapter", record["given"], record["given"] if has_adapter else []),
        ("likelihood", (record["likelihood"], attributes), (type(given).__name__, own)),
    ):
        if saved != here:
            raise ValueError(
                f"The posterior was fitted with {str(saved)[:150]}, not with {str(here)[:150]}: "
                f"pass the same {name}, or fit again."
            )
    sizes = {"K": len(state.get("w_samples", ())), "P": layout.size}
    for name, axes in _NEEDED.items():
        shape = tuple(state[name].shape) if name in state else None
        due = shape if axes is None else tuple(sizes[axis] for axis in axes)
        if shape is None or shape != due:
            words = "is missing" if shape is None else f"has the shape {shape}, not {due}"
            raise ValueError(
                f"The tensor {name!r} of the state {words}. The state was changed or damaged after "
                "it was saved: save the posterior again."
            )
