"""How a posterior is stored: tensors by name, and files."""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.inference import Estimate, FitResult
from torch_lla_em.jacobian import LinearModel, Network
from torch_lla_em.likelihoods import LIKELIHOODS, Likelihood, Regression, is_named
from torch_lla_em.prediction.calibration import restored
from torch_lla_em.prediction.posterior import Found, Posterior, Setting
from torch_lla_em.prediction.reference import REFERENCE, Reference
from torch_lla_em.problem import place_of_vectors
from torch_lla_em.runtime import PRIORS, Compute, files, free_memory

_RESULT = (
    *("w_lin", "w_samples", "scale", "prior_precision", "sigma_noise"),
    *("mixture", "certificate"),
    *("constant", "network_noise"),
)
"""Tensors of a fit's result that have the same name in files."""

_ADAPTED = {"forward_fn", "adapter"}
"""Names in files of a function that calls the network, which a file cannot store."""

_REPLACED = "fitted_mixture", "fitted_sigma_noise"
"""Tensors of a posterior as fitted that ``calibrate`` has replaced."""

_NEEDED = (
    *("w_samples", "certificate", "w_lin", "scale", "prior_precision", "mixture"),
    *("effective_dim", "_log_evidence"),
)
"""Tensors that every posterior has."""


def likelihood_options(given: Likelihood) -> dict[str, Any]:
    """Return a likelihood as options of ``LinearisedLaplace``; none for a user's own."""
    if not is_named(given):
        return {}
    name = next(name for name, kind in LIKELIHOODS.items() if kind is type(given))
    if given.observation_noise is None or given.from_data:
        return {"likelihood": name}
    return {"likelihood": name, "sigma_noise": given.observation_noise.tolist()}


def without_prefix(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors of a module in the state of one that contains it."""
    return {n[len(prefix) :]: tensor for n, tensor in state.items() if n.startswith(prefix)}


def attributes_of(given: Likelihood) -> str | None:
    """Return the attributes of a user's own likelihood, by which another one is noticed."""
    return None if is_named(given) else files.plain(vars(given))


def read(
    path: str | PathLike[str], model: nn.Module, given: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return state and options of a saved posterior; ``given`` options replace those saved."""
    state = files.read(path, "posterior")
    if "options" not in state:
        raise ValueError("The file holds a state_dict: construct the object and load_state_dict.")
    refuse_other_network(state, Network(model).module)
    options = {**_upgraded(files.from_bytes(state["options"])), **given}
    needed = ["likelihood"]
    if _ADAPTED.intersection(files.from_bytes(state["record"]).get("given", [])):
        needed.append("adapter")
    missing = [name for name in needed if name not in options]
    if missing:
        raise ValueError(
            f"The posterior was fitted with your own {' and '.join(missing)}, which a file cannot "
            f"store. Pass {', '.join(f'{name}=...' for name in missing)} to load."
        )
    return state, options


def _upgraded(options: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of ``LinearisedLaplace`` from the options in a file of this version or an earlier one."""
    names = "g_prior", "sigma_noise", "temperature", "precision", "tolerance"
    scaling, sigma, _, precision, tolerance = (options.pop(name, None) for name in names)
    if isinstance(scaling, bool):
        layerwise = options["prior"] == "layerwise"
        options["prior"] = next(k for k, v in PRIORS.items() if v == (layerwise, scaling))
    if sigma is not None:
        sigma = torch.as_tensor(sigma, dtype=torch.float64, device="cpu")
        options["likelihood"] = Regression(sigma)
    options["compute"] = Compute(precision=precision or "float32", tolerance=tolerance)
    return options


def state_of(posterior: Posterior, given: Likelihood, own: list[str]) -> dict[str, Tensor]:
    """Return a posterior as tensors by name; ``own`` are the options that a file cannot store."""
    layout = posterior.setting.linear_model.layout
    record = {
        "likelihood": type(posterior.likelihood).__name__,
        "likelihood_options": attributes_of(given),
        "given": own,
        "num_data": posterior.num_data,
        "room": posterior.room,
        "trained_on": list(posterior.trained_on),
        "history": posterior.history,
        "calibration": posterior.calibration,
        "said": posterior.messages,
        "mark": posterior.mark,
        "said_by_fit": posterior.replaced and posterior.replaced[2],
        "why": posterior.result.why,
        "names": layout.names,
        "shapes": [list(shape) for shape in layout.shapes],
    }
    result, replaced = posterior.result, posterior.replaced
    before: tuple[Tensor | None, ...] = ()
    if replaced is not None:  # copies, since safetensors refuses tensors that share memory
        before = replaced[:2]
        before = tuple(tensor if tensor is None else tensor.clone() for tensor in before)
    tensors = {
        **{name: getattr(result, name) for name in _RESULT},
        "effective_dim": result.effective_dim.value,
        "effective_dim_error": result.effective_dim.standard_error,
        "_log_evidence": torch.stack(list(result.log_evidence)),
        "training_deviations": result.examples,
        "largest_variance": posterior.largest_variance,
        "training_distances": posterior.training_distances,
        **dict(zip(_REPLACED, before)),
        **dict(zip(REFERENCE, posterior.reference or ())),
    }
    return {
        **{name: tensor for name, tensor in tensors.items() if tensor is not None},
        "torch_lla_em_version": torch.tensor(files.VERSION, device="cpu"),
        "fingerprint": posterior.setting.state.fingerprint,
        "record": files.to_bytes(record),
    }


def posterior_of(
    state: dict[str, Tensor], setting: Setting, given: Any, own: list[str], compute: Compute
) -> Posterior:
    """Return the posterior of a state; raise if it is of other parameters or another likelihood."""
    record = checked(state, setting.linear_model, given, own)
    here = setting.linear_model.network.device
    place = place_of_vectors(state["w_samples"].nbytes, compute, here, free_memory(here))

    def tensor(name: str) -> Tensor | None:
        return state[name].to(place, copy=True) if name in state else None

    known: dict[str, Any] = {name: tensor(name) for name in _RESULT}
    result = FitResult(
        **known,
        effective_dim=Estimate(tensor("effective_dim"), tensor("effective_dim_error")),
        log_evidence=Estimate(*tensor("_log_evidence")),
        examples=tensor("training_deviations"),
        why=record.get("why", "accurate"),
    )
    sigma, reference = result.sigma_noise, [tensor(name) for name in REFERENCE]
    replaced = None
    if record.get("said_by_fit") is not None:
        mixture, sigma_before = (tensor(name) for name in _REPLACED)
        replaced = mixture, sigma_before, tuple(record["said_by_fit"])
    return Posterior(
        setting,
        given if sigma is None else given.with_noise(sigma),
        result,
        largest_variance=tensor("largest_variance"),
        training_distances=tensor("training_distances"),
        reference=None if reference[0] is None else Reference(*reference),
        calibration=restored(record.get("calibration")),
        num_data=record["num_data"],
        room=record.get("room", setting.room()),
        trained_on=tuple(record.get("trained_on", ())),
        history=tuple(record["history"]),
        messages=tuple(record.get("said", ["The memory plan was not saved."])),
        replaced=replaced,
        mark=record.get("mark"),
    )


def state_of_found(found: Found) -> dict[str, Tensor]:
    """Return what ``calibrate`` has found of several posteriors as tensors by name."""
    tensors = {"table": found.table, "noise": found.noise}
    tensors |= dict(zip(REFERENCE, found.reference or ()))
    names = "calibration", "messages", "marks"
    return {
        **{name: tensor for name, tensor in tensors.items() if tensor is not None},
        "record": files.to_bytes({name: getattr(found, name) for name in names}),
        "torch_lla_em_version": torch.tensor(files.VERSION, device="cpu"),
    }


def found_of(state: dict[str, Tensor], device: torch.device) -> Found:
    """Return it from a state; that of version 0.4 has no messages and no marks."""

    def tensor(name: str) -> Tensor | None:
        return state[name].to(device) if name in state else None

    record = files.from_bytes(state["record"])
    reference: list[Any] = [tensor(name) for name in REFERENCE]
    marks = record.get("marks")
    return Found(
        tensor("table"),
        tensor("noise"),
        None if reference[0] is None else Reference(*reference),
        restored(record["calibration"]),
        tuple(record.get("messages", ())),
        marks if marks is None else tuple(marks),
    )


def checked(
    state: dict[str, Tensor], model: LinearModel, likelihood: Likelihood, given: list[str]
) -> dict[str, Any]:
    """Return the record of a state, or raise if it is of another network or likelihood.

    ``given`` are the names of the options that cannot be compared.
    """
    record: dict[str, Any] = files.from_bytes(state["record"])
    saved = list(zip(record["names"], map(tuple, record["shapes"])))
    own = list(zip(model.layout.names, map(tuple, model.layout.shapes)))
    kind, attributes = type(likelihood).__name__, record.get("likelihood_options")
    if saved != own:
        raise ValueError(
            f"The posterior is over {len(saved)} tensors that start with {saved[0]}, but this "
            f"object has {len(own)} in its posterior, which start with {own[0]}: pass the same "
            "`parameters`."
        )
    refuse_other_shapes(state, model.layout.size)
    if _ADAPTED.intersection(record.get("given", ())) and not given:
        raise ValueError(
            "The posterior was fitted with an Adapter that has outputs, but this object has none. "
            "Construct it with the same adapter."
        )
    if record["likelihood"] != kind:
        raise ValueError(
            f"The posterior was fitted with the likelihood {record['likelihood']}, but this "
            f"object has {kind}: construct it with the same one."
        )
    if attributes not in (None, attributes_of(likelihood)):
        raise ValueError(
            f"The posterior was fitted with a {kind} that has other attributes, {attributes}: "
            "construct this object with the same likelihood, or fit again."
        )
    return record


def refuse_other_shapes(state: dict[str, Tensor], size: int) -> None:
    """Raise an error if a tensor of a state is missing, or has not the shape for so many parameters."""
    found = {name: tuple(state[name].shape) if name in state else None for name in _NEEDED}
    count = (found["w_samples"] or (0,))[0]
    due = {"w_samples": (count, size), "certificate": (count,), "w_lin": (size,), "scale": (size,)}
    for name, shape in found.items():
        if shape is None or shape != due.get(name, shape):
            words = "is missing"
            if shape is not None:
                words = f"has the shape {shape}, but {due[name]} is expected"
            raise ValueError(
                f"The tensor {name!r} of the state {words}. The state was changed or damaged after it was "
                "saved: save the posterior again."
            )


def refuse_other_network(state: dict[str, Tensor], module: nn.Module) -> None:
    """Raise an error if a state is of another network, or was not saved by this library."""
    files.check(state, "posterior")
    if not torch.equal(files.fingerprint(module), state["fingerprint"].cpu()):
        raise ValueError(
            "The network's weights or buffers are not those that the posterior was fitted to: "
            "load the checkpoint of that network first, or fit again."
        )
