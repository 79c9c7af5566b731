"""A network as a function of its parameters, and products with its Jacobian."""

from torch_lla_em.jacobian.checks import last_layers, require_rows
from torch_lla_em.jacobian.linear_model import LinearModel
from torch_lla_em.jacobian.network import ForwardFn, Network
from torch_lla_em.jacobian.parameters import (
    ParameterLayout,
    Selection,
    leaves_out,
    select_parameters,
)
from torch_lla_em.jacobian.rows import Pulled, Rows, Ways
from torch_lla_em.jacobian.state import NetworkState

__all__ = [
    "ForwardFn",
    "LinearModel",
    "Network",
    "NetworkState",
    "ParameterLayout",
    "Pulled",
    "Rows",
    "Selection",
    "Ways",
    "last_layers",
    "leaves_out",
    "require_rows",
    "select_parameters",
]
