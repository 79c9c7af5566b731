"""What is saved is what comes back: also what the first releases wrote."""

from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
from tiny import tiny
from torch import nn
from torch.nn.functional import softplus
from torch.testing import assert_close

from torch_lla_em import (
    Bernoulli,
    BlockCG,
    Compute,
    LinearisedLaplace,
    LinearOperator,
    LinearOperatorRegression,
)
from torch_lla_em.prediction.functions import functions_of
from torch_lla_em.runtime import write_atomically
from torch_lla_em.runtime.records import from_bytes, to_bytes

READ = Compute(keep_data=False)
SAVED = Path(__file__).parent / "saved"


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_a_posterior_of_the_first_release_predicts_the_same(kind):
    truth = torch.load(SAVED / f"{kind}_truth.pt", weights_only=True)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    model.load_state_dict(truth["model"])
    la = LinearisedLaplace.load(SAVED / f"{kind}.pt", model)

    def answer():
        if kind == "regression":
            return la(truth["x"])
        prediction = la.predict(truth["x"])  # averaged over as many functions as then
        functions = prediction.centre + functions_of(prediction.deviations, 256)
        return functions.softmax(-1).mean(0)

    assert_close(answer(), truth["answer"])
    assert la.mean == "linear" and la.num_samples == 3 and len(la.history) == 3
    state = la.state_dict()
    la.load_state_dict(state)
    assert_close(answer(), truth["answer"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    case = tiny("classification")
    la = LinearisedLaplace(case.model, "classification", num_samples=3)
    la.fit([(case.x, case.y)], em_steps=0, prior_precision=5.0, progress_bar=False)
    path = tmp_path_factory.mktemp("saved") / "la.pt"
    la.save(path)
    return case.model, torch.load(path, weights_only=True)


def cut(name, *index):
    return lambda state: {**state, name: state[name][index]}


def put(name, value):
    return lambda state: {**state, name: value(state[name])}


def without(name):
    return lambda state: {n: tensor for n, tensor in state.items() if n != name}


PARTS = "table", "unusual", "errors"
DAMAGES = {
    "w_lin": [cut("w_lin", slice(5)), without("w_lin"), put("w_lin", lambda w: w * torch.nan)],
    "w_samples": [
        cut("w_samples", slice(None), slice(3)),
        cut("w_samples", slice(0)),
        put("w_samples", torch.Tensor.long),
        put("w_samples", lambda w: torch.cat([w, w[:, :5]], 1)),
    ],
    "scale": [without("scale"), put("scale", torch.neg)],
    "prior_precision": [put("prior_precision", torch.neg), put("prior_precision", lambda p: p * 0)],
    "certificate": [cut("certificate", slice(2))],
    "mixture": [without("mixture"), cut("mixture", slice(None), slice(2))],
    "conformal": [
        lambda state: {**state, "conformal_errors": torch.zeros(3, 1)},
        lambda state: {**state, **{f"conformal_{n}": torch.zeros(3) for n in PARTS}},
    ],
    "record": [without("record"), put("record", lambda r: r[:20])],
}
CASES = [(name, damage) for name, damages in DAMAGES.items() for damage in damages]


@pytest.mark.parametrize("name, damage", CASES, ids=lambda case: case if type(case) is str else "")
def test_damaged_files_are_refused_with_their_name_and_the_entry(name, damage, saved, tmp_path):
    model, state = saved
    torch.save(damage(state), tmp_path / "damaged.pt")
    with pytest.raises(ValueError, match=rf"(?s)damaged\.pt.*{name}"):
        LinearisedLaplace.load(tmp_path / "damaged.pt", model)


def test_unknown_options_in_a_file_raise(saved, tmp_path):
    model, state = saved
    options = {**from_bytes(state["options"]), "colour": "red"}
    torch.save({**state, "options": to_bytes(options)}, tmp_path / "la.pt")
    with pytest.raises(ValueError, match="no option 'colour'"):
        LinearisedLaplace.load(tmp_path / "la.pt", model)


def test_files_that_claim_more_than_they_hold_are_refused(saved, tmp_path):
    model, state = saved
    wide = torch.zeros(1).double().expand(10**9)[None].expand(3, -1)
    torch.save({**state, "w_samples": wide}, tmp_path / "expanded.pt")
    with pytest.raises(ValueError, match="w_samples"):
        LinearisedLaplace.load(tmp_path / "expanded.pt", model)
    torch.save({**state, "more": torch.zeros(10**6)}, tmp_path / "plain.pt")
    with ZipFile(tmp_path / "plain.pt") as plain, ZipFile(tmp_path / "packed.pt", "w") as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name), ZIP_DEFLATED)
    with pytest.raises(ValueError, match="damaged"):
        LinearisedLaplace.load(tmp_path / "packed.pt", model)


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_safetensors_hold_the_same(kind, tmp_path):
    safetensors = pytest.importorskip("safetensors")
    case = tiny(kind)
    la = LinearisedLaplace(case.model, kind, num_samples=3)
    la.fit([(case.x, case.y)], em_steps=2, progress_bar=False)
    la.save(tmp_path / "la.pt")
    la.save(tmp_path / "la.safetensors")
    safe = LinearisedLaplace.load(tmp_path / "la.safetensors", case.model)
    plain = LinearisedLaplace.load(tmp_path / "la.pt", case.model).state_dict()
    state = safe.state_dict()
    assert state.keys() == plain.keys()
    assert all(torch.equal(state[name], plain[name]) for name in plain)
    with safetensors.safe_open(tmp_path / "la.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("w_samples"), la.w_samples)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_damaged_safetensors_are_refused(saved, tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    model, state = saved
    path = tmp_path / "la.safetensors"
    write_atomically(state, path)
    whole = path.read_bytes()
    for place in (len(whole) - 9, len(whole) // 2, 3):  # tensors, and the header
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match="damaged"):
            LinearisedLaplace.load(path, model)
    path.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match="damaged"):
        LinearisedLaplace.load(path, model)
    (tmp_path / "renamed.safetensors").write_bytes(whole)
    LinearisedLaplace.load(tmp_path / "renamed.safetensors", model)
    torch.save(state, path)  # torch's format under this name
    with pytest.raises(ValueError, match="of another program"):
        LinearisedLaplace.load(path, model)
    monkeypatch.setattr("torch_lla_em.runtime.files.find_spec", lambda _: None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        LinearisedLaplace.load(path, model)


class Weighted(Bernoulli):
    """Whose weight is a number in a closure."""

    def __init__(self, weight):
        self.weight = lambda: weight

    def log_prob(self, f, y):
        return self.weight() * super().log_prob(f, y)

    def gradient(self, f, y):
        return self.weight() * super().gradient(f, y)

    def curvature(self, f):
        return self.weight() * super().curvature(f)


class WeightedBeyond(Weighted):
    """Whose weight of large outputs, alone, is a number in a closure."""

    def __init__(self, weight):
        self.weight = lambda f: torch.where(f.abs() > 3, weight, 1.0)

    def log_prob(self, f, y):
        return (self.weight(f) * (y * f - softplus(f))).sum(-1)

    def gradient(self, f, y):
        return self.weight(f) * Bernoulli.gradient(self, f, y)

    def curvature(self, f):
        return self.weight(f) * Bernoulli.curvature(self, f)


def measured(number):
    A = torch.tensor([[1.0, 0.5, -1.0], [0.0, 1.0, number]]).double()
    return LinearOperatorRegression(LinearOperator(lambda f: f @ A.T, lambda v: v @ A, (3,)), 0.5)


OWN = {
    "weights": (WeightedBeyond, "bernoulli", lambda y: y),
    "closure": (Weighted, "bernoulli", lambda y: y),
    "operator": (measured, "regression", lambda y: y[:, :2]),
}


@pytest.mark.parametrize("kind", OWN)
def test_other_likelihoods_of_the_user_raise_when_loading(kind, tmp_path):
    make, name, targets = OWN[kind]
    case = tiny(name)
    batches = list(zip(case.x.split(7), targets(case.y).split(7)))

    def fit(likelihood, folder=None):
        la = LinearisedLaplace(case.model, likelihood, num_samples=3)
        return la.fit(batches, em_steps=2, progress_bar=False, checkpoint=folder)

    la = fit(make(0.5), tmp_path / "finished")
    la.calibrate(batches)
    la.save(tmp_path / "la.pt")
    same = LinearisedLaplace.load(tmp_path / "la.pt", case.model, likelihood=make(0.5))
    assert torch.equal(same.predict(case.x).samples, la.predict(case.x).samples)
    assert torch.equal(fit(make(0.5), tmp_path / "finished").w_samples, la.w_samples)
    other = make(0.25)
    with pytest.raises(ValueError, match="same outputs and targets"):
        LinearisedLaplace.load(tmp_path / "la.pt", case.model, likelihood=other)
    for state in (la.state_dict(), same.state_dict()):
        with pytest.raises(ValueError, match="same outputs and targets"):
            LinearisedLaplace(case.model, other).load_state_dict(state)
    with pytest.raises(ValueError, match="same outputs and targets"):
        fit(other, tmp_path / "finished")


@pytest.mark.parametrize("kind", OWN)
def test_an_unfinished_checkpoint_raises_for_another_likelihood(kind, tmp_path):
    make, name, targets = OWN[kind]
    case = tiny(name)
    batches = list(zip(case.x.split(7), targets(case.y).split(7)))

    class Breaking:
        passes = 0

        def __iter__(self):
            self.passes += 1
            yield from batches[:2]
            if self.passes == 4:
                raise InterruptedError
            yield from batches[2:]

    def fit(likelihood, loader):
        la = LinearisedLaplace(case.model, likelihood, num_samples=3, compute=READ)
        return la.fit(loader, em_steps=2, progress_bar=False, checkpoint=tmp_path)

    with pytest.raises(InterruptedError):
        fit(make(0.5), Breaking())
    with pytest.raises(ValueError, match="began with another likelihood"):
        fit(make(0.25), batches)
    fit(make(0.5), batches)


def test_named_likelihoods_store_no_examples():
    case = tiny("classification")
    la = LinearisedLaplace(case.model, "classification", num_samples=2)
    la.fit([(case.x, case.y)], em_steps=0, prior_precision=5.0, progress_bar=False)
    assert not any("example" in name for name in la.state_dict())


GIVEN = {
    "forward_fn": lambda model, x: model(10 * x),
    "target_fn": lambda batch: batch[1],
    "solver": BlockCG(),
}


@pytest.mark.parametrize("name", GIVEN)
def test_functions_of_the_user_must_be_passed_to_load(name, tmp_path):
    case = tiny("classification")
    given = {name: GIVEN[name]}
    la = LinearisedLaplace(case.model, "classification", num_samples=2, **given)
    la.fit([(case.x, case.y)], em_steps=0, prior_precision=5.0, progress_bar=False)
    la.save(tmp_path / "la.pt")
    with pytest.raises(ValueError, match=rf"fitted with {name} of your own.*pass {name}=\.\.\."):
        LinearisedLaplace.load(tmp_path / "la.pt", case.model)
    assert torch.equal(
        LinearisedLaplace.load(tmp_path / "la.pt", case.model, **given)(case.x), la(case.x)
    )
    without = LinearisedLaplace(case.model, "classification")
    if name == "forward_fn":
        with pytest.raises(ValueError, match="the same forward_fn"):
            without.load_state_dict(la.state_dict())
        with pytest.raises(ValueError, match="the same forward_fn"):
            LinearisedLaplace.load(tmp_path / "la.pt", case.model, forward_fn=None)
    else:
        without.load_state_dict(la.state_dict())
