"""A fit that is killed at any pass ends, when started again, where an unbroken one does."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from checkpoints import (
    READ,
    Fuse,
    Rationed,
    Shuffled,
    fit,
    fit_slowly,
    fit_with_a_worker,
    until_done,
)
from daily import daily
from fresh import CONTEXT
from tiny import tiny
from torch import nn
from torch.utils.data import DataLoader

from torch_lla_em import SGD, LinearisedLaplace
from torch_lla_em.checkpoint.log import Log as PassLog
from torch_lla_em.data import sources as orders
from torch_lla_em.inference.learn import learn
from torch_lla_em.likelihoods import Classification
from torch_lla_em.runtime import records as persistence

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
    # every run does three passes more than the one before
    la, broken = until_done(lambda _: fit(solver, Fuse(3), tmp_path / "broken"))
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

    def run(broken):
        if broken:
            monkeypatch.setattr("torch_lla_em.problem.setting.memory_for_vectors", lambda _: later)
        return fit(solver, Fuse(5), tmp_path / "broken", prior=prior)

    la, broken = until_done(run)
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


@pytest.mark.parametrize(
    "forward, passes", daily((doubled, 2), (turned, 10**6), rest=[(doubled, 10**6)])
)
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


@pytest.mark.parametrize("batches", daily(4, rest=[1]))
def test_rows_in_another_order_are_no_other_forward(batches, tmp_path):
    first = fit("krylov", Restless(batches, 0), tmp_path)
    again = fit("krylov", Restless(batches, 1), tmp_path)
    assert torch.equal(again.w_samples, first.w_samples)


def test_other_data_are_refused_though_every_pass_is_there(tmp_path, monkeypatch):
    def died(*_):
        raise InterruptedError

    monkeypatch.setattr(PassLog, "finish", died)
    with pytest.raises(InterruptedError):
        fit("krylov", Fuse(10**6), tmp_path)
    monkeypatch.undo()
    case = tiny("classification")
    with pytest.raises(ValueError, match="of other data"):
        fit("krylov", [(case.x, (case.y + 1) % 3)], tmp_path)
    whole = fit("krylov", Fuse(10**6), None)
    loader = Fuse(10**6)
    assert torch.equal(fit("krylov", loader, tmp_path).w_samples, whole.w_samples)
    assert 10**6 - loader.passes_left == 1


@pytest.mark.slow
@pytest.mark.parametrize("solver, likelihood", [("krylov", "regression"), ("cg", "classification")])
def test_passes_go_on_in_their_middle(solver, likelihood, tmp_path, every_batch):
    options = {"likelihood": likelihood}
    whole = fit(solver, Rationed(10**6, likelihood), tmp_path / "whole", **options)
    # a look ahead, all of the pass under way, and one more: the end comes nearer
    la, runs = until_done(
        lambda _: fit(solver, Rationed(7, likelihood), tmp_path / "broken", **options)
    )
    assert runs > 4
    for name in ("w_samples", "w_lin", "prior_precision"):
        assert torch.equal(getattr(la, name), getattr(whole, name))
    assert not (tmp_path / "broken" / "partial.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["krylov", "sgd"])
@pytest.mark.filterwarnings("ignore:The linear mode", "ignore:The samples")
def test_a_restart_sees_the_order_of_an_unbroken_run(solver, tmp_path, every_batch):
    """Also where noise is drawn again at the linear mode, and where steps follow the order."""

    def run(loader, folder):
        torch.manual_seed(0)
        if solver == "sgd":
            return descend(loader, folder)
        return fit(solver, loader, folder, curvature="linear")

    whole = run(Shuffled(10**6, own=False), tmp_path / "whole")
    batches = 30 if solver == "sgd" else 50
    after = torch.rand(1)
    la, runs = until_done(lambda _: run(Shuffled(batches, own=False), tmp_path / "broken"), 40)
    assert runs > 4
    assert torch.equal(la.w_samples, whole.w_samples) and torch.equal(la.w_lin, whole.w_lin)
    assert torch.equal(torch.rand(1), after)
    again = run(Shuffled(10**6, own=False), tmp_path / "broken")
    assert torch.equal(again.w_samples, whole.w_samples)
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize("loaders", [None, {}, len, [[]]])
def test_what_others_call_loaders_is_left_alone(loaders):
    class Odd(list):
        pass

    odd = Odd()
    odd.loaders = loaders
    assert len(orders.states(odd)) == 1


def descend(loader, folder, epochs=3, em_steps=0):
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The linear mode", "ignore:The samples")
def test_epochs_of_sgd_go_on_in_their_middle(tmp_path, every_batch):
    whole = descend(Rationed(10**6), tmp_path / "whole", em_steps=1)
    # every solve counts batches anew, so that later runs need more
    la, runs = until_done(
        lambda broken: descend(Rationed(12 + broken), tmp_path / "broken", em_steps=1), 100
    )
    assert runs > 10
    assert torch.equal(la.w_samples, whole.w_samples)
    assert torch.equal(la.w_lin, whole.w_lin)
    assert la.history[-1]["columns"] == pytest.approx(whole.history[-1]["columns"])


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
