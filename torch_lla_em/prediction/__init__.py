"""What a fitted posterior answers."""

from torch_lla_em.prediction.prediction import Prediction
from torch_lla_em.prediction.predictive_posterior import PredictivePosterior, check_choice
from torch_lla_em.prediction.stored import NotFittedError

__all__ = ["NotFittedError", "Prediction", "PredictivePosterior", "check_choice"]
