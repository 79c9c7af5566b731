"""Memory: how much is free, and what to make of its end."""

from __future__ import annotations

import gc
import os
import socket
from collections import Counter
from collections.abc import Callable
from math import ceil, inf, log2
from typing import TypeVar

import torch

from torch_lla_em.runtime.cgroup import room

T = TypeVar("T")

# what is no OutOfMemoryError: of the CPU's allocator, of libraries with an allocator of their own
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
    # of handles, which take memory of the card when they are first made
    "_STATUS_NOT_INITIALIZED",
    # of a layer that is not supported they say the same, and still do when one row is tried
    "unable to find an engine to execute this computation",
    "could not create a primitive",
)
_UNSUPPORTED = "could not create a primitive descriptor"


class DoesNotFit(MemoryError):
    """One column of a batch takes more memory than there is."""


def attempt(run: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return the result of ``run``, or what the allocator said when memory ended.

    What the failed attempt held is free again by then.
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
    """Return what the allocator said; raise what is no shortage, or one that nothing helps."""
    if isinstance(error, DoesNotFit) or not is_shortage(error):
        raise error
    return words_of(error)


def words_of(error: Exception) -> str:
    """Return what the allocator said."""
    return str(error).split("\n")[0] or type(error).__name__


def is_shortage(error: Exception) -> bool:
    """Return whether an error says that memory has ended, and nothing else is wrong."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError) or _UNSUPPORTED in str(error):
        return False
    return any(words in str(error) for words in _WORDS)


def release() -> None:
    """Hand back what is held by nothing but cycles and caches."""
    gc.collect()  # graphs may be parts of cycles
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        release_pinned()


def release_pinned() -> None:
    """Hand back pinned memory that nothing holds, which torch keeps by powers of two."""
    torch._C._host_emptyCache()


def pinned_bytes(size: float) -> float:
    """Return what so many bytes of pinned memory take."""
    return 2.0 ** ceil(log2(max(1.0, size)))


def free_memory(device: torch.device) -> float:
    """Return the bytes that may still be allocated on a device."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        cached = reserved - torch.cuda.memory_allocated(device)
        return max(0.0, min(free, _share_of(device) * total - reserved)) + cached
    return min(_available(), room(), _below_limits())


def _share_of(device: torch.device) -> float:
    """Return the share of a card that this process is allowed, where torch tells."""
    tell = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return 1.0 if tell is None else tell(None if device.index is None else device)


def _below_limits() -> float:
    """Return the bytes left below the limits of this process, on Linux; without any, infinity."""
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


def _available() -> float:
    """Return what the machine has left, or half of what it has where it does not tell."""
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":") for line in lines)
        return float(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
        return pages * os.sysconf("SC_PAGE_SIZE") / 2 if pages else 4e9


def place_of(device: torch.device) -> str:
    """Return a name of the memory behind a device: its machine, and its card."""
    card = device.type
    if card == "cuda":
        card = str(getattr(torch.cuda.get_device_properties(device), "uuid", device))
    return f"{socket.gethostname()}/{card}"


def least_share(every: list[list]) -> float:
    """Return what each of several processes may allocate, of [memory, free bytes] of all."""
    sharing = Counter(place for place, _ in every)
    return min(free / sharing[place] for place, free in every)
