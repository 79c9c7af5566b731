"""Passes that are kept are not made again, and give what an unbroken run gives: without a network."""

import os
import signal

import pytest
import torch
from checkpoints import Rationed, Shuffled, until_done
from faked_passes import FakeFit, descend, power
from torch.testing import assert_close

from torch_lla_em.checkpoint.log import Log
from torch_lla_em.runtime import files, leaving_cleanly

ENOUGH = 10**6


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    """Nothing here outlives a power failure."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def frugal(fit):
    """Power, from what was found on the way if memory lasted there."""

    def run():
        found = power(fit, 2)
        fit.room()
        return found

    fit.room = getattr(fit, "room", lambda: None)
    found, shortage = fit.record.attempt(run)
    return power(fit, 2) + (0.0 if shortage else found)


METHODS = {"passes": power, "epochs": descend, "decisions": frugal}
method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def left_at(batches, folder, method=power, **options):
    """The fit that broke off when so many batches had been read."""
    fit = FakeFit(Rationed(batches), **options)
    with pytest.raises(InterruptedError):
        fit.run(folder, method)
    return fit


@method
@pytest.mark.parametrize("parts", [True, False])
def test_a_run_that_ends_at_any_batch_goes_on_there(method, parts, tmp_path, request):
    if parts:
        request.getfixturevalue("every_batch")
    whole = FakeFit(Rationed(ENOUGH))
    expected = whole.run(tmp_path / "whole", method)
    for batches in range(0, whole.local.worked, 4):  # passes have five
        folder = tmp_path / str(batches)
        broken, again = left_at(batches, folder, method), FakeFit(Rationed(ENOUGH))
        assert torch.equal(again.run(folder, method), expected)
        lost = 0 if parts else batches % 5
        assert broken.local.worked + again.local.worked == whole.local.worked + lost
        assert again.cost.columns == pytest.approx(whole.cost.columns)
        assert not (folder / "partial.pt").exists()


@method
def test_a_run_may_break_off_again_and_again(method, tmp_path, every_batch):
    expected = FakeFit(Rationed(ENOUGH)).run(tmp_path / "whole", method)
    found, runs = until_done(lambda _: FakeFit(Rationed(6)).run(tmp_path / "broken", method), 40)
    assert torch.equal(found, expected) and runs >= 3


@pytest.mark.parametrize("method", [power, descend])
def test_rows_in_another_order_begin_their_pass_anew(method, tmp_path, every_batch):
    expected = FakeFit(Rationed(ENOUGH)).run(tmp_path / "whole", method)
    left_at(13, tmp_path / "broken", method)
    assert (tmp_path / "broken" / "partial.pt").exists()
    torch.manual_seed(0)
    again = FakeFit(Rationed(ENOUGH, shuffled=True))
    found = again.run(tmp_path / "broken", method)
    assert again.local.worked == (15 if method is power else 10)  # passes of five batches
    if method is power:
        assert_close(found, expected)
    else:
        assert again.cost.columns == 4 * 5


@method
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_a_restart_sees_the_order_of_an_unbroken_run(keep, own, method, tmp_path, every_batch):
    """Also where batches are kept, in the order of the third pass."""

    def run(batches, folder):
        torch.manual_seed(0)

        def meanwhile(worked, sums):
            if worked > batches:
                raise InterruptedError

        return FakeFit(Shuffled(ENOUGH, own), meanwhile, keep).run(folder, method)

    expected = run(ENOUGH, tmp_path / "whole")
    after = torch.rand(1)
    found, runs = until_done(lambda _: run(5, tmp_path / "broken"), 40)
    assert runs > 3 and torch.equal(found, expected)
    assert own or torch.equal(torch.rand(1), after)
    assert torch.equal(run(0, tmp_path / "broken"), expected)  # which is finished
    assert own or torch.equal(torch.rand(1), after)


def test_memory_ends_at_a_restart_where_it_ended(tmp_path):
    def ends():
        raise torch.OutOfMemoryError("none left")

    short = FakeFit(Rationed(ENOUGH))
    short.room = ends
    expected = short.run(tmp_path / "short", frugal)
    assert not torch.equal(expected, FakeFit(Rationed(ENOUGH)).run(tmp_path / "whole", frugal))
    broken = FakeFit(Rationed(12))
    broken.room = ends
    with pytest.raises(InterruptedError):
        broken.run(tmp_path / "broken", frugal)
    again = FakeFit(Rationed(ENOUGH))
    assert torch.equal(again.run(tmp_path / "broken", frugal), expected)


def test_a_pass_that_failed_is_asked_again_in_its_place(tmp_path):
    log, key, entry = Log(tmp_path, {}), torch.ones(3), {"Gw": torch.ones(2)}

    def fails():
        raise torch.OutOfMemoryError("none left")

    log.recorded(key, "cpu", lambda: entry)
    with pytest.raises(torch.OutOfMemoryError):
        log.recorded(key, "cpu", fails)
    log.recorded(key, "cpu", lambda: entry)
    assert log.position == 2 == len(list(tmp_path.glob("pass-*.pt")))
    assert all((tmp_path / f"pass-0000{number}.pt").exists() for number in range(2))


def test_paths_that_differ_are_refused(tmp_path):
    left_at(12, tmp_path)
    path = sorted(tmp_path.glob("pass-*.pt"))[-1]
    entry = torch.load(path, weights_only=True)
    torch.save({**entry, "asked": entry["asked"] + 1.0}, path)
    with pytest.raises(ValueError, match="another path"):
        FakeFit(Rationed(ENOUGH)).run(tmp_path)


class Other(Rationed):
    """Other rows than those of a run before."""

    def __init__(self, change):
        super().__init__(ENOUGH)
        self.change = change

    def __iter__(self):
        for x, y in super().__iter__():
            yield self.change(x, y)


OTHERS = {
    "inputs": lambda x, y: (x + 1.0, y),
    "labels": lambda x, y: (x, (y + 1) % 3),
    "half": lambda x, y: (x[:3], y[:3]),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("there", ["some passes", "every pass", "the posterior"])
def test_other_data_are_refused(there, other, tmp_path, monkeypatch):
    if there == "some passes":
        left_at(12, tmp_path)
    else:
        with monkeypatch.context() as patched:
            if there == "every pass":
                patched.setattr(Log, "finish", lambda *_: None)
            FakeFit(Rationed(ENOUGH)).run(tmp_path)
    with pytest.raises(ValueError, match="of other data"):
        FakeFit(Other(other)).run(tmp_path)
    again = FakeFit(Rationed(ENOUGH))
    again.run(tmp_path)
    assert (again.local.worked == 0) == (there != "some passes")


def test_data_that_are_read_to_be_compared_leave_the_order(tmp_path, monkeypatch):
    def run():
        torch.manual_seed(0)
        fit = FakeFit(Shuffled(ENOUGH, own=False), keep=True)
        return fit.run(tmp_path), torch.rand(1), fit.data.facts()["orders"], fit.data.num_reads

    with monkeypatch.context() as patched:
        patched.setattr(Log, "finish", lambda *_: None)
        expected, after, orders, _ = run()
    found, then, again, reads = run()
    assert torch.equal(found, expected) and reads == 1
    assert torch.equal(then, after) and again == orders


def test_not_a_number_is_never_kept(tmp_path, every_batch):
    def wrong(worked, sums):
        if worked >= 8:
            sums["Gw"].fill_(torch.nan)

    expected = FakeFit(Rationed(ENOUGH)).run(tmp_path / "whole")
    with pytest.raises(FloatingPointError):
        FakeFit(Rationed(ENOUGH), wrong).run(tmp_path / "broken")
    again = FakeFit(Rationed(ENOUGH))
    assert torch.equal(again.run(tmp_path / "broken"), expected)
    assert again.local.worked == 25 - 5


def test_no_part_with_changed_weights_is_kept(tmp_path, every_batch):
    def changed():
        raise RuntimeError("The network was changed.")

    fit = FakeFit(Rationed(ENOUGH))
    fit.local.refuse_changed_weights = changed
    with pytest.raises(RuntimeError, match="changed"):
        fit.run(tmp_path)
    assert not (tmp_path / "partial.pt").exists()


@pytest.mark.parametrize("method", [power, descend])
def test_asked_to_leave_it_leaves_after_the_batch(method, tmp_path):
    def asked(worked, sums):
        if worked == 8:
            os.kill(os.getpid(), signal.SIGTERM)

    expected = FakeFit(Rationed(ENOUGH)).run(tmp_path / "whole", method)
    fit = FakeFit(Rationed(ENOUGH), asked)
    with pytest.raises(SystemExit), leaving_cleanly(at_once=False) as fit.leaving:
        fit.run(tmp_path / "broken", method)
    again = FakeFit(Rationed(ENOUGH))
    assert torch.equal(again.run(tmp_path / "broken", method), expected)
    assert fit.local.worked == 8 and again.local.worked == (25 if method is power else 20) - 8


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("ignored", [False, True])
def test_handlers_of_ones_own_are_left_alone(ignored, at_once):
    called = []
    own = signal.SIG_IGN if ignored else lambda number, _: called.append(number)
    before = signal.signal(signal.SIGTERM, own)
    try:
        with leaving_cleanly(at_once):
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
    assert called == [signal.SIGTERM] * (not ignored)


@pytest.mark.parametrize("took, writes", [(0.0, 5), (10.0, 5), (30.0, 1)])
def test_parts_are_written_rarely_where_writes_take_long(took, writes, tmp_path, monkeypatch):
    """At most every 300 s, and 5 % of the time; batches take 100 s, in five passes of five."""
    now, written, write = [0.0], [], files.write_atomically

    def timed(state, path):
        write(state, path)
        if path.name == "partial.pt":
            now[0] += took
            written.append(path)

    def meanwhile(worked, sums):
        now[0] += 100.0

    monkeypatch.setattr("torch_lla_em.checkpoint.partial.time.monotonic", lambda: now[0])
    monkeypatch.setattr(files, "write_atomically", timed)
    FakeFit(Rationed(ENOUGH), meanwhile).run(tmp_path)
    assert len(written) == writes
