"""Files are there whole or not at all, and are read by whom they were before."""

import functools
import os
import stat
import threading

import numpy as np
import pytest
import torch
from checkpoints import READ, Fuse
from tiny import tiny
from torch import nn

from torch_lla_em import LinearisedLaplace
from torch_lla_em.likelihoods import Classification
from torch_lla_em.runtime.files import fingerprint, plain, write_atomically


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_files_have_ordinary_modes(mask, tmp_path):
    before = os.umask(mask)
    try:
        write_atomically({"a": torch.ones(1)}, tmp_path / "state.pt")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "state.pt").stat().st_mode) == 0o666 & ~mask


def test_folders_that_are_not_there_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere/state.pt"):
        write_atomically({}, tmp_path / "nowhere" / "state.pt")


class Circular:
    def __init__(self):
        self.own, self.b = self, 1


class Tempered(Classification):
    """Somebody's likelihood, with what people keep in theirs."""

    def __init__(self):
        super().__init__()
        self.link, self.noise = functools.partial(torch.mul, other=1.0), torch.Generator()


def scaled_by(weight):
    return lambda f: weight * f


# twice the same thing, made anew as another process would, and something else
ALIKE = {
    "partial": (
        lambda: functools.partial(torch.clamp, min=2.0),
        functools.partial(torch.clamp, min=3.0),
    ),
    "closure": (lambda: scaled_by(2.0), scaled_by(3.0)),
    "tensor": (lambda: torch.tensor(1.00001).double(), torch.tensor(1.00004).double()),
    "circle": (Circular, Tempered()),
    "module": (lambda: functools, os),
    "array": (lambda: np.arange(5000), np.arange(5000) ** 2),
    "numpy's generator": (lambda: np.random.default_rng(1), 1),
    "lock": (threading.Lock, 2),
    "iterator": (lambda: iter([]), 3),
    "text": (lambda: "0xabc", "0xabd"),
    "set": (lambda: {"a", "b"}, {"a", "c"}),
    "likelihood": (Tempered, Classification()),
}


@pytest.mark.parametrize("name", ALIKE)
def test_settings_are_the_same_text_in_every_process(name):
    make, other = ALIKE[name]
    kept, anew = make(), make()
    assert plain({"x": kept}) == plain({"x": anew}) != plain({"x": other})
    assert name == "text" or "0x" not in plain(kept)


FACTOR = torch.ones(2)


def test_functions_are_compared_with_the_global_values_that_they_use(monkeypatch):
    def scaled(f):
        return torch.mul(f, FACTOR)

    before = plain(scaled)
    monkeypatch.setitem(globals(), "FACTOR", torch.ones(2))
    assert plain(scaled) == before
    monkeypatch.setitem(globals(), "FACTOR", 2 * torch.ones(2))
    assert plain(scaled) != before


class Masked(nn.Module):
    """A network with buffers of every kind."""

    def __init__(self, **changed):
        super().__init__()
        self.net = tiny("classification").model
        buffers = {
            "mask": torch.tensor([True, True, False]),
            "places": torch.arange(3),
            "graph": torch.eye(3).to_sparse(),
            "phases": torch.ones(2, dtype=torch.complex64),
            "num_batches_tracked": torch.tensor(5),
        }
        for name, buffer in {**buffers, **changed}.items():
            self.register_buffer(name, buffer)

    def forward(self, x):
        return self.net(x) * self.mask


OTHER = {
    "mask": torch.tensor([True, False, True]),
    "places": torch.tensor([0, 2, 1]),
    "graph": 2 * torch.eye(3).to_sparse(),
    "phases": torch.tensor([1.0, 1.0j]),
}


@pytest.mark.parametrize("name", OTHER)
def test_every_buffer_is_part_of_the_weights(name):
    other = fingerprint(Masked(**{name: OTHER[name]}))
    assert not torch.equal(other, fingerprint(Masked()))


def test_other_buffers_are_refused_and_counts_of_batches_are_not(tmp_path):
    def run(model, passes):
        la = LinearisedLaplace(
            model, "classification", num_samples=4, curvature="network", compute=READ
        )
        return la.fit(Fuse(passes), progress_bar=False, checkpoint=tmp_path / "run")

    other = Masked(mask=OTHER["mask"])
    with pytest.raises(InterruptedError):
        run(Masked(), 3)
    with pytest.raises(ValueError, match="network weights"):
        run(other, 10**6)
    counted = Masked(num_batches_tracked=torch.tensor(6))
    run(counted, 10**6).save(tmp_path / "la.pt")
    with pytest.raises(ValueError, match="weights or buffers"):
        LinearisedLaplace.load(tmp_path / "la.pt", other)
    LinearisedLaplace.load(tmp_path / "la.pt", Masked())
