"""A folder that fails, is damaged or shared costs EM steps at most: never the fit, nor its result."""

import errno
import io
import os
import pickle
import shutil

import pytest
import torch
from checkpoints import Fuse, dying_after, fit

from torch_lla_em.checkpoint import Folder
from torch_lla_em.runtime import files


@pytest.fixture(scope="module")
def whole():
    return fit("krylov", Fuse(), None).w_samples


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """The folder of a fit that was left after its first EM step."""
    folder = tmp_path_factory.mktemp("left") / "run"
    with pytest.raises(InterruptedError), dying_after(2):
        fit("krylov", Fuse(), folder)
    return folder


@pytest.mark.parametrize("full", ["block-", "state.pt", "posterior.pt"])
def test_a_disk_that_fills_up_costs_nothing_but_the_checkpoint(
    full, whole, tmp_path, monkeypatch, caplog
):
    write = files.write_atomically

    def failing(state, path):
        if path.name.startswith(full):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(state, path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_atomically", failing)
        assert torch.equal(fit("krylov", Fuse(), tmp_path).w_samples, whole)
    assert caplog.text.count("cannot be written any more") == 1
    assert not (tmp_path / "posterior.pt").exists()
    assert torch.equal(fit("krylov", Fuse(), tmp_path).w_samples, whole)


def test_files_that_cannot_be_removed_stay(whole, tmp_path, monkeypatch):
    def refused(path, **_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refused)
        assert torch.equal(fit("krylov", Fuse(), tmp_path).w_samples, whole)
    assert (tmp_path / "state.pt").exists() and (tmp_path / "posterior.pt").exists()
    assert torch.equal(fit("krylov", Fuse(), tmp_path).w_samples, whole)


def test_unwritable_folders_are_found_at_the_start(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="cannot be used"):
        Folder(tmp_path / "file" / "run", {})


def test_files_half_written_by_a_killed_run_are_removed(tmp_path):
    ours = f".writing-{32 * '0'}"
    users = ".writing-abc", "probe", "block-words.pt"
    for name in (ours, *users):
        (tmp_path / name).write_bytes(b"half")
    with pytest.raises(InterruptedError), dying_after(1):
        fit("krylov", Fuse(), tmp_path)
    fit("krylov", Fuse(), tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert ours not in left and left >= set(users)


def test_files_with_names_of_ours_are_never_overwritten(tmp_path):
    (tmp_path / "state.pt").write_bytes(b"somebody's")
    with pytest.raises(ValueError, match="pass another folder"):
        Folder(tmp_path, {})
    assert (tmp_path / "state.pt").read_bytes() == b"somebody's"
    with pytest.raises(ValueError, match="is not the name of a folder"):
        Folder("", {})


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


DAMAGES = {
    "truncated": lambda raw: raw[: len(raw) // 2],
    "short by little": lambda raw: raw[:-3],
    "empty": lambda raw: b"",
    "garbage": lambda raw: bytes((7 * i * i + i // 3 + 128) % 256 for i in range(len(raw))),
    "code": lambda raw: pickle.dumps(print),
    "another thing": lambda raw: stored({"x": torch.ones(1)}),
    "no dict": lambda raw: stored(torch.ones(1)),
}


def stored(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["header.pt", "state.pt", "block", "posterior.pt"])
def test_damaged_files_are_named(name, damage, left, tmp_path):
    folder = shutil.copytree(left, tmp_path / "run")
    path = min(folder.glob("block-*.pt")) if name == "block" else folder / name
    raw = path.read_bytes() if path.exists() else (folder / "state.pt").read_bytes()
    path.write_bytes(DAMAGES[damage](raw))
    with pytest.raises(ValueError, match=f"{path.name}' cannot be read.*Delete") as caught:
        fit("krylov", Fuse(), folder)
    assert caught.value.__context__ is None  # torch's advice is to let code run


def test_memory_that_ends_is_no_damage(left, monkeypatch):
    def short(*_, **__):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(torch, "load", short)
    with pytest.raises(torch.OutOfMemoryError):
        files.contents_of(left / "state.pt")
