"""How a script begins, and what a reader needs to repeat it: machine, versions, commit and command."""

import argparse
import logging
import platform
import shlex
import subprocess
import sys
import warnings
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import torch


def script_parser(doc: str, out: str) -> argparse.ArgumentParser:
    """Return the parser of a script whose lines go to a file of ``results``."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=form)
    parser.add_argument("--out", type=Path, default=Path("results") / f"{out}.jsonl")
    parser.add_argument("--report", action="store_true", help="only print what --out has")
    return parser


def begin(
    parser: argparse.ArgumentParser, arguments: list[str] | None = None
) -> argparse.Namespace:
    """Parse the arguments of a script; it runs on one thread, without warnings or messages."""
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("torch_lla_em").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    return args


def provenance(packages: tuple[str, ...]) -> dict[str, str]:
    """Return machine, versions, commit and command of this run."""
    versions = [f"Python {platform.python_version()}", *(f"{p} {version(p)}" for p in packages)]
    pairs = pairwise(sys.argv)  # without where the lines go
    arguments = [own for last, own in pairs if "--out" not in (last, own)]
    described = ["git", "describe", "--always", "--exclude=*"]
    commit = subprocess.run(described, cwd=Path(__file__).parent, capture_output=True, text=True)
    return {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} thread(s)",
        "versions": ", ".join(versions),
        "commit": commit.stdout.strip(),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments]),
    }
