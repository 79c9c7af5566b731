"""A fit that is killed at any pass ends, when started again, where an unbroken one does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tiny import tiny
from torch_lla_em import BlockCG, FunctionSpace, LinearisedLaplace
from torch_lla_em.checkpoint import write_atomically

TESTS = Path(__file__).parent

RUN = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs inherit it ignored
from test_checkpoint import Fuse, fit
fit(sys.argv[1], Fuse(int(sys.argv[3]), getattr(signal, sys.argv[4])), sys.argv[2])
"""


class Fuse:
    """A loader that kills its process, or raises, in the middle of some pass."""

    def __init__(self, passes, with_signal=None):
        self.passes_left = passes
        self.with_signal = with_signal

    def __iter__(self):
        case = tiny("classification")
        batches = list(zip(case.x.split(7), case.y.split(7)))
        yield from batches[:2]
        if self.passes_left == 0:
            if self.with_signal is None:
                raise InterruptedError
            os.kill(os.getpid(), self.with_signal)
        self.passes_left -= 1
        yield from batches[2:]


SOLVERS = {"krylov": None, "cg": BlockCG(), "function space": FunctionSpace()}


def fit(solver, loader, folder, **options):
    name = options.pop("likelihood", "classification")
    options = {"num_samples": 4, "solver": SOLVERS[solver], **options}
    la = LinearisedLaplace(tiny(name).model, name, **options)
    return la.fit(loader, progress_bar=False, checkpoint=folder)


@pytest.mark.parametrize("solver", SOLVERS)
def test_broken_runs_end_like_whole_ones(solver, tmp_path):
    whole = fit(solver, Fuse(10**6), tmp_path / "whole")
    broken = 0
    while True:  # every run does three passes more than the one before
        try:
            la = fit(solver, Fuse(3), tmp_path / "broken")
            break
        except InterruptedError:
            broken += 1
    assert broken > 3
    for name, tensor in whole.state_dict().items():
        if name != "record":  # which holds seconds
            assert torch.equal(la.state_dict()[name], tensor), name
    assert [r["columns"] for r in la.history] == [r["columns"] for r in whole.history]


@pytest.mark.slow
@pytest.mark.parametrize("number, passes", [("SIGKILL", 0), ("SIGKILL", 9), ("SIGTERM", 4), ("SIGINT", 4)])
def test_killed_processes_resume(number, passes, tmp_path):
    script = RUN.format(tests=str(TESTS))
    command = [sys.executable, "-c", script, "krylov", str(tmp_path / "run"), str(passes), number]
    died = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert died.returncode != 0
    assert not list((tmp_path / "run").glob(".writing-*"))
    resumed = fit("krylov", Fuse(10**6), tmp_path / "run")
    whole = fit("krylov", Fuse(10**6), tmp_path / "whole")
    assert torch.equal(resumed.w_samples, whole.w_samples)


def test_finished_runs_return_at_once(tmp_path):
    first = fit("krylov", Fuse(10**6), tmp_path)
    again = fit("krylov", Fuse(1), tmp_path)  # reads the data once, to see that they are the same
    assert torch.equal(first.w_samples, again.w_samples)
    assert {path.name for path in tmp_path.iterdir()} == {"header.pt", "posterior.pt"}


def test_finished_runs_of_other_data_are_refused(tmp_path):
    fit("krylov", Fuse(10**6), tmp_path)
    case = tiny("classification")
    with pytest.raises(ValueError, match="of other data"):
        fit("krylov", [(case.x[:10], case.y[:10])], tmp_path)


def test_the_same_call_twice_is_the_same_run(tmp_path):
    case = tiny("regression")
    la = LinearisedLaplace(case.model, "regression", num_samples=4)
    for _ in range(2):
        la.fit([(case.x, case.y)], progress_bar=False, checkpoint=tmp_path)
    assert la.sigma_noise != 1.0


def interrupted(tmp_path):
    with pytest.raises(InterruptedError):
        fit("krylov", Fuse(2), tmp_path)


def test_other_settings_are_refused_by_name(tmp_path):
    interrupted(tmp_path)
    with pytest.raises(ValueError, match="its seed is '0', here it is '1'"):
        fit("krylov", Fuse(10**6), tmp_path, seed=1)
    with pytest.raises(ValueError, match="its solver"):
        fit("cg", Fuse(10**6), tmp_path)


def test_other_weights_are_refused(tmp_path):
    interrupted(tmp_path)
    case = tiny("classification")
    with torch.no_grad():
        case.model[0].bias += 1e-6
    la = LinearisedLaplace(case.model, "classification", num_samples=4)
    with pytest.raises(ValueError, match="network weights"):
        la.fit(Fuse(10**6), progress_bar=False, checkpoint=tmp_path)


def test_other_data_are_refused(tmp_path):
    interrupted(tmp_path)
    case = tiny("classification")
    la = LinearisedLaplace(case.model, "classification", num_samples=4)
    with pytest.raises(ValueError, match="of other data"):
        la.fit([(case.x + 1.0, case.y)], progress_bar=False, checkpoint=tmp_path)


def test_paths_that_differ_are_refused(tmp_path):
    interrupted(tmp_path)
    path = sorted(tmp_path.glob("pass-*.pt"))[-1]
    entry = torch.load(path, weights_only=True)
    torch.save({**entry, "asked": entry["asked"] + 1.0}, path)
    with pytest.raises(ValueError, match="another path"):
        fit("krylov", Fuse(10**6), tmp_path)


def test_unwritable_folders_are_found_at_the_start(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="cannot be written to"):
        fit("krylov", Fuse(0), tmp_path / "file" / "run")


def test_a_disk_that_fills_up_costs_nothing_but_the_checkpoint(tmp_path, monkeypatch, caplog):
    calls = []

    def failing(state, path):
        calls.append(path)
        if len(calls) > 5:
            raise OSError(28, "No space left on device")
        write_atomically(state, path)

    whole = fit("krylov", Fuse(10**6), tmp_path / "whole")
    monkeypatch.setattr("torch_lla_em.checkpoint.write_atomically", failing)
    with pytest.raises(InterruptedError):
        fit("krylov", Fuse(8), tmp_path / "full")
    assert "cannot be written any more" in caplog.text
    monkeypatch.undo()
    resumed = fit("krylov", Fuse(10**6), tmp_path / "full")
    assert torch.equal(resumed.w_samples, whole.w_samples)


def test_atomic_writes_leave_the_old_file(tmp_path):
    path = tmp_path / "state.pt"
    write_atomically({"a": torch.ones(1)}, path)
    with pytest.raises(Exception):
        write_atomically({"a": lambda: None}, path)
    assert torch.load(path, weights_only=True)["a"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]


def test_sigterm_is_given_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    fit("krylov", Fuse(10**6), tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before
