"""Predictions of a fitted posterior, and how they are calibrated, compared and stored.

``predictor``, ``calibrates`` and ``stored`` have what users call as methods of the objects that
hold a record, ``posterior``; each makes a ``prediction`` by way of a ``pushforward``. ``arrays``
has functions that students need as well.
"""

from torch_lla_em.prediction import arrays, calibrates, exports, predictor, stored, summary
from torch_lla_em.prediction.arrays import Compared, Interval, mean_and_error
from torch_lla_em.prediction.base import BasePrediction
from torch_lla_em.prediction.calibrates import calibrate
from torch_lla_em.prediction.calibration import Calibration, Correction
from torch_lla_em.prediction.check import Check, check
from torch_lla_em.prediction.exports import program_of
from torch_lla_em.prediction.monitor import Monitor
from torch_lla_em.prediction.moved import temperature_of_neighbours
from torch_lla_em.prediction.passes import refuse_training_data
from torch_lla_em.prediction.posterior import (
    Fitted,
    Holder,
    NotFittedError,
    Posterior,
    Posteriors,
    Record,
    Setting,
    required,
)
from torch_lla_em.prediction.prediction import Prediction, functions_of
from torch_lla_em.prediction.predictor import Mean, predict, predictions
from torch_lla_em.prediction.printed import CALL, Printed, Table
from torch_lla_em.prediction.reference import Reference, Score, Stated
from torch_lla_em.prediction.risk import RiskControl
from torch_lla_em.prediction.stored import likelihood_options
from torch_lla_em.prediction.summary import Accuracy, Fit, Shown, advice, usual_tolerance
from torch_lla_em.prediction.suspicious import SuspiciousTargets, suspicious, suspicious_among
from torch_lla_em.prediction.validation import (
    Comparison,
    PredictedData,
    auroc,
    binned,
    calibration_error,
    compare,
    covered,
    predicted_data,
    scores,
    stated_and_right,
    warn_of_collapse,
)

__all__ = [
    "CALL",
    "Accuracy",
    "BasePrediction",
    "Calibration",
    "Check",
    "Compared",
    "Comparison",
    "Correction",
    "Fit",
    "Fitted",
    "Holder",
    "Interval",
    "Mean",
    "Monitor",
    "NotFittedError",
    "Posterior",
    "Posteriors",
    "PredictedData",
    "Prediction",
    "Printed",
    "Record",
    "Reference",
    "RiskControl",
    "Score",
    "Setting",
    "Shown",
    "Stated",
    "SuspiciousTargets",
    "Table",
    "advice",
    "arrays",
    "auroc",
    "binned",
    "calibrate",
    "calibrates",
    "calibration_error",
    "check",
    "compare",
    "covered",
    "exports",
    "functions_of",
    "likelihood_options",
    "mean_and_error",
    "predict",
    "predicted_data",
    "predictions",
    "predictor",
    "program_of",
    "refuse_training_data",
    "required",
    "scores",
    "stated_and_right",
    "stored",
    "summary",
    "suspicious",
    "suspicious_among",
    "temperature_of_neighbours",
    "usual_tolerance",
    "warn_of_collapse",
]
