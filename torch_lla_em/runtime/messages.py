"""The one channel of warnings, which stores each of them before it is shown."""

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
"""The remedy in warnings about predictions as fitted, which calibrated ones do not have."""

_LISTS: ContextVar[tuple[list[str], ...]] = ContextVar("lists of messages", default=())


def or_float64(dtype: torch.dtype) -> str:
    """Return the end of an advice that ends with float64, none in float64 itself."""
    return "" if dtype == torch.float64 else ", or convert the model and its data to float64"


def report(kind: Literal["log", "warn"], text: str) -> None:
    """Add a warning to the lists that collect them in this thread, then show it.

    It is stored first, whatever the settings of ``logging`` and ``warnings``.

    Args:
        kind (str): "log" for what happens while a program runs; "warn" for what the user's code
            should change.
        text (str): One or more sentences, of 40 words at most. Nothing is shown twice while it is
            collected.
    """
    lists = _LISTS.get()
    told = bool(lists) and all(text in messages for messages in lists)
    for messages in lists:
        if text not in messages:
            messages.append(text)
    if told:
        return
    if kind == "log":
        logger.warning("%s", text)
    else:
        warnings.warn(text, stacklevel=2)


@contextmanager
def collected(messages: list[str]) -> Iterator[None]:
    """Append to ``messages`` what ``report`` is given in this thread, each text once."""
    token = _LISTS.set((*_LISTS.get(), messages))
    try:
        yield
    finally:
        _LISTS.reset(token)
