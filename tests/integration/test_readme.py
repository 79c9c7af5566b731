"""What the README says is true: its example runs, its figures are the committed ones."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from daily import daily

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
NUMBER = re.compile(r"\d+\.\d+")


@pytest.mark.parametrize("threads", daily(1, rest=[2]))
def test_example_prints_what_is_shown(threads, capsys):
    pytest.importorskip("sklearn")
    code, shown = re.findall(r"```(?:python|text)\n(.*?)```", README, re.DOTALL)
    assert len(code.splitlines()) <= 25
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        exec(code, {})
    finally:
        torch.set_num_threads(before)
    printed = capsys.readouterr().out
    assert NUMBER.sub("", printed) == NUMBER.sub("", shown)
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (printed, shown)]
    # rounding differs between machines, and a training magnifies it
    assert numbers[0] == pytest.approx(numbers[1], rel=0.1)
    network, posterior, seen, unseen = numbers[0]
    assert posterior < network and unseen > 5 * seen


def test_table_is_the_committed_result():
    lines = (ROOT / "benchmarks/results/digits.jsonl").read_text().splitlines()
    expected = table([json.loads(line) for line in lines])
    shown = re.search(r"<!-- digits -->\n(.*?)<!-- /digits -->", README, re.DOTALL).group(1)
    assert shown == expected


def table(records):
    columns = ["accuracy", "NLL", "joint NLL", "rotated", "noised", "shuffled"]
    rows = [f"| | {' | '.join(columns)} |", "|---" * 7 + "|"]
    for record in records:
        figures = " | ".join(f"{record[column]:.3f}" for column in columns)
        rows.append(f"| {record['method']} | {figures} |")
    return "\n".join(rows) + "\n"


def test_linked_files_exist():
    for path in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / path).exists(), path


def test_readme_is_short():
    assert len(README.splitlines()) <= 90


def test_every_room_has_a_line():
    rooms = re.findall(r"^\| `([a-z]+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    faces = (ROOT / "torch_lla_em").glob("*/__init__.py")
    assert sorted(rooms) == sorted(face.parent.name for face in faces)


def test_import_needs_no_torchvision():
    code = "import sys; sys.modules['torchvision'] = None; import torch_lla_em"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.slow
def test_demo_runs_with_another_solver(tmp_path):
    command = [sys.executable, "benchmarks/digits.py", "--solver", "cg"]
    command += ["--num-samples", "4", "--seed", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "linearised Laplace, calibrated" in done.stdout
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".jsonl"}
