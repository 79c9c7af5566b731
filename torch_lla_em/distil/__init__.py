"""Students: networks that predict in one forward pass what a posterior predicts.

``training`` has ``distil``, which makes a student; ``inputs`` gathers unlabelled inputs and makes more of them,
and ``targets`` is what is learnt at each. ``student`` is the network, ``prediction`` what it predicts, and ``error``
how far it is from its posterior.
"""

from torch_lla_em.distil.error import StudentError
from torch_lla_em.distil.prediction import StudentPrediction
from torch_lla_em.distil.student import Student
from torch_lla_em.distil.training import distil, distilled

__all__ = ["Student", "StudentError", "StudentPrediction", "distil", "distilled"]
