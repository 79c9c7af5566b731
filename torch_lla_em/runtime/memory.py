"""Free memory of a device, and the recognition of out-of-memory errors."""

from __future__ import annotations

import gc
import os
import re
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path

import torch

from torch_lla_em.runtime.group import Group

# out-of-memory errors of the CPU's allocator, and of libraries whose handles need memory of the
# GPU; the last two are also raised for layers that are not supported, but then for a single example
# too
_WORDS = re.compile(
    "can't allocate memory|not enough memory|std::bad_alloc|CUDA error: out of memory"
    "|ALLOC_FAILED|ALLOCATION_FAILED|_STATUS_NOT_INITIALIZED"
    "|unable to find an engine to execute this computation"
    "|could not create a primitive(?! descriptor)"
)

NUMBERS = 4_000_000
"""Largest number of entries of a temporary tensor: of comparisons, of differences between examples,
of functions, or of vectors in float64."""


class DoesNotFit(MemoryError):
    """What a fit needs does not fit into memory, or cannot be stored."""


def shortage_of(error: Exception) -> str:
    """Return the allocator's message. The error is raised if it has another cause or no remedy."""
    if isinstance(error, DoesNotFit) or not is_shortage(error):
        raise error
    return str(error).split("\n")[0] or type(error).__name__


def is_shortage(error: Exception) -> bool:
    """Whether an error is an out-of-memory error."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _WORDS.search(str(error)) is not None


@contextmanager
def suppressed(failures: list[Exception] | None = None) -> Iterator[None]:
    """Suppress errors and append them to ``failures``, unless memory has run out."""
    try:
        yield
    except Exception as error:
        if is_shortage(error):
            raise
        if failures is not None:
            failures.append(error)


def release() -> None:
    """Release memory that is held only by reference cycles and caches."""
    gc.collect()  # graphs may be parts of cycles
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def free_memory(device: torch.device) -> float:
    """Return the free memory of a device in bytes."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        cached = reserved - torch.cuda.memory_allocated(device)
        share = 1.0
        if hasattr(torch.cuda, "get_per_process_memory_fraction"):  # not in older torch
            share = torch.cuda.get_per_process_memory_fraction(device.index)
        return max(0.0, min(free, share * total - reserved)) + cached
    available = 4e9
    with suppress(AttributeError, ValueError, OSError):  # not on Windows
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
    with suppress(OSError, KeyError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        entries = dict(line.split(":", 1) for line in lines)
        available = 1024.0 * int(entries["MemAvailable"].split()[0])
    return min(available, container_room())


def container_room(
    groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> float:
    """Return the bytes that are left below the memory limits of a container or job; infinity if
    there is none.

    These are the limits of this process's control group (version 2) and of all groups that contain
    it.
    """
    folder, room = mount, inf
    with suppress(OSError):
        folder = mount / groups.read_text().rpartition(":")[2].strip().lstrip("/")
    for part in (folder, *folder.parents):
        with suppress(OSError, ValueError):  # there is no such group, or its limit is "max"
            limit = int((part / "memory.max").read_text())
            used = int((part / "memory.current").read_text())
            lines = (part / "memory.stat").read_text().splitlines()
            # cached files can be evicted
            cached = int(dict(line.split() for line in lines).get("inactive_file", 0))
            room = min(room, max(0.0, limit - used + cached))
    return room


def free_for_each(group: Group, device: torch.device) -> float:
    """Return the bytes that every rank may still allocate on a device; ranks on one machine share
    them equally."""
    name = f"{socket.gethostname()}/{device.type}"
    if device.type == "cuda":  # ranks may share a GPU
        name += str(getattr(torch.cuda.get_device_properties(device), "uuid", device))
    every = group.meet((name, free_memory(device)), list)
    sharing = Counter(place for place, _ in every)
    return min(free / sharing[place] for place, free in every)
