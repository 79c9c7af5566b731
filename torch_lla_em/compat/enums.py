"""The options of laplace-torch as enums, for ``from torch_lla_em.compat.enums import PredType``."""

from enum import Enum

SubsetOfWeights = Enum(
    "SubsetOfWeights",
    {"ALL": "all", "LAST_LAYER": "last_layer", "SUBNETWORK": "subnetwork"},
    type=str,
)
HessianStructure = Enum(
    "HessianStructure",
    {"FULL": "full", "KRON": "kron", "DIAG": "diag", "LOWRANK": "lowrank", "GP": "gp"},
    type=str,
)
Likelihood = Enum(
    "Likelihood",
    {
        "REGRESSION": "regression",
        "CLASSIFICATION": "classification",
        "REWARD_MODELING": "reward_modeling",
    },
    type=str,
)
PredType = Enum("PredType", {"GLM": "glm", "NN": "nn", "GP": "gp"}, type=str)
LinkApprox = Enum(
    "LinkApprox",
    {"MC": "mc", "PROBIT": "probit", "BRIDGE": "bridge", "BRIDGE_NORM": "bridge_norm"},
    type=str,
)
TuningMethod = Enum("TuningMethod", {"MARGLIK": "marglik", "GRIDSEARCH": "gridsearch"}, type=str)
PriorStructure = Enum(
    "PriorStructure", {"SCALAR": "scalar", "DIAG": "diag", "LAYERWISE": "layerwise"}, type=str
)
FunctionalApproximation = Enum(
    "FunctionalApproximation",
    {"SOD": "sod", "NYSTROM": "nystrom", "VARIATIONAL": "variational"},
    type=str,
)
