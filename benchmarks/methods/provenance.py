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
    versions = [f"Python {platform.python_version()}", *(f"{p} {version(p)}" for p in packages)]
    described = ["git", "describe", "--always", "--exclude=*"]
    commit = subprocess.run(described, cwd=Path(__file__).parent, capture_output=True, text=True)
    return {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} thread(s)",
        "versions": ", ".join(versions),
        "commit": commit.stdout.strip(),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }
