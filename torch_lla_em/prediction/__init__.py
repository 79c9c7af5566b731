"""What a fitted posterior answers: ``functions``, ``mixture``, ``prediction``, ``parts``,
``calibration``, ``standing``, ``stored``, ``fitted``."""

from torch_lla_em.prediction import stored
from torch_lla_em.prediction.calibration import Calibration
from torch_lla_em.prediction.collapse import stated_and_right
from torch_lla_em.prediction.fitted import Fitted
from torch_lla_em.prediction.held_out import Rows, rows_of
from torch_lla_em.prediction.parts import posterior_alone
from torch_lla_em.prediction.prediction import Prediction
from torch_lla_em.prediction.stored import NotFittedError

__all__ = [
    "Calibration",
    "Fitted",
    "NotFittedError",
    "Prediction",
    "Rows",
    "posterior_alone",
    "rows_of",
    "stated_and_right",
    "stored",
]
