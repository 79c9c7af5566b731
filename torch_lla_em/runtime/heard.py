"""What the library warns of, for those who read it later."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident


@contextmanager
def heard(said: list[str]) -> Iterator[None]:
    """Note in ``said`` what is warned of in this thread meanwhile."""
    thread, logger = get_ident(), logging.getLogger("torch_lla_em")

    def note(record: logging.LogRecord) -> bool:
        words = record.getMessage()
        if record.levelno >= logging.WARNING and record.thread == thread and words not in said:
            said.append(words)
        return True

    # no handler, beside which a message would not go to stderr by itself
    logger.addFilter(note)
    try:
        yield
    finally:
        logger.removeFilter(note)
