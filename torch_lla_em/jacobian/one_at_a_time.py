"""A lock for the inside of networks, which a forked process does not inherit as held."""

from __future__ import annotations

import os
import threading
from types import TracebackType

# seconds; a prediction takes less, a pass over much data may take more
_WAIT = 10.0


class OneAtATime:
    """A reentrant lock. A fork waits until the thread that is inside has left.

    Otherwise the child would inherit a lock that nobody releases, and a network whose weights
    are exchanged. Where the wait is too long, the child is forked all the same, and predicting
    there is an error.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._own = threading.local()
        self._is_torn = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._before_fork,
                after_in_parent=self._after_in_parent,
                after_in_child=self._after_in_child,
            )

    def __enter__(self) -> None:
        if self._is_torn:
            raise RuntimeError(
                "This process was forked while another thread was inside a network, whose weights "
                "may be exchanged here. Start processes by torch.multiprocessing's 'spawn', or "
                "before the other thread calls fit() or predicts."
            )
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()

    def _before_fork(self) -> None:
        self._own.waited = self._lock.acquire(timeout=_WAIT)

    def _after_in_parent(self) -> None:
        if self._own.waited:
            self._lock.release()

    def _after_in_child(self) -> None:
        if self._own.waited:
            self._lock.release()
        else:
            self._lock, self._is_torn = threading.RLock(), True


ONE_AT_A_TIME = OneAtATime()
"""Inside a network others would see its substitutes, and flags are the whole process's."""
