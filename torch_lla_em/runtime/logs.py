"""Warnings of the library, collected so that they can be shown with the result."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident


@contextmanager
def collected_warnings(messages: list[str]) -> Iterator[None]:
    """Append to ``messages`` what the library warns of in this thread, each message once."""
    thread, logger = get_ident(), logging.getLogger("torch_lla_em")

    def note(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        is_new = record.thread == thread and message not in messages
        if is_new and record.levelno >= logging.WARNING:
            messages.append(message)
        return True

    # a filter, since with a handler logging would no longer write warnings to stderr by default
    logger.addFilter(note)
    try:
        yield
    finally:
        logger.removeFilter(note)
