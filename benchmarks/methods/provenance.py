"""What a reader needs to repeat a run: machine, versions, commit and command."""

import json
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


def save(record: dict, path: Path) -> None:
    """Write a record that grows part by part, with what a reader needs to repeat it."""
    origin = provenance(("torch", "scikit-learn"))
    for key, one in (("commands", "command"), ("commits", "commit"), ("machines", "machine")):
        earlier = record.get(key, [record[one]] if one in record else [])
        record[key] = sorted({*earlier, origin.pop(one)})
    record.pop("machine", None)  # of one run alone
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record | origin) + "\n")


def processor() -> str:
    """Return the processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "")


def source(record: dict) -> str:
    """Return commands, machine, versions and commits of a record, in one sentence."""
    commands = ", ".join(f"`{command}`" for command in record["commands"])
    commits = ", ".join(record["commits"])
    machines = " and ".join(record.get("machines") or [record["machine"]])
    return f"{commands}; {machines}; {record['versions']}; commit {commits}."
