"""A fit that is killed at any pass ends, when started again, where an unbroken one does."""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from checkpoints import READ, SOLVERS, Fuse, Rationed, fit, fit_slowly, fit_with_a_worker
from daily import daily
from fresh import CONTEXT
from tiny import tiny
from torch import nn
from torch.utils.data import DataLoader

from torch_lla_em import SGD, Compute, LinearisedLaplace
from torch_lla_em.checkpoint.log import Log as PassLog
from torch_lla_em.checkpoint.partial import Partial
from torch_lla_em.data import sources as orders
from torch_lla_em.inference.learn import learn
from torch_lla_em.likelihoods import Classification
from torch_lla_em.runtime import records as persistence
from torch_lla_em.runtime.files import write_atomically

TESTS = Path(__file__).parents[1]

RUN = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs inherit it ignored
from checkpoints import Fuse, fit
fit(sys.argv[1], Fuse(int(sys.argv[3]), getattr(signal, sys.argv[4])), sys.argv[2])
"""


@pytest.mark.parametrize("solver", daily("krylov", "cg", rest=["function space"]))
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
@pytest.mark.parametrize(
    "number, passes", [("SIGKILL", 0), ("SIGKILL", 9), ("SIGTERM", 4), ("SIGINT", 4)]
)
def test_killed_processes_resume(number, passes, tmp_path):
    script = RUN.format(tests=str(TESTS))
    command = [sys.executable, "-c", script, "krylov", str(tmp_path / "run"), str(passes), number]
    died = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert died.returncode != 0
    assert not list((tmp_path / "run").glob(".writing-*"))
    assert (tmp_path / "run" / "partial.pt").exists() == (number != "SIGKILL")
    resumed = fit("krylov", Fuse(10**6), tmp_path / "run")
    whole = fit("krylov", Fuse(10**6), tmp_path / "whole")
    assert torch.equal(resumed.w_samples, whole.w_samples)


@pytest.mark.slow
def test_twenty_kills_at_random_moments_leave_the_posterior_alone(tmp_path):
    whole, moment = fit("krylov", Fuse(10**6), tmp_path / "whole"), random.Random(0)
    kills = finished = 0
    while kills < 20 or not finished:
        folder = tmp_path / f"run {finished}"
        process = CONTEXT.Process(target=fit_slowly, args=(folder,))
        process.start()
        process.join(moment.uniform(0.5, 3.0) if kills < 20 else 120)
        if process.exitcode is None:
            process.kill()
            process.join()
            kills += 1
            continue
        assert process.exitcode == 0
        resumed = fit("krylov", Fuse(1), folder)
        assert torch.equal(resumed.w_samples, whole.w_samples)
        assert torch.equal(resumed.w_lin, whole.w_lin)
        finished += 1


def test_finished_runs_return_at_once(tmp_path):
    first = fit("krylov", Fuse(10**6), tmp_path)
    again = fit("krylov", Fuse(1), tmp_path)  # reads the data once, to see that they are the same
    assert torch.equal(first.w_samples, again.w_samples)
    assert {path.name for path in tmp_path.iterdir()} == {"header.pt", "outputs.pt", "posterior.pt"}


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


@pytest.mark.parametrize("first, later", daily((1e12, 4.0), rest=[(4.0, 1e12)]))
@pytest.mark.parametrize("solver, prior", daily(("krylov", "scalar"), rest=[("cg", "layerwise")]))
def test_memory_may_be_another_at_a_restart(
    solver, prior, first, later, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("torch_lla_em.problem.setting.memory_for_vectors", lambda _: first)
    whole = fit(solver, Fuse(10**6), tmp_path / "whole", prior=prior)
    broken = 0
    while True:
        try:
            la = fit(solver, Fuse(5), tmp_path / "broken", prior=prior)
            break
        except InterruptedError:
            monkeypatch.setattr("torch_lla_em.problem.setting.memory_for_vectors", lambda _: later)
            broken += 1
    assert broken > 1
    assert torch.equal(la.w_samples, whole.w_samples)
    assert ("here are" in caplog.text) == (later < first)


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
    la = LinearisedLaplace(
        case.model, "classification", num_samples=4, curvature="network", compute=READ
    )
    with pytest.raises(ValueError, match="network weights"):
        la.fit(Fuse(10**6), progress_bar=False, checkpoint=tmp_path)


def doubled(model, x):
    return 2.0 * model(x)


def turned(model, x):
    return model(x).roll(1, dims=1)


class Restless:
    """A loader whose rows come in another order every time."""

    def __init__(self, batches, seed):
        self.case, self.batches = tiny("classification"), batches
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self):
        order = torch.randperm(len(self.case.x), generator=self.generator)
        for rows in order.tensor_split(self.batches):
            yield self.case.x[rows], self.case.y[rows]


@pytest.mark.parametrize("forward", [doubled, turned])
@pytest.mark.parametrize("passes", [2, 10**6])
def test_another_forward_is_refused(forward, passes, tmp_path):
    def run(passes, forward=None):
        fit("krylov", Fuse(passes), tmp_path, forward_fn=forward)

    if passes == 2:
        interrupted(tmp_path)
    else:
        run(passes)
    with pytest.raises(ValueError, match="outputs on the first batch differ"):
        run(10**6, forward)
    run(10**6, lambda model, x: model(x) * (1 + 1e-7))


def test_another_code_of_a_layer_is_refused(tmp_path, monkeypatch):
    case, batches = tiny("classification"), [*Rationed(5)]

    def run():
        la = LinearisedLaplace(
            case.model, "classification", num_samples=4, curvature="network", compute=READ
        )
        la.fit(batches, progress_bar=False, checkpoint=tmp_path)

    run()
    monkeypatch.setattr(nn.Tanh, "forward", lambda self, x: x.sigmoid())
    with pytest.raises(ValueError, match="outputs on the first batch differ"):
        run()


@pytest.mark.parametrize("batches", [1, 4])
def test_rows_in_another_order_are_no_other_forward(batches, tmp_path):
    first = fit("krylov", Restless(batches, 0), tmp_path)
    again = fit("krylov", Restless(batches, 1), tmp_path)
    assert torch.equal(again.w_samples, first.w_samples)


def test_other_data_are_refused(tmp_path):
    interrupted(tmp_path)
    case = tiny("classification")
    la = LinearisedLaplace(
        case.model, "classification", num_samples=4, curvature="network", compute=READ
    )
    with pytest.raises(ValueError, match="of other data"):
        la.fit([(case.x + 1.0, case.y)], progress_bar=False, checkpoint=tmp_path)


OTHERS = {
    "inputs": lambda x, y: (x + 1.0, y),
    "labels": lambda x, y: (x, (y + 1) % 3),
    "half": lambda x, y: (x[:15], y[:15]),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_other_data_are_refused_though_every_pass_is_there(other, tmp_path, monkeypatch):
    def died(*_):
        raise InterruptedError

    monkeypatch.setattr(PassLog, "finish", died)
    with pytest.raises(InterruptedError):
        fit("krylov", Fuse(10**6), tmp_path)
    monkeypatch.undo()
    case = tiny("classification")
    with pytest.raises(ValueError, match="of other data"):
        fit("krylov", [other(case.x, case.y)], tmp_path)
    whole = fit("krylov", Fuse(10**6), None)
    loader = Fuse(10**6)
    assert torch.equal(fit("krylov", loader, tmp_path).w_samples, whole.w_samples)
    assert 10**6 - loader.passes_left == 1


def test_data_that_are_read_to_be_compared_leave_the_order(tmp_path, monkeypatch):
    def run(folder):
        torch.manual_seed(0)
        la = fit("krylov", Shuffled(10**6, own=False), folder, compute=Compute())
        return la, torch.rand(1), torch.load(folder / "posterior.pt", weights_only=True)["facts"]

    whole, after, facts = run(tmp_path / "whole")
    finish = PassLog.finish
    monkeypatch.setattr(PassLog, "finish", lambda *_: None)
    with pytest.raises(FileNotFoundError):
        run(tmp_path / "broken")
    monkeypatch.setattr(PassLog, "finish", finish)
    la, then, known = run(tmp_path / "broken")
    assert torch.equal(la.w_samples, whole.w_samples)
    assert torch.equal(then, after) and torch.equal(known, facts)


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
    monkeypatch.setattr("torch_lla_em.runtime.files.write_atomically", failing)
    with pytest.raises(InterruptedError):
        fit("krylov", Fuse(8), tmp_path / "full")
    assert "cannot be written any more" in caplog.text
    monkeypatch.undo()
    resumed = fit("krylov", Fuse(10**6), tmp_path / "full")
    assert torch.equal(resumed.w_samples, whole.w_samples)


def test_a_disk_that_torch_finds_full_is_an_os_error(tmp_path, monkeypatch):
    def full(*_):
        raise RuntimeError("unexpected pos 896 vs 790")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="could not be written"):
        write_atomically({"x": torch.zeros(1)}, tmp_path / "state.pt")
    assert not list(tmp_path.iterdir())


def test_files_half_written_by_a_killed_run_are_removed(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    ours = f".writing-{socket.gethostname()}-{process.pid}-{12 * '0'}-3"
    users = ".writing-abc", "probe", "pass-words.pt"
    for name in (ours, *users):
        (tmp_path / name).write_bytes(b"half")
    fit("krylov", Fuse(10**6), tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert ours not in left and left >= set(users)


def test_files_with_names_of_ours_are_never_overwritten(tmp_path):
    (tmp_path / "partial.pt").write_bytes(b"somebody's")
    with pytest.raises(ValueError, match="folder of its own"):
        fit("krylov", Fuse(10**6), tmp_path)
    assert (tmp_path / "partial.pt").read_bytes() == b"somebody's"
    with pytest.raises(ValueError, match="names no folder"):
        fit("krylov", Fuse(10**6), "")


def test_not_a_number_is_never_recorded(tmp_path, monkeypatch):
    hessian_product, calls = Classification.hessian_product, []

    def once_wrong(self, *args):
        calls.append(1)
        return hessian_product(self, *args) * (float("nan") if len(calls) == 9 else 1.0)

    whole = fit("krylov", Fuse(10**6), tmp_path / "whole")
    monkeypatch.setattr(Classification, "hessian_product", once_wrong)
    with pytest.raises((ValueError, ArithmeticError, RuntimeError)):
        fit("krylov", Fuse(10**6), tmp_path / "broken")
    resumed = fit("krylov", Fuse(10**6), tmp_path / "broken")
    assert torch.equal(resumed.w_samples, whole.w_samples)


def test_atomic_writes_leave_the_old_file(tmp_path):
    path = tmp_path / "state.pt"
    write_atomically({"a": torch.ones(1)}, path)
    with pytest.raises(Exception):
        write_atomically({"a": lambda: None}, path)
    assert torch.load(path, weights_only=True)["a"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]


@pytest.mark.parametrize("likelihood", daily("regression", rest=["classification"]))
@pytest.mark.parametrize("solver", daily("krylov", rest=["cg"]))
def test_passes_go_on_in_their_middle(solver, likelihood, tmp_path, every_batch):
    options = {"likelihood": likelihood}
    whole = fit(solver, Rationed(10**6, likelihood), tmp_path / "whole", **options)
    runs = 0
    while True:  # six batches: all of the pass under way and one more, so the end comes nearer
        try:
            la = fit(solver, Rationed(6, likelihood), tmp_path / "broken", **options)
            break
        except InterruptedError:
            runs += 1
            assert runs < 1000
    assert runs > 4
    for name in ("w_samples", "w_lin", "prior_precision"):
        assert torch.equal(getattr(la, name), getattr(whole, name))
    assert not (tmp_path / "broken" / "partial.pt").exists()


def test_rows_that_are_summed_are_not_run_again(tmp_path, every_batch):
    with pytest.raises(InterruptedError):
        fit("krylov", Rationed(13), tmp_path)  # two passes, and three batches of the third
    shutil.copytree(
        tmp_path, tmp_path / "whole", ignore=shutil.ignore_patterns("partial.pt", "whole")
    )

    def calls(folder):
        model, seen = tiny("classification").model, []
        model.register_forward_pre_hook(lambda *_: seen.append(1))
        la = LinearisedLaplace(
            model, "classification", num_samples=4, curvature="network", compute=READ
        )
        with pytest.raises(InterruptedError):
            la.fit(Rationed(6), progress_bar=False, checkpoint=folder)
        return len(seen)

    assert calls(tmp_path / "whole") - calls(tmp_path) >= 3


def test_passes_in_another_order_begin_anew(tmp_path, every_batch):
    whole = fit("krylov", Rationed(10**6), tmp_path / "whole")
    with pytest.raises(InterruptedError):
        fit("krylov", Rationed(13), tmp_path / "broken")
    assert (tmp_path / "broken" / "partial.pt").exists()
    la = fit("krylov", Rationed(10**6, shuffled=True), tmp_path / "broken")
    # the mode goes another way then, to the same tolerance
    torch.testing.assert_close(la.w_samples, whole.w_samples, rtol=1e-2, atol=1e-3)


class Shuffled(DataLoader):
    """A shuffling loader that raises after so many batches in all."""

    def __init__(self, batches, own):
        case, generator = tiny("classification"), torch.Generator().manual_seed(5) if own else None
        rows = list(zip(case.x, case.y))
        super().__init__(rows, batch_size=5, shuffle=True, generator=generator)
        self.__dict__["left"] = [batches]

    def __iter__(self):
        for batch in super().__iter__():
            if self.left[0] == 0:
                raise InterruptedError
            self.left[0] -= 1
            yield batch


@pytest.mark.parametrize("own", daily(False, rest=[True]))
@pytest.mark.parametrize("solver", daily("krylov", rest=["sgd"]))
@pytest.mark.filterwarnings("ignore:The linear mode", "ignore:The samples")
def test_a_restart_sees_the_order_of_an_unbroken_run(solver, own, tmp_path, every_batch):
    """Also where noise is drawn again at the linear mode, and where steps follow the order."""

    def run(loader, folder):
        torch.manual_seed(0)
        if solver == "sgd":
            return descend(loader, folder, 3)
        return fit(solver, loader, folder, curvature="linear")

    whole, la, runs = run(Shuffled(10**6, own), tmp_path / "whole"), None, 0
    after = torch.rand(1)
    while la is None:
        try:
            la = run(Shuffled(30 if solver == "sgd" else 50, own), tmp_path / "broken")
        except InterruptedError:
            runs += 1
            assert runs < 40
    assert runs > 4
    assert torch.equal(la.w_samples, whole.w_samples) and torch.equal(la.w_lin, whole.w_lin)
    assert own or torch.equal(torch.rand(1), after)
    again = run(Shuffled(10**6, own), tmp_path / "broken")
    assert torch.equal(again.w_samples, whole.w_samples)
    assert own or torch.equal(torch.rand(1), after)


def test_batches_that_are_kept_come_in_their_order_at_a_restart(tmp_path, monkeypatch):
    """An unbroken run goes over them as in the third pass; a restart has to read them so."""
    recorded, left = PassLog.recorded, [0]

    def counted(log, key, device, compute):
        if not log.next_pass.exists():
            if not left[0]:
                raise InterruptedError
            left[0] -= 1
        return recorded(log, key, device, compute)

    def run(passes, folder):
        torch.manual_seed(0)
        left[0], loader = passes, Shuffled(10**6, own=False)
        return fit("krylov", loader, folder, curvature="linear", compute=Compute())

    monkeypatch.setattr(PassLog, "recorded", counted)
    whole, la, runs = run(10**6, tmp_path / "whole"), None, 0
    after = torch.rand(1)
    while la is None:
        try:
            la = run(12, tmp_path / "broken")
        except InterruptedError:
            runs += 1
            assert runs < 40
    assert runs > 2
    # what is kept of J, where its batches are, rounds otherwise than what is computed anew
    torch.testing.assert_close(la.w_samples, whole.w_samples, rtol=1e-6, atol=1e-8)
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize("loaders", [None, {}, len, [[]]])
def test_what_others_call_loaders_is_left_alone(loaders):
    class Odd(list):
        pass

    odd = Odd()
    odd.loaders = loaders
    assert len(orders.states(odd)) == 1


def descend(loader, folder, epochs=8, em_steps=0):
    solver = SGD(epochs=epochs, averaging=0.1)
    la = LinearisedLaplace(
        tiny("classification").model,
        "classification",
        solver=solver,
        curvature="network",
        compute=READ,
    )
    settings = {"em_steps": em_steps, "prior_precision": 30.0, "checkpoint": folder}
    return la.fit(loader, progress_bar=False, **settings)


@pytest.mark.filterwarnings("ignore:The linear mode", "ignore:The samples")
def test_epochs_of_sgd_are_kept(tmp_path):
    whole, la, runs = descend(Rationed(10**6), tmp_path / "whole"), None, 0
    while la is None:
        try:
            la = descend(Rationed(18), tmp_path / "broken")
        except InterruptedError:
            runs += 1
            assert runs < 100
    assert runs > 4
    assert torch.equal(la.w_samples, whole.w_samples)


@pytest.mark.filterwarnings("ignore:The linear mode", "ignore:The samples")
def test_epochs_of_sgd_go_on_in_their_middle(tmp_path, every_batch):
    whole = descend(Rationed(10**6), tmp_path / "whole", 3, em_steps=1)
    la, runs = None, 0
    while la is None:  # every solve counts batches anew, so that later runs need more
        try:
            la = descend(Rationed(12 + runs), tmp_path / "broken", 3, em_steps=1)
        except InterruptedError:
            runs += 1
            assert runs < 100
    assert runs > 10
    assert torch.equal(la.w_samples, whole.w_samples)
    assert torch.equal(la.w_lin, whole.w_lin)
    assert la.history[-1]["columns"] == pytest.approx(whole.history[-1]["columns"])


@pytest.mark.filterwarnings("ignore:The linear mode", "ignore:The samples")
def test_epochs_of_sgd_in_another_order_begin_anew(tmp_path, every_batch):
    whole = descend(Rationed(10**6), tmp_path / "whole")
    runs = 0
    while not (tmp_path / "broken" / "partial.pt").exists() or runs < 8:
        with pytest.raises(InterruptedError):
            descend(Rationed(12), tmp_path / "broken")
        runs += 1
    la = descend(Rationed(10**6, shuffled=True), tmp_path / "broken")
    torch.testing.assert_close(la.w_samples, whole.w_samples, rtol=0.1, atol=0.1)


class Clock:
    """Stands in for the module ``time``: five minutes a reading, and a jump at one of them."""

    def __init__(self, jump=0.0, at=0):
        self.jump, self.at, self.readings = jump, at, 0

    def monotonic(self):
        self.readings += 1
        return 300.0 * self.readings + self.jump * (self.readings >= self.at)


def writes_of_parts(monkeypatch, clock):
    """Return a list that grows with every part of a pass that is written, by this clock."""
    written, write = [], Partial._write
    monkeypatch.setattr("torch_lla_em.checkpoint.partial.time", clock)
    monkeypatch.setattr("torch_lla_em.checkpoint.partial.WRITES", 1.0)
    monkeypatch.setattr(Partial, "_write", lambda *args: written.append(1) or write(*args))
    return written


@pytest.mark.parametrize("jump", daily(1e9, rest=[-1e9]))
@pytest.mark.parametrize("at", daily(5, rest=[6]))  # while the first part is written, and after it
def test_clocks_may_jump(jump, at, tmp_path, monkeypatch):
    whole = fit("krylov", Rationed(10**6), tmp_path / "whole")
    counts = []
    for clock in Clock(), Clock(jump, at):
        folder = tmp_path / str(len(counts))
        written = writes_of_parts(monkeypatch, clock)
        with pytest.raises(InterruptedError):
            fit("krylov", Rationed(13), folder)
        counts.append(len(written))
        la = fit("krylov", Rationed(10**6), folder)
        assert torch.equal(la.w_samples, whole.w_samples)
        monkeypatch.undo()
    steady, jumpy = counts
    assert steady == 13 and jumpy >= 10


class Poisoned(nn.Module):
    """A network whose outputs on one batch are NaN from some call on."""

    def __init__(self, net, calls):
        super().__init__()
        self.net, self.calls = net, [calls]

    def forward(self, x):
        self.calls[0] -= 1
        return self.net(x) * (float("nan") if self.calls[0] < 0 else 1.0)


def test_not_a_number_names_its_batch_and_spares_the_checkpoint(tmp_path, every_batch):
    case = tiny("classification")
    batches = list(zip(case.x.split(7), case.y.split(7)))

    def run(calls, folder):
        model = Poisoned(case.model, calls)
        la = LinearisedLaplace(
            model, "classification", num_samples=4, curvature="network", compute=READ
        )
        return la.fit(batches, progress_bar=False, checkpoint=folder)

    whole = run(10**9, tmp_path / "whole")
    with pytest.raises(FloatingPointError, match="outputs on batch"):
        run(60, tmp_path / "broken")
    assert list((tmp_path / "broken").glob("pass-*.pt"))
    assert torch.equal(run(10**9, tmp_path / "broken").w_samples, whole.w_samples)


WITH_A_WORKER = """
import sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from checkpoints import fit_with_a_worker
fit_with_a_worker(4, sys.argv[1])
"""


@pytest.mark.slow
def test_workers_may_die(tmp_path):
    # in a process of its own: torch goes on raising the death of a worker wherever it happens to be
    command = [
        sys.executable,
        "-c",
        WITH_A_WORKER.format(tests=str(TESTS)),
        str(tmp_path / "broken"),
    ]
    died = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert died.returncode == 1 and "Error" in died.stderr  # torch says it in several ways
    assert not (tmp_path / "broken" / "posterior.pt").exists()
    whole = fit_with_a_worker(10**6, tmp_path / "whole")
    resumed = fit_with_a_worker(10**6, tmp_path / "broken")
    assert torch.equal(resumed.w_samples, whole.w_samples)


def test_settings_are_compared_to_the_last_digit(tmp_path):
    def run(precision, **options):
        case = tiny("regression")
        la = LinearisedLaplace(case.model, "regression", num_samples=4, **options)
        settings = {"em_steps": 0, "prior_precision": torch.tensor(precision).double()}
        return la.fit([(case.x, case.y)], progress_bar=False, checkpoint=tmp_path, **settings)

    run(1.00001)
    with pytest.raises(ValueError, match="its prior_precision"):
        run(1.00004)
    with pytest.raises(ValueError, match="options of the likelihood"):
        run(1.00001, sigma_noise=1.00001)


def test_a_disk_that_is_full_at_the_end_costs_no_posterior(tmp_path, monkeypatch, caplog):
    def full(state, path):
        if path.name == "posterior.pt":
            raise OSError(28, "No space left on device")
        write_atomically(state, path)

    whole = fit("krylov", Fuse(10**6), tmp_path / "whole")
    monkeypatch.setattr("torch_lla_em.runtime.files.write_atomically", full)
    la = fit("krylov", Fuse(10**6), tmp_path / "full")
    assert "cannot be written any more" in caplog.text
    assert torch.equal(la.w_samples, whole.w_samples)


@pytest.mark.parametrize("solver", ["krylov", SGD(epochs=200)])
def test_asked_to_leave_it_leaves_at_the_next_batch(solver, tmp_path):
    class Signalling(Rationed):
        def __iter__(self):
            for batch in super().__iter__():
                yield batch
                if self.left == 10**6 - 20:
                    self.asked = self.left
                    os.kill(os.getpid(), signal.SIGTERM)

    loader = Signalling(10**6)
    model = tiny("classification").model
    given = SOLVERS.get(solver) if isinstance(solver, str) else solver
    la = LinearisedLaplace(
        model, "classification", num_samples=4, solver=given, curvature="network", compute=READ
    )
    with pytest.raises(SystemExit):
        la.fit(loader, progress_bar=False, checkpoint=tmp_path, em_steps=0, prior_precision=30.0)
    assert loader.asked - loader.left <= 2


def test_batches_in_pieces_are_written_before_it_leaves(tmp_path, monkeypatch):
    monkeypatch.setattr("torch_lla_em.problem.problem._GROUP_ROWS", 2)
    draw, pieces = Classification.hessian_sqrt_product, []

    def signalling(self, *args):
        pieces.append(1)
        if len(pieces) == 8:  # of three a batch
            os.kill(os.getpid(), signal.SIGTERM)
        return draw(self, *args)

    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(Classification, "hessian_sqrt_product", signalling)
        fit("krylov", Rationed(10**6), tmp_path / "broken")
    assert rows_kept(tmp_path / "broken") == 18
    whole = fit("krylov", Rationed(10**6), tmp_path / "whole")
    resumed = fit("krylov", Rationed(10**6), tmp_path / "broken")
    assert torch.equal(resumed.w_samples, whole.w_samples)


def rows_kept(folder):
    state = torch.load(folder / "partial.pt", weights_only=True)
    return persistence.from_bytes(state["facts"])["rows"]


def die_late(number, _):
    """Be a worker that is killed when its fit has been left."""
    time.sleep(0.5)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


class Slow(torch.utils.data.Dataset):
    """Tells, and sleeps, at a row of the third pass."""

    def __init__(self, row, told, passes):
        self.case, self.row, self.told, self.passes = tiny("classification"), row, told, passes

    def __len__(self):
        return len(self.case.x)

    def __getitem__(self, row):
        if row == self.row:
            self.passes.value += 1
            if self.passes.value == 3:
                signal.signal(signal.SIGTERM, die_late)
                time.sleep(0.3)  # until all before it has been worked on
                self.told.set()
                time.sleep(60)
        return self.case.x[row], self.case.y[row]


def fit_in_a_group(folder, row, persistent, told, passes):
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    data = Slow(row, told, passes)
    loader = DataLoader(
        data, 7, num_workers=2, multiprocessing_context="fork", persistent_workers=persistent
    )
    if persistent:  # workers that know nothing of the fit
        list(loader)
    if row is None:
        told_in_the_middle_of_a_batch(told)
    fit("krylov", loader, folder)


def told_in_the_middle_of_a_batch(told):
    product, calls = Classification.hessian_product, []

    def telling(self, *args):
        calls.append(1)
        if len(calls) == 8:
            told.set()
            time.sleep(0.5)
        return product(self, *args)

    Classification.hessian_product = telling


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, row, persistent",
    [
        ("SIGTERM", 14, False),
        ("SIGTERM", None, False),
        ("SIGTERM", None, True),
        ("SIGINT", 14, True),
    ],
)
def test_signals_to_a_group_with_workers_leave_cleanly(number, row, persistent, tmp_path):
    told, passes = CONTEXT.Event(), CONTEXT.Value("i", -persistent)
    arguments = tmp_path / "broken", row, persistent, told, passes
    process = CONTEXT.Process(target=fit_in_a_group, args=arguments)
    process.start()
    assert told.wait(60)
    asked = time.monotonic()
    os.killpg(process.pid, getattr(signal, number))
    process.join(60)
    assert time.monotonic() - asked < 4.5  # torch looks every five seconds whether workers live
    assert process.exitcode == {"SIGTERM": 128 + signal.SIGTERM, "SIGINT": 1}[number]
    assert rows_kept(tmp_path / "broken") == (row or 21)
    whole = fit("krylov", Fuse(10**6), tmp_path / "whole")
    resumed = fit("krylov", Fuse(10**6), tmp_path / "broken")
    assert torch.equal(resumed.w_samples, whole.w_samples)


def exchange(layer):
    layer.weight = nn.Parameter(1.5 * layer.weight.detach())


CHANGES = {
    "larger": lambda layer: layer.weight.data.mul_(1.5),
    "other signs": lambda layer: layer.weight.data.neg_(),
    "one other sign": lambda layer: layer.bias.data[2:3].neg_(),
    "other places": lambda layer: layer.weight.data.copy_(layer.weight.data.roll(1, dims=0)),
    "exchanged": exchange,
    "in place": lambda layer: layer.bias.detach().add_(1e-3),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_weights_that_change_unseen_are_seen(change):
    case = tiny("classification")

    class Training:
        def __iter__(self):
            yield from zip(case.x.split(7), case.y.split(7))
            change(case.model[0])

    la = LinearisedLaplace(case.model, "classification", num_samples=4)
    with pytest.raises(RuntimeError, match="chang"):
        la.fit(Training(), progress_bar=False)


def test_weights_may_not_change_during_a_fit(tmp_path):
    case = tiny("classification")

    def batches():
        yield from zip(case.x.split(7), case.y.split(7))
        with torch.no_grad():
            case.model[0].bias += 1e-3

    class Training:
        def __iter__(self):
            return batches()

    la = LinearisedLaplace(
        case.model, "classification", num_samples=4, curvature="network", compute=READ
    )
    with pytest.raises(RuntimeError, match="'0.bias' was changed"):
        la.fit(Training(), progress_bar=False)


class Meddling:
    """A loader that changes the network after some batch of some pass."""

    def __init__(self, at, batch, change):
        self.case, self.passes = tiny("classification"), 0
        self.last = 0
        """The last pass that went to its end: a fit may look at the first rows once more."""

        self.at, self.batch, self.change = at, batch, change

    def __iter__(self):
        self.passes += 1
        for index, (x, y) in enumerate(zip(self.case.x.split(7), self.case.y.split(7))):
            yield x, y
            if (self.passes, index) == (self.at, self.batch):
                self.change(self.case.model[0])
        self.last = self.passes

    def fit(self, folder):
        la = LinearisedLaplace(
            self.case.model, "classification", num_samples=4, curvature="network", compute=READ
        )
        return la.fit(self, progress_bar=False, checkpoint=folder)


@pytest.mark.parametrize("change", daily("one other sign", rest=["in place"]))
@pytest.mark.parametrize("at, batch", daily((3, 0), rest=[(2, 0), ("last", 4)]))
def test_no_pass_with_changed_weights_is_kept(at, batch, change, tmp_path, every_batch):
    whole = Meddling(0, 0, None)
    expected = whole.fit(tmp_path / "whole")
    at = whole.last if at == "last" else at
    with pytest.raises(RuntimeError, match="chang"):
        Meddling(at, batch, CHANGES[change]).fit(tmp_path / "broken")
    assert not (tmp_path / "broken" / "posterior.pt").exists()
    la = Meddling(0, 0, None).fit(tmp_path / "broken")
    assert torch.equal(la.w_samples, expected.w_samples)
    assert torch.equal(la.w_lin, expected.w_lin)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_weights_may_not_change_in_the_last_pass(change):
    whole = Meddling(0, 0, None)
    whole.fit(None)
    with pytest.raises(RuntimeError, match="chang"):
        Meddling(whole.last, 4, change).fit(None)


def test_weights_may_not_change_after_the_last_pass(monkeypatch):
    case = tiny("classification")

    def and_train(*args):
        posterior = learn(*args)
        CHANGES["in place"](case.model[0])
        return posterior

    monkeypatch.setattr("torch_lla_em.laplace.learn", and_train)
    la = LinearisedLaplace(case.model, "classification", num_samples=4)
    with pytest.raises(RuntimeError, match="was changed"):
        la.fit([(case.x, case.y)], progress_bar=False)


def test_sigterm_is_given_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    fit("krylov", Fuse(10**6), tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("ignored", [False, True])
def test_handlers_of_ones_own_are_left_alone(ignored, checkpoint, tmp_path):
    called = []
    own = signal.SIG_IGN if ignored else lambda number, _: called.append(number)
    before = signal.signal(signal.SIGTERM, own)
    try:
        la = fit("krylov", Fuse(1, signal.SIGTERM), tmp_path if checkpoint else None)
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
    assert la.w_samples.isfinite().all() and called == [signal.SIGTERM] * (not ignored)


def test_a_pass_that_failed_is_asked_again_in_its_place(tmp_path):
    log, key, entry = PassLog(tmp_path, {}), torch.ones(3), {"Gw": torch.ones(2)}

    def fails():
        raise torch.OutOfMemoryError("none left")

    log.recorded(key, "cpu", lambda: entry)
    with pytest.raises(torch.OutOfMemoryError):
        log.recorded(key, "cpu", fails)
    log.recorded(key, "cpu", lambda: entry)
    assert log.position == 2 == len(list(tmp_path.glob("pass-*.pt")))
    assert all((tmp_path / f"pass-0000{number}.pt").exists() for number in range(2))
