"""The one channel of warnings, which stores each of them before it is shown."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch

logger = logging.getLogger("torch_lla_em")

_LISTS: ContextVar[tuple[list[str], ...]] = ContextVar("lists of messages", default=())

# modules between a user's code and this function
_BETWEEN = {"contextlib", "torch", "torch_lla_em"}


def or_float64(dtype: torch.dtype) -> str:
    """Return the end of an advice that ends with float64, none in float64 itself."""
    return "" if dtype == torch.float64 else ", or convert the model and its data to float64"


def report(kind: Literal["log", "warn", "show"], text: str) -> None:
    """Add a warning to the lists that collect them in this thread, then show it.

    It is stored first, whatever the settings of ``logging`` and ``warnings``.

    Args:
        kind (str): "log" for what happens while a program runs; "warn" for what the user's code should change,
            with the line of this code; "show" for what only matters now: it is not stored.
        text (str): One or more sentences, of 40 words at most. Nothing is shown twice while it is collected.
    """
    lists = _LISTS.get() if kind != "show" else ()
    told = bool(lists) and all(text in messages for messages in lists)
    for messages in lists:
        if text not in messages:
            messages.append(text)
    if told:
        return
    if kind != "warn":
        logger.warning("%s", text)
    else:
        warnings.warn(text, stacklevel=_level_of_user())


@contextmanager
def collected(messages: list[str]) -> Iterator[None]:
    """Append to ``messages`` what ``report`` is given in this thread, each text once."""
    token = _LISTS.set((*_LISTS.get(), messages))
    try:
        yield
    finally:
        _LISTS.reset(token)


def _level_of_user() -> int:
    """Return the number of frames from the caller of this function to the user's code."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _BETWEEN:
            break
        frame, level = frame.f_back, level + 1
    return level
