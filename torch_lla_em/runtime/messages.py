"""The channel of all warnings, which stores each warning before it is shown."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch

logger = logging.getLogger("torch_lla_em")

CALL = "Call la.calibrate(validation_loader)"
"""The remedy in warnings about predictions as fitted; calibrated predictions do not have these
warnings."""

_IS_SHOWN: ContextVar[bool] = ContextVar("whether messages are shown", default=True)
_LISTS: ContextVar[tuple[list[str], ...]] = ContextVar("lists of messages", default=())


def or_float64(dtype: torch.dtype) -> str:
    """Return the end of a recommendation of float64; it is empty if the dtype is float64
    already."""
    return "" if dtype == torch.float64 else ", or convert the model and its data to float64"


def report(kind: Literal["log", "warn"], text: str) -> None:
    """Add a warning to the lists that collect them in this thread, then show it.

    It is stored first, independent of the settings of ``logging`` and ``warnings``.

    Args:
        kind (str): "log" for an event while a program runs; "warn" for a problem that the user's
            code should avoid.
        text (str): One or more sentences, of at most 40 words. A text is shown only once while
            warnings are collected.
    """
    lists = _LISTS.get()
    told = bool(lists) and all(text in messages for messages in lists)
    for messages in lists:
        if text not in messages:
            messages.append(text)
    if told or not _IS_SHOWN.get():
        return
    if kind == "log":
        logger.warning("%s", text)
    else:
        warnings.warn(text, stacklevel=2)


@contextmanager
def collected(messages: list[str], is_shown: bool = True) -> Iterator[None]:
    """Append the texts of ``report`` in this thread to ``messages``, each text once. Without
    ``is_shown``, which is for fits that the user has not asked for, they are not shown."""
    lists = _LISTS.set((*_LISTS.get(), messages))
    shown = _IS_SHOWN.set(is_shown and _IS_SHOWN.get())
    try:
        yield
    finally:
        _LISTS.reset(lists)
        _IS_SHOWN.reset(shown)
