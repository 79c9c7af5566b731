"""What a fitted posterior predicts, how it is calibrated and compared, and how it is stored."""

from torch_lla_em.prediction import stored
from torch_lla_em.prediction.calibration import Calibration
from torch_lla_em.prediction.collapse import stated_and_right, warn_of_collapse
from torch_lla_em.prediction.compare import Comparison, compare
from torch_lla_em.prediction.ensemble import LaplaceEnsemble
from torch_lla_em.prediction.fitted import Fitted
from torch_lla_em.prediction.held_out import PredictedData, predicted_data
from torch_lla_em.prediction.parts import posterior_alone
from torch_lla_em.prediction.prediction import Prediction
from torch_lla_em.prediction.scores import auroc, binned, calibration_error, outcomes, scores
from torch_lla_em.prediction.stored import NotFittedError

__all__ = [
    "Calibration",
    "Comparison",
    "Fitted",
    "LaplaceEnsemble",
    "NotFittedError",
    "PredictedData",
    "Prediction",
    "auroc",
    "binned",
    "calibration_error",
    "compare",
    "outcomes",
    "posterior_alone",
    "predicted_data",
    "scores",
    "stated_and_right",
    "stored",
    "warn_of_collapse",
]
