"""Predictions of a fitted posterior, and how they are calibrated, compared and stored.

A prediction is a ``mixture`` of components, from which a ``distribution`` has moments and densities by the
averages of ``functions`` and ``scores``; ``prediction`` compares it with a validation set by ``conformal`` and
``neighbours``. ``pushforward`` makes it from the outputs and products of inputs. ``calibration``, ``passes``,
``metrics`` and ``validation`` use held-out data; ``reference`` has what ``calibrate`` keeps of them. ``posterior`` is the frozen
record of a fit, and ``stored`` writes and reads it. ``predictor`` and ``calibrates`` have the methods that users call, of
one posterior (``fitted``) or several (``ensemble``); ``exports`` and ``export`` write programs, ``summary`` prints results.
"""

from torch_lla_em.prediction import stored
from torch_lla_em.prediction.calibrates import calibrated_on
from torch_lla_em.prediction.calibration import Calibration
from torch_lla_em.prediction.conformal import Score, chosen
from torch_lla_em.prediction.ensemble import Ensemble
from torch_lla_em.prediction.export import program_of
from torch_lla_em.prediction.fitted import PosteriorBase
from torch_lla_em.prediction.metrics import (
    auroc,
    binned,
    calibration_error,
    covered,
    scores,
    stated_and_right,
)
from torch_lla_em.prediction.passes import refuse_training_data
from torch_lla_em.prediction.posterior import NotFittedError, Posterior, Setting
from torch_lla_em.prediction.prediction import Prediction
from torch_lla_em.prediction.predictor import Predictor, Records
from torch_lla_em.prediction.ranks import (
    infinite_if_nan,
    mass_above,
    p_values,
    quantiles,
    require,
    rounding,
)
from torch_lla_em.prediction.reference import Reference
from torch_lla_em.prediction.regions import Ellipsoid
from torch_lla_em.prediction.risk import RiskControl
from torch_lla_em.prediction.scores import (
    Interval,
    aligned,
    conformal_interval,
    conformal_set,
    errors_of_classes,
    errors_of_values,
    gaussian_entropy,
    gaussian_interval,
    has_classes,
    has_values,
    require_share,
)
from torch_lla_em.prediction.stored import likelihood_options
from torch_lla_em.prediction.summary import CALL, Printed, Table, advice, of_examples
from torch_lla_em.prediction.validation import (
    Comparison,
    PredictedData,
    compare,
    predicted_data,
    warn_of_collapse,
)

__all__ = [
    "CALL",
    "Calibration",
    "Comparison",
    "Ellipsoid",
    "Ensemble",
    "Interval",
    "NotFittedError",
    "Posterior",
    "PosteriorBase",
    "PredictedData",
    "Prediction",
    "Predictor",
    "Printed",
    "Records",
    "Reference",
    "RiskControl",
    "Score",
    "Setting",
    "Table",
    "advice",
    "aligned",
    "auroc",
    "binned",
    "calibrated_on",
    "calibration_error",
    "chosen",
    "compare",
    "conformal_interval",
    "conformal_set",
    "covered",
    "errors_of_classes",
    "errors_of_values",
    "gaussian_entropy",
    "gaussian_interval",
    "has_classes",
    "has_values",
    "infinite_if_nan",
    "likelihood_options",
    "mass_above",
    "of_examples",
    "p_values",
    "predicted_data",
    "program_of",
    "quantiles",
    "refuse_training_data",
    "require",
    "require_share",
    "rounding",
    "scores",
    "stated_and_right",
    "stored",
    "warn_of_collapse",
]
