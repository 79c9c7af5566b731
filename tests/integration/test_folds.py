"""Ensembles of networks that were each trained without one fold of the data."""

import copy
from math import ceil

import pytest
import torch
from tiny import draw
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from torch_lla_em import LaplaceEnsemble, LinearisedLaplace

FOLDS = 3
LOSSES = {"classification": F.cross_entropy, "regression": F.mse_loss}


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
        optimizer = torch.optim.Adam(net.double().parameters(), 0.1)
        for _ in range(self.steps):
            optimizer.zero_grad()
            LOSSES[self.kind](net(x), y).backward()
            optimizer.step()
        return net


@pytest.fixture(scope="module", params=LOSSES)
def case(request):
    # where calibration changes the predictions
    x, y = data(request.param, frequency=3.0, noise=0.05)
    train = Trained(request.param)
    options = {"num_samples": 4, "progress_bar": False}
    ensemble = LaplaceEnsemble.from_folds(train, x, y, FOLDS, **options)
    assert ensemble.calibration.applied
    return ensemble, train, x, y


def unseen(case):
    """Yield each member's number, and the examples that it was not trained on."""
    _, train, x, _ = case
    for k, (given, _) in enumerate(train.given):
        yield k, (x[:, None] != given).any(-1).all(1)


def test_every_example_is_kept_from_one_network(case):
    _, train, x, y = case
    masks = torch.stack([mask for _, mask in unseen(case)])
    assert len(masks) == FOLDS and (masks.sum(0) == 1).all()
    for (_, mask), (given, labels) in zip(unseen(case), train.given):
        assert torch.equal(given, x[~mask]) and torch.equal(labels, y[~mask])
        if y.dim() == 1:
            sizes = torch.stack([y.bincount(minlength=3), 3 * y[mask].bincount(minlength=3)])
            assert (sizes[0] - sizes[1]).abs().max() < 3


def test_numbers_are_fitted_to_predictions_of_unseen_examples(case):
    ensemble, _, x, y = case
    before = [-ensemble.members[k].predict(x[m]).log_prob(y[m]) for k, m in unseen(case)]
    assert_close(ensemble.calibration.before, torch.cat(before).mean().item())
    table = ensemble.table.clone()

    def loss(scale):
        ensemble.table = table.clone()
        ensemble.table[0, 3] *= scale
        each = [-ensemble.predict(x[m]).members[k].log_prob(y[m]) for k, m in unseen(case)]
        return torch.cat(each).sum().item() + 0.5 * (0.5 * ensemble.table[0, 3].log().item()) ** 2

    assert loss(1.0) < min(loss(0.8), loss(1.25))
    ensemble.table = table


def test_p_values_add_the_ranks_of_all_folds(case):
    ensemble, _, x, _ = case
    new = torch.cat([draw(20, 2, seed=9), 30 * draw(5, 2, seed=8)])
    count, predicted = torch.zeros(len(new)), ensemble.predict(new)
    for k, mask in unseen(case):
        theirs, own = (
            ensemble.predict(inputs).members[k].scored.values for inputs in (x[mask], new)
        )
        count += (theirs[:, :1] >= own[:, 0]).sum(0)
    assert_close(predicted.p_values("epistemic"), (1 + count.double()) / (1 + len(x)))
    found = predicted.p_value
    assert (found[-5:] < 0.1).any() and torch.equal(ensemble.is_ood(new), found <= 0.05)


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_sets_and_intervals_use_the_errors_of_all_examples(case, level):
    ensemble, _, x, y = case
    new = draw(30, 2, seed=9)
    predicted = ensemble.predict(new)
    each = [(ensemble.predict(x[m]).members[k], y[m]) for k, m in unseen(case)]
    index = ceil((len(x) + 1) * level) - 1
    if y.dim() == 1:

        def above(p):
            return (p[:, None] * (p[:, None] > p[..., None] * (1 + 1e-7))).sum(-1)

        errors = torch.cat([above(p.probs).gather(1, t[:, None])[:, 0] for p, t in each])
        expected = above(predicted.probs) <= errors.sort().values[index] + 1e-7
        assert torch.equal(predicted.prediction_set(level), expected)
        return
    errors = [(t - p.expectation).abs() / p.predictive_variance.sqrt() for p, t in each]
    q = torch.cat(errors)[:, 0].sort().values[index]
    means = torch.stack([p.expectation for p in predicted.members])
    v = torch.stack([p.predictive_variance for p in predicted.members]).mean(0)
    half = q * (v**2 / (v + means.var(0, correction=0))).sqrt()
    lower, upper = predicted.interval(level)
    assert_close(lower, means.mean(0) - half, atol=1e-6, rtol=1e-6)
    assert_close(upper, means.mean(0) + half, atol=1e-6, rtol=1e-6)


def test_an_ensemble_by_folds_is_saved(case, tmp_path):
    ensemble, _, x, _ = case
    ensemble.save(tmp_path / "folds.pt")
    kind = type(ensemble.members[0].likelihood).__name__.lower()
    members = [LinearisedLaplace(copy.deepcopy(la.model), kind) for la in ensemble.members]
    again = LaplaceEnsemble.load(tmp_path / "folds.pt", members)
    ours, theirs = ensemble.predict(x), again.predict(x)
    assert torch.equal(ours.expectation, theirs.expectation)
    assert torch.equal(ours.p_value, theirs.p_value)


def test_a_validation_set_replaces_the_folds():
    x, y = data("regression")
    options = {"num_samples": 4, "progress_bar": False}
    ensemble = LaplaceEnsemble.from_folds(Trained("regression", 5), x, y, 2, **options)
    assert ensemble.conformal_folds.tolist() == [30, 30]
    ensemble.calibrate(*data("regression", 40, seed=4))
    assert ensemble.conformal_folds is None and len(ensemble.conformal_unusual) == 20
    ensemble.predict(x).interval(0.8)


def test_wrong_folds_are_refused():
    x, y = data("regression", 10)
    for folds in (1, 11):
        with pytest.raises(ValueError, match=f"folds={folds}, but it must lie between 2 and .* 10"):
            LaplaceEnsemble.from_folds(Trained("regression"), x, y, folds)
    with pytest.raises(ValueError, match="10 targets, but tensors of x have lengths .9."):
        LaplaceEnsemble.from_folds(Trained("regression"), x[1:], y)
    with pytest.raises(TypeError, match="train must return a trained nn.Module, not NoneType"):
        LaplaceEnsemble.from_folds(lambda x, y: None, x, y, progress_bar=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOSSES)
def test_folds_keep_to_their_levels_over_repeated_data(kind):
    """False alarms have a bound; sets and intervals have their coverage approximately."""
    covered, alarms = [], []
    for seed in range(30):
        x, y = data(kind, 80, seed=100 * seed)
        options = {"num_samples": 4, "progress_bar": False}
        ensemble = LaplaceEnsemble.from_folds(Trained(kind, 300), x, y, 5, **options)
        new, labels = data(kind, 300, seed=100 * seed + 50)
        predicted = ensemble.predict(new)
        alarms.append(predicted.is_ood(0.1).double().mean())
        if kind == "regression":
            lower, upper = predicted.interval(0.8)
            inside = ((lower <= labels) & (labels <= upper)).double()
        else:
            inside = predicted.prediction_set(0.8).gather(1, labels[:, None]).double()
        covered.append(inside.mean())
    covered, alarms = torch.stack(covered), torch.stack(alarms)
    error = covered.std() / len(covered) ** 0.5
    assert 0.78 - 5 * error < covered.mean() < 0.86 + 5 * error
    assert alarms.mean() < 0.1
