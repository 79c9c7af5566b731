"""What survives a kill: the result of every pass."""

from torch_lla_em.checkpoint.first_outputs import FirstOutputs
from torch_lla_em.checkpoint.pass_log import FORMAT, PassLog
from torch_lla_em.checkpoint.recorded import RecordedProblem
from torch_lla_em.checkpoint.shared_log import SharedLog

__all__ = ["FORMAT", "FirstOutputs", "PassLog", "RecordedProblem", "SharedLog"]
