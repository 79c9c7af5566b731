"""P-values, sets and intervals: of all examples, within groups and classes, and under a shift."""

import copy

import pytest
import tiny
import torch
from daily import daily
from models import trained
from tiny import batched, draw, posterior_of, prediction_of
from torch import nn
from torch.testing import assert_close

from torch_lla_em import LaplaceEnsemble, LinearisedLaplace, compare
from torch_lla_em.likelihoods import Classification, Regression
from torch_lla_em.prediction import functions_of
from torch_lla_em.prediction.conformal import p_values, quantiles
from torch_lla_em.prediction.neighbours import largest_variance, output_variance
from torch_lla_em.prediction.prediction import predicted_by
from torch_lla_em.prediction.pushforward import Pushforward

FIXED = {"em_steps": 0, "prior_precision": 1.0, "progress_bar": False}
TEST = slice(6000, None)


@pytest.fixture(scope="module")
def fit():
    """Three classes, of which the last is rare and hard, the posterior of a network, and its training rows."""
    generator = torch.Generator().manual_seed(0)
    y = torch.multinomial(torch.tensor([0.5, 0.38, 0.12]), 9000, True, generator=generator)
    centres = torch.tensor([[0.0, 0.0, 0.0], [2.5, 0.0, 0.0], [1.2, 0.5, 0.0]])
    x = (centres[y] + torch.randn(9000, 3, generator=generator)).double()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 3)).double()
        trained(net, x[:400], y[:400], 100)
    la = LinearisedLaplace(net, "classification", num_samples=8)
    return la.fit(x[:400], y[:400], progress_bar=False), x, y


@pytest.fixture
def blobs(fit):
    """A copy of the posterior, and examples that were not trained on."""
    la, x, y = fit
    return copy.copy(la), x[400:], y[400:]


@pytest.fixture(scope="module")
def several():
    """Three correlated outputs of a linear network, and its posterior."""
    generator = torch.Generator().manual_seed(0)
    root = torch.tensor([[1.0, 0.0, 0.0], [0.9, 0.3, 0.0], [0.0, 0.2, 2.0]])
    x = torch.randn(7000, 4, generator=generator).double()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Linear(4, 3).double()
    y = net(x).detach() + torch.randn(7000, 3, generator=generator) @ root.T
    la = LinearisedLaplace(net, Regression(torch.ones(3)), num_samples=8)
    return la.fit(x[:100], y[:100], progress_bar=False), x[100:], y[100:]


def test_far_inputs_are_flagged_and_others_at_the_rate(blobs):
    la, x, y = blobs
    far, alarms, inside = 10 * draw(500, 3), [], []
    outside = torch.cdist(far, x).amin(1) > 3
    for k in range(8):  # disjoint validation sets, one test set
        rows = slice(100 * k, 100 * (k + 1))
        la.calibrate(x[rows], y[rows])
        alarms.append(la.is_ood(x[TEST], 0.1).double().mean())
        sets = la.predict(x[TEST]).prediction_set(0.8)
        inside.append(sets.gather(1, y[TEST, None]).double().mean())
        kinds = "all", "epistemic", "distance"
        flagged, spread, distant = (la.is_ood(far, score=kind).double() for kind in kinds)
        assert distant.mean() > 0.95 and distant[outside].mean() > 0.99
        assert flagged[outside].mean() > 0.9 and flagged.mean() >= spread.mean()
    assert outside.double().mean() > 0.9
    # the share that 50 examples leave has variance p (1 - p) / 52
    assert torch.stack(alarms).mean() < 0.1 + 5 * (0.09 / 52 / 8 + 0.09 / 2600) ** 0.5
    assert torch.stack(inside).mean() > 0.8 - 5 * (0.16 / 52 / 8 + 0.16 / 2600) ** 0.5


def test_without_a_validation_set_there_is_nothing_to_compare_with(blobs):
    la, x, _ = blobs
    calls = (p := la.predict(x[:3])).prediction_set, p.is_ood, p.p_values, lambda: la.is_ood(x[:3])
    for call in (*calls, lambda: la.export(x[:3], p_value=True)):
        with pytest.raises(ValueError, match=r"Call la.calibrate\(validation_loader\)"):
            call()


def test_outputs_with_too_many_numbers_are_predicted_without_training_examples(monkeypatch):
    monkeypatch.setattr("torch_lla_em.inference.result.NUMBERS", 4 * 5 * 5 * 3 - 1)
    torch.manual_seed(0)
    x, y = torch.randn(3, 1, 5, 5), torch.randint(3, (3, 5, 5))
    net, options = nn.Conv2d(1, 3, 3, padding=1), {"num_samples": 4, "class_dim": 1}
    la = posterior_of(net, "classification", [(x, y)], **options, em_steps=2)
    assert la.posterior.training is None
    fresh = LinearisedLaplace(net, "classification", **options)
    fresh.load_state_dict(la.state_dict())
    assert torch.equal(fresh(x), la(x))
    assert la.calibrate([(x, y)]).predict(x).p_value.shape == (3,)


def test_the_reference_is_of_labelled_examples_that_nothing_was_fitted_to(blobs):
    la, x, y = blobs
    x, y = x[:75], y[:75].clone()
    y[::5] = -100
    labelled = (y >= 0).nonzero()[:, 0]
    before = la.calibrate(x, y).reference.table.clone()
    assert la.reference.unusual.shape == (30, 3) and la.reference.errors.shape == (30, 1)
    other = y.clone()
    other[labelled[1::2]] = (other[labelled[1::2]] + 1) % 3
    assert torch.equal(la.calibrate(x, other).reference.table, before)
    batches = batched(7, x, y)
    assert_close(la.calibrate(batches).reference.table, before, rtol=1e-4, atol=1e-5)
    la.calibrate(batches, groups=torch.arange(75) % 2)
    assert la.reference.groups.bincount().tolist() == [15, 15]


def test_sets_grow_with_the_level_and_scores_can_be_chosen(blobs):
    la, x, y = blobs
    prediction = la.calibrate(x[:400], y[:400]).predict(x[400:500])
    sizes = torch.stack([prediction.prediction_set(level).sum(1) for level in (0.5, 0.9, 0.99)])
    assert (sizes[0] >= 1).all() and (sizes.diff(dim=0) >= 0).all()
    reference, own = prediction._judged("p_value")
    scores, units = own._scored
    assert_close(own.epistemic.double(), scores[:, 0], rtol=1e-4, atol=1e-6)
    for score, columns in (("all", [0, 1, 2]), ("epistemic", [0]), ("distance", [1, 2])):
        among = reference.unusual[:, columns], scores[:, columns]
        due = p_values(*among, prediction._ties, units[columns])
        assert_close(prediction.p_values(score), due)
        assert torch.equal(la.is_ood(x[400:500], score=score), due <= 0.05)
    assert torch.equal(prediction.p_value, prediction.p_values())


@pytest.mark.parametrize("most", [512, 7])
def test_a_fit_keeps_products_and_the_largest_variance_of_training_examples(most, monkeypatch):
    """Of a narrow posterior, under which H is nearly the same everywhere; some, spread evenly."""
    monkeypatch.setattr("torch_lla_em.inference.result.EXAMPLES", most)
    torch.manual_seed(0)
    x, y = draw(20, 4), torch.arange(20) % 3
    la = posterior_of(nn.Linear(4, 3).double(), "classification", x, y, num_samples=64, at=100.0)
    x = x[torch.linspace(0, 19, min(20, most)).round().long()]
    training, Jw = la.posterior.training, la.posterior.at(x).members[0].Jw
    assert_close(training.deviations, Jw[1:].movedim(0, 1), rtol=1e-6, atol=1e-9)
    p = functions_of(la.predict(x, mean="linear"))[0].softmax(-1)
    H = torch.diag_embed(p.mean(0)) - torch.einsum("snc,snd->ncd", p, p) / len(p)
    leverages = torch.einsum("knc,ncd,lnd->nkl", Jw[1:], H, Jw[1:]) / 64
    given = training.likelihood, training.deviations
    due, without = (largest_variance(*given, factor * leverages) for factor in (1, 0))
    assert abs(training.largest_variance / due - 1) < 0.2 * (due / without - 1)


def test_means_are_shrunk_beyond_the_variance_of_training_examples_only(fit):
    la, x, _ = fit
    x = x[:60]
    for at, is_far in ((x, False), (50 * x, True)):
        (member,) = la.posterior.at(at).members
        plain = predicted_by(Pushforward((member._replace(training=None),)), la.mixture)
        found, variance = la.predict(at), output_variance(la.likelihood, member.Jw[1:])
        share = (la.posterior.training.largest_variance / variance).clamp_max(1)
        assert (share < 0.5).any() == is_far and (is_far or (share == 1).all())
        assert_close(found.f_mean, share[:, None] * plain.f_mean)
        own, other = (p._mixture.components[0].deviations for p in (found, plain))
        assert_close(own, other)


# several outputs, and other likelihoods


def test_intervals_cover_each_output_or_all_at_once(several):
    la, x, y = several
    prediction = copy.copy(la).calibrate(x[:1000], y[:1000]).predict(x[1000:])
    (lower, upper), box = prediction.interval(0.8), prediction.interval(0.8, joint=True)
    inside, all_inside = ((low <= y[1000:]) & (y[1000:] <= up) for low, up in ((lower, upper), box))
    error = 5 * (0.16 / 502 + 0.16 / 5900) ** 0.5
    for share in (*inside.double().mean(0), all_inside.all(1).double().mean()):
        assert abs(share - 0.8) < error
    reference, own = prediction._judged("interval")
    size = 2 * own.predictive_variance.sqrt()
    due = quantiles(reference.errors, 0.8), quantiles(reference.errors.amax(1, keepdim=True), 0.8)
    assert_close((upper - lower) / size, due[0].expand(size.shape))
    assert_close((box.upper - box.lower) / size, due[1].expand(size.shape))
    assert (copy.copy(la).calibrate(x[:80], y[:80]).predict(100 * x[:9]).p_value < 0.05).all()


@pytest.mark.parametrize("name", ["bernoulli", "poisson"])
def test_other_likelihoods_have_p_values_and_no_sets(name):
    case, la = tiny.known(name)
    prediction = copy.copy(la).calibrate(case.x + 0.1, case.y).predict(case.x)
    assert prediction.p_value.shape == (len(case.x),)
    for ask in (prediction.prediction_set, prediction.interval):
        with pytest.raises(TypeError):
            ask()
    if name == "poisson":  # a mean of 0 would be a rate of 1: it is not shrunk
        (member,) = la.posterior.at(50 * case.x).members
        plain = predicted_by(Pushforward((member._replace(training=None),)), la.mixture)
        assert_close(la.predict(50 * case.x).f_mean, plain.f_mean)


# groups, classes and weights


def test_thresholds_of_groups_are_those_of_their_examples_alone(blobs):
    la, x, y = blobs
    groups = (x[:600, 1] > 0.3).long() * 7 - 2  # any integers
    la.calibrate(x[:500], y[:500], groups=groups[:500].numpy())
    mixed = groups[500:]
    prediction = la.predict(x[500:600], groups=mixed)
    reference, own = prediction._judged("p_value")
    both = prediction.prediction_set(0.9)
    assert torch.equal(la.is_ood(x[500:600], groups=mixed), prediction.is_ood())
    for g in (-2, 5):
        assert (reference.groups == g).sum() == (groups[:500] == g).sum() // 2
        mine = la.predict(x[500:600], groups=torch.full((100,), g))
        errors = reference.errors[reference.groups == g].sort(0).values
        bound = errors[-(-(len(errors) + 1) * 9 // 10) - 1]
        of_all = own._errors(torch.zeros(100).long())
        sets = mine.prediction_set(0.9)
        assert torch.equal(sets[:, 0], (of_all <= bound + prediction._ties)[:, 0])
        assert torch.equal(both[mixed == g], sets[mixed == g])
        ties = own._scored[0], prediction._ties, own._scored[1]
        assert_close(mine.p_value, p_values(reference.unusual[reference.groups == g], *ties))
    # of classes it is the largest among the examples of each
    prediction = la.calibrate(x[:500], y[:500], groups="classes").predict(x[500:520])
    reference, own = prediction._judged("p_value")
    ties = own._scored[0], prediction._ties, own._scored[1]
    each = [p_values(reference.unusual[reference.classes == c], *ties) for c in range(3)]
    assert_close(prediction.p_value, torch.stack(each).amax(0))


def test_what_does_not_fit_is_refused_with_the_remedy(blobs, several):
    la, x, y = blobs
    few = torch.cat([(y == c).nonzero()[:60, 0] for c in (0, 1)] + [(y == 2).nonzero()[:8, 0]])
    X, Y, groups = x[few], y[few], (x[few, 0] > 1).long()
    one = (torch.arange(len(few)) == 3).long()
    parity = torch.arange(len(few)) % 2
    single = parity.index_fill(0, torch.tensor([0]), 1)

    def by(ask, **given):
        return lambda: ask(copy.copy(la).calibrate(X, Y, **given))

    def sets(**given):
        return lambda la: la.predict(x[:3], **given).prediction_set(0.9)

    def calibrate(**given):
        return by(None, **given)

    pixels = prediction_of(Classification(), torch.zeros(2, 5, 5, 3), torch.zeros(2, 2, 5, 5, 3), 1)
    plain = prediction_of(Regression(1.0), torch.zeros(2, 1), torch.zeros(2, 2, 1))
    case, real = tiny.known("regression")
    known = copy.copy(several[0]).calibrate(several[1][:100], several[2][:100])
    for error, words, call in (
        (ValueError, "9 reference examples of class 2, and there are 4.*18", by(sets(), groups="classes")),
        (ValueError, "19 reference examples of class 2.*38", by(lambda la: la.is_ood(x[:3]), groups="classes")),
        (ValueError, r"la.predict\(x, groups=labels\)", by(sets(), groups=groups)),
        (ValueError, r"groups \[4\].*it has \[0, 1\]", by(sets(groups=[0, 4, 1]), groups=groups)),
        (ValueError, r"shape \(2,\), but there are 3", by(sets(groups=[0, 1]), groups=groups)),
        (ValueError, "calibrate was not", by(sets(weights=[1.0, 2.0, 3.0]))),
        (ValueError, "score='entropy'", by(lambda la: la.predict(x[:3]).is_ood(score="entropy"))),
        (ValueError, "without mean=", by(lambda la: la.predict(x[:3], mean="network").prediction_set())),
        *((TypeError, "groups must be integers.*numpy.unique", calibrate(groups=[g] * 128)) for g in ("a", 0.5)),
        (ValueError, "'class'", calibrate(groups="class")),
        (ValueError, "fewer than two .* of group 1", calibrate(groups=one)),
        (ValueError, "of group 0 with a positive weight", calibrate(groups=parity, weights=single)),
        *((ValueError, "finite and not negative", calibrate(weights=w * x[few, 0].abs())) for w in (-1, torch.nan)),
        (TypeError, "weights must be numbers", calibrate(weights=["a"] * 128)),
        (TypeError, "one class label", lambda: real.calibrate(case.x, case.y, groups="classes")),
        *((TypeError, r"use interval\(level\).*RiskControl\(la,", each.prediction_set) for each in (pixels, plain)),
        (TypeError, "prediction_set", by(lambda la: la.predict(x[:3]).interval())),
        (ValueError, "regressions do not have", lambda: known.predict(several[1][:3]).p_values("distance")),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            call()
    compare([la], x[:50], y[:50])


def test_weights_reach_the_ranks_and_files_keep_what_was_stated(blobs, tmp_path):
    la, x, y = blobs
    groups, weights, own = (x[:, 0] > 1).long(), x[:300, 1].exp(), x[300:400, 1].exp()
    prediction = la.calibrate(x[:300], y[:300], weights=weights).predict(x[300:400], weights=own)
    (reference, judged), given = prediction._judged("p_value"), {"own": own}
    given["weights"] = reference.weights
    ties = judged._scored[0], prediction._ties, judged._scored[1]
    assert_close(prediction.p_value, p_values(reference.unusual, *ties, **given))
    bounds = quantiles(reference.errors, 0.8, **given)
    inside = judged._errors(torch.zeros(100).long()) <= bounds + prediction._ties
    assert torch.equal(prediction.prediction_set(0.8)[:, 0], inside[:, 0])
    safe = la.predict(x[300:400]).prediction_set(0.8)  # inputs without a weight have the largest
    assert (safe >= la.predict(x[300:400], weights=[weights.min()] * 100).prediction_set(0.8)).all()
    la.calibrate(x[:300], y[:300], groups=groups[:300], weights=weights)
    la.save(tmp_path / "la.pt")
    loaded = LinearisedLaplace.load(tmp_path / "la.pt", la.model)
    stated = {"groups": groups[300:400], "weights": own}
    ours, theirs = (each.predict(x[300:400], **stated) for each in (la, loaded))
    assert torch.equal(ours.p_value, theirs.p_value) and "2 groups" in str(la)
    assert torch.equal(ours.prediction_set(0.8), theirs.prediction_set(0.8))
    ensemble = LaplaceEnsemble([la, la]).calibrate(x[:300], y[:300], groups="classes")
    ensemble.save(tmp_path / "ensemble.pt")
    again = LaplaceEnsemble.load(tmp_path / "ensemble.pt", [la, la])
    found = (each.predict(x[300:400]).prediction_set(0.8) for each in (ensemble, again))
    assert torch.equal(*found) and "each class" in str(ensemble)
    # every other example of positive weight is the reference, and no inputs have no sets
    la.calibrate(x[:80], y[:80], weights=torch.arange(80) % 2 == 0)
    for given in ([0.0, 1, 1], [0.0] * 3):
        assert la.predict(x[:3], weights=given).p_value.isfinite().all()
    assert la.predict(x[:0], weights=torch.zeros(0)).prediction_set(0.8).shape == (0, 3)
    la.calibrate(x[:80], y[:80], groups=torch.arange(80) % 2)
    prediction = la.predict(x[:0], groups=torch.zeros(0, dtype=torch.long))
    assert prediction.prediction_set(0.8).shape == (0, 3) and prediction.p_value.shape == (0,)


# ties, batches and rounding


def discrete(n, seed):
    """Inputs of two values, and labels that depend on them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(2, (n, 1), generator=generator).float()
    y = torch.rand(n, generator=generator) < 0.2 + 0.4 * x[:, 0]
    return x.expand(n, 3).contiguous(), y.long() + torch.randint(2, (n,), generator=generator)


def of_discrete(seed, likelihood="classification"):
    """A calibrated posterior of a network on inputs of two values, by rounding different in batches."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 3))
    la = LinearisedLaplace(net, likelihood, num_samples=8, seed=seed)
    targets = nn.functional.one_hot if likelihood == "regression" else lambda y, _: y
    (x, y), (new, labels) = discrete(60, seed), discrete(80, seed + 100)
    la.fit(x, targets(y, 3) * 1, **FIXED)  # there is hardly any signal
    return la.calibrate(new, targets(labels, 3) * 1)


def alone_and_together(la, x=torch.eye(2)[:, [0, 0, 0]]):
    """The p-values of inputs, which with flags and sets are the same in any batch."""

    def results(x):
        p = la.predict(x)
        has_sets = not p.likelihood.real_valued
        sets = [p.prediction_set(level) for level in (0.5, 0.8, 0.9) if has_sets]
        return [p.p_value, p.is_ood(0.1), *sets]

    for row in x:
        alone = results(row[None])
        for n in (7, 200):
            together = results(row.expand(n, 3).contiguous())
            assert all((many == one).all() for many, one in zip(together, alone, strict=True))
    return torch.cat([la.predict(row[None]).p_value.cpu() for row in x])


@pytest.mark.parametrize("seed", daily(0, rest=range(1, 4)))
def test_results_of_an_input_depend_neither_on_its_batch_nor_on_the_dtype(seed):
    """A reference keeps the rounding errors of the dtype in which it was computed."""
    la = of_discrete(seed)
    ensemble = LaplaceEnsemble([la, of_discrete(seed + 50)]).calibrate(*discrete(80, seed + 200))
    x = torch.eye(2)[:, [0, 0, 0]]
    student = la.distil(discrete(60, seed)[0], num_inputs=100, steps=40, progress_bar=False)
    student.calibrate(*discrete(80, seed + 300))
    for each in (la, ensemble, student):
        found, sets = alone_and_together(each), each.predict(x).prediction_set(0.8)
        cast = copy.deepcopy(each).double()
        now = cast.predict(x.double())
        assert each.reference.unusual.dtype == torch.float64
        assert_close(now.p_value.double(), found.double(), rtol=0, atol=1e-12)
        assert torch.equal(now.prediction_set(0.8), sets)
    la = of_discrete(seed, "regression")
    alone_and_together(la)
    # a target at the end of an interval is in it
    x, y = discrete(80, seed + 100)
    y = nn.functional.one_hot(y, 3)
    for size in (1, 80):
        ends = [la.predict(part).interval(0.8) for part in x.split(size)]
        lower, upper = (torch.cat(end) for end in zip(*ends, strict=True))
        assert ((lower <= y) & (y <= upper))[1::2].double().mean(0).min() >= 0.8


@pytest.mark.cuda
def test_ties_are_the_same_on_both_devices():
    la = of_discrete(1)
    found = alone_and_together(la)
    there = alone_and_together(la.to("cuda"), torch.eye(2)[:, [0, 0, 0]].cuda())
    assert torch.equal(there, found)
