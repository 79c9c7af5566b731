"""A network as a function of its weights, and its Jacobian as products."""

from torch_lla_em.jacobian.bad_inputs import explained, require_rows
from torch_lla_em.jacobian.factored import Factors
from torch_lla_em.jacobian.layers import called_last
from torch_lla_em.jacobian.linear_model import AddPullback, LinearModel, after_columns
from torch_lla_em.jacobian.network import ForwardFn, Network
from torch_lla_em.jacobian.parameters import ParameterLayout, Selection, select_parameters

__all__ = [
    "AddPullback",
    "Factors",
    "ForwardFn",
    "LinearModel",
    "Network",
    "ParameterLayout",
    "Selection",
    "after_columns",
    "called_last",
    "explained",
    "require_rows",
    "select_parameters",
]
