"""The C library's heap, kept for the next tensor while a network is at work.

glibc takes tensors of 32 MiB and more from the system, and hands them back when they die. Every
temporary of a product is then cleared page by page, which takes as long as the arithmetic.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_KEPT = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1}
# setting any of them ends glibc's own rule, so these are where that rule arrives
_ORDINARY = {_MMAP_MAX: 65536, _TRIM_THRESHOLD: 2**26, _MMAP_THRESHOLD: 2**25}

# seconds, far above what it takes to have the same memory filled in again
_WORTH_TRIMMING = 5.0

# bytes, more than any thread's own heap holds
_TRIED = 2**26 + 2**24

_lock = threading.Lock()
_keepers = 0


@contextmanager
def kept_heap() -> Iterator[None]:
    """Keep freed memory for what comes next, and hand it back on exit.

    After a short time it is left to the C library to do so. A process whose user has set how its
    memory is allocated is left alone.
    """
    if not can_be_kept():
        yield
        return
    began = time.monotonic()
    _keep(+1)
    try:
        yield
    finally:
        if _keep(-1) == 0 and time.monotonic() - began > _WORTH_TRIMMING:
            _library().malloc_trim(0)


@cache
def can_be_kept() -> bool:
    """Whether this is glibc's heap, as glibc sets it up."""
    asked = [name for name in os.environ if name.startswith("MALLOC_")]
    return not asked and "malloc" not in os.environ.get("GLIBC_TUNABLES", "") and _library() is not None


def is_kept_here() -> bool:
    """Whether freed memory does serve the next tensor, in this thread and in its heap as it is.

    Tried out: glibc takes the large tensors of other threads from the system all the same, and
    those of a thread that has once run out of memory.
    """
    if not can_be_kept():
        return False
    with kept_heap():  # what one leaves may be too small for the next, but not for all of them
        return any(_pages_of_another() < 0.5 * _TRIED / mmap.PAGESIZE for _ in range(5))


def _pages_of_another() -> int:
    """Return how many pages the system has to fill in for one more large piece."""
    import resource  # of Unix alone

    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    try:
        b"1" * _TRIED
    except MemoryError:
        return _TRIED
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def hand_back() -> None:
    """Give the system what is kept and not in use."""
    if _keepers:
        _library().malloc_trim(0)


def _keep(change: int) -> int:
    """Count one more or fewer who wants the heap kept, and return how many do."""
    global _keepers
    with _lock:
        before, _keepers = _keepers, max(0, _keepers + change)
        if (before == 0) != (_keepers == 0):
            _set(_KEPT if _keepers else _ORDINARY)
        return _keepers


def _set(parameters: dict[int, int]) -> None:
    for parameter, value in parameters.items():
        _library().mallopt(parameter, value)


def _leave_to_a_child() -> None:
    """Begin a forked process, such as a loader's worker, with the heap as glibc has it."""
    global _keepers
    if _keepers:
        _keepers = 0
        _set(_ORDINARY)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_a_child)


@cache
def _library() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    named = ("gnu_get_libc_version", "mallopt", "malloc_trim")
    return library if all(hasattr(library, name) for name in named) else None
