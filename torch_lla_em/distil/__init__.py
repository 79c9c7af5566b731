"""Students: networks that predict in one forward pass what a posterior predicts.

``training`` has ``distil``, which makes a ``student`` and measures its error; ``inputs`` gathers unlabelled inputs and makes
more of them, and ``prediction`` is what a student predicts.
"""

from torch_lla_em.distil.prediction import StudentPrediction
from torch_lla_em.distil.student import Student, StudentError
from torch_lla_em.distil.training import distil

__all__ = ["Student", "StudentError", "StudentPrediction", "distil"]
