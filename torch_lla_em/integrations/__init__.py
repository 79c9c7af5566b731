"""Other libraries: one module for each, which needs its library."""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["needs"]


@contextmanager
def needs(library: str) -> Iterator[None]:
    """Raise an error with the command that installs a library if it cannot be imported."""
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"This module needs {library}: pip install torch_lla_em[{library}]."
        ) from error
