"""Seconds and peak memory of a piece of work."""

import ctypes
import gc
import threading
import time
from contextlib import suppress
from pathlib import Path

_STATM = Path("/proc/self/statm")


class Meter:
    """Times a block, and watches by how much the process grows meanwhile."""

    seconds: float
    megabytes: float | None
    """Peak growth; None where the system does not tell."""

    def __enter__(self) -> "Meter":
        _return_memory()
        self._done = threading.Event()
        self._start = self._peak = _resident()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        self._clock = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self._clock
        self._done.set()
        self._thread.join()
        self.megabytes = None
        if self._start is not None:
            self.megabytes = (max(self._peak, _resident()) - self._start) * 4096 / 1e6

    def _watch(self) -> None:
        while self._start is not None and not self._done.wait(0.01):
            self._peak = max(self._peak, _resident())


def _return_memory() -> None:
    """Give what is free back to the system, or a block could live on what others have left."""
    gc.collect()
    with suppress(OSError, AttributeError):  # not every system has glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _resident() -> int | None:
    """Return the pages in memory."""
    return int(_STATM.read_text().split()[1]) if _STATM.exists() else None
