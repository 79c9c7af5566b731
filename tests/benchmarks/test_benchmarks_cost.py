"""What a fit costs, and what one card does, are measured whole at a toy's size."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

for package in ("torchvision", "transformers", "laplace"):
    pytest.importorskip(package)

import card  # noqa: E402
import cost  # noqa: E402
from methods import markdown  # noqa: E402


@pytest.mark.parametrize("name", cost.PROBLEMS)
def test_networks_take_their_data(name):
    problem = cost.made(cost.PROBLEMS[name])
    assert problem.network.eval()(problem.x[:2]).shape[0] == 2
    assert len(problem.y) == len(problem.x)
    if not problem.regression:
        counts = problem.y.bincount().double()
        assert len(counts) > 1 and counts.max() < 0.8 * counts.sum()


@pytest.mark.slow
def test_parts_write_what_fits_cost(tmp_path, monkeypatch):
    small = partial(cost.mlp, rows=60, width=5)
    monkeypatch.setattr(cost, "PROBLEMS", {"mlp": small, "cnn": small})
    monkeypatch.setattr(cost, "GROWTH", {"K": [({"rows": 60, "width": 5}, 2)]})
    cost.main(["--num-samples", "2", "--out", str(tmp_path)])
    lines = markdown.read(tmp_path / "cost.jsonl")
    parts = [line["part"] for line in lines]
    assert parts == 4 * ["fits"] + 10 * ["loaders"] + ["growth"]
    for line in lines:
        assert line["epochs"] == pytest.approx(line["seconds"] / line["epoch_seconds"])
    assert lines[1]["laplace_torch"] > 0 and lines[1]["ensemble"] > 0
    again = ["--parts", "fits", "--problems", "mlp", "--before", str(tmp_path / "cost.jsonl")]
    cost.main([*again, "--num-samples", "2", "--out", str(tmp_path / "again")])
    again = markdown.read(tmp_path / "again" / "cost.jsonl")
    assert [line["before"] for line in again] == [line["epochs"] for line in lines[:2]]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_card_is_measured_whole(tmp_path, device, monkeypatch):
    monkeypatch.setattr(cost, "PROBLEMS", {"mlp": partial(cost.mlp, rows=60, width=5)})
    card.main(["--tiny", "--device", device, "--out", str(tmp_path)])
    steps = json.loads((tmp_path / "card.json").read_text())["steps"]
    known = {"fit lenet", "product lenet, eager", "launches lenet"}
    assert set(steps) == known | {"recovery", "compile lenet", "cost mlp"}
    assert not [line for lines in steps.values() for line in lines if "error" in line]
    assert steps["fit lenet"][0]["relative_certificate"] <= 1e-3
    assert steps["compile lenet"][0]["difference"] < 1e-5
    assert [line["problem"] for line in steps["cost mlp"]][1:] == ["mlp"]
    page = (tmp_path / "card.md").read_text()
    assert "| lenet | 4 | eager | 2 |" in page


def test_a_step_that_fails_is_told_and_the_rest_goes_on(tmp_path, monkeypatch):
    def fail(args):
        raise RuntimeError("no memory")

    steps = {"fit lenet": fail, "recovery": lambda args: [{"of": "it", "seconds": 1.0}]}
    monkeypatch.setattr(card, "steps", lambda args: steps)
    card.main(["--device", "cpu", "--out", str(tmp_path)])
    page = (tmp_path / "card.md").read_text()
    assert "- fit lenet: RuntimeError: no memory" in page and "| it |" in page
