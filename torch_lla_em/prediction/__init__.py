"""What a fitted posterior answers: ``functions``, ``mixture``, ``prediction``, ``parts``,
``calibration``, ``standing``, ``stored``."""

from torch_lla_em.prediction import stored
from torch_lla_em.prediction.calibration import Calibration, calibrated
from torch_lla_em.prediction.functions import mixed, slots
from torch_lla_em.prediction.parts import (
    MODE,
    NETWORK,
    SCALE,
    WEIGHT,
    mean_of,
    posterior_alone,
    predicted,
)
from torch_lla_em.prediction.prediction import Prediction
from torch_lla_em.prediction.standing import Standing
from torch_lla_em.prediction.stored import NotFittedError

__all__ = [
    "MODE",
    "NETWORK",
    "SCALE",
    "WEIGHT",
    "Calibration",
    "NotFittedError",
    "Prediction",
    "Standing",
    "calibrated",
    "mean_of",
    "mixed",
    "posterior_alone",
    "predicted",
    "slots",
    "stored",
]
