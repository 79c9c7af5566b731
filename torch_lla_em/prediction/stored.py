"""How a posterior is stored: tensors by name, and files."""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.inference import Posterior
from torch_lla_em.jacobian import LinearModel, Network, ParameterLayout
from torch_lla_em.likelihoods import LIKELIHOODS, Likelihood, Regression, is_named
from torch_lla_em.prediction.conformal import REFERENCE
from torch_lla_em.prediction.pushed import posterior_alone
from torch_lla_em.runtime import records as persistence

# the buffers of a posterior; the private ones are for the evidence and its curve
TENSORS = (
    "w_lin",
    "w_samples",
    "scale",
    "prior_precision",
    "sigma_noise",
    "mixture",
    "effective_dim",
    "effective_dim_error",
    "certificate",
    "_log_evidence",
    "_eigenvalues",
    "_xi_coordinates",
    "_eta_coordinates",
    "_modes",
    "training_deviations",
    "largest_variance",
    *REFERENCE,
)


class NotFittedError(RuntimeError):
    """Predictions were requested before ``fit``, or after the network had changed."""


def tensors_of(posterior: Posterior) -> dict[str, Tensor | None]:
    """Return the results of a fit by the names of ``TENSORS``, without a calibration."""
    spectrum, mixture = posterior.spectrum or (None, None, None), posterior.mixture
    return {
        "w_lin": posterior.w_lin,
        "w_samples": posterior.w_samples,
        "scale": posterior.scale,
        "prior_precision": posterior.hyper.precision,
        "sigma_noise": posterior.hyper.sigma,
        "mixture": (posterior_alone() if mixture is None else mixture).to(posterior.w_lin.device),
        "effective_dim": posterior.effective_dim.value,
        "effective_dim_error": posterior.effective_dim.standard_error,
        "certificate": posterior.certificate,
        "_log_evidence": torch.stack(list(posterior.log_evidence)),
        **dict(zip(("_eigenvalues", "_xi_coordinates", "_eta_coordinates"), spectrum)),
        "_modes": posterior.modes,
        "training_deviations": posterior.examples,
        "largest_variance": None,
        **dict.fromkeys(REFERENCE),
    }


def checked(
    state: dict[str, Tensor], linear_model: LinearModel
) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
    """Return tensors and record of a state, or raise if it is of another network."""
    persistence.check(state)
    record = persistence.from_bytes(state["record"])
    _refuse_other_network(state["fingerprint"], linear_model.network.module)
    _refuse_other_weights(record, linear_model.layout)
    return {name: state.get(name) for name in TENSORS}, record


def likelihood_option(given: Likelihood) -> dict[str, str]:
    """Return the name of a likelihood as a saved option; none for a user's own."""
    names = {kind: name for name, kind in LIKELIHOODS.items()}
    return {"likelihood": names[type(given)]} if is_named(given) else {}


def options_of(given: Likelihood) -> str | None:
    """Return the attributes of a user's own likelihood, by which another one is noticed."""
    return None if is_named(given) else persistence.plain(vars(given))


def sigma_option(given: Likelihood) -> float | list[float] | None:
    """Return the observation noise at which a regression starts, as given by the user."""
    if type(given) is not Regression or given.from_data:
        return None
    noise: float | list[float] = given.sigma_noise.tolist()
    return noise


def read(
    path: str | PathLike[str], model: nn.Module, given: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return state and options of a saved posterior; ``given`` options replace those saved."""
    state = persistence.read(path)
    if "options" not in state:
        raise ValueError("The file holds a state_dict: construct the object and load_state_dict.")
    _refuse_other_network(state["fingerprint"], Network(model).module)
    options = {**persistence.from_bytes(state["options"]), **given}
    if "likelihood" not in options:
        raise ValueError(
            "The posterior was fitted with a custom likelihood, or with non-default arguments of "
            "one: pass likelihood=... to load."
        )
    record = persistence.from_bytes(state["record"])
    missing = [name for name in record.get("given", ()) if name not in given]
    if missing:
        arguments = ", ".join(f"{name}=..." for name in missing)
        raise ValueError(
            f"The posterior was fitted with your own {' and '.join(missing)}, which a file cannot "
            f"store. Pass {arguments} to load."
        )
    sigma = options["sigma_noise"]
    if sigma is not None:
        options["sigma_noise"] = torch.as_tensor(sigma, dtype=torch.float64, device="cpu")
    return state, options


def _refuse_other_weights(record: dict[str, Any], layout: ParameterLayout) -> None:
    saved = list(zip(record["names"], map(tuple, record["shapes"])))
    if saved != list(zip(layout.names, map(tuple, layout.shapes))):
        raise ValueError(
            f"The posterior is over {len(saved)} tensors that start with {saved[0]}, but this "
            f"object has {len(layout.names)} in its posterior, which start with "
            f"{(layout.names[0], tuple(layout.shapes[0]))}: pass the same `parameters`."
        )


def _refuse_other_network(saved: Tensor, module: nn.Module) -> None:
    if not torch.equal(persistence.fingerprint(module), saved.cpu()):
        raise ValueError(
            "The network's weights or buffers are not those that the posterior was fitted to: "
            "load the checkpoint of that network first, or fit again."
        )
