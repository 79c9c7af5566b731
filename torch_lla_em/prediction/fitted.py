"""How a module that holds the record of a fit is stored, loaded and moved: methods of ``LinearisedLaplace``."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from os import PathLike
from typing import Any, TypeVar

from torch import Tensor, nn

from torch_lla_em.jacobian import LinearModel, NetworkState
from torch_lla_em.prediction import stored
from torch_lla_em.prediction.posterior import NotFittedError, Posterior, Setting, required
from torch_lla_em.runtime import files, report

Own = TypeVar("Own", bound=Any)


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
    destination: dict[str, Tensor] | None = None,
    prefix: str = "",
    keep_vars: bool = False,
) -> dict[str, Tensor]:
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
        return stored.state_of(record, la._given_likelihood, la._given)
    if la._posterior is not None:
        try:
            own = state_dict(la)
        except NotFittedError as error:
            report("warn", f"The state_dict has no posterior. {error}")
            own = {}
        destination.update({f"{prefix}{name}": tensor for name, tensor in own.items()})
    return destination


def load_state_dict(la: Any, state: dict[str, Tensor], strict: bool = True) -> None:
    """Load a posterior that ``state_dict`` returned.

    Args:
        la (LinearisedLaplace): The object; ``la.load_state_dict(state)`` passes it.
        state (dict): The tensors by name.
        strict (bool): Ignored: the state is always compared with the network and the options.

    Raises:
        ValueError: If the state belongs to another network or likelihood.
    """
    network = la._linear_model.network
    stored.refuse_other_network(state, network.module)
    la.take(loaded(la, state, Setting(la._linear_model, NetworkState(network), la.adapter.targets)))


def load_from_state_dict(
    la: Any, state_dict: dict[str, Tensor], prefix: str, *more: Any, **named: Any
) -> None:
    """Load the tensors of this module from those of the module that contains it.

    The network may be loaded later, so it is compared when the posterior is used.
    """
    _, _, missing, _, errors = more
    own = stored.without_prefix(state_dict, prefix)
    if not own:
        missing += [f"{prefix}w_lin"] * (la._posterior is not None)
        return
    try:
        files.check(own, "posterior")
        expected = NetworkState(la._linear_model.network, own["fingerprint"].cpu())
        la.take(loaded(la, own, Setting(la._linear_model, expected, la.adapter.targets)))
    except ValueError as error:
        errors.append(str(error))


def loaded(la: Any, state: dict[str, Tensor], setting: Setting) -> Posterior:
    """Return the record of a state with the options of an object."""
    return stored.posterior_of(state, setting, la._given_likelihood, la._given, la.compute)


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
    state, model = state_dict(la), la._linear_model
    own = "prior", "num_samples", "curvature", "seed"
    options = {
        **{name: getattr(la, name) for name in own},
        **stored.likelihood_options(la._given_likelihood),
        "parameters": model.layout.names,
        "class_dim": model.network.class_dim,
        "precision": la.compute.precision,
        "tolerance": la.compute.tolerance,
    }
    files.write_atomically({**state, "options": files.to_bytes(options)}, path)


def load(cls: type[Own], path: str | PathLike[str], model: nn.Module, **options: Any) -> Own:
    """Return a saved posterior on its network.

    Args:
        cls (type): The class; ``LinearisedLaplace.load(path, model)`` passes it.
        path (str): Name of the file that ``save`` has written.
        model (nn.Module): The network, with the weights that the posterior was fitted to.
        **options: Arguments of ``LinearisedLaplace`` that the fit had and a file cannot store: a
            custom likelihood, ``adapter``, and ``compute`` if you call ``fit`` again. Other arguments replace those saved.

    Raises:
        ValueError: If the file is damaged or belongs to another network, or if an option is
            missing.

    Example:
        >>> la = LinearisedLaplace.load("posterior.pt", model)  # doctest: +SKIP
    """
    state, options = stored.read(path, model, options)
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
