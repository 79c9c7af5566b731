"""Memory: how much is free, and which errors say that it has run out."""

from __future__ import annotations

import gc
import os
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from math import ceil, inf, log2
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")

# errors that are no OutOfMemoryError: of the CPU's allocator, and of libraries with their own
_WORDS = (
    "can't allocate memory",
    "not enough memory",
    "std::bad_alloc",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "DEVICE_ALLOCATION_FAILED",
    "HOST_ALLOCATION_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
    # of handles, which take memory of the GPU when they are first made
    "_STATUS_NOT_INITIALIZED",
    # also raised for layers that are not supported, then for a single example too
    "unable to find an engine to execute this computation",
    "could not create a primitive",
)
_UNSUPPORTED = "could not create a primitive descriptor"

# limit, usage, and what of it are cached files, of a control group of Linux in its two versions
_CONTROL_GROUPS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


class DoesNotFit(MemoryError):
    """One column of a batch takes more memory than there is."""


def attempt(run: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return the result of ``run``, or the allocator's message if it ran out of memory.

    The memory of the failed attempt has been released by then.
    """
    try:
        return run(), None
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        shortage = words_of(error)
    release()
    return None, shortage


def shortage_of(error: Exception) -> str:
    """Return the allocator's message; raise an error that is none, or that nothing helps against."""
    if isinstance(error, DoesNotFit) or not is_shortage(error):
        raise error
    return words_of(error)


def words_of(error: Exception) -> str:
    """Return the first line of an allocator's message."""
    return str(error).split("\n")[0] or type(error).__name__


def is_shortage(error: Exception) -> bool:
    """Whether an error says that memory has run out, and nothing else is wrong."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError) or _UNSUPPORTED in str(error):
        return False
    return any(words in str(error) for words in _WORDS)


def release() -> None:
    """Release memory that is held only by reference cycles and caches."""
    gc.collect()  # graphs may be parts of cycles
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        release_pinned()


def release_pinned() -> None:
    """Release pinned memory that is not in use; torch caches it by powers of two."""
    torch._C._host_emptyCache()


def pinned_bytes(size: float) -> float:
    """Return the size of an allocation of so many bytes of pinned memory."""
    return 2.0 ** ceil(log2(max(1.0, size)))


def free_memory(device: torch.device) -> float:
    """Return the bytes that may still be allocated on a device."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        cached = reserved - torch.cuda.memory_allocated(device)
        return max(0.0, min(free, _share_of(device) * total - reserved)) + cached
    return min(_available(), container_room(), _below_limits())


def _share_of(device: torch.device) -> float:
    """Return the share of a GPU that this process may use, as far as torch knows."""
    tell = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return 1.0 if tell is None else tell(None if device.index is None else device)


def _below_limits() -> float:
    """Return the bytes left below the ``ulimit`` of this process on Linux, infinity without one."""
    try:
        import resource

        with open("/proc/self/status") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        limits = {"VmSize": resource.RLIMIT_AS, "VmData": resource.RLIMIT_DATA}
        allowed = {name: resource.getrlimit(limit)[0] for name, limit in limits.items()}
        held = {name: float(fields[name].split()[0]) * 1024 for name in limits}
    except (ImportError, OSError, KeyError):
        return inf
    left = [allowed[n] - held[n] for n in limits if allowed[n] != resource.RLIM_INFINITY]
    return max(0.0, min(left, default=inf))


def container_room(
    groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> float:
    """Return the bytes left below the limits of a container or job, infinity without one.

    These are the limits of this process's control groups and of all groups that they are in.
    """
    folders = {mount, mount / "memory"}
    with suppress(OSError):
        paths = [line.split(":", 2)[2].lstrip("/") for line in groups.read_text().splitlines()]
        folders |= {root / path for root in tuple(folders) for path in paths}
    every = {above for folder in folders for above in (folder, *folder.parents)}
    return min(_group_room(folder, names) for folder in every for names in _CONTROL_GROUPS)


def _group_room(folder: Path, names: tuple[str, str, str]) -> float:
    """Return the bytes left below the limit of one control group; cached files can be evicted."""
    limit, usage, cached = names
    try:
        left = int((folder / limit).read_text()) - int((folder / usage).read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
        left += int(dict(line.split() for line in lines).get(cached, 0))
    except (OSError, ValueError):  # there is no such group, or its limit is "max"
        return inf
    return max(0.0, left)


def _available() -> float:
    """Return the bytes available on this machine; if unknown, half of its memory."""
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":") for line in lines)
        return float(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
        return pages * os.sysconf("SC_PAGE_SIZE") / 2 if pages else 4e9


def place_of(device: torch.device) -> str:
    """Return a name of the memory of a device: its machine, and its GPU."""
    name = device.type
    if name == "cuda":
        name = str(getattr(torch.cuda.get_device_properties(device), "uuid", device))
    return f"{socket.gethostname()}/{name}"


def least_share(every: list[list]) -> float:
    """Return the bytes that each process may allocate, from (name of the memory, free bytes) of all."""
    sharing = Counter(place for place, _ in every)
    return min(free / sharing[place] for place, free in every)
