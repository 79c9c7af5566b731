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
from daily import daily
from tiny import tiny

from torch_lla_em.checkpoint.log import Log as PassLog
from torch_lla_em.runtime import files


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


@pytest.mark.parametrize("number", daily(errno.EIO, rest=[errno.EROFS, errno.EACCES]))
def test_folders_that_break_during_a_fit_cost_no_fit(
    number, tmp_path, monkeypatch, caplog, every_batch
):
    whole = fit("krylov", Rationed(10**6), tmp_path / "whole")
    folder = BrokenFolder(monkeypatch, number)

    class Breaking(Rationed):
        def __iter__(self):
            for batch in super().__iter__():
                folder.broken |= self.left == 10**6 - 13
                yield batch

    la = fit("krylov", Breaking(10**6), tmp_path / "broken")
    assert "cannot be written any more" in caplog.text
    assert torch.equal(la.w_samples, whole.w_samples)
    folder.broken = False
    assert (tmp_path / "broken" / "partial.pt").exists()
    resumed = fit("krylov", Rationed(10**6), tmp_path / "broken")
    assert torch.equal(resumed.w_samples, whole.w_samples)


def test_passes_that_cannot_be_removed_are_no_fault(tmp_path, monkeypatch):
    folder, replace = BrokenFolder(monkeypatch), os.replace

    def breaking(source, path):
        replace(source, path)
        folder.broken = Path(path).name == "posterior.pt"

    monkeypatch.setattr(os, "replace", breaking)
    first = fit("krylov", Fuse(10**6), tmp_path)
    assert list(tmp_path.glob("pass-*.pt"))
    folder.broken = False
    again = fit("krylov", Fuse(1), tmp_path)
    assert torch.equal(again.w_samples, first.w_samples)


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


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """A folder of a run that was left inside its third pass, and what an unbroken one gives."""
    folder = tmp_path_factory.mktemp("left")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_lla_em.checkpoint.partial.INTERVAL", 0.0)
        patch.setattr("torch_lla_em.checkpoint.partial.WRITES", 0.0)
        with pytest.raises(InterruptedError):
            fit("krylov", Rationed(13), folder / "run")
    return folder / "run", fit("krylov", Rationed(10**6), folder / "whole")


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("last", [False, True])
def test_damaged_parts_and_last_passes_are_computed_again(last, damage, left, tmp_path, caplog):
    folder = shutil.copytree(left[0], tmp_path / "run")
    name = max(path.name for path in folder.glob("pass-*.pt")) if last else "partial.pt"
    damaged(folder / name, damage)
    resumed = fit("krylov", Rationed(10**6), folder)
    assert [name in record.message for record in caplog.records] == [True]
    assert torch.equal(resumed.w_samples, left[1].w_samples)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["header.pt", "outputs.pt", "pass-00000.pt", "posterior.pt"])
def test_damaged_files_are_named(name, damage, left, tmp_path):
    folder = shutil.copytree(left[0], tmp_path / "run")
    if name == "posterior.pt":
        shutil.copy(folder / "outputs.pt", folder / name)
    damaged(folder / name, damage)
    with pytest.raises(ValueError, match=f"{name}' cannot be read.*Delete") as caught:
        fit("krylov", Rationed(10**6), folder)
    assert caught.value.__context__ is None  # torch's advice is to let code run


def test_files_that_may_not_be_read_are_named(left, tmp_path, monkeypatch):
    def denied(path, *args):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(files, "open", denied, raising=False)
    with pytest.raises(PermissionError, match="header.pt"):
        fit("krylov", Rationed(10**6), shutil.copytree(left[0], tmp_path / "run"))


def test_memory_that_ends_is_no_damage(left, tmp_path, monkeypatch):
    def short(*_, **__):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(torch, "load", short)
    with pytest.raises(torch.OutOfMemoryError):
        files.tensors_of(left[0] / "pass-00000.pt")


def disk(monkeypatch, free, total=10**9):
    usage = shutil.disk_usage("/")._replace(free=free, total=total)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)


def bytes_of_two_passes():
    return (
        2 * 4 * sum(p.numel() * p.element_size() for p in tiny("classification").model.parameters())
    )


def test_disks_without_room_for_passes_are_found_at_the_start(tmp_path, monkeypatch):
    disk(monkeypatch, bytes_of_two_passes() - 1)
    with pytest.raises(OSError, match="kB free, but two passes take .* kB: free space"):
        fit("krylov", Fuse(0), tmp_path)
    disk(monkeypatch, bytes_of_two_passes())
    fit("krylov", Fuse(10**6), tmp_path)
    disk(monkeypatch, 0)
    fit("krylov", Fuse(1), tmp_path)  # a finished one takes no more


@pytest.mark.parametrize("total", [0, None])
def test_disks_that_do_not_tell_are_tried(total, tmp_path, monkeypatch):
    disk(monkeypatch, 0, total)
    if total is None:
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: os.stat(tmp_path / "nowhere"))
    fit("krylov", Fuse(10**6), tmp_path)


def test_a_fit_goes_on_from_its_passes_without_room_for_more(left, tmp_path, monkeypatch, caplog):
    disk(monkeypatch, 100)
    resumed = fit("krylov", Rationed(10**6), shutil.copytree(left[0], tmp_path / "run"))
    assert "0.1 kB free" in caplog.text
    assert torch.equal(resumed.w_samples, left[1].w_samples)


AT_WORK = """
import sys, time
from pathlib import Path
from torch_lla_em.checkpoint.log import Log as PassLog
PassLog(Path(sys.argv[1]), {})
print("begun", flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(os.name != "posix", reason="locks of POSIX")
def test_a_second_run_in_a_folder_is_told(tmp_path, caplog):
    command = [sys.executable, "-c", AT_WORK, str(tmp_path)]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "begun\n"
        PassLog(tmp_path, {})
        assert "Another process is at work in the checkpoint folder" in caplog.text
    finally:
        other.kill()
        other.communicate()
    caplog.clear()
    for _ in range(2):  # one process may begin again
        PassLog(tmp_path, {})
    assert not caplog.records


def test_folders_without_locks_are_fine(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(files, "fcntl", None)
    PassLog(tmp_path, {}).finish({}, {})
    assert not caplog.records


def test_a_pass_that_another_run_removes_is_computed(tmp_path, monkeypatch):
    entry = {"Gw": torch.ones(2)}
    PassLog(tmp_path, {}).recorded(torch.ones(3), "cpu", lambda: entry)

    def removed(path, *_):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))

    log = PassLog(tmp_path, {})
    monkeypatch.setattr(files, "tensors_of", removed)
    assert log.recorded(torch.ones(3), "cpu", lambda: entry) is entry
