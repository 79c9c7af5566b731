"""Mixtures of posteriors: averages of their members, calibrated by one set of numbers; members by folds."""

import copy
import re
from functools import partial
from math import ceil, log

import pytest
import torch
from models import trained
from tiny import draw, label_log_prob, posterior_of, tiny
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.data import DataLoader

from torch_lla_em import LaplaceEnsemble, LinearisedLaplace, compare
from torch_lla_em.prediction import predict

KINDS = "classification", "regression", "poisson"
LOSSES = {"classification": F.cross_entropy, "regression": F.mse_loss}


def kind_of(la):
    return type(la.likelihood).__name__.lower()


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


def scaled(ensemble, factor):
    """Its record with another scale of the posterior's variance."""
    correction = ensemble.posterior.correction
    table = correction.table.clone()
    table[0, 3] *= factor
    return ensemble.posterior.corrected(correction._replace(table=table))


@pytest.fixture(scope="module")
def unseen(members):
    """Inputs, and targets drawn around the first network."""
    x = draw(60, 2, seed=7)
    f = members[0].model(x).detach()
    return x, members[0].likelihood.sample(f, torch.Generator().manual_seed(3))


def test_the_mixture_is_the_average_of_its_members(members, unseen):
    x, y = unseen
    ensemble = LaplaceEnsemble(members)
    found, each = ensemble.predict(x), [la.predict(x) for la in members]

    def mean_of(value):
        return torch.stack([value(p) for p in each]).mean(0)

    mean = mean_of(lambda p: p.expectation)
    assert_close(found.expectation, mean)
    second = mean_of(lambda p: p.predictive_variance + p.expectation**2)
    assert_close(found.predictive_variance, second - mean**2)
    assert_close(found.log_prob(y).exp(), mean_of(lambda p: p.log_prob(y).exp()))
    assert_close(found.joint_log_prob(y).exp(), mean_of(lambda p: p.joint_log_prob(y).exp()))
    assert (found.epistemic >= mean_of(lambda p: p.epistemic) - 1e-9).all()
    mean = mean_of(lambda p: p.f_mean)
    assert_close(found.f_mean, mean)
    assert_close(found.f_variance, mean_of(lambda p: p.f_variance + p.f_mean**2) - mean**2)
    assert_close(found.f_covariance.diagonal(), found.f_variance.flatten())
    assert_close(found.samples, torch.cat([p.samples for p in each]))
    each = [la.predict(x, "network") for la in members]
    assert_close(ensemble.predict(x, "network").expectation, mean_of(lambda p: p.expectation))
    rows = DataLoader([(row, 0) for row in x], 7, shuffle=True)
    assert_close(ensemble.predict(rows).f_mean.sum(0), found.f_mean.sum(0))


def test_numbers_sets_and_flags_are_of_the_mixture(members, unseen):
    x, y = unseen
    ensemble, before = LaplaceEnsemble(members), [la.mixture.clone() for la in members]
    with pytest.raises(ValueError, match=r"Call ensemble\.calibrate\(.* ensemble\.predict\(x\)"):
        ensemble.is_ood(x)
    first = -label_log_prob(ensemble.predict(x), y).mean()
    ensemble.calibrate(x, y)
    assert_close(ensemble.calibration.before, first.item(), rtol=1e-6, atol=0)
    after = -label_log_prob(ensemble.predict(x), y).mean()
    assert after <= first + 1e-9
    for factor in (0.9, 1.1) if ensemble.calibration.applied else ():
        other = scaled(ensemble, factor)  # of the posterior's variance
        assert -label_log_prob(predict(other, x), y).mean() > after - 2e-3
    assert all(torch.equal(la.mixture, old) for la, old in zip(members, before, strict=True))
    alone = torch.stack([la.model(x).detach() for la in members])
    assert_close(ensemble.predict(x, "network").f_mean, alone.mean(0))
    assert ensemble.is_ood(x, 0.1).shape == (60,)
    assert ensemble.is_ood(1000 * x, 0.1).double().mean() > 0.8
    prediction, kind = ensemble.predict(x), kind_of(members[0])
    if kind == "classification":
        inside = prediction.prediction_set(0.9).gather(1, y[:, None])
    elif kind == "regression":
        inside = (prediction.interval(0.9).lower <= y) & (y <= prediction.interval(0.9).upper)
    if kind != "poisson":
        assert inside.double().mean() > 0.75


@pytest.mark.parametrize("name", KINDS)
def test_a_calibrated_ensemble_of_one_is_its_member_around_each_mean(name):
    alone = posterior(name, 1)
    x = draw(60, 2, seed=7)
    y = alone.likelihood.sample(3 * alone.model(x).detach(), torch.Generator().manual_seed(3))
    together = LaplaceEnsemble([posterior(name, 1)]).calibrate(x, y)
    alone.calibrate(x, y)
    for mean in ("network", "linear"):
        expected, found = alone.predict(x, mean), together.predict(x, mean)
        assert_close(found.f_mean, expected.f_mean)
        assert_close(found.f_variance, expected.f_variance)
        assert_close(found.log_prob(y), expected.log_prob(y))


def test_members_have_one_likelihood_and_the_same_classes():
    pair = [posterior(name, 0, fitted=False) for name in ("classification", "poisson")]
    case = tiny("classification")
    two = posterior_of(nn.Linear(2, 2).double(), "classification", case.x, case.y % 2, at=2.0)
    three, one = posterior("classification", 0), LaplaceEnsemble(pair[:1])
    (x, y), train = data("regression", 10), Trained("regression")
    folds = partial(LaplaceEnsemble.from_folds, progress_bar=False)
    for error, words, call in (
        (ValueError, "all with the same likelihood", lambda: LaplaceEnsemble([])),
        (ValueError, "all with the same likelihood", lambda: LaplaceEnsemble(pair)),
        (TypeError, "takes a list of posteriors", lambda: LaplaceEnsemble(pair[0])),
        (TypeError, "takes a list of posteriors", lambda: LaplaceEnsemble([pair[0].model])),
        (ValueError, "same classes", lambda: LaplaceEnsemble([two, three])(case.x)),
        (RuntimeError, "Call la.fit", lambda: one.predict(case.x)),
        (ValueError, "folds=1, but it must lie between 2 and .* 10", lambda: folds(train, x, y, 1)),
        (ValueError, "folds=11, .* 10", lambda: folds(train, x, y, 11)),
        (ValueError, "10 targets, but tensors .* lengths .9.", lambda: folds(train, x[1:], y)),
        (TypeError, "must return a trained nn.Module, not NoneType", lambda: folds(print, x, y)),
    ):
        with pytest.raises(error, match=words):
            call()
    assert "1 of 1 members are not fitted" in repr(one) and "call fit of each" in str(one.details())


@pytest.mark.parametrize("again", ["fit", "calibrate"])
def test_an_ensemble_notices_that_a_member_has_changed(again, members, unseen):
    x, y = unseen
    copies = [copy.deepcopy(la) for la in members]
    ensemble = LaplaceEnsemble(copies).calibrate(x, y)
    before = ensemble.predict(x).expectation
    ensemble.float().double()  # which changes rounding alone
    assert_close(ensemble.predict(x).expectation, before, rtol=1e-3, atol=1e-3)
    if again == "fit":
        copies[0].fit(x[:10], y[:10], em_steps=0, prior_precision=9.0, progress_bar=False)
    else:
        copies[0].calibrate(3 * x, y)
    for use in (lambda: ensemble(x), lambda: ensemble.is_ood(x, 0.2)):
        with pytest.raises(RuntimeError, match="calibrate.* again"):
            use()
    ensemble.calibrate(x, y)(x)


def test_ensembles_are_printed_compared_and_reported(members, unseen, tmp_path):
    pytest.importorskip("matplotlib")
    x, y = unseen
    ensemble = LaplaceEnsemble(members).calibrate(x[:40], y[:40])
    shown, (title, rows) = repr(ensemble), ensemble.details()._table()
    assert len(shown.splitlines()) <= 15 and "of 3 posteriors" in shown, shown
    assert str(ensemble.calibration) in " ".join(shown.split())
    assert (title, rows[: len(ensemble._table()[1])]) == ensemble._table()
    for i, la in enumerate(members):
        own = la.details()._table()[1][len(la._table()[1]) :]
        assert own and {(f"member {i}: {name}", text) for name, text in own} <= {*rows}
    batches = [(x[40:50], y[40:50]), (x[50:], y[50:])]
    found = compare({"one": members[0], "all": ensemble}, batches)
    log_prob = label_log_prob(ensemble.predict(x[40:]), y[40:])
    assert_close(found.log_probs["all"], log_prob.double(), rtol=1e-5, atol=1e-6)
    assert found.records["all"]["parameters"] == 3 * found.records["one"]["parameters"]
    assert "1: LaplaceEnsemble" in compare([members[0], ensemble], x, y).records
    ensemble.report(batches, tmp_path / "report.html", 5 * x)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Ensemble of 3 posteriors of Sequential" in page and "member 2: log evidence" in page
    line = re.search(r">network</t.>.{0,40}>posterior</t.>.*?(>NLL<.*?</tr>)", page)[1]
    assert f"{-log_prob.mean():.4g}" in line
    if kind_of(members[0]) == "classification":
        alone = torch.stack([la.model(x[40:]).detach() for la in members]).softmax(-1).mean(0)
        assert f"{-alone.log().gather(1, y[40:, None]).mean():.4g}" in line


# members that were each trained without one fold


def data(kind, count=60, seed=0, frequency=1.0, noise=0.3):
    x = draw(count, 2, seed=seed)
    clear = torch.stack([x[:, 0], x[:, 1], -x.sum(1)], 1)
    if kind == "classification":
        return x, (clear + 2 * draw(count, 3, seed=seed + 1)).argmax(1)
    return x, (frequency * x[:, :1]).sin() + noise * draw(count, 1, seed=seed + 1)


class Trained:
    """A function that trains a small network, which remembers what it was given."""

    def __init__(self, kind, steps=60):
        self.kind, self.steps, self.given = kind, steps, []

    def __call__(self, x, y):
        self.given.append((x, y))
        with torch.random.fork_rng():
            torch.manual_seed(len(self.given))
            net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3 if y.dim() == 1 else 1))
        return trained(net.double(), x, y, self.steps, 0.1, LOSSES[self.kind])


@pytest.fixture(scope="module", params=LOSSES)
def folds(request):
    """An ensemble of three folds, its training function, its data, and the rows that each has not seen."""
    x, y = data(request.param, frequency=3.0, noise=0.05)  # where calibration changes predictions
    train, options = Trained(request.param), {"num_samples": 4, "progress_bar": False}
    ensemble = LaplaceEnsemble.from_folds(train, x, y, 3, **options)
    assert ensemble.calibration.applied
    masks = [(x[:, None] != given).any(-1).all(1) for given, _ in train.given]
    return ensemble, train, x, y, masks


def test_numbers_are_fitted_to_predictions_of_examples_that_a_network_has_not_seen(folds):
    ensemble, train, x, y, masks = folds
    assert len(masks) == 3 and (torch.stack(masks).sum(0) == 1).all()
    for mask, (given, labels) in zip(masks, train.given, strict=True):
        assert torch.equal(given, x[~mask]) and torch.equal(labels, y[~mask])
        if y.dim() == 1:
            sizes = y.bincount(minlength=3) - 3 * y[mask].bincount(minlength=3)
            assert sizes.abs().max() < 3
    pairs = zip(ensemble.members, masks, strict=True)
    before = [-la.predict(x[m]).log_prob(y[m]) for la, m in pairs]
    assert_close(ensemble.calibration.before, torch.cat(before).mean().item())

    def loss(scale):
        other = scaled(ensemble, scale)
        each = [-predict(other, x[m]).members[k].log_prob(y[m]) for k, m in enumerate(masks)]
        return torch.cat(each).sum().item() + 0.5 * (0.5 * log(other.tables[0][0][3])) ** 2

    assert loss(1.0) < min(loss(0.8), loss(1.25))


def test_guarantees_use_the_ranks_and_errors_of_all_folds(folds, level=0.9):
    ensemble, _, x, y, masks = folds
    new = torch.cat([draw(30, 2, seed=9), 30 * draw(5, 2, seed=8)])
    count, predicted, errors = torch.zeros(35), ensemble.predict(new), []

    def above(p):
        return (p[:, None] * (p[:, None] > p[..., None] * (1 + 1e-7))).sum(-1)

    for k, mask in enumerate(masks):
        own, labels = ensemble.predict(x[mask]).members[k], y[mask]
        theirs, mine = own._scored[0], predicted.members[k]._scored[0]
        count += (theirs[:, :1] >= mine[:, 0]).sum(0)
        if y.dim() == 1:
            errors.append(above(own.probs).gather(1, labels[:, None]))
        else:
            errors.append((labels - own.expectation).abs() / own.predictive_variance.sqrt())
    assert_close(predicted.p_values("epistemic"), (1 + count.double()) / (1 + len(x)))
    found = predicted.p_value
    assert (found[-5:] < 0.1).any() and torch.equal(ensemble.is_ood(new), found <= 0.05)
    q = torch.cat(errors)[:, 0].sort().values[ceil((len(x) + 1) * level) - 1]
    if y.dim() == 1:
        assert torch.equal(predicted.prediction_set(level), above(predicted.probs) <= q + 1e-7)
        return
    means = torch.stack([p.expectation for p in predicted.members])
    v = torch.stack([p.predictive_variance for p in predicted.members]).mean(0)
    half = q * (v**2 / (v + means.var(0, correction=0))).sqrt()
    due = means.mean(0) - half, means.mean(0) + half
    assert_close(tuple(predicted.interval(level)), due, atol=1e-6, rtol=1e-6)


def test_an_ensemble_by_folds_is_saved_and_a_validation_set_replaces_the_folds(folds, tmp_path):
    ensemble, train, x, _, _ = folds
    ensemble.save(tmp_path / "folds.pt")
    fresh = [LinearisedLaplace(la.model, train.kind, num_samples=4) for la in ensemble.members]
    again = LaplaceEnsemble.load(tmp_path / "folds.pt", fresh)
    ours, theirs = ensemble.predict(x), again.predict(x)
    assert torch.equal(ours.expectation, theirs.expectation)
    assert torch.equal(ours.p_value, theirs.p_value)
    assert again.reference.folds.tolist() == [20, 20, 20]
    again.calibrate(*data(train.kind, 40, seed=4))
    assert again.reference.folds is None and len(again.reference.unusual) == 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOSSES)
def test_folds_keep_to_their_levels_over_repeated_data(kind):
    """False alarms have a bound; sets and intervals have their coverage approximately."""
    covered, alarms, options = [], [], {"num_samples": 4, "progress_bar": False}
    for seed in range(30):
        x, y = data(kind, 80, seed=100 * seed)
        ensemble = LaplaceEnsemble.from_folds(Trained(kind, 300), x, y, 5, **options)
        new, labels = data(kind, 300, seed=100 * seed + 50)
        predicted = ensemble.predict(new)
        alarms.append(predicted.is_ood(0.1).double().mean())
        if kind == "regression":
            lower, upper = predicted.interval(0.8)
            inside = (lower <= labels) & (labels <= upper)
        else:
            inside = predicted.prediction_set(0.8).gather(1, labels[:, None])
        covered.append(inside.double().mean())
    covered, alarms = torch.stack(covered), torch.stack(alarms)
    error = covered.std() / len(covered) ** 0.5
    assert 0.78 - 5 * error < covered.mean() < 0.86 + 5 * error
    assert alarms.mean() < 0.1
