"""The page on other libraries runs, where they are installed."""

import re
import warnings
from pathlib import Path

import pytest
import torch
from tiny import tiny

from torch_lla_em import LinearisedLaplace

PAGE = (Path(__file__).parents[2] / "docs/other_libraries.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("package", ["mapie", "torch_uncertainty"])
@pytest.mark.filterwarnings("ignore")
def test_code_runs(package, tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    (block,) = [block for block in BLOCKS if f"from {package}." in block]
    case = tiny("classification")
    la = LinearisedLaplace(case.model, "classification", num_samples=4)
    la.fit(case.x, case.y, em_steps=0, prior_precision=5.0, progress_bar=False)
    names = {"la": la, "x": case.x, "y": case.y}
    torch.manual_seed(0)
    exec(block, names)
    assert names["results"] if package != "mapie" else names["sets"].shape == (139, 2, 1)
