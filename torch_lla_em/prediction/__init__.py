"""What a fitted posterior answers: ``functions``, ``mixture``, ``prediction``, ``parts``,
``calibration``, ``standing``, ``stored``, ``fitted``, ``scores``, ``compare``."""

from torch_lla_em.prediction import stored, summary
from torch_lla_em.prediction.calibration import Calibration
from torch_lla_em.prediction.collapse import stated_and_right
from torch_lla_em.prediction.compare import Comparison, compare
from torch_lla_em.prediction.fitted import Fitted
from torch_lla_em.prediction.held_out import Rows, rows_of
from torch_lla_em.prediction.parts import posterior_alone
from torch_lla_em.prediction.prediction import Prediction
from torch_lla_em.prediction.scores import auroc, binned, calibration_error, outcomes, scores
from torch_lla_em.prediction.stored import NotFittedError

__all__ = [
    "Calibration",
    "Comparison",
    "Fitted",
    "NotFittedError",
    "Prediction",
    "Rows",
    "auroc",
    "binned",
    "calibration_error",
    "compare",
    "outcomes",
    "posterior_alone",
    "rows_of",
    "scores",
    "stated_and_right",
    "stored",
    "summary",
]
