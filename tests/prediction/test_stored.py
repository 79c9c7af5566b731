"""What is saved is what comes back."""

from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
from measurements import LinearOperatorRegression
from tiny import fitted, tiny

from torch_lla_em import (
    Bernoulli,
    BlockCG,
    Classification,
    Compute,
    LinearisedLaplace,
)
from torch_lla_em.prediction.calibration import Calibration, restored
from torch_lla_em.runtime import write_atomically
from torch_lla_em.runtime.files import from_bytes, to_bytes


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    case, la = fitted(likelihood="classification", em_steps=0, prior_precision=5.0)
    path = tmp_path_factory.mktemp("saved") / "la.pt"
    la.save(path)
    return case.model, torch.load(path, weights_only=True)


def test_files_that_claim_more_than_they_hold_are_refused(saved, tmp_path):
    model, state = saved
    torch.save({**state, "more": torch.zeros(10**6)}, tmp_path / "plain.pt")
    with ZipFile(tmp_path / "plain.pt") as plain, ZipFile(tmp_path / "packed.pt", "w") as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name), ZIP_DEFLATED)
    with pytest.raises(ValueError, match="damaged"):
        LinearisedLaplace.load(tmp_path / "packed.pt", model)


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_safetensors_hold_the_same(kind, tmp_path):
    safetensors = pytest.importorskip("safetensors")
    case, la = fitted(kind, likelihood=kind, em_steps=2)
    la.calibrate(case.x, case.y)
    la.save(tmp_path / "la.pt")
    la.save(tmp_path / "la.safetensors")
    assert LinearisedLaplace.load(tmp_path / "la.pt", case.model).calibration == la.calibration
    older = [*la.calibration[:4], [0.8, 0.9], 0.1, True]  # as release 0.3.0 stored it
    due = Calibration(*la.calibration[:4], True)
    assert restored(older) == due and restored(None) is None
    assert restored([*la.calibration[:4], True]) == due  # as release 0.4.0 did
    safe = LinearisedLaplace.load(tmp_path / "la.safetensors", case.model)
    plain = LinearisedLaplace.load(tmp_path / "la.pt", case.model).state_dict()
    state = safe.state_dict()
    assert state.keys() == plain.keys()
    assert all(torch.equal(state[name], plain[name]) for name in plain)
    with safetensors.safe_open(tmp_path / "la.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("w_samples"), la.w_samples)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_files_of_release_0_3_are_loaded(tmp_path):
    """They have other tensors for the evidence, coverages of the calibration, and no training examples."""
    case, la = fitted("regression", likelihood="regression", em_steps=2, curvature="network")
    la.calibrate(case.x, case.y).save(tmp_path / "la.pt")
    state = torch.load(tmp_path / "la.pt", weights_only=True)
    record = from_bytes(state["record"])
    record["calibration"] = [*record["calibration"][:4], [0.8, 0.9], 0.1, record["calibration"][4]]
    del record["said"]
    old = {f"_{name}": torch.ones(3) for name in ("eigenvalues", "xi_coordinates", "modes")}
    torch.save({**state, **old, "record": to_bytes(record)}, tmp_path / "old.pt")
    loaded = LinearisedLaplace.load(tmp_path / "old.pt", case.model)
    ours, theirs = la.predict(case.x), loaded.predict(case.x)
    assert torch.equal(ours.predictive_variance, theirs.predictive_variance)
    assert torch.equal(ours.p_value, theirs.p_value)
    assert loaded.calibration == Calibration(*la.calibration[:5])
    assert loaded.history == la.history
    assert loaded.messages == ["The memory plan was not saved."]
    assert loaded.state_dict().keys() == la.state_dict().keys()


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
    with pytest.raises(ValueError, match="by another program"):
        LinearisedLaplace.load(path, model)
    monkeypatch.setattr("torch_lla_em.runtime.files.find_spec", lambda _: None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        LinearisedLaplace.load(path, model)


class Weighted(Bernoulli):
    """A user's likelihood, whose weight is an attribute."""

    def __init__(self, weight):
        self.weight = torch.tensor(weight)

    def log_prob(self, f, y):
        return self.weight * super().log_prob(f, y)

    def gradient(self, f, y):
        return self.weight * super().gradient(f, y)

    def curvature(self, f):
        return self.weight * super().curvature(f)


def measured(number):
    A = torch.tensor([[1.0, 0.5, -1.0], [0.0, 1.0, number]]).double()
    return LinearOperatorRegression(lambda f: f @ A.T, (3,), 0.5)


@pytest.mark.parametrize("make", [Weighted, measured])
def test_other_likelihoods_of_the_user_raise_when_loading(make, tmp_path):
    case = tiny("regression" if make is measured else "bernoulli")
    y = case.y[:, :2] if make is measured else case.y
    batches = list(zip(case.x.split(7), y.split(7)))

    def fit(likelihood):
        la = LinearisedLaplace(case.model, likelihood, num_samples=3)
        return la.fit(batches, em_steps=2, progress_bar=False, checkpoint=tmp_path / "finished")

    la = fit(make(0.5))
    la.calibrate(batches)
    la.save(tmp_path / "la.pt")
    same = LinearisedLaplace.load(tmp_path / "la.pt", case.model, likelihood=make(0.5))
    assert torch.equal(same.predict(case.x).samples, la.predict(case.x).samples)
    assert torch.equal(fit(make(0.5)).w_samples, la.w_samples)
    with pytest.raises(ValueError, match="other attributes"):
        LinearisedLaplace.load(tmp_path / "la.pt", case.model, likelihood=make(0.25))
    for state in (la.state_dict(), same.state_dict()):
        with pytest.raises(ValueError, match="other attributes"):
            LinearisedLaplace(case.model, make(0.25)).load_state_dict(state)
    with pytest.raises(ValueError, match="options of the likelihood"):
        fit(make(0.25))


GIVEN = {
    "likelihood": Classification(ignore_index=-1),
    "forward_fn": lambda model, x: model(10 * x),
    "target_fn": lambda batch: batch[1],
}
REFUSED = {
    "likelihood": ("classification", "the same likelihood"),
    "forward_fn": (None, "the same forward_fn"),
}


def test_neither_a_solver_nor_the_precision_is_asked_for(tmp_path):
    """Predictions need no solver, and the precision of the network is in the file."""
    options = {"solver": BlockCG(), "compute": Compute(precision="bfloat16")}
    case, la = fitted(likelihood="classification", em_steps=0, prior_precision=5.0, **options)
    la.save(tmp_path / "la.pt")
    loaded = LinearisedLaplace.load(tmp_path / "la.pt", case.model)
    assert loaded.compute == la.compute and torch.equal(loaded(case.x), la(case.x))
    given = {"compute": Compute(vectors="cpu")}
    assert LinearisedLaplace.load(tmp_path / "la.pt", case.model, **given).compute == Compute(
        vectors="cpu"
    )
    state = torch.load(tmp_path / "la.pt", weights_only=True)
    record, saved = from_bytes(state["record"]), from_bytes(state["options"])
    record["given"], _ = ["solver"], saved.pop("precision")  # as release 0.4.0 stored them
    torch.save({**state, "record": to_bytes(record), "options": to_bytes(saved)}, tmp_path / "old")
    assert LinearisedLaplace.load(tmp_path / "old", case.model).compute == Compute()


def test_tensors_of_other_shapes_name_themselves(saved):
    model, state = saved
    la = LinearisedLaplace(model, "classification")
    count, size = state["w_samples"].shape
    changed = {
        "w_lin": (state["w_lin"][1:], rf"'w_lin' .* shape \({size - 1},\), but \({size},\) is"),
        "w_samples": (state["w_samples"][:, 1:], rf"'w_samples' .*but \({count}, {size}\)"),
        "certificate": (state["certificate"][1:], rf"'certificate' .*but \({count},\)"),
        "prior_precision": (None, "'prior_precision' of the state is missing.*save"),
    }
    for name, (tensor, words) in changed.items():
        other = {n: t for n, t in {**state, name: tensor}.items() if t is not None}
        with pytest.raises(ValueError, match=words):
            la.load_state_dict(other)
    la.load_state_dict(state)


@pytest.mark.parametrize("name", GIVEN)
def test_functions_of_the_user_must_be_passed_to_load(name, tmp_path):
    given = {name: GIVEN[name]}
    fit = {"likelihood": "classification", "em_steps": 0, "prior_precision": 5.0}
    case, la = fitted(**{**fit, **given})
    la.save(tmp_path / "la.pt")
    with pytest.raises(ValueError, match=rf"fitted with your own {name}.*Pass {name}=\.\.\."):
        LinearisedLaplace.load(tmp_path / "la.pt", case.model)
    assert torch.equal(
        LinearisedLaplace.load(tmp_path / "la.pt", case.model, **given)(case.x), la(case.x)
    )
    without = LinearisedLaplace(case.model, "classification")
    if name in REFUSED:
        other, message = REFUSED[name]
        with pytest.raises(ValueError, match=message):
            without.load_state_dict(la.state_dict())
        with pytest.raises(ValueError, match=message):
            LinearisedLaplace.load(tmp_path / "la.pt", case.model, **{name: other})
    else:
        without.load_state_dict(la.state_dict())


@pytest.mark.parametrize("name", ["classification", "regression"])
def test_no_two_tensors_of_a_calibrated_state_share_memory(name):
    """Otherwise safetensors refuses them, as where ``calibrate`` has kept the predictions as fitted."""
    case, la = fitted(name, likelihood=name)
    la.calibrate(case.x + 0.1, case.y)
    places = [tensor.data_ptr() for tensor in la.state_dict().values() if tensor.numel()]
    assert len(set(places)) == len(places)
