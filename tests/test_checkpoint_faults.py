"""A folder that fails, is damaged or shared costs passes at most: never the fit, nor its result."""

import errno
import os
from pathlib import Path

import pytest
import torch

from test_checkpoint import Fuse, Rationed, fit
from torch_lla_em import persistence


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


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EIO])
def test_folders_that_break_during_a_fit_cost_no_fit(number, tmp_path, monkeypatch, caplog, every_batch):
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
        persistence.write_atomically({}, tmp_path / "state.pt")
