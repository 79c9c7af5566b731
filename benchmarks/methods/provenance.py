"""What a reader needs to repeat a run: machine, versions, commit and command."""

import platform
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch

PACKAGES = ("torch", "torchmetrics", "laplace-torch", "scikit-learn")


def provenance(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Return machine, versions, commit and command of this run."""
    return {
        "machine": f"{platform.machine()}, {processor()}, {torch.get_num_threads()} thread(s)",
        "versions": ", ".join(
            [f"Python {platform.python_version()}", *(f"{p} {version(p)}" for p in packages)]
        ),
        "commit": _commit(),
        "command": shlex.join(
            ["python", f"benchmarks/{Path(sys.argv[0]).name}", *_told(sys.argv[1:])]
        ),
    }


def _commit() -> str:
    command, here = ["git", "rev-parse", "--short", "HEAD"], Path(__file__).parent
    try:
        return subprocess.run(command, cwd=here, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git here
        return ""


def _told(arguments: list[str]) -> list[str]:
    """Return what matters of a command: not the folders that results and pages went to."""
    left_out = [i for i, word in enumerate(arguments) if word in ("--out", "--docs")]
    return [word for i, word in enumerate(arguments) if i not in left_out and i - 1 not in left_out]


def processor() -> str:
    """Return the processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "")
