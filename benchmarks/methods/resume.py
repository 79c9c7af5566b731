"""Measurements that continue from their file: the loop of the benchmarks that take hours."""

from collections.abc import Callable, Iterable
from pathlib import Path

from methods import markdown


def resume(
    path: Path,
    cases: Iterable[dict],
    measure: Callable[..., Iterable[dict]],
    origin: dict,
) -> list[dict]:
    """Measure every case that has no record in the file, and return all records of the file.

    ``measure`` is called with a case's values by name. A case's records are appended together, each
    with the case, so that a killed run repeats only the case in which it was killed.
    """
    done = markdown.read(path)
    for case in cases:
        if not any(case.items() <= record.items() for record in done):
            markdown.append(path, [case | record for record in measure(**case)], origin)
            print(*case.values(), flush=True)
    return markdown.read(path)
