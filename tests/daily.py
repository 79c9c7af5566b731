"""Which of a test's cases a plain run takes: the first, and what it says."""

import pytest


def daily(*cases, rest):
    """Return the cases, and the rest marked slow."""
    as_tuple = [case if isinstance(case, tuple) else (case,) for case in rest]
    return [*cases, *(pytest.param(*case, marks=pytest.mark.slow) for case in as_tuple)]
