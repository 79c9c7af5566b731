"""Targets that may be wrong: scores and masks against their definitions, forms of targets, and what is refused."""

import pytest
import torch
from models import trained
from tiny import draw, fitted, known
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from torch_lla_em import Classification, LaplaceEnsemble, LinearisedLaplace, NotFittedError
from torch_lla_em.prediction import functions_of

FIXED = {"em_steps": 0, "prior_precision": 1.0, "progress_bar": False, "validation": False}


def blobs(count=200):
    """Three groups of points, their labels, of which every tenth is replaced by the next, and a trained network."""
    y = torch.arange(count) % 3
    x = 0.3 * draw(count, 3) + 3 * torch.eye(3).double()[y]
    given = torch.where(torch.arange(count) % 10 == 0, (y + 1) % 3, y)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Linear(3, 3).double()
    return x, y, given, trained(net, x, given, 200, 0.05, nn.functional.cross_entropy)


def without(prediction, y, power=0.25):
    """Probabilities of labels, classes last, by functions that count by p(y)^-power, one by one."""
    functions, weights = functions_of(prediction)
    p = prediction.likelihood.mean(functions.double())
    if prediction.likelihood.elementwise:
        p = torch.stack([1 - p, p], -1)
    weights = torch.ones(len(p)) if weights is None else weights
    total = torch.zeros_like(p[0])
    for each, weight in zip(p, weights, strict=True):
        total += weight * each / each.gather(-1, y.long()[..., None]) ** power
    return total / total.sum(-1, keepdim=True)


def test_wrong_labels_are_found_and_counted():
    x, y, given, net = blobs()
    la = LinearisedLaplace(net, "classification", num_samples=8).fit(x, given, **FIXED)
    record, wrong = la.suspicious(x, given), given != y
    log_p = without(la.predict(x), given).log()
    own = log_p.gather(1, given[:, None])[:, 0]
    assert_close(record.score, -own)
    assert (record.score > -la.predict(x).log_prob(given)).all()
    limit = own.exp().mean().log()
    assert record.mask.equal(own - log_p.scatter(1, given[:, None], -torch.inf).amax(1) < limit)
    assert record.mask[wrong].all() and record.number == record.mask.sum() <= wrong.sum() + 2
    assert wrong[record.order[: int(wrong.sum()) - 1]].all()
    assert record.label[wrong].equal(y[wrong]) and record.given.equal(given)
    assert_close(record.probability, log_p.exp().amax(1))
    lines = repr(record).splitlines()
    assert len(lines) == 5 and f"{record.number} of 200" in lines[1]
    assert "the posterior predicts" in lines[2]
    # labels that are right: hardly any is in the mask
    assert la.suspicious(x, y).number <= 2


def test_a_loader_that_shuffles_is_judged_in_the_order_of_its_dataset():
    x, _, given, net = blobs()
    la = LinearisedLaplace(net, "classification", num_samples=8).fit(x, given, **FIXED)
    whole = la.suspicious(x, given)
    for loader in (
        DataLoader(TensorDataset(x, given), 30, shuffle=True),
        [(x[:7], given[:7]), (x[7:], given[7:])],
    ):
        record = la.suspicious(loader)
        assert_close(record.score, whole.score)
        assert record.mask.equal(whole.mask)
    last = LinearisedLaplace(net, "classification", num_samples=4, parameters="weight")
    found = last.fit(x, given, **FIXED).suspicious(x, given)
    assert "all parameters" in repr(found) and "all parameters" not in repr(whole)


def test_examples_without_a_label_or_a_weight_are_not_judged():
    x, y, given, net = blobs()
    la = LinearisedLaplace(net, Classification(ignore_index=255), num_samples=8).fit(
        x, given, **FIXED
    )
    some = given.clone()
    some[0], weights = 255, torch.ones(200)
    weights[10] = 0
    record = la.suspicious(x, some, weights=weights)
    assert record.score[0] == record.score[10] == 0 and not record.mask[[0, 10]].any()
    assert record.mask[given != y].sum() == (given != y).sum() - 2
    triples = la.suspicious([(x, some, weights)], weights="last")
    assert triples.mask.equal(record.mask)
    with pytest.raises(ValueError, match="No example has a label and a positive weight"):
        la.suspicious(x, given, weights=0.0)
    with pytest.raises(ValueError, match="No example has a label"):
        la.suspicious(x, torch.full_like(given, 255))


def test_examples_of_folds_are_judged_by_networks_that_have_not_seen_them():
    x, y, given, _ = blobs(90)

    def train(x, y):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        return trained(net, x, y, 60, 0.05, nn.functional.cross_entropy)

    ensemble = LaplaceEnsemble.from_folds(train, x, given, 3, progress_bar=False, num_samples=4)
    record = ensemble.suspicious(x, given, folds=ensemble.folds)
    members = ensemble.predict(x).members
    expected = torch.stack([-m.log_prob(given) for m in members])[ensemble.folds, torch.arange(90)]
    assert_close(record.score, expected.double())
    assert record.mask[given != y].all()
    p = without(ensemble.predict(x), given).gather(1, given[:, None])[:, 0]
    assert_close(ensemble.suspicious(x, given).score, -p.log())
    with pytest.raises(ValueError, match="groups has the shape"):
        ensemble.suspicious(x[:80], given[:80], folds=ensemble.folds)


def test_sites_have_a_map_and_their_mean():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 2, 4, 4, generator=generator)
    y = x.argmax(1)
    net = nn.Conv2d(2, 2, 1)
    with torch.no_grad():
        net.weight.copy_(4 * torch.eye(2)[..., None, None])
        net.bias.zero_()
    given = y.clone()
    given[3], given[5, 0], given[7, 1, 1] = 1 - y[3], 1 - y[5, 0], -100
    la = LinearisedLaplace(net, "classification", class_dim=1, num_samples=4).fit(x, y, **FIXED)
    record = la.suspicious(x, given)
    p = without(la.predict(x), given.clamp_min(0))
    own = -p.log().gather(-1, given.clamp_min(0)[..., None])[..., 0]
    kept = given != -100
    assert_close(record.map, own.where(kept, 0))
    assert_close(record.score, (own * kept).sum((1, 2)) / kept.sum((1, 2)))
    assert record.order[:2].tolist() == [3, 5] and record.mask.nonzero().tolist() == [[3]]
    assert record.label.equal(y) and "score" in repr(record)


def test_of_several_labels_the_least_probable_counts():
    case, la = known("bernoulli")
    record, p = la.suspicious(case.x, case.y), without(la.predict(case.x), case.y)[..., 1]
    own = torch.where(case.y > 0.5, p, 1 - p)
    assert_close(record.map, -own.log())
    assert_close(record.score, -own.log().amin(1))
    assert record.label.equal((p > 0.5).long())
    assert record.mask.equal(((own / (1 - own)) < own.mean()).any(1))
    assert la.suspicious(1e6 * case.x, case.y).map.isfinite().all()


@pytest.mark.parametrize("name", ["regression", "poisson"])
def test_numbers_are_judged_on_both_sides(name):
    case, la = known(name)
    y = case.y.clone()
    usual, (high, low) = la.suspicious(case.x, y), case.y.sum(1).argsort()[[-1, 0]].tolist()
    y[high, 0] = (40 * (1 + y[high, 0].abs())).round()
    record = la.suspicious(case.x, y)
    assert record.order[0] == high and record.mask[high] and not usual.mask.any()
    prediction = la.predict(case.x)
    if name == "regression":
        away = (case.y - prediction.expectation) / prediction.predictive_variance.sqrt()
        two_sided = 2 * torch.distributions.Normal(0.0, 1.0).cdf(-away.abs())
        spread = prediction.predictive_variance[low, 0].sqrt()
        for away, is_shown in (
            (2.5, False),
            (3.3, True),
        ):  # .012 and .001, and there are 90 targets
            y[low, 0] = prediction.expectation[low, 0] - away * spread
            assert la.suspicious(case.x, y).mask[low] == is_shown
    else:
        rates, counts = prediction.samples.exp(), torch.arange(400.0, dtype=torch.double)
        pmf = torch.distributions.Poisson(rates[..., None]).log_prob(counts).exp().mean(0)
        at_most, at_least = (
            (pmf * keep).sum(-1)
            for keep in (counts <= case.y[..., None], counts >= case.y[..., None])
        )
        two_sided = (2 * torch.minimum(at_most, at_least)).clamp_max(1)
    assert_close(usual.probability, two_sided)
    assert_close(usual.score, -two_sided.log().amin(1))


def test_what_cannot_be_judged_is_refused():
    case, la = known("classification")
    with pytest.raises(ValueError, match="Class labels must be integers of shape"):
        la.suspicious(case.x, case.y[:, None])
    with pytest.raises(ValueError, match="30 inputs but 7 targets"):
        la.suspicious(case.x, case.y[:7])
    with pytest.raises(ValueError, match="empty"):
        la.suspicious([])
    numbers, of_numbers = known("regression")
    with pytest.raises(ValueError, match="NaN"):
        of_numbers.suspicious(numbers.x, numbers.y * torch.nan)
    counts, binomial = known("binomial")
    with pytest.raises(TypeError, match="log_prob"):
        binomial.suspicious(counts.x, counts.y)
    x = case.x.clone()
    x[4, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="prediction of example 4 is not finite"):
        la.suspicious([(x[:2], case.y[:2]), (x[2:], case.y[2:])])
    with pytest.raises(FloatingPointError, match="prediction of example 0 is not finite"):
        la.suspicious(x * torch.nan, case.y)
    for folds in (torch.arange(30) % 2, -torch.ones(30).long()):
        with pytest.raises(ValueError, match="but there are 1 members"):
            la.suspicious(case.x, case.y, folds=folds)
    own, changed = fitted("classification", em_steps=1)
    with pytest.raises(NotFittedError):
        LinearisedLaplace(own.model, "classification").suspicious(own.x, own.y)
    with torch.no_grad():
        own.model[2].bias += 1
    with pytest.raises(NotFittedError, match="weights have changed"):
        changed.suspicious(own.x, own.y)
