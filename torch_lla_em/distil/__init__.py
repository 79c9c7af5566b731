"""Students: networks that predict in one forward pass what a posterior predicts.

``training`` has ``distil``, which makes a student; ``inputs`` gathers unlabelled inputs and makes more of them, and
``error`` has what is learnt at each, and how far a student is from it. ``student`` is the network, and
``prediction`` what it predicts.
"""

from torch_lla_em.distil.error import StudentError
from torch_lla_em.distil.prediction import StudentPrediction
from torch_lla_em.distil.student import Student
from torch_lla_em.distil.training import distil

__all__ = ["Student", "StudentError", "StudentPrediction", "distil"]
