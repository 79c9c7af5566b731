"""Contexts for settings of the whole process: the precision of matrix products, and turns of
threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 in matrix products and convolutions on CUDA devices."""
    cudnn: Any = torch.backends.cudnn
    # flags, each with the value that it would inherit; before torch 2.9 flags do not inherit
    flags: list[tuple[Any, str, str | None]] = []
    if hasattr(torch.backends, "fp32_precision"):
        for part in (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn):
            flags.append((part, "fp32_precision", cudnn.fp32_precision))
    else:
        flags += [(part, "allow_tf32", None) for part in (torch.backends.cuda.matmul, cudnn)]
    values = [getattr(flag, name) for flag, name, _ in flags]
    # inherited values stay inherited
    before = [
        own if own != inherited else "none"
        for own, (_, _, inherited) in zip(values, flags, strict=True)
    ]
    try:
        older = [cudnn.allow_tf32]  # torch.export reads it, and it must agree with the others
    except RuntimeError:
        older = []

    def set_all(old: bool, values: list[Any]) -> None:
        if older:
            cudnn.allow_tf32 = old
        for (flag, name, _), value in zip(flags, values, strict=True):
            setattr(flag, name, value)

    named = "tf32" if allowed else "ieee"
    set_all(allowed, [allowed if inherited is None else named for _, _, inherited in flags])
    try:
        yield
    finally:
        set_all(any(older), before)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Compute in the dtype of the tensors, also inside the user's ``torch.autocast``."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return nullcontext()  # entering it takes no time
    return torch.autocast(kind, enabled=False)


class Turns:
    """A reentrant, fair lock: a thread that releases it and acquires it again waits until the next
    thread in line has had its turn."""

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


ONE_AT_A_TIME = Turns()
"""The lock that is held during a call, because other threads would see replaced weights and changed
flags of the process."""

if hasattr(os, "register_at_fork"):
    # a fork waits for other threads, as the child would inherit replaced weights
    os.register_at_fork(
        before=ONE_AT_A_TIME.acquire,
        after_in_parent=ONE_AT_A_TIME.release,
        after_in_child=ONE_AT_A_TIME.release_in_child,
    )
