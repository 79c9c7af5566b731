"""The arguments and attributes of laplace-torch, and what to use for those without a meaning here."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch_lla_em.runtime import check_choice

logger = logging.getLogger("torch_lla_em")

LIKELIHOODS = "classification", "regression", "reward_modeling"

_STRUCTURES = "full", "kron", "diag", "lowrank", "gp"

_IGNORED = dict.fromkeys(
    ("backend", "backend_kwargs", "asdl_fisher_kwargs", "damping"),
    "products with the Jacobian are chosen for each network, with the full GGN",
) | dict.fromkeys(
    ("n_subset", "independent_outputs", "functional_approximation", "M", "diagonal_kernel"),
    "the posterior is that of the full GGN with all data and outputs",
)
"""Arguments of laplace-torch that choose how the GGN is computed or approximated."""

_OPTIONS = {
    "last_layer_name": "use LinearisedLaplace(model, likelihood, parameters=[name + '.*'])",
    "feature_reduction": "select the outputs in the forward_fn of LinearisedLaplace",
    "subnetwork_indices": "use LinearisedLaplace(model, likelihood, parameters=[...])",
}
"""Arguments of laplace-torch that have no meaning here -> what to use."""

REPLACEMENTS = {
    "H": "the GGN is not stored; la.posterior.w_samples are samples of the posterior",
    "posterior_precision": "the GGN is not stored; la.posterior.w_samples are samples",
    "posterior_covariance": "use la.functional_variance(x), or la.posterior.w_samples",
    "posterior_scale": "use la.posterior.w_samples",
    "posterior_variance": "use la.posterior.w_samples.square().mean(0)",
    "backend": "products with the Jacobian are chosen for each network",
    "log_prob": "the density over weights is not available; use la.log_marginal_likelihood()",
}
"""Attributes of laplace-torch that do not exist here -> what to use."""

_CLASSES = {
    f"{structure}{layer}Laplace": f'Laplace(model, likelihood, "{subset}", "{name}")'
    for structure, name in (("Full", "full"), ("Kron", "kron"), ("Diag", "diag"))
    for layer, subset in (("", "all"), ("LL", "last_layer"))
}
_CLASSES |= dict.fromkeys(
    ("LowRankLaplace", "FunctionalLaplace", "ELLA", "VaLLA"),
    'Laplace(model, likelihood, "all", "full")',
)
_CLASSES |= {"FunctionalLLLaplace": 'Laplace(model, likelihood, "last_layer", "full")'}
_CLASSES |= dict.fromkeys(
    ("SubnetLaplace", "FullSubnetLaplace", "DiagSubnetLaplace"),
    "LinearisedLaplace(model, likelihood, parameters=[...]), which selects tensors by name",
)
"""Classes of laplace-torch -> what to use."""


def missing(name: str) -> Exception:
    """Return the error for a name that the package does not have; it says what to use."""
    if name in _CLASSES:
        return ImportError(f"torch_lla_em has no {name}: use {_CLASSES[name]}.")
    return AttributeError(f"module 'torch_lla_em.compat' has no attribute {name!r}")


def name_of(option: Any) -> str:
    """Return an option of laplace-torch, a string or a member of an enum, as a string."""
    return str(getattr(option, "value", option))


def check_pred_type(pred_type: Any) -> None:
    if name_of(pred_type) != "glm":
        raise ValueError(
            f'pred_type={name_of(pred_type)!r} is not available, only "glm": the posterior is that of the '
            "linearised network, and the network at sampled weights is another function."
        )


def check_arguments(likelihood: Any, subset: Any, structure: Any, options: dict[str, Any]) -> None:
    """Raise an error for arguments that have no meaning here."""
    check_choice("likelihood", name_of(likelihood), LIKELIHOODS)
    if name_of(subset) == "subnetwork":
        raise ValueError(
            'subset_of_weights="subnetwork" selects single weights. Select tensors by name: '
            "LinearisedLaplace(model, likelihood, parameters=[...])."
        )
    check_choice("subset_of_weights", name_of(subset), ("last_layer", "all"))
    check_choice("hessian_structure", name_of(structure), _STRUCTURES)
    for name in options:
        if name in _IGNORED:
            logger.info("%s has no effect here: %s.", name, _IGNORED[name])
        elif name in _OPTIONS:
            raise ValueError(f"{name} is not available: {_OPTIONS[name]}.")
        else:
            raise TypeError(f"Laplace has no argument {name!r}.")


@contextmanager
def without_warnings() -> Iterator[None]:
    """Drop the warnings of fits at prior precisions that are only tried."""

    def is_quiet(record: logging.LogRecord) -> bool:
        return record.levelno < logging.WARNING

    logger.addFilter(is_quiet)
    try:
        yield
    finally:
        logger.removeFilter(is_quiet)
