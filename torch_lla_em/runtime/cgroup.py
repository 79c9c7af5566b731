"""What a container may still take of its machine's memory, on Linux."""

from __future__ import annotations

from contextlib import suppress
from math import inf
from pathlib import Path
from typing import NamedTuple


class _Files(NamedTuple):
    """What the files of a control group are called, in each of the two versions."""

    limit: str
    usage: str
    reclaimable: str


_FIRST = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_SECOND = _Files("memory.max", "memory.current", "inactive_file")


def room(groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the bytes left below the tightest limit of this process's control groups.

    Files cached in memory count as used there, but give way. Without a limit: infinity.
    """
    least = inf
    with suppress(OSError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                least = min(least, _along(mount, path, _SECOND))
            elif "memory" in controllers.split(","):
                least = min(least, _along(mount / "memory", path, _FIRST))
    return least


def _along(mount: Path, path: str, files: _Files) -> float:
    """Return the least room of a group and all groups it lies in."""
    group, least = mount / path.lstrip("/"), inf
    # a container may see its own group as the root, whatever its path outside
    for folder in (group, *group.parents):
        with suppress(OSError, ValueError):
            limit = int((folder / files.limit).read_text())  # "max" is no number
            least = min(least, limit - _used(folder, files))
        if folder == mount:
            break
    return max(least, 0.0)


def _used(folder: Path, files: _Files) -> int:
    used = int((folder / files.usage).read_text())
    with suppress(OSError, ValueError):
        lines = (folder / "memory.stat").read_text().splitlines()
        used -= int(dict(line.split() for line in lines).get(files.reclaimable, 0))
    return used
