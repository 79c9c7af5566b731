"""A lock for calls of networks, which is free in a forked process."""

from __future__ import annotations

import os
import threading

ONE_AT_A_TIME = threading.RLock()
"""Held during a call: other threads would see replaced weights, and flags of the whole process."""

if hasattr(os, "register_at_fork"):
    # a fork waits for other threads, as the child would inherit replaced weights
    os.register_at_fork(
        before=ONE_AT_A_TIME.acquire,
        after_in_parent=ONE_AT_A_TIME.release,
        after_in_child=ONE_AT_A_TIME.release,
    )
