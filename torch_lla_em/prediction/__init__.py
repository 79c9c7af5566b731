"""Predictions of a fitted posterior, and how they are calibrated, compared and stored.

Begin with ``predict``, which makes a ``prediction`` from a record (``posterior``) by way of a
``pushforward``. Methods that users call have a file with their name: ``calibrate``, ``check``,
``compare``, ``export``, ``monitor``, ``suspicious``. Students use ``conformal`` and ``base`` too.
"""

from torch_lla_em.prediction import conformal, stored, summary
from torch_lla_em.prediction.base import BasePrediction
from torch_lla_em.prediction.calibrate import (
    calibrate,
    calibrated_by_folds,
    calibrated_on,
    without_validation,
)
from torch_lla_em.prediction.calibration import Calibration, Correction
from torch_lla_em.prediction.check import Check, check
from torch_lla_em.prediction.compare import Comparison, PredictedData, compare, predicted_data
from torch_lla_em.prediction.conformal import Compared, Interval, mean_and_error
from torch_lla_em.prediction.export import export, program_of
from torch_lla_em.prediction.monitor import Monitor
from torch_lla_em.prediction.moved import NoSubstitute, temperature_of_neighbours
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
from torch_lla_em.prediction.predict import LOADERS, Mean, predict, predictions
from torch_lla_em.prediction.prediction import Prediction, functions_of
from torch_lla_em.prediction.printed import Cells, Printed, Table
from torch_lla_em.prediction.pushforward import require_one_shape
from torch_lla_em.prediction.reference import Reference, Score, Stated
from torch_lla_em.prediction.risk import RiskControl
from torch_lla_em.prediction.scores import (
    auroc,
    binned,
    calibration_error,
    covered,
    scores,
    stated_and_right,
)
from torch_lla_em.prediction.stored import likelihood_options
from torch_lla_em.prediction.summary import Accuracy, advice, usual_tolerance
from torch_lla_em.prediction.suspicious import SuspiciousTargets, suspicious, suspicious_among

__all__ = [
    "LOADERS",
    "Accuracy",
    "BasePrediction",
    "Calibration",
    "Cells",
    "Check",
    "Compared",
    "Comparison",
    "Correction",
    "Fitted",
    "Holder",
    "Interval",
    "Mean",
    "Monitor",
    "NoSubstitute",
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
    "Stated",
    "SuspiciousTargets",
    "Table",
    "advice",
    "auroc",
    "binned",
    "calibrate",
    "calibrated_by_folds",
    "calibrated_on",
    "calibration_error",
    "check",
    "compare",
    "conformal",
    "covered",
    "export",
    "functions_of",
    "likelihood_options",
    "mean_and_error",
    "predict",
    "predicted_data",
    "predictions",
    "program_of",
    "refuse_training_data",
    "require_one_shape",
    "required",
    "scores",
    "stated_and_right",
    "stored",
    "summary",
    "suspicious",
    "suspicious_among",
    "temperature_of_neighbours",
    "usual_tolerance",
    "without_validation",
]
