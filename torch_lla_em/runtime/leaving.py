"""SIGTERM as an exception, so that the network is restored and files are closed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def leaving_cleanly() -> Iterator[None]:
    """Raise SystemExit where SIGTERM arrives, unless it has a handler or is ignored.

    A signal to the whole process group ends the workers of a loader too. Their deaths are no error
    then: torch would raise one while the exception is on its way.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: Any) -> None:
        workers = getattr(signal, "SIGCHLD", None)  # None on Windows
        if workers is not None and callable(signal.getsignal(workers)):
            signal.signal(workers, lambda *_: None)
        raise SystemExit(128 + number)

    handles = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if handles:
        signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        if handles:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
