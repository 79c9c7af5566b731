"""Predictions of a fitted posterior, and how they are calibrated, compared and stored.

A prediction is a mixture of ``functions``: ``conformal`` compares it with stored examples, and
``prediction`` has its public properties. ``pushed`` makes it from the outputs and products of
inputs. ``calibration``, ``metrics`` and ``validation`` use held-out data. ``posterior`` and
``stored`` keep the results of a fit, ``predictor`` has the methods that users call, of one posterior
(``fitted``) or several (``ensemble``); ``export`` writes programs, ``summary`` prints results.
"""

from torch_lla_em.prediction.calibration import Calibration
from torch_lla_em.prediction.ensemble import LaplaceEnsemble
from torch_lla_em.prediction.fitted import Fitted
from torch_lla_em.prediction.metrics import (
    auroc,
    binned,
    calibration_error,
    covered,
    outcomes,
    scores,
    stated_and_right,
)
from torch_lla_em.prediction.prediction import Prediction
from torch_lla_em.prediction.pushed import inputs_in
from torch_lla_em.prediction.stored import NotFittedError
from torch_lla_em.prediction.summary import as_html, findings
from torch_lla_em.prediction.validation import Comparison, PredictedData, compare, predicted_data

__all__ = [
    "Calibration",
    "Comparison",
    "Fitted",
    "LaplaceEnsemble",
    "NotFittedError",
    "PredictedData",
    "Prediction",
    "as_html",
    "auroc",
    "binned",
    "calibration_error",
    "compare",
    "covered",
    "findings",
    "inputs_in",
    "outcomes",
    "predicted_data",
    "scores",
    "stated_and_right",
]
