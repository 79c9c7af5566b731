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

_IS_QUIET: ContextVar[bool] = ContextVar("whether nothing is shown", default=False)
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
    if told or _IS_QUIET.get():
        return
    if kind == "log":
        logger.warning("%s", text)
    else:
        warnings.warn(text, stacklevel=2)


@contextmanager
def collected(messages: list[str]) -> Iterator[None]:
    """Append the texts of ``report`` in this thread to ``messages``, each text once."""
    token = _LISTS.set((*_LISTS.get(), messages))
    try:
        yield
    finally:
        _LISTS.reset(token)


@contextmanager
def quiet() -> Iterator[None]:
    """Show nothing that ``report`` is given in this thread: for a fit that nobody has asked for."""
    token = _IS_QUIET.set(True)
    try:
        yield
    finally:
        _IS_QUIET.reset(token)
