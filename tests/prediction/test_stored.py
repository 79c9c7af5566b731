"""What is saved is what comes back: also what the first releases wrote."""

from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
from tiny import tiny
from torch import nn
from torch.testing import assert_close

from torch_lla_em import LinearisedLaplace
from torch_lla_em.prediction.functions import functions_of
from torch_lla_em.runtime.records import from_bytes, to_bytes

SAVED = Path(__file__).parent / "saved"


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_a_posterior_of_the_first_release_answers_as_it_did(kind):
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
    "record": [without("record"), put("record", lambda r: r[:20])],
}
CASES = [(name, damage) for name, damages in DAMAGES.items() for damage in damages]


@pytest.mark.parametrize("name, damage", CASES, ids=lambda case: case if type(case) is str else "")
def test_damaged_files_are_refused_with_their_name_and_the_entry(name, damage, saved, tmp_path):
    model, state = saved
    torch.save(damage(state), tmp_path / "damaged.pt")
    with pytest.raises(ValueError, match=rf"(?s)damaged\.pt.*{name}"):
        LinearisedLaplace.load(tmp_path / "damaged.pt", model)


def test_options_that_nobody_takes_are_refused(saved, tmp_path):
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
