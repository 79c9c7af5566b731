"""Predictions of a fitted posterior, and how they are calibrated, compared and stored.

A ``prediction`` is a mixture of components, of which it has moments and densities by the averages of ``functions``
and ``scores``; ``targets`` has its intervals and draws, and ``comparison`` compares it with a ``reference``. ``pushforward`` makes it from the
outputs and products of inputs, and ``neighbours`` shrinks it far from training examples. ``calibration``, ``passes``,
``check`` and ``validation`` use held-out data, and ``moved`` training examples in their place. ``posterior`` is the
frozen record of a fit or of several, and ``stored`` writes and reads it. ``predictor`` and ``calibrates`` have the
functions of records that users call as methods of the objects that hold them; ``exports`` writes programs, ``summary``
prints results.
"""

from torch_lla_em.prediction import calibrates, exports, predictor, stored, summary
from torch_lla_em.prediction.calibrates import calibrate
from torch_lla_em.prediction.calibration import Calibration
from torch_lla_em.prediction.check import check
from torch_lla_em.prediction.exports import program_of
from torch_lla_em.prediction.moved import temperature_of_neighbours
from torch_lla_em.prediction.passes import refuse_training_data
from torch_lla_em.prediction.posterior import (
    Correction,
    NotFittedError,
    Posterior,
    Posteriors,
    Setting,
    required,
)
from torch_lla_em.prediction.prediction import Prediction
from torch_lla_em.prediction.predictor import predict, predictions
from torch_lla_em.prediction.reference import Reference
from torch_lla_em.prediction.risk import RiskControl
from torch_lla_em.prediction.scores import (
    Interval,
    aligned,
    conformal_interval,
    conformal_set,
    errors_of_classes,
    errors_of_values,
    gaussian_entropy,
    has_classes,
    has_values,
    infinite_if_nan,
    mean_and_error,
    p_values,
    quantiles,
    require,
    require_share,
    rounding,
)
from torch_lla_em.prediction.stored import likelihood_options, result
from torch_lla_em.prediction.summary import CALL, Printed, Table, advice, of_examples
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
    "Calibration",
    "Comparison",
    "Correction",
    "Interval",
    "NotFittedError",
    "Posterior",
    "Posteriors",
    "PredictedData",
    "Prediction",
    "Printed",
    "Reference",
    "RiskControl",
    "Setting",
    "Table",
    "advice",
    "aligned",
    "auroc",
    "binned",
    "calibrate",
    "calibrates",
    "calibration_error",
    "check",
    "compare",
    "conformal_interval",
    "conformal_set",
    "covered",
    "errors_of_classes",
    "errors_of_values",
    "exports",
    "gaussian_entropy",
    "has_classes",
    "has_values",
    "infinite_if_nan",
    "likelihood_options",
    "mean_and_error",
    "of_examples",
    "p_values",
    "predict",
    "predicted_data",
    "predictions",
    "predictor",
    "program_of",
    "quantiles",
    "refuse_training_data",
    "require",
    "require_share",
    "required",
    "result",
    "rounding",
    "scores",
    "stated_and_right",
    "stored",
    "summary",
    "temperature_of_neighbours",
    "warn_of_collapse",
]
