"""A lock that is handed to a waiting thread before its holder can take it again."""

from __future__ import annotations

import threading


class Turns:
    """A reentrant lock for one thread at a time, in turns: a holder that comes back waits for the next in line."""

    def __init__(self) -> None:
        self._lock, self._next = threading.Lock(), threading.Lock()
        self._owner, self._depth = 0, 0

    def acquire(self) -> None:
        """Wait for the turn of this thread."""
        if self._owner != threading.get_ident():
            with self._next:
                self._lock.acquire()
            self._owner = threading.get_ident()
        self._depth += 1

    def release(self, *_: object) -> None:
        """Let the next thread in, once for every ``acquire``."""
        self._depth -= 1
        if not self._depth:
            self._owner = 0
            self._lock.release()

    __enter__, __exit__ = acquire, release

    def release_in_child(self) -> None:
        """Release in a forked process, in which no other thread waits."""
        self._next = threading.Lock()
        self.release()
