"""The scripts that take a --device run on a card, at a toy's size."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

for package in ("torchvision", "torchmetrics", "sklearn", "matplotlib"):
    pytest.importorskip(package)

import digits  # noqa: E402
import speed  # noqa: E402
from methods import markdown  # noqa: E402

pytestmark = pytest.mark.cuda


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_digits(tmp_path, monkeypatch):
    load, train = digits.load, digits.train
    few = lambda part: digits.Split(part.x[:60], part.y[:60])  # noqa: E731
    monkeypatch.setattr(digits, "load", lambda device: map(few, load(device)))
    monkeypatch.setattr(digits, "train", partial(train, epochs=15))
    options = ["--device", "cuda", "--num-samples", "4", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["digits.py", *options])
    digits.main()
    lines = markdown.read(tmp_path / "digits.jsonl")
    assert len(lines) == 5 and all(line["machine"] for line in lines)
    assert (tmp_path / "digits.png").exists()


def test_speed(monkeypatch, capsys):
    options = ["--networks", "lenet", "--batch", "4", "--columns", "1", "2", "--repeats", "1"]
    for means in speed.MEANS:
        own = [*options, "--device", "cuda", "--means", means, "--child"]
        monkeypatch.setattr(sys, "argv", ["speed.py", *own])
        speed.main()
        lines = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert [line["columns"] for line in lines] == [1, 2]
        assert all(line["peak_gb"] > 0 for line in lines)
