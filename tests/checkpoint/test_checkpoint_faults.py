"""A folder that fails, is damaged or shared costs passes at most: never the fit, nor its result."""

import errno
import io
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import Fuse, Rationed, fit
from faked_passes import FakeFit
from tiny import tiny

from torch_lla_em.checkpoint import FirstOutputs, Log
from torch_lla_em.data import Identity
from torch_lla_em.runtime import files

ENOUGH = 10**6


def faked(folder):
    return FakeFit(Rationed(ENOUGH)).run(folder)


class BrokenFolder:
    """Stands in for the calls that change a folder, and has them fail from some time on."""

    def __init__(self, monkeypatch, number=errno.EROFS):
        self.broken, self.number = False, number
        for name in ("unlink", "remove", "replace", "open"):
            monkeypatch.setattr(os, name, self._failing(getattr(os, name)))

    def _failing(self, call):
        def changed(path, *args, **options):
            writes = call.__name__ != "open" or args[0] & os.O_CREAT
            if self.broken and writes:
                raise OSError(self.number, os.strerror(self.number), path)
            return call(path, *args, **options)

        return changed


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.EACCES])
def test_folders_that_break_during_a_fit_cost_no_fit(
    number, tmp_path, monkeypatch, caplog, every_batch
):
    expected, folder = faked(tmp_path / "whole"), BrokenFolder(monkeypatch, number)

    def breaking(worked, sums):
        folder.broken |= worked == 13

    found = FakeFit(Rationed(ENOUGH), breaking).run(tmp_path / "broken")
    assert "cannot be written any more" in caplog.text
    assert torch.equal(found, expected)
    folder.broken = False
    assert (tmp_path / "broken" / "partial.pt").exists()
    assert torch.equal(faked(tmp_path / "broken"), expected)


def test_passes_that_cannot_be_removed_are_no_fault(tmp_path, monkeypatch):
    folder, replace = BrokenFolder(monkeypatch), os.replace

    def breaking(source, path):
        replace(source, path)
        folder.broken = Path(path).name == "posterior.pt"

    monkeypatch.setattr(os, "replace", breaking)
    first = faked(tmp_path)
    assert list(tmp_path.glob("pass-*.pt"))
    folder.broken = False
    assert torch.equal(faked(tmp_path), first)


@pytest.mark.parametrize("first", ["pass-00002.pt", "posterior.pt"])
def test_a_disk_that_fills_up_costs_nothing_but_the_checkpoint(
    first, tmp_path, monkeypatch, caplog
):
    write = files.write_atomically

    def failing(state, path):
        if path.name == first:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(state, path)

    expected = faked(tmp_path / "whole")
    with monkeypatch.context() as patched:
        patched.setattr(files, "write_atomically", failing)
        assert torch.equal(faked(tmp_path / "full"), expected)
    assert "cannot be written any more" in caplog.text
    again = FakeFit(Rationed(ENOUGH))
    assert torch.equal(again.run(tmp_path / "full"), expected)
    assert again.local.worked == (15 if first.startswith("pass") else 0)


def test_unwritable_folders_are_found_at_the_start(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="cannot be written to"):
        Log(tmp_path / "file" / "run", {})


def test_files_half_written_by_a_killed_run_are_removed(tmp_path):
    ours = f".writing-{32 * '0'}"
    users = ".writing-abc", "probe", "pass-words.pt"
    for name in (ours, *users):
        (tmp_path / name).write_bytes(b"half")
    faked(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert ours not in left and left >= set(users)


def test_files_with_names_of_ours_are_never_overwritten(tmp_path):
    (tmp_path / "partial.pt").write_bytes(b"somebody's")
    with pytest.raises(ValueError, match="folder of its own"):
        Log(tmp_path, {})
    assert (tmp_path / "partial.pt").read_bytes() == b"somebody's"
    with pytest.raises(ValueError, match="names no folder"):
        Log("", {})


def test_a_disk_that_torch_finds_full_is_an_os_error(tmp_path, monkeypatch):
    def full(*_):
        raise RuntimeError("unexpected pos 896 vs 790")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="could not be written"):
        files.write_atomically({"x": torch.zeros(1)}, tmp_path / "state.pt")
    assert not list(tmp_path.iterdir())


def test_atomic_writes_leave_the_old_file(tmp_path):
    path = tmp_path / "state.pt"
    files.write_atomically({"a": torch.ones(1)}, path)
    with pytest.raises(Exception):
        files.write_atomically({"a": lambda: None}, path)
    assert torch.load(path, weights_only=True)["a"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]


def test_a_write_that_fails_says_why_even_if_its_rest_stays(tmp_path, monkeypatch):
    folder = BrokenFolder(monkeypatch)

    def breaking(state, file):
        folder.broken = True
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", breaking)
    with pytest.raises(OSError, match="No space left"):
        files.write_atomically({}, tmp_path / "state.pt")


DAMAGES = {
    "truncated": lambda raw: raw[: len(raw) // 2],
    "short by little": lambda raw: raw[:-3],
    "empty": lambda raw: b"",
    "garbage": lambda raw: bytes((7 * i * i + i // 3 + 128) % 256 for i in range(len(raw))),
    "turned bits": lambda raw: raw.replace(b'{"', b"{ ", 1),
    "code": lambda raw: pickle.dumps(print),
    "another thing": lambda raw: stored({"x": torch.ones(1)}),
    "no dict": lambda raw: stored(torch.ones(1)),
}


def stored(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def damaged(path, damage):
    path.write_bytes(DAMAGES[damage](path.read_bytes()))


OUTPUTS = FirstOutputs(Identity(), torch.ones(2, 3), 1e-4)


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """A folder of a run that was left inside its third pass, and what an unbroken one gives."""
    folder = tmp_path_factory.mktemp("left")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_lla_em.checkpoint.partial.INTERVAL", 0.0)
        patch.setattr("torch_lla_em.checkpoint.partial.WRITES", float("inf"))
        fit = FakeFit(Rationed(13))
        with pytest.raises(InterruptedError):
            fit.run(folder / "run")
        fit.log.compare(OUTPUTS, None)
    return folder / "run", faked(folder / "whole")


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("last", [False, True])
def test_damaged_parts_and_last_passes_are_computed_again(last, damage, left, tmp_path, caplog):
    folder = shutil.copytree(left[0], tmp_path / "run")
    name = max(path.name for path in folder.glob("pass-*.pt")) if last else "partial.pt"
    damaged(folder / name, damage)
    assert torch.equal(faked(folder), left[1])
    assert [name in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["header.pt", "outputs.pt", "pass-00000.pt", "posterior.pt"])
def test_damaged_files_are_named(name, damage, left, tmp_path):
    folder = shutil.copytree(left[0], tmp_path / "run")
    if name == "posterior.pt":
        shutil.copy(folder / "outputs.pt", folder / name)
    damaged(folder / name, damage)
    with pytest.raises(ValueError, match=f"{name}' cannot be read.*Delete") as caught:
        FakeFit(Rationed(ENOUGH)).open(folder).log.compare(OUTPUTS, None)
        faked(folder)
    assert caught.value.__context__ is None  # torch's advice is to let code run


def test_files_that_may_not_be_read_are_named(left, tmp_path, monkeypatch):
    def denied(path, *args):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(files, "open", denied, raising=False)
    with pytest.raises(PermissionError, match="header.pt"):
        Log(shutil.copytree(left[0], tmp_path / "run"), {"seed": 0})


def test_memory_that_ends_is_no_damage(left, tmp_path, monkeypatch):
    def short(*_, **__):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(torch, "load", short)
    with pytest.raises(torch.OutOfMemoryError):
        files.tensors_of(left[0] / "pass-00000.pt")


def disk(monkeypatch, free, total=10**9):
    usage = shutil.disk_usage("/")._replace(free=free, total=total)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)


def test_disks_without_room_for_passes_are_found_at_the_start(tmp_path, monkeypatch):
    model = tiny("classification").model
    two_passes = 2 * 4 * sum(p.numel() * p.element_size() for p in model.parameters())
    disk(monkeypatch, two_passes - 1)
    with pytest.raises(OSError, match="kB free, but two passes take .* kB: free space"):
        fit("krylov", Fuse(0), tmp_path)
    disk(monkeypatch, two_passes)
    fit("krylov", Fuse(10**6), tmp_path)
    disk(monkeypatch, 0)
    fit("krylov", Fuse(1), tmp_path)  # a finished one takes no more


@pytest.mark.parametrize("total", [0, None])
def test_disks_that_do_not_tell_are_tried(total, tmp_path, monkeypatch):
    disk(monkeypatch, 0, total)
    if total is None:
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: os.stat(tmp_path / "nowhere"))
    Log(tmp_path, {}).require_room(10**9)


def test_a_fit_goes_on_from_its_passes_without_room_for_more(left, tmp_path, monkeypatch, caplog):
    disk(monkeypatch, 100)
    Log(shutil.copytree(left[0], tmp_path / "run"), {"seed": 0}).require_room(10**9)
    assert "0.1 kB free" in caplog.text


AT_WORK = """
import sys, time
from pathlib import Path
from torch_lla_em.checkpoint import Log
Log(Path(sys.argv[1]), {})
print("begun", flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(os.name != "posix", reason="locks of POSIX")
def test_a_second_run_in_a_folder_is_told(tmp_path, caplog):
    command = [sys.executable, "-c", AT_WORK, str(tmp_path)]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "begun\n"
        half = tmp_path / f".writing-{32 * '0'}"
        half.write_bytes(b"half")
        Log(tmp_path, {})
        assert "Another process or thread is at work in the checkpoint folder" in caplog.text
        assert half.exists()  # the other may be writing it
    finally:
        other.kill()
        other.communicate()
    caplog.clear()
    for _ in range(2):  # one process may begin again
        Log(tmp_path, {})
    assert not caplog.records and not half.exists()


def test_folders_without_locks_are_fine(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(files, "fcntl", None)
    Log(tmp_path, {}).finish({}, {})
    assert not caplog.records


def test_a_pass_that_another_run_removes_is_computed(tmp_path, monkeypatch):
    entry = {"Gw": torch.ones(2)}
    Log(tmp_path, {}).recorded(torch.ones(3), "cpu", lambda: entry)

    def removed(path, *_):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))

    log = Log(tmp_path, {})
    monkeypatch.setattr(files, "tensors_of", removed)
    assert log.recorded(torch.ones(3), "cpu", lambda: entry) is entry
