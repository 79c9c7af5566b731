"""A posterior as tensors by name: what a fit leaves, what is saved, and when it may be loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torch_lla_em.data import Data
from torch_lla_em.inference import Curve, Modes, Posterior, curve
from torch_lla_em.jacobian import Network, ParameterLayout
from torch_lla_em.likelihoods import LIKELIHOODS, Example, Likelihood, is_named
from torch_lla_em.prediction.parts import posterior_alone
from torch_lla_em.runtime import check_options, files
from torch_lla_em.runtime import records as persistence
from torch_lla_em.solvers import Spectrum

if TYPE_CHECKING:
    from torch_lla_em.prediction.fitted import Fitted

# what a posterior is, as buffers; the private ones serve evidence and curve
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
)


class DamagedError(ValueError):
    """A posterior lacks something, or holds what no fit leaves."""


class NotFittedError(RuntimeError):
    """Something was asked of a posterior that is not there yet."""


def tensors_of(posterior: Posterior) -> dict[str, Tensor | None]:
    """Return what a fit has found, by the names of ``TENSORS``, not calibrated yet."""
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
    }


def state_of(fitted: Fitted) -> dict[str, Tensor]:
    """Return a posterior as tensors, with a version and the network's fingerprint."""
    layout, tensors = fitted._linear_model.layout, dict(fitted._buffers)
    record = {
        "likelihood": type(fitted.likelihood).__name__,
        "given": fitted._given,
        "num_data": fitted.num_data,
        "history": fitted.history,
        "calibration": fitted.calibration,
        "said": fitted.said,
        "names": layout.names,
        "shapes": [list(shape) for shape in layout.shapes],
    }
    example = fitted._example and fitted._example.by(fitted.likelihood, fitted._device)
    return {
        **{name: tensors[name] for name in TENSORS if tensors[name] is not None},
        **(example.tensors() if example else {}),
        "torch_lla_em_version": torch.tensor(persistence.VERSION, device="cpu"),
        "fingerprint": fitted._standing.fingerprint,
        "record": persistence.to_bytes(record),
    }


def example_of(fitted: Fitted, data: Data) -> Example | None:
    """Return what a likelihood of one's own makes of a few outputs, by which it is known again."""
    if is_named(fitted._given_likelihood):
        return None
    network, batch = fitted._linear_model.network, next(data.first().split(64))
    with network.guarded():
        f = network.outputs(batch.inputs).movedim(network.class_dim, -1)
    y = fitted.likelihood.align(batch.targets, network.class_dim)
    return Example.of(fitted.likelihood, f, y)


def checked(
    state: dict[str, Tensor], fitted: Fitted
) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
    """Return tensors and record of a state; refused where it is not of this object."""
    persistence.check(state)
    record, linear_model = _record_of(state), fitted._linear_model
    _refuse_other_weights(record, linear_model.layout)
    _refuse_other_network(state["fingerprint"], linear_model.network.module)
    if "forward_fn" in record.get("given", ()) and "forward_fn" not in fitted._given:
        raise ValueError(
            "The posterior was fitted with a forward_fn of your own, but this object has none: "
            "construct it with the same forward_fn."
        )
    likelihood, sigma = fitted._given_likelihood, state.get("sigma_noise")
    if record["likelihood"] != type(likelihood).__name__:
        raise ValueError(
            f"The posterior was fitted with the likelihood {record['likelihood']}, but this "
            f"object has {type(likelihood).__name__}: construct it with the same one."
        )
    tensors = {name: state.get(name) for name in TENSORS}
    _refuse_damaged(state, linear_model.layout)
    if tensors["mixture"] is None:  # of an earlier release
        factor, scale = state.get("mean_factor", 1.0), state["posterior_scale"]
        tensors["mixture"] = posterior_alone(record.get("mean", "network"), factor, scale)
    example = Example.known(state)
    at = likelihood if sigma is None else likelihood.at_noise(sigma)
    if example is not None and example.contradicts(at, fitted._device):
        raise ValueError(
            f"The posterior was fitted with another {record['likelihood']}: for the same outputs and "
            "targets, this object's likelihood returns other values. Construct it with the same "
            "likelihood, or fit again."
        )
    return tensors, record


def curve_of(fitted: Fitted, precisions: Iterable[float] | Tensor) -> Curve:
    """Return γ and evidence over a grid of λ."""
    check_options(precisions=precisions)
    tensors = fitted._buffers
    path = [record["prior_precision"] for record in fitted.history]
    precisions = torch.as_tensor(precisions, dtype=torch.float64, device="cpu")
    if tensors["_eigenvalues"] is None:
        raise ValueError(
            "The curve needs one λ, one curvature for all of them and the block-Krylov solver: fit "
            "with curvature='network' (or 'linear'), prior='scalar', one sigma_noise, solver=None."
        )
    names = "_eigenvalues", "_xi_coordinates", "_eta_coordinates"
    spectrum = Spectrum(*(tensors[name].double().cpu() for name in names))
    modes = Modes(*tensors["_modes"].double().cpu())
    gamma, evidence = curve(spectrum, modes, precisions)
    found = tensors["prior_precision"].item()
    return Curve(precisions, gamma, evidence, torch.tensor(path, device="cpu"), found)


def write(state: dict[str, Tensor], path: str | PathLike, options: dict[str, Any]) -> None:
    """Write a state and the options of its constructor to a file."""
    files.write_atomically({**state, "options": persistence.to_bytes(options)}, path)


def likelihood_option(given: Likelihood) -> dict[str, str]:
    """Return how a likelihood is named among saved options: not at all, if it is one's own."""
    names = {kind: name for name, kind in LIKELIHOODS.items()}
    return {"likelihood": names[type(given)]} if is_named(given) else {}


@contextmanager
def naming(path: str | PathLike) -> Iterator[None]:
    """Say which file is damaged."""
    try:
        yield
    except DamagedError as error:
        raise DamagedError(f"{str(path)!r} cannot be loaded: {error}") from None


def read(
    path: str | PathLike, model: nn.Module, given: dict[str, Any], known: Iterable[str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return state and options of a saved posterior, with ``given`` in the place of those saved."""
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
    """Refuse tensors of other shapes, kinds or values than a fit leaves."""
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
    if mixture is None and "posterior_scale" not in state:
        raise DamagedError("'mixture' is missing.")


def _refuse_other_weights(record: dict[str, Any], layout: ParameterLayout) -> None:
    saved = list(zip(record["names"], map(tuple, record["shapes"])))
    if saved != list(zip(layout.names, map(tuple, layout.shapes))):
        raise ValueError(
            f"The posterior is over {len(saved)} tensors that start with {saved[0]}, but this "
            f"object's random weights are {len(layout.names)} that start with "
            f"{(layout.names[0], tuple(layout.shapes[0]))}: pass the same `parameters`."
        )


def _refuse_other_network(saved: Tensor, module: nn.Module) -> None:
    own = (persistence.fingerprint(module, earlier) for earlier in (False, True))
    if not any(torch.equal(mark, saved.cpu()) for mark in own):
        raise ValueError(
            "The network's weights or buffers are not those that the posterior was fitted to: "
            "load the checkpoint of that network first, or fit again."
        )
