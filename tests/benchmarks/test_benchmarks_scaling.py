"""The benchmark of ranks runs, and counts what goes over the loopback."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_every_way_to_share_out_is_measured(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from methods import markdown

    small = "--rows 8 --batch 4 --width 8 --num-samples 2 --repeats 1 --ranks 1 2".split()
    script = [sys.executable, BENCHMARKS / "scaling.py", *small, "--out", tmp_path]
    subprocess.run(list(map(str, script)), check=True, timeout=300)
    lines = markdown.read(tmp_path / "scaling.jsonl")
    shards = [line["shard"] for line in lines if (line["kind"], line["ranks"]) == ("strong", 2)]
    assert shards == ["data", "weights"]
    sent = {line["shard"]: line["bytes"] for line in lines if line["ranks"] == 2}
    assert sent["data"] >= 2  # 2 (R - 1) K P numbers, and what others send
