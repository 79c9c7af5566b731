"""Ctrl-C and SIGTERM: leave where nothing is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Leaving:
    """Whether somebody has asked to leave, and with which exception."""

    requested: BaseException | None = None

    def __init__(self) -> None:
        self.idle: Callable[[], bool] = lambda: False
        """Whether nothing is under way but reading, so that there is nothing to wait for."""


@contextmanager
def leaving_cleanly(at_once: bool) -> Iterator[Leaving]:
    """Turn SIGTERM into SystemExit, so that files are closed and the network is restored.

    Unless ``at_once``, SIGTERM and SIGINT are noted for whoever looks between two batches;
    while a batch is read, and a second time, they do not wait. A signal to a whole group ends a
    loader's workers too: what fails for that is the request to leave, and no error.
    """
    leaving = Leaving()
    if threading.current_thread() is not threading.main_thread():
        yield leaving
        return
    before: dict[int, Any] = {}

    def leave(number: int, _: Any) -> None:
        _ignore_deaths(before, for_good=number == signal.SIGTERM)
        reason = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
        if at_once or leaving.requested:
            raise reason
        leaving.requested = reason
        if leaving.idle():
            raise reason

    defaults: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL}
    if not at_once:
        defaults[signal.SIGINT] = signal.default_int_handler
    for number, default in defaults.items():
        if signal.getsignal(number) is default:
            before[number] = signal.signal(number, leave)
    try:
        yield leaving
    except Exception as error:
        if leaving.requested:
            raise leaving.requested from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if leaving.requested:  # too late for a batch to see
        raise leaving.requested


def _ignore_deaths(before: dict[int, Any], for_good: bool) -> None:
    """Let workers die unseen, which torch would raise in the middle of a batch, or after it.

    ``for_good`` where the process ends: its workers may die after all else has been left.
    """
    number = getattr(signal, "SIGCHLD", None)  # None on Windows
    if number is None or not callable(signal.getsignal(number)):
        return
    handler = signal.signal(number, lambda *_: None)
    if for_good:
        before.pop(number, None)
    else:
        before.setdefault(number, handler)
