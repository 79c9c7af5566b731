"""A fit that is killed at any moment ends, when started again, where an unbroken one does; no fault costs more."""

import errno
import io
import os
import pickle
import random
import shutil
import time
from functools import partial
from typing import NamedTuple

import pytest
import torch
from checkpoints import Fuse, dying_after, fit, fit_slowly, until_done
from daily import daily
from direct import Direct
from fresh import CONTEXT
from tiny import batched, likelihood_of, posterior_of, tiny
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from torch_lla_em import SGD, Adapter, BlockCG, Classification
from torch_lla_em.checkpoint import Folder
from torch_lla_em.inference import Estimate
from torch_lla_em.runtime import files

CASES = {
    "variational": ("classification", {"curvature": None}),
    "krylov": ("classification", {}),
    "krylov, regression": ("regression", {}),
    "no room for a span": ("classification", {"span_memory": 2000}),
    "cg, a precision per tensor": ("poisson", {"layerwise": True}),
    "cg, a noise per output": ("regression per output", {}),
    "block CG": ("classification", {"solver": BlockCG()}),
    "function space": ("classification", {"solver": Direct()}),
    "sgd": ("classification", {"solver": SGD(epochs=3), "tolerance": 9.0}),
}


def posterior(name, loader=None, folder=None, keep_data=False):
    (name, options), given = CASES[name], {"curvature": "network", "keep_data": keep_data}
    case, likelihood = tiny(name), likelihood_of(name) if "per output" in name else name
    loader = batched(7, case.x, case.y) if loader is None else loader
    return posterior_of(case.model, likelihood, loader, checkpoint=folder, **given | options)


def same(la, whole):
    for name, tensor in whole.state_dict().items():
        if name != "record":  # which holds seconds
            found = la.state_dict()[name]
            assert_close(found, tensor, rtol=0, atol=0, equal_nan=True, msg=name)
    own = "seconds", "columns", "data_passes"  # what this run took, with passes for the span
    for one, other in zip(la.history, whole.history, strict=True):
        one, other = ({k: v for k, v in step.items() if k not in own} for step in (one, other))
        assert repr(one) == repr(other)  # of NaN too


def interrupted(folder, saves=2, run=lambda folder: fit("krylov", Fuse(), folder)):
    with pytest.raises(InterruptedError), dying_after(saves):
        run(folder)


@pytest.fixture(scope="module")
def whole():
    return fit("krylov", Fuse(), None)


@pytest.mark.parametrize("name", daily(*[*CASES][:5], rest=[*CASES][5:]))
@pytest.mark.filterwarnings("ignore:The mode", "ignore:The samples")
def test_fits_killed_after_every_step_end_like_whole_ones(name, tmp_path):
    whole = posterior(name)
    la, deaths = until_done(lambda: posterior(name, folder=tmp_path))
    assert deaths > len(whole.history) > 1  # the noise is saved, too
    same(la, whole)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("own", daily(True, rest=[False]))
@pytest.mark.parametrize("name", ["variational"])
def test_shuffled_rows_come_in_the_order_of_an_unbroken_fit(name, own, keep, tmp_path):
    case = tiny("classification")

    def run(folder=None):
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(3) if own else None
        data = TensorDataset(case.x, case.y)
        loader = DataLoader(data, batch_size=7, shuffle=True, generator=generator)
        return posterior(name, loader, folder, keep)

    whole, la = run(), until_done(lambda: run(tmp_path))[0]
    if not keep:
        same(la, whole)
    # the Jacobian's factors are kept with batches, and round otherwise
    assert_close(la.w_samples, whole.w_samples, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, 12])
def test_kills_at_random_moments_leave_the_posterior_alone(kills, whole, tmp_path):
    moment, folder = random.Random(kills), tmp_path / "run"
    while True:
        process = CONTEXT.Process(target=fit_slowly, args=(folder,))
        process.start()
        if not kills:
            break
        # the first one comes while a state is written, or after that
        process.join(moment.uniform(0.0, 3.5) if kills % 2 else 0)
        while process.exitcode is None and not (folder / "state.pt").exists():
            time.sleep(0.01)
        process.join(moment.uniform(0.0, 0.6))
        process.kill()
        process.join()
        kills -= 1
    process.join(120)
    assert process.exitcode == 0
    same(fit("krylov", Fuse(1), folder), whole)


@pytest.mark.parametrize("finished", [True, False])
def test_other_data_and_settings_are_refused_by_name(finished, whole, tmp_path):
    case, loader = tiny("classification"), Fuse()
    fit("krylov", Fuse(), tmp_path) if finished else interrupted(tmp_path)
    for data, solver, options, words in (
        ([(case.x[:10], case.y[:10])], "krylov", {}, "belongs to other data"),
        ([(case.x, (case.y + 1) % 3)], "krylov", {}, "belongs to other data"),
        ([(case.x + torch.eye(2)[0], case.y)], "krylov", {}, "belongs to other data"),
        (loader, "krylov", {"seed": 1}, "its seed is '0', but here it is '1'"),
        (loader, "krylov", {"class_dim": 1}, "its class_dim is -1, but here it is 1"),
        (loader, "krylov", {"precision": "tf32"}, "its precision"),
        (loader, "cg", {}, "its solver"),
        (loader, "krylov", {"adapter": Adapter(outputs=lambda m, x: m(2 * x))}, "the outputs"),
    ):
        with pytest.raises(ValueError, match=words):
            fit(solver, data, tmp_path, **options)
    again = Fuse()
    same(fit("krylov", again, tmp_path), whole)
    if finished:  # it returns at once, after one pass to see that the data are the same
        assert 10**6 - again.passes_left == 1


class Tempered(Classification):
    """A user's likelihood, of which another version has the same name and attributes."""

    def log_prob(self, f, y):
        return super().log_prob(f / 2, y)


@pytest.mark.parametrize("finished", [True, False])
def test_other_functions_of_the_same_name_are_refused(finished, tmp_path):
    def run(folder, outputs, likelihood, loader):
        return fit("krylov", loader, folder, likelihood, adapter=Adapter(outputs))

    own = type("Tempered", (Classification,), {})
    first = (lambda model, x: model(x), own())
    refit = partial(run, tmp_path, *first)
    refit(Fuse()) if finished else interrupted(tmp_path, run=lambda _: refit(Fuse()))
    again = refit(Fuse())  # what computes the same is the same
    same(again, run(None, *first, Fuse()))
    other = lambda model, x: model(x) / 4  # noqa: E731
    for outputs, likelihood, words in ((other, own(), "outputs"), (first[0], Tempered(), "losses")):
        with pytest.raises(ValueError, match=f"the {words} for the first training examples"):
            run(tmp_path, outputs, likelihood, Fuse())


def test_a_restart_tells_what_the_whole_fit_took(whole, tmp_path, caplog):
    caplog.set_level("INFO", "torch_lla_em")
    interrupted(tmp_path, 3)
    la = fit("krylov", Fuse(), tmp_path)
    assert "Resuming from the checkpoint after EM step 2" in caplog.text
    assert la.history[-1]["columns"] >= whole.history[-1]["columns"]  # with J V again
    seconds = [record["seconds"] for record in la.history]
    assert seconds == sorted(seconds)


class Stranger(NamedTuple):
    command: str


def test_states_come_back_from_what_a_file_holds_and_no_other_class_does(tmp_path):
    x, here = torch.arange(6.0), torch.device("cpu")
    state = {
        "facts": {1.5: {"nested": (x, Estimate(Estimate(x, x), x)), "list": [x, x + 1]}},
        "numbers": [1, 2.5, float("nan"), float("inf"), 2**64 - 1, None, True, "words"],
    }
    Folder(tmp_path, {}).save(lambda: state)
    back = Folder(tmp_path, {}).load("state.pt", here)
    assert repr(back) == repr(state) and type(back["facts"][1.5]["nested"][1].value) is Estimate
    Folder(tmp_path / "other", {}).save(lambda: {"facts": Stranger("ls")})
    with pytest.raises(ValueError, match="cannot be read.*UnpicklingError"):
        Folder(tmp_path / "other", {}).load("state.pt", here)


def test_saving_takes_a_twentieth_of_the_time(tmp_path, monkeypatch):
    now, saved = [0.0], []
    monkeypatch.setattr("torch_lla_em.checkpoint.time.monotonic", lambda: now[0])

    def slow():
        now[0] += 1.0
        saved.append(now[0])
        return {"facts": {}}

    folder = Folder(tmp_path, {})
    while now[0] < 200:
        if folder.is_due():
            folder.save(slow)
        now[0] += 0.5
    assert len(saved) in (9, 10) and saved[0] == 1.0


# weights that change


CHANGES = {
    "one other sign": lambda layer: layer.bias.data[2:3].neg_(),
    "in place": lambda layer: layer.bias.detach().add_(1e-3),
}


class Meddling:
    """A loader that changes the network after some batch of some pass."""

    def __init__(self, at=0, batch=0, change=None):
        self.case, self.passes = tiny("classification"), 0
        self.last = 0  # that went to its end: a fit may look at the first rows once more
        self.at, self.batch, self.change = at, batch, change

    def __iter__(self):
        self.passes += 1
        for index, (x, y) in enumerate(batched(7, self.case.x, self.case.y)):
            yield x, y
            if (self.passes, index) == (self.at, self.batch):
                self.change(self.case.model[0])
        self.last = self.passes

    def fit(self, folder):
        return fit("krylov", self, folder, model=self.case.model)


@pytest.mark.parametrize("change", daily("one other sign", rest=["in place"]))
@pytest.mark.parametrize("at, batch", daily((6, 0), ("last", 4), rest=[(2, 0)]))
def test_no_state_of_changed_weights_is_kept(at, batch, change, tmp_path):
    unchanged = Meddling()
    expected = unchanged.fit(None)
    at = unchanged.last if at == "last" else at
    with pytest.raises(RuntimeError, match="chang"):
        Meddling(at, batch, CHANGES[change]).fit(tmp_path)
    assert not (tmp_path / "posterior.pt").exists()
    same(Meddling().fit(tmp_path), expected)


# a folder that fails, is damaged or shared costs EM steps at most


@pytest.mark.parametrize("full", ["state.pt", "posterior.pt", "unlink"])
def test_a_disk_that_fails_costs_nothing_but_the_checkpoint(
    full, whole, tmp_path, monkeypatch, caplog
):
    """It fills up, or files cannot be removed."""
    write = files.write_atomically

    def failing(state, path):
        if path.name.startswith(full):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(state, path)

    def refused(path, **_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    with monkeypatch.context() as patch:
        if full == "unlink":
            patch.setattr(os, "unlink", refused)
        else:
            patch.setattr(files, "write_atomically", failing)
        same(fit("krylov", Fuse(), tmp_path), whole)
    assert caplog.text.count("cannot be written any more") == (full != "unlink")
    assert (tmp_path / "posterior.pt").exists() == (full == "unlink")
    same(fit("krylov", Fuse(), tmp_path), whole)


def test_files_of_others_are_left_alone_and_halves_of_ours_removed(tmp_path):
    ours, users = f".writing-{32 * '0'}", (".writing-abc", "probe")
    for name in (ours, *users):
        (tmp_path / name).write_bytes(b"half")
    interrupted(tmp_path, 1)
    fit("krylov", Fuse(), tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert ours not in left and left >= {*users}
    (tmp_path / "file").write_text("in the way")
    for error, words, folder in (
        (ValueError, "is not the name of a folder", ""),
        (OSError, "cannot be used", tmp_path / "file" / "run"),
    ):
        with pytest.raises(error, match=words):
            Folder(folder, {})


def test_atomic_writes_leave_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "state.pt"
    files.write_atomically({"a": torch.ones(1)}, path)
    with pytest.raises(Exception):
        files.write_atomically({"a": lambda: None}, path)

    def full(*_):
        raise RuntimeError("unexpected pos 896 vs 790")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="could not be written"):
        patch.setattr(torch, "save", full)  # which a full disk is for torch
        files.write_atomically({"a": torch.zeros(1)}, path)
    assert torch.load(path, weights_only=True)["a"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]

    def short(*_, **__):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(torch, "load", short)
    with pytest.raises(torch.OutOfMemoryError):  # is no damage
        files.contents_of(path, (), "")


def stored(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


DAMAGES = {
    "truncated": lambda raw: raw[: len(raw) // 2],
    "short by little": lambda raw: raw[:-3],
    "empty": lambda raw: b"",
    "garbage": lambda raw: bytes((7 * i * i + i // 3 + 128) % 256 for i in range(len(raw))),
    "code": lambda raw: pickle.dumps(print),
    "another thing": lambda raw: stored({"x": torch.ones(1)}),
    "no dict": lambda raw: stored(torch.ones(1)),
}


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """The folder of a fit that was left after its first EM step."""
    folder = tmp_path_factory.mktemp("left") / "run"
    interrupted(folder)
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_named(damage, left, tmp_path):
    for name in ("header.pt", "state.pt", "posterior.pt"):
        folder = shutil.copytree(left, tmp_path / name)
        path = folder / name
        raw = path.read_bytes() if path.exists() else (folder / "state.pt").read_bytes()
        path.write_bytes(DAMAGES[damage](raw))
        with pytest.raises(ValueError, match=f"{path.name}' cannot be read.*Delete") as caught:
            fit("krylov", Fuse(), folder)
        assert caught.value.__context__ is None  # torch's advice is to let code run
