"""How a posterior is stored: tensors by name, and files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.inference import Posterior
from torch_lla_em.jacobian import LinearModel, Network, ParameterLayout
from torch_lla_em.likelihoods import LIKELIHOODS, Likelihood, Regression, is_named
from torch_lla_em.prediction.conformal import REFERENCE
from torch_lla_em.prediction.pushed import posterior_alone
from torch_lla_em.runtime import files
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


class DamagedError(ValueError):
    """A stored posterior is incomplete, or contains values that no fit produces."""


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
    """Return tensors and record of a state, or raise if it is damaged or of another network."""
    persistence.check(state)
    record = _record_of(state)
    _refuse_other_weights(record, linear_model.layout)
    _refuse_other_network(state["fingerprint"], linear_model.network.module)
    _refuse_damaged(state, linear_model.layout)
    tensors = {name: state.get(name) for name in TENSORS}
    if tensors["mixture"] is None:  # of an earlier release
        factor, scale = state.get("mean_factor", 1.0), state["posterior_scale"]
        tensors["mixture"] = posterior_alone(record.get("mean", "network"), factor, scale)
    return tensors, record


def write(state: dict[str, Tensor], path: str | PathLike[str], options: dict[str, Any]) -> None:
    """Write a state and the options of its constructor to a file."""
    files.write_atomically({**state, "options": persistence.to_bytes(options)}, path)


def likelihood_option(given: Likelihood) -> dict[str, str]:
    """Return the name of a likelihood as a saved option; none for a user's own."""
    names = {kind: name for name, kind in LIKELIHOODS.items()}
    return {"likelihood": names[type(given)]} if is_named(given) else {}


def sigma_option(given: Likelihood) -> float | list[float] | None:
    """Return the observation noise at which a regression starts, as given by the user."""
    asked = type(given) is Regression and not given.from_data
    return given.sigma_noise.tolist() if asked else None  # type: ignore[attr-defined]


@contextmanager
def naming(path: str | PathLike[str]) -> Iterator[None]:
    """Add the file's name to errors about damaged states."""
    try:
        yield
    except DamagedError as error:
        raise DamagedError(f"{str(path)!r} cannot be loaded: {error}") from None


def read(
    path: str | PathLike[str], model: nn.Module, given: dict[str, Any], known: Iterable[str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return state and options of a saved posterior; ``given`` options replace those saved."""
    state = persistence.read(path)
    if "options" not in state:
        raise ValueError("The file holds a state_dict: construct the object and load_state_dict.")
    options = {**persistence.from_bytes(state["options"]), **given}
    if "likelihood" not in options:
        raise ValueError(
            "The file was written with a likelihood of your own, or with arguments of your "
            "own: pass likelihood=."
        )
    missing = [name for name in _record_of(state).get("given", ()) if name not in given]
    if missing:
        arguments = ", ".join(f"{name}=..." for name in missing)
        raise ValueError(
            f"The posterior was fitted with {' and '.join(missing)} of your own, which a file cannot "
            f"hold: pass {arguments} to load."
        )
    unknown = options.keys() - set(known)
    if unknown:
        raise DamagedError(f"there is no option {min(unknown)!r}.")
    sigma = options["sigma_noise"]
    if sigma is not None:
        options["sigma_noise"] = torch.as_tensor(sigma, dtype=torch.float64, device="cpu")
    record = _record_of(state)
    shapes = {name: list(p.shape) for name, p in Network(model).module.named_parameters()}
    missing = [n for n, s in zip(record["names"], record["shapes"]) if shapes.get(n) != s]
    if missing:
        raise ValueError(
            f"The model has no parameter {missing[0]!r} of the saved shape: the posterior "
            "belongs to another architecture."
        )
    return state, options


def _record_of(state: dict[str, Tensor]) -> dict[str, Any]:
    try:
        record = persistence.from_bytes(state["record"])
        missing = {"names", "shapes", "likelihood", "history", "num_data"} - record.keys()
    except (KeyError, ValueError, TypeError, AttributeError):
        missing = {"itself"}
    if missing:
        raise DamagedError(f"'record' lacks {sorted(missing)[0]!r}, or cannot be read.")
    return record


def _refuse_damaged(state: dict[str, Tensor], layout: ParameterLayout) -> None:
    """Raise for tensors of other shapes, dtypes or values than a fit produces."""
    P, blocks = layout.size, len(layout.names)
    samples = state.get("w_samples")
    K = len(samples) if isinstance(samples, Tensor) and samples.dim() else 0
    shapes: dict[str, list[tuple[int, ...]]] = {
        "w_lin": [(P,)],
        "w_samples": [(K, P)] if K else [],
        "scale": [(P,)],
        "prior_precision": [(), (blocks,)],
        "effective_dim": [(), (blocks,)],
        "effective_dim_error": [(), (blocks,)],
        "certificate": [(K,)],
        "_log_evidence": [(2,)],
    }
    for name, allowed in shapes.items():
        tensor = state.get(name)
        if not isinstance(tensor, Tensor):
            raise DamagedError(f"{name!r} is missing.")
        if tuple(tensor.shape) not in allowed or not tensor.is_floating_point():
            raise DamagedError(
                f"{name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}, which is none of a "
                f"posterior over {P} weights."
            )
    for name, tensor in state.items():
        if tensor.nbytes > tensor.untyped_storage().nbytes():
            raise DamagedError(f"{name!r} claims to be larger than what is there.")
    positive = {"prior_precision", "sigma_noise", "posterior_scale"}
    for name in (*shapes, *positive, "mixture", "mean_factor"):
        tensor = state.get(name)
        if tensor is None or name == "_log_evidence":
            continue
        if not tensor.isfinite().all() or (name in positive and not (tensor > 0).all()):
            raise DamagedError(f"{name!r} holds values that no fit leaves.")
    if (state["scale"] < 0).any():
        raise DamagedError("'scale' holds negative values.")
    mixture = state.get("mixture")
    if mixture is not None and (mixture.dim() != 2 or mixture.shape[1] != 4 or not len(mixture)):
        raise DamagedError(f"'mixture' has shape {tuple(mixture.shape)}.")
    reference = [state.get(name) for name in REFERENCE]
    if any(t is not None for t in reference) and any(
        t is None or t.dim() != 2 for t in (reference[0], *reference[2:])
    ):
        raise DamagedError("'conformal_*' is incomplete or of other shapes.")
    examples = [state.get(name) for name in ("training_deviations", "largest_variance")]
    if any(t is not None for t in examples) and any(
        t is None or not t.isfinite().all() for t in examples
    ):
        raise DamagedError("'training_deviations' or 'largest_variance' is missing or not finite.")
    if mixture is None and "posterior_scale" not in state:
        raise DamagedError("'mixture' is missing.")


def _refuse_other_weights(record: dict[str, Any], layout: ParameterLayout) -> None:
    saved = list(zip(record["names"], map(tuple, record["shapes"])))
    if saved != list(zip(layout.names, map(tuple, layout.shapes))):
        raise ValueError(
            f"The posterior is over {len(saved)} tensors that start with {saved[0]}, but this "
            f"object has {len(layout.names)} in its posterior, which start with "
            f"{(layout.names[0], tuple(layout.shapes[0]))}: pass the same `parameters`."
        )


def _refuse_other_network(saved: Tensor, module: nn.Module) -> None:
    own = (persistence.fingerprint(module, earlier) for earlier in (False, True))
    if not any(torch.equal(mark, saved.cpu()) for mark in own):
        raise ValueError(
            "The network's weights or buffers are not those that the posterior was fitted to: "
            "load the checkpoint of that network first, or fit again."
        )
