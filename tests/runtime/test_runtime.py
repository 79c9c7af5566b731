"""Files and what they are compared with, warnings, random numbers by key, and limits of memory."""

import functools
import logging
import os
import stat
import threading
import warnings
from math import inf

import numpy as np
import pytest
import tiny
import torch
from torch import nn
from torch.testing import assert_close

from torch_lla_em import LinearisedLaplace
from torch_lla_em.likelihoods import Classification
from torch_lla_em.runtime import collected, memory, report
from torch_lla_em.runtime.files import fingerprint, plain, write_atomically
from torch_lla_em.runtime.memory import container_room
from torch_lla_em.runtime.noise import normals


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
def test_files_have_ordinary_modes_and_missing_folders_are_named(tmp_path):
    mask = 0o027
    before = os.umask(mask)
    try:
        write_atomically({"a": torch.ones(1)}, tmp_path / "state.pt")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "state.pt").stat().st_mode) == 0o666 & ~mask
    with pytest.raises(FileNotFoundError, match="nowhere/state.pt"):
        write_atomically({}, tmp_path / "nowhere" / "state.pt")


class Circular:
    def __init__(self):
        self.own, self.b = self, 1


class Tempered(Classification):
    """A user's likelihood, with attributes of any kind."""

    def __init__(self):
        super().__init__()
        self.link, self.noise = functools.partial(torch.mul, other=1.0), torch.Generator()


def scaled_by(weight):
    return lambda f: weight * f


# twice the same thing, made anew as another process would, and something else
ALIKE = [
    (lambda: functools.partial(torch.clamp, min=2.0), functools.partial(torch.clamp, min=3.0)),
    (lambda: scaled_by(2.0), scaled_by(3.0)),
    (lambda: torch.tensor(1.00001).double(), torch.tensor(1.00004).double()),
    (Circular, Tempered()),
    (lambda: functools, os),
    (lambda: np.arange(5000), np.arange(5000) ** 2),
    (lambda: np.random.default_rng(1), 1),
    (lambda: [threading.Lock(), iter([])], 3),
    (lambda: {"a", "b"}, {"a", "c"}),
    (Tempered, Classification()),
]


def test_settings_are_the_same_text_in_every_process():
    for make, other in ALIKE:
        kept, anew = make(), make()
        assert plain({"x": kept}) == plain({"x": anew}) != plain({"x": other})
        assert "0x" not in plain(kept)
    assert plain("0xabc") != plain("0xabd")


BUFFERS = {
    "mask": torch.tensor([True, True, False]),
    "places": torch.arange(3),
    "graph": torch.eye(3).to_sparse(),
    "phases": torch.ones(2, dtype=torch.complex64),
    "num_batches_tracked": torch.tensor(5),
}


def masked(**changed):
    """A network with buffers of every kind."""
    model = tiny.tiny("classification").model
    for name, buffer in {**BUFFERS, **changed}.items():
        model.register_buffer(name, buffer)
    return model


def test_other_buffers_are_refused_and_counts_of_batches_are_not(tmp_path):
    _, la = tiny.fitted(model=masked(num_batches_tracked=torch.tensor(6)), em_steps=1)
    la.save(tmp_path / "la.pt")
    LinearisedLaplace.load(tmp_path / "la.pt", masked())
    for name in ("mask", "places", "graph", "phases"):
        other = masked(**{name: -1 * BUFFERS[name]})
        assert not torch.equal(fingerprint(other), fingerprint(masked()))
        with pytest.raises(ValueError, match="weights or buffers"):
            LinearisedLaplace.load(tmp_path / "la.pt", other)


def test_lists_in_this_thread_get_each_text_once(caplog):
    outer, inner, elsewhere, raised = [], [], [], []

    def other_thread():
        with collected(elsewhere):
            report("log", "of the other thread")

    with collected(outer):
        report("log", "first")
        with collected(inner), pytest.warns(UserWarning, match="second"):
            report("warn", "second")
        report("log", "first")
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
    report("log", "of nobody")
    assert (outer, inner, elsewhere) == (["first", "second"], ["second"], ["of the other thread"])
    assert caplog.messages == ["first", "of the other thread", "of nobody"]
    with collected(raised), pytest.raises(UserWarning):  # warnings are errors in these tests
        report("warn", "stored")
    assert raised == ["stored"]


def without_noise():
    torch.manual_seed(0)
    x, net = tiny.draw(12, 2).float(), nn.Linear(2, 1)
    return LinearisedLaplace(net, "regression", num_samples=4), x, net(x).detach()


def test_warnings_of_a_fit_are_stored(tmp_path):
    la, x, y = without_noise()
    with pytest.warns(UserWarning, match="lost to rounding"):
        la.fit(x, y, progress_bar=False)
    la, x, y = without_noise()
    logging.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            la.fit(x, y, progress_bar=False)
    finally:
        logging.disable(logging.NOTSET)
    la.save(tmp_path / "la.pt")
    again = LinearisedLaplace.load(tmp_path / "la.pt", la.model)
    for words in ("lost to rounding", *la.messages[1:]):
        assert words in " ".join(la.messages)
        for each in (la, again):
            assert words[:20] in " ".join(repr(each).split()) and words in each._repr_html_()


def test_any_part_of_the_noise_can_be_drawn_again_and_all_keys_matter(monkeypatch):
    whole, rows = normals(3, 1, [2, 3], torch.arange(10), 9), torch.arange(50)
    assert torch.equal(normals(3, 1, [3], torch.arange(4, 7), 9), whole[1:, 4:7])
    assert torch.equal(normals(3, 1, [2, 3], torch.arange(10), 5), whole[..., :5])
    first = normals(3, 1, [2], rows, 40)
    for seed, stream, sample in ((4, 1, 2), (3, 0, 2), (3, 1, 3)):
        other = normals(seed, stream, [sample], rows, 40)
        assert ((first * other).mean() * first.numel() ** 0.5).abs() < 5
    monkeypatch.setattr("torch_lla_em.runtime.noise.NUMBERS", 7)
    assert torch.equal(normals(3, 1, [2], rows, 40), first)


def test_noise_is_that_of_earlier_versions():
    """Otherwise a checkpoint would go on with other random numbers than it began with."""
    found = normals(2**63 + 5, 1, [0, 3], torch.tensor([0, 7]), 3)[:, 1]
    expected = [[2.06422422, 0.12137404, -2.88202395], [-0.31185839, -1.07650738, -1.20509995]]
    assert_close(found, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.slow
def test_moments_are_those_of_a_standard_normal():
    z = normals(0, 0, [0], torch.arange(1000), 1000).flatten()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert (z.pow(power).mean() - moment).abs() < 5 * (variance / len(z)) ** 0.5
    correlations = z.view(1000, 1000).corrcoef().fill_diagonal_(0)
    assert correlations.abs().max() * 1000**0.5 < 6  # the largest of half a million


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_the_tightest_control_group_counts(tmp_path):
    """Limits of containers, from files as the kernel writes them."""
    groups, mount = tmp_path / "cgroup", tmp_path / "fs"
    groups.write_text("0::/pods/one\n")
    assert container_room(groups, mount) == container_room(tmp_path / "no", tmp_path) == inf
    for folder, limit, used, cached, expected in (
        ("pods/one", 1000, 400, 100, 700),
        ("pods", 2000, 1500, 0, 500),
        ("pods", "max", 1500, 0, 700),
        (".", 300, 100, 0, 200),  # a group seen as the root
        ("pods/one", 100, 150, 0, 0),  # more than is allowed
    ):
        stat = f"anon 5\nfile 7\ninactive_file {cached}"
        write(mount / folder, memory__max=limit, memory__current=used, memory__stat=stat)
        assert container_room(groups, mount) == expected


def test_a_limit_makes_less_memory_free(monkeypatch):
    assert 1e7 < memory.free_memory(torch.device("cpu")) < 1e14
    monkeypatch.setattr(memory, "container_room", lambda: 12345.0)
    assert memory.free_memory(torch.device("cpu")) == 12345.0
