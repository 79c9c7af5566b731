"""What the pages show runs: the quickstart, and every example, small."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_quickstart_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs/index.md").read_text(), re.DOTALL):
        exec(code, names)
    assert names["probs"].shape == (200, 3)
    assert (tmp_path / "posterior.pt").exists()


def test_pages_on_calibration_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for page in ("calibration", "out_of_distribution"):
        text = (ROOT / f"docs/{page}.md").read_text()
        for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            with torch.random.fork_rng():
                exec(code, names)
    la, X, prediction = names["la"], names["X"], names["prediction"]
    assert (tmp_path / "ensemble.pt").exists()
    assert prediction.prediction_set(0.9).shape == (len(X) - 1000, 10)
    shares = [la.is_ood(x).float().mean() for x in (X[1000:], 3 * X[1000:])]
    assert shares[0] < 0.15 and shares[1] > 0.5, shares


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_code_cell_has_its_output(path):
    shown = json.loads((path.parent / "shown" / f"{path.stem}.json").read_text())
    code = re.findall(r"^# %%$", path.read_text(), re.MULTILINE)
    assert len(shown["outputs"]) == len(code), f"run: python docs/pages.py {path.stem}"
    for output in shown["outputs"]:
        assert all((path.parent / "shown" / picture).exists() for picture in output["pictures"])


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(path, tmp_path):
    environment = {**os.environ, "TINY": "1", "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(path)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr


def test_every_room_and_example_is_in_the_contents():
    contents = (ROOT / "mkdocs.yml").read_text()
    for face in (ROOT / "torch_lla_em").glob("*/__init__.py"):
        assert f"api/{face.parent.name}.md" in contents
    for path in EXAMPLES:
        assert f"tutorials/{path.stem}.md" in contents
