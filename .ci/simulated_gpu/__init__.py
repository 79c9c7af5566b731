"""A simulated GPU: torch's own CUDA code over host memory, with CPU kernels below it."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

VERSIONS = "2.14", "2.15"
"""The versions of torch whose private names are known."""

MEMORY = 8 << 30
_SOURCE = Path(__file__).with_name("runtime.c")

library: ctypes.CDLL | None = None
"""The runtime, once it is installed."""

absent: str | None = "no CUDA device: see .ci/simulated_gpu"
"""Why there is no simulated GPU; None if there is one."""

_watching: list[Counter[tuple[str, str]]] = []
_callbacks: list[object] = []


def install() -> None:
    """Replace CUDA's runtime, before torch is imported; set ``absent`` if that is not possible."""
    global library, absent
    version = metadata.version("torch")
    headers = _headers()
    if not version.startswith(tuple(f"{known}." for known in VERSIONS)):
        absent = f"the simulated GPU supports torch {' and '.join(VERSIONS)}, not {version}"
    elif headers is None or not (compiler := shutil.which("cc") or shutil.which("gcc")):
        absent = "the simulated GPU needs a C compiler, and CUDA's headers, which triton has"
    else:
        library = ctypes.CDLL(str(_built(compiler, headers)), ctypes.RTLD_GLOBAL)
        report = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_report)
        _callbacks.append(report)
        library.gpu_setup(ctypes.c_size_t(MEMORY), report)
        from simulated_gpu import kernels  # which imports torch

        kernels.install()
        absent = None


def _headers() -> Path | None:
    triton = importlib.util.find_spec("triton")  # found, not imported
    found = Path(triton.origin).parent / "backends/nvidia/include" if triton else None
    return found if found and (found / "cuda_runtime_api.h").exists() else None


def _built(compiler: str, headers: Path) -> Path:
    mark = hashlib.sha256(_SOURCE.read_bytes() + str(headers).encode()).hexdigest()[:16]
    built = Path(tempfile.gettempdir()) / f"simulated_gpu_{os.getuid()}_{mark}.so"
    if not built.exists():
        made = f"{built}.{os.getpid()}"
        command = [compiler, "-shared", "-fPIC", "-O2", "-w", f"-I{headers}", str(_SOURCE)]
        named = "-Wl,-soname,libcuda.so.1"
        subprocess.run([*command, named, "-o", made, "-lpthread"], check=True)
        os.replace(made, built)
    return built


def _report(what: bytes) -> None:
    own = [f for f in traceback.extract_stack() if re.search(r"/torch_lla_em/", f.filename)]
    place = [f"{f.filename.rpartition('/torch_lla_em/')[2]}:{f.lineno}" for f in own[-1:]]
    for counts in _watching:
        counts[what.decode(), "".join(place) or "elsewhere"] += 1


@contextmanager
def watched() -> Iterator[Counter[tuple[str, str]]]:
    """Count what the runtime reports (synchronisations, races), by line of the library."""
    _watching.append(Counter())
    try:
        yield _watching[-1]
    finally:
        _watching.pop()


def waits(counts: Counter[tuple[str, str]]) -> int:
    """Return how often the host synchronised with the GPU."""
    return sum(n for (what, _), n in counts.items() if what.endswith(("Synchronize", "Memcpy")))


def fail_at_malloc(count: int) -> int:
    """Make the ``count``-th allocation from now on fail, once; return how many were left until the
    failure requested before."""
    requested = ctypes.c_long.in_dll(library, "gpu_fail_malloc")
    left, requested.value = requested.value, count
    return left
