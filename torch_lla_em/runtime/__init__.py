"""Memory, precision, warnings, files, ranks of a process group, and random numbers by key."""

from torch_lla_em.runtime.files import write_atomically
from torch_lla_em.runtime.group import Group, first, group_of
from torch_lla_em.runtime.memory import (
    NUMBERS,
    DoesNotFit,
    free_for_each,
    free_memory,
    is_shortage,
    release,
    shortage_of,
    suppressed,
)
from torch_lla_em.runtime.messages import CALL, collected, or_float64, report
from torch_lla_em.runtime.modes import ONE_AT_A_TIME, tf32, without_autocast
from torch_lla_em.runtime.noise import normals
from torch_lla_em.runtime.options import (
    PRECISION_BOUNDS,
    PRIORS,
    Adapter,
    Compute,
    check_choice,
    check_whole,
    check_within,
    refuse_former,
    require,
)

__all__ = [
    "CALL",
    "NUMBERS",
    "ONE_AT_A_TIME",
    "PRECISION_BOUNDS",
    "PRIORS",
    "Adapter",
    "Compute",
    "DoesNotFit",
    "Group",
    "check_choice",
    "check_whole",
    "check_within",
    "collected",
    "first",
    "free_for_each",
    "free_memory",
    "group_of",
    "is_shortage",
    "normals",
    "or_float64",
    "refuse_former",
    "release",
    "report",
    "require",
    "shortage_of",
    "suppressed",
    "tf32",
    "without_autocast",
    "write_atomically",
]
