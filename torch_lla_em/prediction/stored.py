"""How a posterior is stored, loaded and moved: tensors by name beside one record, and methods of ``LinearisedLaplace``."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from os import PathLike
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torch_lla_em.inference import Estimate, FitResult
from torch_lla_em.jacobian import LinearModel, Network, NetworkState
from torch_lla_em.likelihoods import LIKELIHOODS, Likelihood, Regression, is_named
from torch_lla_em.prediction.calibration import restored
from torch_lla_em.prediction.posterior import (
    NotFittedError,
    Posterior,
    Posteriors,
    Setting,
    required,
)
from torch_lla_em.prediction.reference import REFERENCE, Reference
from torch_lla_em.problem import place_of_vectors
from torch_lla_em.runtime import PRIORS, Compute, files, free_memory, report

Own = TypeVar("Own", bound=Any)
State = dict[str, Tensor]

_RESULT = "w_lin w_samples scale prior_precision sigma_noise mixture certificate constant network_noise".split()
"""Tensors of a fit's result that have the same name in files."""

_NEEDED = (
    "w_samples certificate w_lin scale prior_precision mixture effective_dim _log_evidence".split()
)
"""Tensors that every posterior has."""

_REPLACED = "fitted_mixture", "fitted_sigma_noise"
"""Tensors of a posterior as fitted that ``calibrate`` has replaced."""


_SAME = "pass the same likelihood"


def result(name: str, meaning: str, kind: Callable[..., Any] | None = None) -> Any:
    """Return a property with a field of the record; before ``fit`` it is None, or an empty ``kind``."""
    of = attrgetter(name)

    def value(self: Any) -> Any:
        if self._posterior is None:
            return None if kind is None else kind()
        return of(self._posterior) if kind is None else kind(of(self._posterior))

    return property(value, doc=meaning if kind else f"{meaning} None before ``fit``.")


def state_dict(
    la: Any,
    *args: Any,
    destination: State | None = None,
    prefix: str = "",
    keep_vars: bool = False,
) -> State:
    """Return the posterior as tensors, with a format version and the network's fingerprint.

    The posterior is part of the ``state_dict`` of a module that contains it once it is fitted,
    and as long as the network does not change.

    Args:
        la (LinearisedLaplace): The posterior; ``la.state_dict()`` passes it.
        destination (dict, optional): Where to add the tensors, as PyTorch passes it.
        prefix (str): What their names start with there. Default "".
        keep_vars (bool): Ignored: no tensor requires gradients.

    Raises:
        NotFittedError: Before ``fit``, or if the model has changed since.
    """
    if destination is None:
        record: Any = required(la, surely=True)
        return state_of(record, la._given_likelihood, la._given)
    if la._posterior is not None:
        try:
            own = state_dict(la)
        except NotFittedError as error:
            report("warn", f"The state_dict has no posterior. {error}")
            own = {}
        destination.update({f"{prefix}{name}": tensor for name, tensor in own.items()})
    return destination


def load_state_dict(la: Any, state: State, strict: bool = True) -> None:
    """Load a posterior that ``state_dict`` returned.

    Args:
        la (LinearisedLaplace): The object; ``la.load_state_dict(state)`` passes it.
        state (dict): The tensors by name.
        strict (bool): Ignored: the state is always compared with the network and the options.

    Raises:
        ValueError: If the state belongs to another network or likelihood.
    """
    model = la._linear_model
    la.take(loaded(la, state, Setting(model, NetworkState(model.network), la.adapter.targets)))


def load_from_state_dict(la: Any, state_dict: State, prefix: str, *more: Any, **named: Any) -> None:
    """Load the tensors of this module from those of the module that contains it.

    The network may be loaded later, so it is compared when the posterior is used.
    """
    _, _, missing, _, errors = more
    own, model = without_prefix(state_dict, prefix), la._linear_model
    if not own:
        missing += [f"{prefix}w_lin"] * (la._posterior is not None)
        return
    try:
        files.check(own, "posterior")
        expected = NetworkState(model.network, own["fingerprint"].cpu())
        la.take(loaded(la, own, Setting(model, expected, la.adapter.targets)))
    except ValueError as error:
        errors.append(str(error))


def save(la: Any, path: str | PathLike[str]) -> None:
    """Write the posterior to a file, without the network. Loading it runs no code.

    Args:
        la (LinearisedLaplace): The posterior; ``la.save(path)`` passes it.
        path (str): Name of the file.

    Raises:
        NotFittedError: Before ``fit``, or if the model has changed since.

    Example:
        >>> la.save("posterior.pt")  # doctest: +SKIP
    """
    state, model, compute = state_dict(la), la._linear_model, la.compute
    options = {name: getattr(la, name) for name in ("prior", "num_samples", "curvature", "seed")}
    options |= {"parameters": model.layout.names, "class_dim": model.network.class_dim}
    options |= {"precision": compute.precision, "tolerance": compute.tolerance}
    options |= likelihood_options(la._given_likelihood)
    files.write_atomically({**state, "options": files.to_bytes(options)}, path)


def load(cls: type[Own], path: str | PathLike[str], model: nn.Module, **options: Any) -> Own:
    """Return a saved posterior on its network.

    Args:
        cls (type): The class; ``LinearisedLaplace.load(path, model)`` passes it.
        path (str): Name of the file that ``save`` has written.
        model (nn.Module): The network, with the weights that the posterior was fitted to.
        **options: Arguments of ``LinearisedLaplace`` that the fit had and a file cannot store: a custom
            likelihood, ``adapter``, and ``compute`` if you call ``fit`` again. Others replace those saved.

    Raises:
        ValueError: If the file is damaged or belongs to another network, or if an option is
            missing.

    Example:
        >>> la = LinearisedLaplace.load("posterior.pt", model)  # doctest: +SKIP
    """
    state = files.read(path, "posterior")
    record, saved = _upgraded(state)
    if saved is None:
        raise ValueError("The file holds a state_dict: construct the object and load_state_dict.")
    _refuse_other_network(state, files.fingerprint(Network(model).module))
    options = {**saved, **options}
    needed = ["likelihood", *["adapter"] * bool(record["given"])]
    missing = [name for name in needed if name not in options]
    if missing:
        raise ValueError(
            f"The posterior was fitted with your own {' and '.join(missing)}, which a file cannot "
            f"store. Pass {', '.join(f'{name}=...' for name in missing)} to load."
        )
    la: Own = cls(model, options.pop("likelihood"), **options)
    la.load_state_dict(state)
    return la


def moved(la: Any, fn: Callable[[Tensor], Tensor]) -> tuple[LinearModel, Posterior | None]:
    """Map the network's tensors; return its linear model, to be probed, and the record there.

    A module that contains both may have moved the network before.
    """
    posterior, network = la._posterior, la._linear_model.network
    unchanged = posterior is not None and posterior.setting.state.holds(network)
    la.model._apply(fn)
    model = LinearModel(network, la._linear_model.layout)
    if posterior is None:
        return model, None
    state = NetworkState(network) if unchanged else posterior.setting.state
    return model, posterior.moved(fn, posterior.setting._replace(linear_model=model, state=state))


def likelihood_options(given: Likelihood) -> dict[str, Any]:
    """Return a likelihood as options of ``LinearisedLaplace``; none for a user's own."""
    if not is_named(given):
        return {}
    name = next(name for name, kind in LIKELIHOODS.items() if kind is type(given))
    if given.observation_noise is None or given.from_data:
        return {"likelihood": name}
    return {"likelihood": name, "sigma_noise": given.observation_noise.tolist()}


def without_prefix(state: State, prefix: str) -> State:
    """Return the tensors of a module in the state of one that contains it."""
    return {n[len(prefix) :]: tensor for n, tensor in state.items() if n.startswith(prefix)}


def state_of(posterior: Posterior, given: Likelihood, own: list[str]) -> State:
    """Return a posterior as tensors by name; ``own`` are the options that a file cannot store."""
    layout, result = posterior.setting.linear_model.layout, posterior.result
    mixture, sigma, said = posterior.replaced or (None, None, None)
    names = "num_data", "room", "trained_on", "history", "calibration", "mark"
    record = {name: getattr(posterior, name) for name in names}
    record |= {"said": posterior.messages, "said_by_fit": said, "why": result.why, "given": own}
    record |= {"names": layout.names, "shapes": [list(shape) for shape in layout.shapes]}
    record["likelihood"] = type(posterior.likelihood).__name__
    record["likelihood_options"] = _attributes(given)
    tensors = {
        **{name: getattr(result, name) for name in _RESULT},
        "effective_dim": result.effective_dim.value,
        "effective_dim_error": result.effective_dim.standard_error,
        "_log_evidence": torch.stack(list(result.log_evidence)),
        "training_deviations": result.examples,
        "largest_variance": posterior.largest_variance,
        "training_distances": posterior.training_distances,
        "fingerprint": posterior.setting.state.fingerprint,
        **dict(zip(_REPLACED, (mixture, sigma))),
    }
    return _written(tensors, posterior.reference, record)


def loaded(la: Any, state: State, setting: Setting) -> Posterior:
    """Return the record of a state with the options of an object; raise if it belongs to another one."""
    files.check(state, "posterior")
    record, _ = _upgraded(state)
    _refuse_others(la, state, record, setting)
    here, given = setting.linear_model.network.device, la._given_likelihood
    place = place_of_vectors(state["w_samples"].nbytes, la.compute, here, free_memory(here))
    tensor, reference = _read(state, place)
    known: dict[str, Any] = {name: tensor(name) for name in _RESULT}
    result = FitResult(
        **known,
        effective_dim=Estimate(tensor("effective_dim"), tensor("effective_dim_error")),
        log_evidence=Estimate(*tensor("_log_evidence")),
        examples=tensor("training_deviations"),
        why=record["why"],
    )
    sigma, said = result.sigma_noise, record["said_by_fit"]
    return Posterior(
        setting,
        given if sigma is None else given.with_noise(sigma),
        result,
        largest_variance=tensor("largest_variance"),
        training_distances=tensor("training_distances"),
        reference=reference,
        calibration=restored(record["calibration"]),
        num_data=record["num_data"],
        room=setting.room() if record["room"] is None else record["room"],
        trained_on=tuple(record["trained_on"]),
        history=tuple(record["history"]),
        messages=tuple(record["said"]),
        replaced=None if said is None else (*map(tensor, _REPLACED), tuple(said)),
        mark=record["mark"],
    )


def state_of_several(found: Posteriors) -> State:
    """Return what ``calibrate`` has found of several posteriors as tensors by name."""
    record = {name: getattr(found, name) for name in ("calibration", "messages", "marks")}
    return _written({"table": found.table, "noise": found.noise}, found.reference, record)


def several_of(state: State, device: torch.device) -> Posteriors:
    """Return it from a state, without members."""
    (tensor, reference), (record, _) = _read(state, device), _upgraded(state)
    said = restored(record["calibration"]), tuple(record["messages"])
    marks = None if record["marks"] is None else tuple(record["marks"])
    return Posteriors((), tensor("table"), tensor("noise"), reference, *said, marks)


def _written(tensors: dict[str, Any], reference: Reference | None, record: Any) -> State:
    """Return the state of what is not None, and of a record."""
    tensors |= dict(zip(REFERENCE, reference or ()))
    tensors["torch_lla_em_version"] = torch.tensor(files.VERSION, device="cpu")
    tensors["record"] = files.to_bytes(record)
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _read(state: State, device: torch.device) -> tuple[Callable[[str], Any], Reference | None]:
    """Return a function that finds the tensors of a state by name, or None, and the reference in it."""

    def tensor(name: str) -> Any:
        return state[name].to(device, copy=True) if name in state else None

    reference: list[Any] = [tensor(name) for name in REFERENCE]
    return tensor, None if reference[0] is None else Reference(*reference)


def _upgraded(state: State) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the record and the options in a state of this version, or of 0.3 and 0.4, which had fewer entries."""
    names = "calibration", "room", "said_by_fit", "mark", "marks", "likelihood_options"
    record = dict.fromkeys(names) | {"why": "accurate", "trained_on": (), "messages": ()}
    record |= {"said": ["The memory plan was not saved."], "given": ()}
    record |= files.from_bytes(state["record"])
    # of a function that calls the network; the other options were stored under "given" without need
    record["given"] = [name for name in record["given"] if name in ("forward_fn", "adapter")]
    if "options" not in state:
        return record, None
    options = files.from_bytes(state["options"])
    former = "g_prior", "sigma_noise", "temperature", "precision", "tolerance"
    scaling, sigma, _, precision, tolerance = (options.pop(name, None) for name in former)
    if isinstance(scaling, bool):
        layerwise = options["prior"] == "layerwise"
        options["prior"] = next(k for k, v in PRIORS.items() if v == (layerwise, scaling))
    if sigma is not None:
        sigma = torch.as_tensor(sigma, dtype=torch.float64, device="cpu")
        options["likelihood"] = Regression(sigma)
    options["compute"] = Compute(precision=precision or "float32", tolerance=tolerance)
    return record, options


def _refuse_other_network(state: State, fingerprint: Any) -> None:
    if not torch.equal(fingerprint, state["fingerprint"].cpu()):
        raise ValueError(
            "The network's weights or buffers are not those that the posterior was fitted to: "
            "load the checkpoint of that network first, or fit again."
        )


def _attributes(given: Likelihood) -> str | None:
    """Return the attributes of a user's own likelihood, by which another one is noticed."""
    return None if is_named(given) else files.plain(vars(given))


def _refuse_others(la: Any, state: State, record: dict[str, Any], setting: Setting) -> None:
    """Raise an error if a state is of another network, posterior or likelihood, or is damaged."""
    layout, given = setting.linear_model.layout, la._given_likelihood
    saved = list(zip(record["names"], map(tuple, record["shapes"])))
    own = list(zip(layout.names, map(tuple, layout.shapes)))
    attributes, kind = record["likelihood_options"], type(given).__name__
    _refuse_other_network(state, setting.state.fingerprint)
    for differs, saved_with, remedy in (
        (
            saved != own,
            f"{len(saved)} tensors that start with {saved[0]}, but not with {len(own)} that start with {own[0]}",
            "pass the same `parameters`",
        ),
        (record["given"] and not la._given, "outputs of an Adapter", "pass the same adapter"),
        (record["likelihood"] != kind, f"{record['likelihood']}, but not with {kind}", _SAME),
        (
            attributes not in (None, _attributes(given)),
            f"a {kind} that has other attributes, {attributes}",
            _SAME,
        ),
    ):
        if differs:
            raise ValueError(f"The posterior was fitted with {saved_with}: {remedy}, or fit again.")
    count, size = len(state.get("w_samples", ())), layout.size
    due = {"w_samples": (count, size), "certificate": (count,), "w_lin": (size,), "scale": (size,)}
    for name in _NEEDED:
        shape = tuple(state[name].shape) if name in state else None
        if shape is None or shape != due.get(name, shape):
            words = "is missing"
            if shape is not None:
                words = f"has the shape {shape}, but {due[name]} is expected"
            raise ValueError(
                f"The tensor {name!r} of the state {words}. The state was changed or damaged after it was "
                "saved: save the posterior again."
            )
