"""A fit that is killed at any moment ends, when started again, where an unbroken one does."""

import random
import time
from typing import NamedTuple

import pytest
import torch
from checkpoints import READ, Fuse, dying_after, fit, fit_slowly, until_done
from daily import daily
from fresh import CONTEXT
from tiny import tiny
from torch.utils.data import DataLoader, TensorDataset

from torch_lla_em import SGD, BlockCG, BlockKrylov, Compute, FunctionSpace, LinearisedLaplace
from torch_lla_em.checkpoint import Folder
from torch_lla_em.inference import Estimate
from torch_lla_em.inference.fit import learn
from torch_lla_em.inference.quadrature import Spectrum
from torch_lla_em.runtime import TensorList, files

CASES = {
    "variational": ("classification", {"curvature": None}),
    "krylov": ("classification", {}),
    "no room for a span": ("classification", {"solver": BlockKrylov(memory=2000)}),
    "krylov, regression": ("regression", {}),
    "linear": ("classification", {"curvature": "linear"}),
    "cold": ("regression", {"temperature": 0.5}),
    "cg, a precision per tensor": ("poisson", {"prior": "layerwise"}),
    "cg, a noise per output": ("regression", {"sigma_noise": torch.tensor([0.4, 0.7, 0.2])}),
    "block CG": ("classification", {"solver": BlockCG()}),
    "function space": ("classification", {"solver": FunctionSpace()}),
    "sgd": ("classification", {"solver": SGD(epochs=3), "tolerance": 9.0}),
}
DAILY = "variational", "krylov", "krylov, regression", "linear", "cold"


def posterior(name, loader=None, folder=None, compute=READ):
    likelihood, options = CASES[name]
    case, options = tiny(likelihood), {"num_samples": 4, "curvature": "network", **options}
    loader = list(zip(case.x.split(7), case.y.split(7))) if loader is None else loader
    la = LinearisedLaplace(case.model, likelihood, compute=compute, **options)
    return la.fit(loader, progress_bar=False, checkpoint=folder)


def same(la, whole):
    for name, tensor in whole.state_dict().items():
        if name != "record":  # which holds seconds
            assert torch.equal(la.state_dict()[name], tensor), name
    told = [
        [{k: v for k, v in record.items() if k != "seconds"} for record in found]
        for found in (la.history, whole.history)
    ]
    assert repr(told[0]) == repr(told[1])  # of NaN too


@pytest.mark.parametrize("name", daily(*DAILY, rest=[name for name in CASES if name not in DAILY]))
@pytest.mark.filterwarnings("ignore:The mode", "ignore:The samples")
def test_fits_killed_after_every_step_end_like_whole_ones(name, tmp_path):
    whole = posterior(name)
    la, deaths = until_done(lambda: posterior(name, folder=tmp_path))
    assert deaths > len(whole.history) > 1  # the noise is saved, too
    same(la, whole)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("own", daily(True, rest=[False]))
@pytest.mark.parametrize("name", daily("variational", rest=["linear"]))
def test_shuffled_rows_come_in_the_order_of_an_unbroken_fit(name, own, keep, tmp_path):
    case, compute = tiny("classification"), Compute(keep_data=keep)

    def run(folder=None):
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(3) if own else None
        data = TensorDataset(case.x, case.y)
        loader = DataLoader(data, batch_size=7, shuffle=True, generator=generator)
        return posterior(name, loader, folder, compute)

    whole, la = run(), until_done(lambda: run(tmp_path))[0]
    if not keep:
        same(la, whole)
    # the Jacobian's factors are kept with batches, and round otherwise
    torch.testing.assert_close(la.w_samples, whole.w_samples, rtol=1e-9, atol=1e-9)


def test_blocks_of_a_basis_are_written_once(tmp_path):
    seen = []
    for saves in (2, 1, 1):
        with pytest.raises(InterruptedError), dying_after(saves):
            posterior("krylov, regression", folder=tmp_path)
        seen.append({p.name: p.stat().st_mtime_ns for p in tmp_path.glob("block-*.pt")})
        if len(seen) == 1:
            (tmp_path / f"block-{32 * '0'}-7.pt").write_bytes(b"of no state")
    for before, after in zip(seen, seen[1:]):
        changed = {
            key for key, number in (name[:-3].rsplit("-", 1) for name in before.keys() - after)
        }
        assert len(changed) == 1  # H and J m
        assert len(before.items() - after.items()) == 2 and len(before) > 5
    assert len(seen[0]) < len(seen[2])
    posterior("krylov, regression", folder=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"header.pt", "posterior.pt"}


@pytest.mark.parametrize("kills", daily(2, rest=[12]))
@pytest.mark.slow
def test_kills_at_random_moments_leave_the_posterior_alone(kills, tmp_path):
    moment = random.Random(kills)
    while True:
        process = CONTEXT.Process(target=fit_slowly, args=(tmp_path / "run",))
        process.start()
        if not kills:
            break
        # the first one comes while a state is written, or after that
        process.join(moment.uniform(0.0, 3.5) if kills % 2 else 0)
        while process.exitcode is None and not (tmp_path / "run" / "state.pt").exists():
            time.sleep(0.01)
        process.join(moment.uniform(0.0, 0.6))
        process.kill()
        process.join()
        kills -= 1
    process.join(120)
    assert process.exitcode == 0
    same(fit("krylov", Fuse(1), tmp_path / "run"), fit("krylov", Fuse(), None))


def test_finished_fits_return_at_once(tmp_path):
    first = fit("krylov", Fuse(), tmp_path)
    loader = Fuse()
    again = fit("krylov", loader, tmp_path)  # reads the data once, to see that they are the same
    assert torch.equal(first.w_samples, again.w_samples)
    assert 10**6 - loader.passes_left == 1


@pytest.mark.parametrize("finished", [True, False])
def test_other_data_are_refused(finished, tmp_path):
    case = tiny("classification")
    fit("krylov", Fuse(), tmp_path) if finished else interrupted(tmp_path)
    others = {
        "rows": [(case.x[:10], case.y[:10])],
        "labels": [(case.x, (case.y + 1) % 3)],
        "a column": [(case.x + torch.eye(case.x.shape[1])[0], case.y)],
    }
    for other in others.values():
        with pytest.raises(ValueError, match="belongs to other data"):
            fit("krylov", other, tmp_path)
    same(fit("krylov", Fuse(), tmp_path), fit("krylov", Fuse(), None))


def interrupted(folder, **options):
    with pytest.raises(InterruptedError), dying_after(2):
        fit("krylov", Fuse(), folder, **options)


def test_other_settings_are_refused_by_name(tmp_path):
    interrupted(tmp_path)
    with pytest.raises(ValueError, match="its seed is '0', but here it is '1'"):
        fit("krylov", Fuse(), tmp_path, seed=1)
    with pytest.raises(ValueError, match="its solver"):
        fit("cg", Fuse(), tmp_path)
    with pytest.raises(ValueError, match="its forward_fn"):
        fit("krylov", Fuse(), tmp_path, forward_fn=lambda model, x: model(2 * x))


def test_a_restart_tells_what_the_whole_fit_took(tmp_path, caplog):
    caplog.set_level("INFO", "torch_lla_em")
    whole = fit("krylov", Fuse(), None)
    with pytest.raises(InterruptedError), dying_after(3):
        fit("krylov", Fuse(), tmp_path)
    la = fit("krylov", Fuse(), tmp_path)
    assert "Resuming from the checkpoint after EM step 2" in caplog.text
    assert la.history[-1]["columns"] == pytest.approx(whole.history[-1]["columns"])
    seconds = [record["seconds"] for record in la.history]
    assert seconds == sorted(seconds)


def test_states_come_back_from_what_a_file_holds(tmp_path):
    x = torch.arange(6.0)
    state = {
        "spectrum": Spectrum(x, x, x[:2], x[2:]),
        "grown": TensorList("abc", [x, x + 1]),
        "numbers": [1, 2.5, float("nan"), float("inf"), 2**64 - 1, None, True, "words"],
        1.5: {"nested": (x, Estimate(Estimate(x, x), x))},
    }
    Folder(tmp_path, {}).save(state)
    assert {path.stem for path in tmp_path.glob("block-*")} == {"block-abc-0", "block-abc-1"}
    folder, here = Folder(tmp_path, {}), torch.device("cpu")
    back = folder.with_blocks(folder.load(here), here, lambda: None)
    assert type(back["spectrum"]) is Spectrum and torch.equal(back["spectrum"].eta, x[2:])
    assert back["grown"].key == "abc" and torch.equal(back["grown"].parts[1], x + 1)
    assert repr(back["numbers"]) == repr(state["numbers"])
    assert repr(back[1.5]) == repr(state[1.5])


def test_a_folder_of_an_earlier_release_is_refused(tmp_path):
    files.write_atomically({"header": files.to_bytes({"format": "2.7"})}, tmp_path / "header.pt")
    with pytest.raises(ValueError, match="another release.*Delete the folder"):
        Folder(tmp_path, {"format": "2.8"})


class Stranger(NamedTuple):
    command: str


def test_no_other_class_is_loaded(tmp_path):
    Folder(tmp_path, {}).save(Stranger("ls"))
    with pytest.raises(ValueError, match="cannot be read.*UnpicklingError"):
        Folder(tmp_path, {}).load(torch.device("cpu"))


# weights that change


CHANGES = {
    "one other sign": lambda layer: layer.bias.data[2:3].neg_(),
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
@pytest.mark.parametrize("at, batch", daily((6, 0), ("last", 4), rest=[(2, 0)]))
def test_no_state_of_changed_weights_is_kept(at, batch, change, tmp_path):
    whole = Meddling(0, 0, None)
    expected = whole.fit(None)
    at = whole.last if at == "last" else at
    with pytest.raises(RuntimeError, match="chang"):
        Meddling(at, batch, CHANGES[change]).fit(tmp_path)
    assert not (tmp_path / "posterior.pt").exists()
    same(Meddling(0, 0, None).fit(tmp_path), expected)


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
