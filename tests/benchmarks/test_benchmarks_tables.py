"""What predictions score, tables of results, and the script that measures on tables run whole."""

import json
import time
from math import log
from pathlib import Path

import pytest
import report
import tables
import torch
from methods import markdown, own_training, peers, tasks
from methods.measure import Meter
from methods.metrics import Classes, Numbers

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


def test_pages_are_filled_from_what_is_kept(tmp_path):
    for path in (*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "paper/paper.md"):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(path.read_text())
    report.fill(ROOT / "benchmarks" / "results", tmp_path)
    for path in tmp_path.rglob("*.md"):
        assert path.read_text() == (ROOT / path.relative_to(tmp_path)).read_text(), path


def test_means_over_the_last_seeds_are_kept(tmp_path):
    seeds = [{"seed": 0, "nll": 9.0}, {"seed": 0, "nll": 1.0}, {"seed": 1, "nll": 3.0}]
    lines = [{"task": "a", "network": "n", "row": "r", "commit": "c"} | line for line in seeds]
    path = tmp_path / "mnist.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (line,) = report.kept(path)
    assert line == {"task": "a", "network": "n", "row": "r", "commit": "c", "nll": [2.0, 1.0]}


def test_records_of_one_row_become_mean_and_standard_error():
    records = [{"row": "a", "nll": 0.1}, {"row": "b", "word": "no"}, {"row": "a", "nll": 0.3}]
    shown = markdown.table(records, ["row"], {"nll": "NLL", "word": ""}).splitlines()
    assert shown[0] == "| | NLL | |" and shown[2] == "| a | 0.200 ± 0.100 | |"
    assert shown[3] == "| b | | no |"


@pytest.mark.parametrize("name", ["vowel", "german", "digits", "friedman2", "pima:5"])
def test_tables_are_split_standardised_and_repeatable(name):
    task, again = tasks.task(name, 1), tasks.task(name, 1)
    assert torch.equal(task.test.x, again.test.x) and torch.equal(task.train.y, again.train.y)
    assert task.train.x.mean(0).abs().max() < 0.1 and len(task.held_out.x) <= 500
    permuted = task.shifted["permuted"]
    torch.testing.assert_close(permuted.sort(0).values, task.test.x.sort(0).values)
    assert (task.classes is None) == task.train.y.is_floating_point()


def test_the_sets_of_tables_are_disjoint():
    assert not set(tasks.TUNING) & set(tasks.KEPT)


def test_a_summary_is_relative_to_a_temperature():
    score = {"network": "on", "auroc": 0.6, "fit_seconds": 1.0, "accuracy": 0.8, "ece": 0.1}
    records = []
    for table, seed, ratio in (("a", 0, 4.0), ("a", 1, 1.0), ("b", 0, 0.5)):
        for row, factor in ((peers.REFERENCE, 1.0), ("other", ratio)):
            values = dict.fromkeys(tables.RATIOS, 0.3 * factor)
            records.append(score | values | {"table": table, "seed": seed, "row": row})
    reference, other = tables.lines(records)
    assert reference["nll"] == reference["worst"] == 1
    assert other["nll"] == pytest.approx(2 ** (1 / 3)) and other["worst"] == pytest.approx(2.0)
    assert other["tables"] == "a, b" and other["accuracy"] == 0


def test_the_noise_of_a_network_has_the_least_nll_on_its_rows():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 2, generator=generator), torch.randn(30, 1, generator=generator)
    rows = tasks.Rows(x, y)
    case = peers.Case(tasks.Task(rows, rows, rows, {}, None, torch.nn.Linear), [], 0, [""], 1, True)
    functions = torch.stack([x[:, :1], x[:, 1:]])
    predict = peers.averaged(case, lambda x: functions)
    least = min(
        torch.logspace(-3, 1, 400).tolist(),
        key=lambda s: Numbers.of(functions[..., 0], s).scores(y, {})["nll"],
    )
    assert predict(x).sigma == pytest.approx(least)


@pytest.mark.slow
def test_tables_run_whole(tmp_path, capsys):
    out = str(tmp_path / "tables.jsonl")
    command = ["--tables", "wine", "diabetes", "--seeds", "0", "--quick", "--out", out]
    methods = [*peers.METHODS, *own_training.MORE]
    tables.main([*command, "--ours", "num_samples=8", "--methods", *methods])
    records = markdown.read(tmp_path / "tables.jsonl")
    assert not [record for record in records if "error" in record]
    assert {record["network"] for record in records} == {"early", "on"}
    shown = capsys.readouterr().out
    assert (
        "ours (num_samples=8), calibrated" in shown
        and "regression regression: diabetes" in shown
        and "MC dropout" in shown
    )
    reference = next(r for r in tables.compared(records) if r["row"] == peers.REFERENCE)
    assert reference["nll"] == 0
