"""Which cases of a test run every day; the others are marked slow."""

import pytest


def daily(*cases, rest):
    """Return the cases, followed by the rest, which is marked slow."""
    as_tuple = [case if isinstance(case, tuple) else (case,) for case in rest]
    return [*cases, *(pytest.param(*case, marks=pytest.mark.slow) for case in as_tuple)]
