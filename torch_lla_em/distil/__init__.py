"""A network of one forward pass that predicts what a posterior predicts.

``distillation`` has the method ``distil`` of posteriors and of ``LaplaceEnsemble``. ``inputs`` gathers unlabelled
inputs, ``widening`` makes more of them, ``targets`` is what is learnt of a prediction, ``training`` learns it, and
``progress`` is its checkpoint.
The result is a ``student``, whose predictions are in ``predicted``. ``agreement`` is its error, and
``export`` writes it as a program.
"""

from torch_lla_em.distil.agreement import Agreement, Likelihoods, StudentError
from torch_lla_em.distil.distillation import Distillation, distilled
from torch_lla_em.distil.predicted import StudentPrediction
from torch_lla_em.distil.student import Student

__all__ = [
    "Agreement",
    "Distillation",
    "Likelihoods",
    "Student",
    "StudentError",
    "StudentPrediction",
    "distilled",
]
