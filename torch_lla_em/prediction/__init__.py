"""What a fitted posterior answers: ``functions``, ``prediction``, ``calibration``, ``stored``."""

from torch_lla_em.prediction import stored
from torch_lla_em.prediction.calibration import calibrated
from torch_lla_em.prediction.prediction import Prediction, mixed
from torch_lla_em.prediction.stored import NotFittedError

__all__ = ["NotFittedError", "Prediction", "calibrated", "mixed", "stored"]
