"""The page on mixtures: its code runs, and its figures are those of the committed results."""

import json
import re
from pathlib import Path

import torch
from torch import nn

torch.set_num_threads(1)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "mixtures.md").read_text()


def test_the_code_of_the_page_runs(capsys):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(300) % 3
    x = 3 * torch.eye(3)[labels] + torch.randn(300, 3, generator=generator)
    names = {
        "model": nn.Sequential(),
        "train_loader": list(zip(x.split(50), labels.split(50), strict=True)),
        "features": x,
        "x": x,
    }
    names["model"].add_module("body", nn.Identity())
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        exec(block, names)
    assert names["density"].score(x).shape == (300,)
    assert names["divergence"].abs() < 1e-6
    torch.testing.assert_close(names["again"].log_prob(x), names["mixture"].log_prob(x))
    assert names["posterior"].parameters.expected().weights.topk(3).values.sum() > 0.85
    assert "-" in capsys.readouterr().out


def test_the_table_of_the_page_is_measured():
    results = (ROOT / "benchmarks" / "results" / "mixtures.jsonl").read_text().splitlines()
    measured = {table_row(json.loads(line)) for line in results}
    rows = [line for line in PAGE.splitlines() if line.startswith("| 1")]
    assert len(rows) >= 4
    assert set(rows) <= measured


def table_row(result):
    size = f"{result['rows']:,}".replace(",", " ")
    return (
        f"| {size} × {result['columns']}, {result['dtype']} | {result['components']} "
        f"| {result['covariance']} | {result['seconds']:.1f} | {result['sklearn_seconds']:.1f} "
        f"| {result['times_faster']:.1f} |"
    )
