"""Tables of results, real tables to measure on, and the script run whole at tiny settings."""

import pytest
import tables
import torch
from methods import markdown, own_training, peers, tasks
from methods.metrics import Numbers, neighbours


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


def test_digits_are_split_disjointly_and_repeatable():
    name = "digits-unseen"
    task, again = tasks.task(name, 1), tasks.task(name, 1)
    assert torch.equal(task.train.x, again.train.x)
    assert not torch.equal(task.train.x, tasks.task(name, 2).train.x)
    rows = torch.cat([task.train.x, task.held_out.x, task.test.x]).flatten(1)
    assert len(rows) - len(rows.unique(dim=0)) <= 1
    assert task.network(0.0)(task.test.x[:2]).shape[0] == 2 and task.shifted


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


def test_neighbours_begin_with_the_row_itself():
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    groups = neighbours(x, 5)
    assert groups.shape == (5, 10) and len(groups[:, 0].unique()) == 5
    nearest = (x[groups[0, 0]] - x).norm(dim=1).argsort()
    assert torch.equal(groups[0], nearest[:10])


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
