"""Ctrl-C and SIGTERM: leave where nothing is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Leaving:
    """Whether somebody has asked to leave, and with which exception."""

    requested: BaseException | None = None


@contextmanager
def leaving_cleanly(at_once: bool) -> Iterator[Leaving]:
    """Turn SIGTERM into SystemExit, so that files are closed and the network is restored.

    Unless ``at_once``, SIGTERM and SIGINT are noted for whoever looks between two batches;
    a second one does not wait.
    """
    leaving = Leaving()
    if threading.current_thread() is not threading.main_thread():
        yield leaving
        return

    def leave(number: int, _: Any) -> None:
        reason = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
        if at_once or leaving.requested:
            raise reason
        leaving.requested = reason

    noted = [signal.SIGTERM]
    if not at_once and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        noted.append(signal.SIGINT)
    before = {number: signal.signal(number, leave) for number in noted}
    try:
        yield leaving
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if leaving.requested:  # too late for a batch to see
        raise leaving.requested
