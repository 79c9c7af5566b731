"""What predictions score, what runs are measured by, and what is kept and shown of them."""

import json
import time
from math import log
from pathlib import Path

import report
import torch
from methods.measure import Meter
from methods.metrics import Classes, Numbers
from methods.provenance import provenance

ROOT = Path(__file__).parents[2]


def test_joint_nll_rewards_dependent_functions():
    # one of two functions knows every label, the other says the opposite
    y = torch.zeros(20, dtype=torch.long)
    right = torch.tensor([9.0, -9.0]).expand(20, 2)
    scores = Classes.of(torch.stack([right, -right])).scores(y)
    assert abs(scores["nll"] - log(2)) < 1e-4
    assert abs(scores["joint_dyadic"] - log(2) / 10) < 1e-4
    assert abs(scores["joint_ten"] - log(2) / 10) < 1e-4


def test_mutual_information_is_zero_where_functions_agree():
    agree = Classes.of(torch.ones(4, 3, 2))
    differ = Classes.of(torch.stack([torch.eye(2), -torch.eye(2)]) * 8)
    assert agree.unfamiliarity.abs().max() < 1e-6
    torch.testing.assert_close(differ.unfamiliarity, torch.full((2,), log(2)), atol=1e-2, rtol=0)


def test_gaussian_scores_match_torch():
    samples = torch.randn(50, 12, generator=torch.Generator().manual_seed(0)).double()
    numbers = Numbers.of(samples, 0.5)
    y = torch.linspace(-1, 1, 12).double()
    sd = (numbers.covariance.diagonal() + 0.25).sqrt()
    nll = -torch.distributions.Normal(numbers.mean, sd).log_prob(y).mean()
    assert abs(numbers.scores(y[:, None])["nll"] - nll.item()) < 1e-6


def test_the_meter_counts_reused_memory():
    def grown():
        with Meter() as meter:
            parts = [torch.ones(1 << 14) for _ in range(1000)]  # 64 kB each, from the heap
            assert len(parts) == 1000
            time.sleep(0.05)
        return meter.megabytes

    assert grown() > 50 and grown() > 50


def test_provenance_leaves_out_folders(monkeypatch):
    command = ["/home/me/speed.py", "--networks", "lenet", "--out", "/home/me/results"]
    command += ["--docs", "/home/me/docs", "--seeds", "1"]
    monkeypatch.setattr("sys.argv", command)
    assert provenance()["command"] == "python benchmarks/speed.py --networks lenet --seeds 1"


def test_pages_are_filled_from_what_is_kept(tmp_path):
    for path in (*ROOT.glob("docs/*.md"), ROOT / "README.md"):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(path.read_text())
    report.fill(ROOT / "benchmarks" / "results", tmp_path)
    for path in tmp_path.rglob("*.md"):
        assert path.read_text() == (ROOT / path.relative_to(tmp_path)).read_text(), path


def test_methods_that_a_run_leaves_out_stay_stored():
    line = {"kind": "classes", "set": "kept", "network": "on"}
    stored = [line | {"row": "network", "nll": 1.0}, line | {"row": "other", "nll": 2.0}]
    run = [line | {"row": "network", "nll": 3.0}]
    assert report.replaced(stored, run) == [run[0], stored[1]]
    assert report.replaced(stored, [{"row": "network"}]) == [{"row": "network"}]


def test_means_over_the_last_seeds_are_kept(tmp_path):
    seeds = [{"seed": 0, "nll": 9.0}, {"seed": 0, "nll": 1.0}, {"seed": 1, "nll": 3.0}]
    lines = [{"task": "a", "network": "n", "row": "r", "commit": "c"} | line for line in seeds]
    path = tmp_path / "mnist.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (line,) = report.kept(path)
    assert line == {"task": "a", "network": "n", "row": "r", "commit": "c", "nll": [2.0, 1.0]}
