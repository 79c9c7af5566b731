"""What a fitted posterior answers: ``functions``, ``mixture``, ``prediction``, ``parts``,
``calibration``, ``standing``, ``stored``, ``fitted``."""

from torch_lla_em.prediction import stored
from torch_lla_em.prediction.calibration import Calibration
from torch_lla_em.prediction.fitted import Fitted
from torch_lla_em.prediction.parts import posterior_alone
from torch_lla_em.prediction.prediction import Prediction
from torch_lla_em.prediction.stored import NotFittedError

__all__ = [
    "Calibration",
    "Fitted",
    "NotFittedError",
    "Prediction",
    "posterior_alone",
    "stored",
]
