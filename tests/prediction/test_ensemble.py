"""Mixtures of posteriors: averages of their members, calibrated by one set of numbers."""

import copy
import re

import pytest
import torch
from daily import daily
from tiny import draw, tiny
from torch.testing import assert_close
from torch.utils.data import DataLoader

from torch_lla_em import LaplaceEnsemble, LinearisedLaplace, compare
from torch_lla_em.prediction.reference import REFERENCE

KINDS = {"classification": "classification", "regression": "regression", "poisson": "poisson"}


def posterior(name, seed, fitted=True):
    """A posterior of a network that is unlike those of other seeds."""
    case = tiny(name)
    model = copy.deepcopy(case.model)
    for i, p in enumerate(model.parameters()):
        p.data += 0.3 * seed * draw(*p.shape, seed=100 * seed + i)
    la = LinearisedLaplace(model, name, num_samples=4, seed=seed)
    if fitted:
        la.fit([(case.x, case.y)], em_steps=0, prior_precision=2.0, progress_bar=False)
    return la


@pytest.fixture(scope="module", params=KINDS)
def members(request):
    return [posterior(request.param, seed) for seed in range(3)]


def held_out(members, count=60):
    """Inputs, and targets drawn around the first network."""
    case = tiny(KINDS[type(members[0].likelihood).__name__.lower()])
    x = draw(count, *case.x.shape[1:], seed=7)
    f = members[0].model(x).detach()
    return x, members[0].likelihood.sample(f, torch.Generator().manual_seed(3))


def test_the_details_are_those_of_the_members():
    case, members = tiny("classification"), [posterior("classification", seed) for seed in range(2)]
    ensemble = LaplaceEnsemble(members)
    title, rows = ensemble.details()._table()
    assert (title, rows[: len(ensemble._table()[1])]) == ensemble._table()
    for i, la in enumerate(members):
        own = la.details()._table()[1][len(la._table()[1]) :]
        assert len(own) > 4 and all((f"member {i}: {name}", text) in rows for name, text in own)
    shown = str(ensemble.calibrate(case.x, case.y).details())
    assert "effective dimension γ" in shown and "calibrate(validation_loader)" not in shown
    assert "call fit of each" in str(
        LaplaceEnsemble([posterior("classification", 0, fitted=False)]).details()
    )


def test_the_mixture_is_the_average_of_its_members(members):
    x, y = held_out(members)
    prediction = LaplaceEnsemble(members).predict(x)
    each = [la.predict(x) for la in members]
    mean = torch.stack([p.expectation for p in each]).mean(0)
    assert_close(prediction.expectation, mean)
    second = torch.stack([p.predictive_variance + p.expectation**2 for p in each]).mean(0)
    assert_close(prediction.predictive_variance, second - mean**2)
    for score in ("log_prob", "joint_log_prob"):
        probs = torch.stack([getattr(p, score)(y).exp() for p in each]).mean(0)
        assert_close(getattr(prediction, score)(y).exp(), probs)
    assert (prediction.epistemic >= torch.stack([p.epistemic for p in each]).mean(0) - 1e-9).all()
    mean = torch.stack([p.mean for p in each]).mean(0)
    second = torch.stack([p.variance + p.mean**2 for p in each]).mean(0)
    assert_close(prediction.mean, mean)
    assert_close(prediction.variance, second - mean**2)
    assert_close(prediction.covariance.diagonal(), (second - mean**2).flatten())
    assert_close(prediction.samples, torch.cat([p.samples for p in each]))
    assert repr(prediction).startswith("Prediction under")


def test_ensembles_predict_like_their_members(members):
    x, _ = held_out(members)
    ensemble = LaplaceEnsemble(members)
    for options in ({"num_samples": 2}, {"mean": "network"}):
        each = torch.stack([la.predict(x, **options).expectation for la in members])
        assert_close(ensemble.predict(x, **options).expectation, each.mean(0))
    drawn = ensemble.predict(x, generator=torch.Generator().manual_seed(1))
    again = ensemble.predict(x, generator=torch.Generator().manual_seed(1))
    assert_close(drawn.samples, again.samples)
    assert not torch.allclose(drawn.samples, ensemble.predict(x).samples)
    rows = DataLoader([(row, 0) for row in x], 7, shuffle=True)
    assert_close(ensemble.predict(rows).mean.sum(0), ensemble.predict(x).mean.sum(0))
    if not members[0].likelihood.real_valued:
        each = torch.stack([la(x, "probit") for la in members])
        assert_close(ensemble(x, "probit"), each.mean(0))


def test_one_member_is_calibrated_as_alone(members):
    x, y = held_out(members)
    alone, ensemble = copy.copy(members[0]), LaplaceEnsemble(members[:1])
    alone.calibrate(x, y)
    ensemble.calibrate(list(zip(x.split(7), y.split(7))))
    assert_close(ensemble.calibration[:4], alone.calibration[:4], rtol=1e-4, atol=1e-6)
    for name in REFERENCE:
        ours, theirs = getattr(ensemble, name), getattr(alone.reference, name[len("conformal_") :])
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert_close(ours.double(), theirs.double(), rtol=1e-3, atol=1e-4)
    ours, theirs = ensemble.predict(x), alone.predict(x)
    assert_close(ours.log_prob(y), theirs.log_prob(y), rtol=1e-3, atol=1e-4)
    new = draw(*x.shape, seed=11)  # whose scores are equal to none of the reference
    ours, theirs = ensemble.predict(new).p_value, alone.predict(new).p_value
    assert_close(ours, theirs, rtol=0, atol=1 / 31 + 1e-9)


def test_numbers_are_fitted_to_the_mixture(members):
    x, y = held_out(members)
    ensemble = LaplaceEnsemble(members)
    before = [la.mixture.clone() for la in members]
    first = -ensemble.predict(x).log_prob(y).mean()
    ensemble.calibrate(x, y)
    assert_close(ensemble.calibration.before, first.item(), rtol=1e-6, atol=0)
    after = -ensemble.predict(x).log_prob(y).mean()
    assert after <= first + 1e-9
    if ensemble.calibration.applied:
        for factor in (0.9, 1.1):  # of the posterior's variance, and of the noise
            other = copy.copy(ensemble)
            other._buffers = dict(ensemble._buffers)
            other.table = ensemble.table.clone()
            other.table[0, 3] *= factor
            assert -other.predict(x).log_prob(y).mean() > after - 2e-3
    assert all(torch.equal(la.mixture, old) for la, old in zip(members, before))


def test_sets_and_flags_are_of_the_mixture(members):
    x, y = held_out(members)
    ensemble = LaplaceEnsemble(members)
    with pytest.raises(ValueError, match=r"Call ensemble\.calibrate\(.* ensemble\.predict\(x\)"):
        ensemble.is_ood(x)
    ensemble.calibrate(x, y)
    assert ensemble.is_ood(x, 0.1).shape == (60,)
    assert ensemble.is_ood(1000 * x, 0.1).double().mean() > 0.8
    kind = type(members[0].likelihood).__name__
    if kind == "Classification":
        found = ensemble.predict(x).prediction_set(0.9)
        assert found.gather(1, y[:, None]).double().mean() > 0.75
    if kind == "Regression":
        lower, upper = ensemble.predict(x).interval(0.9)
        assert ((lower <= y) & (y <= upper)).double().mean() > 0.75


@pytest.mark.parametrize("calibrated", [False, True])
def test_ensembles_are_saved(members, calibrated, tmp_path):
    x, y = held_out(members)
    ensemble = LaplaceEnsemble(members)
    ensemble = ensemble.calibrate(x, y) if calibrated else ensemble
    ensemble.save(tmp_path / "ensemble.pt")
    name = KINDS[type(members[0].likelihood).__name__.lower()]
    fresh = [LinearisedLaplace(la.model, name, num_samples=4) for la in members]
    loaded = LaplaceEnsemble.load(tmp_path / "ensemble.pt", fresh)
    assert loaded.calibration == ensemble.calibration
    assert_close(loaded(x), ensemble(x), rtol=0, atol=0)
    if calibrated:
        assert torch.equal(loaded.predict(x).p_value, ensemble.predict(x).p_value)
    with pytest.raises(ValueError, match="no version key"):
        loaded.load_state_dict({})
    with pytest.raises(ValueError, match="has 3 members, but this ensemble has 2"):
        LaplaceEnsemble.load(tmp_path / "ensemble.pt", fresh[:2])


def test_members_have_one_likelihood():
    pair = [posterior(name, 0, fitted=False) for name in ("classification", "poisson")]
    for members in ([], pair):
        with pytest.raises(ValueError, match="all with the same likelihood"):
            LaplaceEnsemble(members)
    for members in (pair[0], [pair[0].model]):
        with pytest.raises(TypeError, match="takes a list of posteriors"):
            LaplaceEnsemble(members)
    with pytest.raises(RuntimeError, match="Call la.fit"):
        LaplaceEnsemble(pair[:1]).predict(tiny("classification").x)


def test_ensembles_are_printed_and_compared(members):
    x, y = held_out(members)
    assert "3 of 3 members are not fitted" in repr(
        LaplaceEnsemble([posterior("classification", seed, fitted=False) for seed in range(3)])
    )
    ensemble = LaplaceEnsemble(members).calibrate(x[:40], y[:40])
    shown = repr(ensemble)
    assert len(shown.splitlines()) <= 16 and "of 3 posteriors" in shown
    assert str(ensemble.calibration) in " ".join(shown.split())
    found = compare({"one": members[0], "all": ensemble}, [(x[40:50], y[40:50]), (x[50:], y[50:])])
    log_prob = ensemble.predict(x[40:]).log_prob(y[40:])
    assert_close(found.log_probs["all"], log_prob.double(), rtol=1e-5, atol=1e-6)
    assert found.records["all"]["parameters"] == 3 * found.records["one"]["parameters"]
    assert "1: ensemble of 3" in compare([members[0], ensemble], x, y).records


CASES = [(name, suffix) for name in KINDS for suffix in ("pt2", "onnx")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name, suffix", daily(CASES[2], rest=[CASES[0], CASES[1], *CASES[3:]]))
def test_all_members_are_exported_as_one_program(name, suffix, tmp_path):
    members = [posterior(name, seed) for seed in range(2)]
    x, ensemble = held_out(members)[0], LaplaceEnsemble(members)
    program, near = exported(ensemble, tmp_path / f"ensemble.{suffix}", x[:7])
    each = torch.stack([la.predict(x).expectation for la in members])
    assert_close(program(x)[0], each.mean(0), **near)
    if suffix == "pt2":
        return
    program, near = exported(ensemble, tmp_path / "few.onnx", x[:7], num_samples=2)
    each = torch.stack([la.predict(x, num_samples=2).expectation for la in members])
    assert_close(program(x)[0], each.mean(0), **near)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_sets_intervals_and_p_values_of_the_mixture_are_exported(members, suffix, tmp_path):
    x, y = held_out(members)
    ensemble = LaplaceEnsemble(members).calibrate(x, y)
    kind, other = type(members[0].likelihood).__name__, draw(31, *x.shape[1:], seed=5)
    level = None if kind == "Poisson" else 0.9
    options = {"level": level, "p_value": True}
    program, near = exported(ensemble, tmp_path / f"ensemble.{suffix}", x[:7], **options)
    found, due = program(other), ensemble.predict(other)
    assert_close(found[0], due.expectation, **near)
    assert_close(found[-1], due.p_value, rtol=0, atol=1.01 / 31)
    if kind == "Classification":
        assert torch.equal(found[1], due.prediction_set(0.9))
    if kind == "Regression":
        for value, end in zip(found[2:4], due.interval(0.9), strict=True):
            assert_close(value, end, **near)


def exported(ensemble, path, x, **options):
    """The outputs of an exported program as a function of inputs, and how close they have to be."""
    program = ensemble.export(x, path, **options)

    def of_torch(x):
        return tuple(program.module()(x).values())

    def of_onnx(x):
        session = pytest.importorskip("onnxruntime").InferenceSession(str(path))
        found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        return tuple(map(torch.from_numpy, found))

    if path.suffix == ".onnx":
        return of_onnx, {"rtol": 1e-4, "atol": 1e-5}
    return of_torch, {"rtol": 1e-6, "atol": 1e-9}


def test_reports_show_the_mixture_and_each_member(members, tmp_path):
    pytest.importorskip("matplotlib")
    x, y = held_out(members)
    ensemble = LaplaceEnsemble(members).calibrate(x[:40], y[:40])
    ensemble.report([(x[40:50], y[40:50]), (x[50:], y[50:])], tmp_path / "report.html", 5 * x)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Ensemble of 3 posteriors of Sequential" in page and "member 2: log evidence" in page
    nll = -ensemble.predict(x[40:]).log_prob(y[40:]).mean()
    alone = -torch.stack([la.model(x[40:]).detach() for la in members]).softmax(-1).mean(0).log()
    found = re.search(r">networks</t.>.{0,9}>posterior</t.>.*?(>NLL<.*?</tr>)", page)
    assert f"{nll:.4g}" in found[1]
    if type(members[0].likelihood).__name__ == "Classification":
        assert f"{alone.gather(1, y[40:, None]).mean():.4g}" in found[1]
    plots = {"Classification": 3, "Regression": 4, "Poisson": 2}
    assert page.count("<img") == plots[type(members[0].likelihood).__name__]
