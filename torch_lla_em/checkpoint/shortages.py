"""Where memory ended between passes, kept so that a restart goes on without the same things."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from torch_lla_em.runtime import with_room

T = TypeVar("T")


class Log(Protocol):
    """The log of passes that shortages have their places in."""

    position: int

    def read_shortages(self) -> list[list[int]]: ...

    def write_shortages(self, known: list[list[int]]) -> None: ...


class KnownShortage(MemoryError):
    """Memory ended here in the run that is gone on with."""


class Shortages:
    """Calls that memory ended in, in order, each known by its number and its place in a log.

    A restart reads products instead of computing them, so that memory may last: each call ends
    there as it did at first, and whoever made room then makes it again.
    """

    def __init__(self, log: Log):
        self._log = log
        self._calls = self._met = 0
        self._known = log.read_shortages()
        """Of each the passes before it, the last call begun, and the call that made room."""

    def with_room(self, run: Callable[[], T], make_room: Callable[[], bool]) -> T:
        """Return the result of ``run``, again as often as memory ends and room can be made."""
        self._calls += 1
        own = self._calls

        def checked() -> T:
            self.meet()
            result = run()
            self.meet()
            return result

        def makes_room() -> bool:
            known = self._next
            if (known and known[2] != own) or not make_room():
                return False
            if known:
                self._calls = known[1]
            else:
                self._note([self._log.position, self._calls, own])
            self._met += 1
            return True

        return with_room(checked, makes_room)

    def meet(self) -> None:
        """Raise where memory ended in the run that is gone on with."""
        if self._next:
            raise KnownShortage("Memory ended here before the restart.")

    @property
    def _next(self) -> list[int] | None:
        """The shortage that was met here, if one is known."""
        if self._met == len(self._known):
            return None
        position, calls, _ = known = self._known[self._met]
        return known if position == self._log.position and calls <= self._calls else None

    def _note(self, shortage: list[int]) -> None:
        self._known = [*self._known[: self._met], shortage]
        self._log.write_shortages(self._known)
