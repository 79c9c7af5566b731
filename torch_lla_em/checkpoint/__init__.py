"""What survives a kill: the result of every pass."""

from torch_lla_em.checkpoint.first_outputs import FirstOutputs
from torch_lla_em.checkpoint.log import FORMAT, Log
from torch_lla_em.checkpoint.partial import Partial
from torch_lla_em.checkpoint.recorded import Recorded

__all__ = ["FORMAT", "FirstOutputs", "Log", "Partial", "Recorded"]
