"""Students: networks that predict in one forward pass what a posterior predicts; begin with
``training``."""

from torch_lla_em.distil.inputs import Way
from torch_lla_em.distil.prediction import StudentPrediction
from torch_lla_em.distil.student import Student, StudentError
from torch_lla_em.distil.training import distil

__all__ = ["Student", "StudentError", "StudentPrediction", "Way", "distil"]
