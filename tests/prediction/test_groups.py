"""Guarantees within groups and classes, under a shift of the inputs, and for several outputs together."""

import pytest
import tiny
import torch
from models import trained
from tiny import draw
from torch import nn
from torch.testing import assert_close

from torch_lla_em import LaplaceEnsemble, LinearisedLaplace, compare
from torch_lla_em.prediction.conformal import errors_of
from torch_lla_em.prediction.ranks import Masses, p_values, weighted_quantiles
from torch_lla_em.prediction.reference import is_second
from torch_lla_em.prediction.regions import Ellipsoid, covariance_of


def others(values, i):
    return torch.cat([values[:i], values[i + 1 :]])


def test_equal_weights_give_the_ranks_and_quantiles_of_no_weights():
    scores, new, ones = draw(40, 2), draw(9, 2, seed=1), torch.ones(40).double()
    masses = Masses(3 * ones, 3 * ones[:9])
    assert_close(p_values(scores, new, masses=masses), p_values(scores, new))
    errors = scores.abs()
    found = weighted_quantiles(errors, 0.8, masses)
    assert_close(found, errors.sort(0).values[32].expand(9, 2))  # the 33rd of 40


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9])
def test_weights_are_the_probability_of_being_the_new_one(level):
    """The new input is the i-th example with probability w_i / Σ w: a finite sum gives its coverage."""
    errors, weights = draw(30, 1).abs(), draw(30, seed=1).exp()
    share = weights / weights.sum()
    bounds, found = [], []
    for i in range(30):
        masses = Masses(others(weights, i), weights[i : i + 1])
        bounds.append(weighted_quantiles(others(errors, i), level, masses)[0])
        found.append(p_values(others(errors, i), errors[i : i + 1], masses=masses)[0])
    covered = (errors <= torch.stack(bounds))[:, 0]
    assert level - 1e-9 <= (share * covered).sum() <= level + share.max()
    alarms = (share * (torch.stack(found) <= 1 - level)).sum()
    assert 1 - level - share.max() <= alarms <= 1 - level + 1e-9


def test_an_input_with_too_large_a_weight_has_no_bound():
    masses = Masses(torch.ones(30), torch.tensor([1.0, 5.0]))
    found = weighted_quantiles(draw(30, 1).abs(), 0.9, masses)
    assert found[0].isfinite() and found[1].isinf()


def test_every_other_example_of_each_group_is_the_reference():
    labels = torch.tensor([3, 1, 3, 3, 1, 1, 2, 1, 2])
    expected = [False, False, True, False, True, False, False, True, True]
    assert is_second(labels).tolist() == expected
    assert is_second(torch.zeros(5).long()).tolist() == [False, True, False, True, False]


@pytest.fixture(scope="module")
def blobs():
    """Three classes, of which the last is rare and hard, and the posterior of a network."""
    generator = torch.Generator().manual_seed(0)
    y = torch.multinomial(torch.tensor([0.5, 0.38, 0.12]), 9000, True, generator=generator)
    centres = torch.tensor([[0.0, 0.0], [2.5, 0.0], [1.2, 0.5]])
    x = centres[y] + torch.randn(9000, 2, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 3))
        trained(net, x[:400], y[:400], 100)
    la = LinearisedLaplace(net, "classification", num_samples=8, seed=0)
    la.fit(x[:400], y[:400], progress_bar=False)
    return la, x[400:], y[400:]


def coverage_of_classes(la, x, y, level):
    sets = la.predict(x).prediction_set(level)
    inside = sets.gather(1, y[:, None])[:, 0].double()
    return torch.stack([inside[y == c].mean() for c in range(3)])


def within(share, level, references, inputs, below_only=False):
    """Whether a share is the level up to five standard errors, over repeats with so many references."""
    p, repeats = level * (1 - level), len(references)
    error = sum(p / (n + 2) for n in references) / repeats**2 + p / inputs
    slack = sum(1 / (n + 1) for n in references) / repeats
    return -5 * error**0.5 <= share - level <= slack + 5 * error**0.5


@pytest.mark.slow
def test_sets_by_class_cover_every_class_and_others_do_not(blobs):
    la, x, y = blobs
    test, found, plain, sizes = slice(6000, None), [], [], []
    for k in range(6):  # disjoint validation sets
        rows = slice(600 * k, 600 * (k + 1))
        la.calibrate(x[rows], y[rows])
        plain.append(coverage_of_classes(la, x[test], y[test], 0.9))
        la.calibrate(x[rows], y[rows], groups="classes")
        found.append(coverage_of_classes(la, x[test], y[test], 0.9))
        sizes.append(la.reference.classes.bincount().tolist())
    assert torch.stack(plain).mean(0)[2] < 0.8
    for c in range(3):
        share, references = torch.stack(found).mean(0)[c], [each[c] for each in sizes]
        assert within(share, 0.9, references, int((y[test] == c).sum())), (c, share)


@pytest.mark.slow
def test_false_alarms_by_class_keep_to_their_rate_in_every_class(blobs):
    la, x, y = blobs
    alarms = []
    for k in range(4):
        rows = slice(900 * k, 900 * (k + 1))
        la.calibrate(x[rows], y[rows], groups="classes")
        flagged = la.is_ood(x[6000:], rate=0.1).double()
        alarms.append(torch.stack([flagged[y[6000:] == c].mean() for c in range(3)]))
        assert la.is_ood(x[:200] + 40, rate=0.1).double().mean() > 0.9
    assert (torch.stack(alarms).mean(0) < 0.1 + 5 * (0.09 / 50 / 4) ** 0.5).all()


def test_p_values_by_class_are_the_largest_of_those_among_each_class(blobs):
    la, x, y = blobs
    la.calibrate(x[:500], y[:500], groups="classes")
    prediction = la.predict(x[500:520])
    reference, own = prediction.judged("p_value")
    ties = own.scored.values, prediction._room, own.scored.units
    each = [p_values(reference.unusual[reference.classes == c], *ties) for c in range(3)]
    assert_close(prediction.p_value, torch.stack(each).amax(0))


def test_thresholds_of_groups_are_those_of_their_examples_alone(blobs):
    la, x, y = blobs
    groups = (x[:500, 1] > 0.3).long() * 7 - 2  # any integers
    la.calibrate(x[:500], y[:500], groups=groups.numpy())
    prediction = la.predict(x[500:600], groups=(x[500:600, 1] > 0.3).long() * 7 - 2)
    reference, own = prediction.judged("p_value")
    sizes = {int(g): int((groups == g).sum()) // 2 for g in groups.unique()}
    assert {int(g): int((reference.groups == g).sum()) for g in groups.unique()} == sizes
    for g in (-2, 5):
        mine = la.predict(x[500:600], groups=torch.full((100,), g))
        errors = reference.errors[reference.groups == g].sort(0).values
        bound = errors[-(-(len(errors) + 1) * 9 // 10) - 1]
        of_all = errors_of(own.mixture, torch.zeros(100).long())
        assert torch.equal(mine.prediction_set(0.9)[:, 0], (of_all <= bound + mine._room)[:, 0])
        ties = own.scored.values, mine._room, own.scored.units
        among = p_values(reference.unusual[reference.groups == g], *ties)
        assert_close(mine.p_value, among)
    mixed = torch.tensor([-2, 5] * 50)
    both = la.predict(x[500:600], groups=mixed).prediction_set(0.9)
    for g in (-2, 5):
        alone = la.predict(x[500:600], groups=torch.full((100,), g)).prediction_set(0.9)
        assert torch.equal(both[mixed == g], alone[mixed == g])
    assert torch.equal(
        la.is_ood(x[500:600], groups=mixed), la.predict(x[500:600], groups=mixed).is_ood()
    )


@pytest.mark.slow
def test_intervals_cover_every_group():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(6000, 1, generator=generator)
    loud = torch.rand(6000, generator=generator) < 0.3
    y = x + torch.where(loud, 1.0, 0.1)[:, None] * torch.randn(6000, 1, generator=generator)
    net = nn.Linear(1, 1)
    with torch.no_grad():
        net.weight.fill_(1.0), net.bias.fill_(0.0)
    la = LinearisedLaplace(net, "regression", num_samples=4).fit(
        x[:200], y[:200], progress_bar=False
    )
    shares, plain, sizes = [], [], []
    for k in range(8):
        rows = slice(200 + 300 * k, 500 + 300 * k)
        la.calibrate(x[rows], y[rows], groups=loud[rows])
        for groups, into in ((loud[3000:], shares), (None, plain)):
            if groups is None:
                la.calibrate(x[rows], y[rows])
            lower, upper = la.predict(x[3000:], groups=groups).interval(0.8)
            inside = ((lower <= y[3000:]) & (y[3000:] <= upper)).double()[:, 0]
            into.append(torch.stack([inside[loud[3000:] == g].mean() for g in (False, True)]))
        sizes.append([int((loud[rows] == g).sum()) // 2 for g in (False, True)])
    for g in (0, 1):
        references = [each[g] for each in sizes]
        inputs = int((loud[3000:] == bool(g)).sum())
        assert within(torch.stack(shares).mean(0)[g], 0.8, references, inputs)
    assert torch.stack(plain).mean(0)[1] < 0.7
    found = la.check(x[3000:], y[3000:], 0.8, groups=loud[3000:])
    assert "group 1" in repr(found) and "groups=labels" in repr(found)
    la.calibrate(x[200:800], y[200:800], groups=loud[200:800])
    by_name = {g.name: g for g in la.check(x[3000:], y[3000:], 0.8, groups=loud[3000:]).groups}
    assert not by_name["group 1"].is_low(0.8)


@pytest.mark.slow
def test_weights_correct_for_a_shift_of_the_inputs():
    """Noise grows with x, and new inputs are larger: with their density ratio the coverage is right."""
    generator = torch.Generator().manual_seed(0)

    def drawn(count, shift):
        x = shift + torch.randn(count, 1, generator=generator)
        return x, (0.8 * x).exp() * torch.randn(count, 1, generator=generator)

    def ratio(x):
        return (x[:, 0] - 0.5).exp()  # N(1, 1) relative to N(0, 1)

    net = nn.Linear(1, 1)
    with torch.no_grad():
        net.weight.fill_(0.0), net.bias.fill_(0.0)
    x, y = drawn(200, 0.0)
    la = LinearisedLaplace(net, "regression", num_samples=4)
    la.fit(x, y, progress_bar=False, prior_precision=1.0, em_steps=0)  # there is no signal
    new_x, new_y = drawn(4000, 1.0)
    plain, found, safe = [], [], []
    for _ in range(12):
        x, y = drawn(600, 0.0)
        la.calibrate(x, y)
        plain.append(covered(la.predict(new_x).interval(0.8), new_y))
        la.calibrate(x, y, weights=ratio(x))
        found.append(covered(la.predict(new_x, weights=ratio(new_x)).interval(0.8), new_y))
        safe.append(covered(la.predict(new_x).interval(0.8), new_y))
    effective = 300 / ratio(drawn(100_000, 0.0)[0]).square().mean()  # (Σ w)² / Σ w²
    error = 5 * (0.16 / effective / 12 + 0.16 / 4000) ** 0.5
    mean = torch.stack(found).mean()
    assert abs(mean - 0.8) < error + 1 / effective, mean
    assert torch.stack(plain).mean() < 0.7
    assert torch.stack(safe).mean() >= mean


def covered(interval, y):
    return ((interval.lower <= y) & (y <= interval.upper)).all(1).double().mean()


@pytest.fixture(scope="module")
def several():
    """Three correlated outputs of a linear network, and its posterior."""
    generator = torch.Generator().manual_seed(0)
    root = torch.tensor([[1.0, 0.0, 0.0], [0.9, 0.3, 0.0], [0.0, 0.2, 2.0]])
    x = torch.randn(7000, 4, generator=generator)
    net = nn.Linear(4, 3)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net.reset_parameters()
    y = net(x).detach() + torch.randn(7000, 3, generator=generator) @ root.T
    la = LinearisedLaplace(net, "regression", sigma_noise=torch.ones(3), num_samples=8)
    return la.fit(x[:100], y[:100], progress_bar=False), x[100:], y[100:]


def test_joint_regions_contain_all_outputs_at_once(several):
    la, x, y = several
    boxes, balls, each = [], [], []
    for k in range(10):
        rows = slice(300 * k, 300 * (k + 1))
        prediction = la.calibrate(x[rows], y[rows]).predict(x[3000:])
        boxes.append(covered(prediction.interval(0.8, joint=True), y[3000:]))
        each.append(covered(prediction.interval(0.8), y[3000:]))
        balls.append(prediction.ellipsoid(0.8).contains(y[3000:]).double().mean())
    for found in (boxes, balls):
        assert within(torch.stack(found).mean(), 0.8, [150] * 10, 3900)
    assert torch.stack(each).mean() < 0.7


def test_the_covariance_of_outputs_is_that_of_f_and_of_the_noise(several):
    la, x, _ = several
    prediction = la.predict(x[:5])
    found = covariance_of(prediction.mixture, prediction.mixture.variance())
    f = prediction.covariance.double().view(5, 3, 5, 3)
    noise = torch.diag(la.sigma_noise.double() ** 2)
    expected = torch.stack([f[i, :, i] for i in range(5)]) + noise
    assert_close(found, expected, rtol=1e-5, atol=1e-8)
    assert_close(found.diagonal(dim1=1, dim2=2), prediction.predictive_variance.double())


def test_an_ellipsoid_contains_what_its_formula_says():
    covariance = torch.tensor([[[4.0, 1.0], [1.0, 1.0]]]).double()
    region = Ellipsoid(torch.ones(1, 2).double(), covariance, torch.tensor([2.0]).double())
    for y in draw(50, 2) * 3:
        apart = y - 1
        inside = apart @ torch.linalg.inv(covariance[0]) @ apart <= 4
        assert region.contains(y[None]).item() == inside.item()
    assert_close(region.log_volume.exp().item(), torch.pi * 4 * 3**0.5)


def test_joint_regions_need_several_continuous_outputs(several, blobs):
    la, x, y = blobs
    la.calibrate(x[:100], y[:100])
    with pytest.raises(TypeError, match="several continuous targets"):
        la.predict(x[:3]).ellipsoid()
    x, y = draw(60, 2), draw(60, 1, seed=1)
    few = LinearisedLaplace(nn.Linear(2, 1).double(), "regression", num_samples=4)
    few.fit(x, y, em_steps=0, prior_precision=1.0, progress_bar=False)
    prediction = few.calibrate(y.expand(60, 2) + x, y).predict(x)
    assert_close(prediction.interval(0.8, joint=True), prediction.interval(0.8))
    with pytest.raises(TypeError, match="interval"):
        prediction.ellipsoid()
    la, x, y = several
    la.calibrate(x[:100], y[:100])
    object.__setattr__(la._posterior, "reference", la.reference._replace(joint=None))
    with pytest.raises(ValueError, match="several outputs together"):
        la.predict(x[:3]).ellipsoid()


def test_folds_have_joint_regions_too():
    x = draw(60, 2).float()
    y = x + 0.3 * draw(60, 2, seed=1).float()
    ensemble = LaplaceEnsemble.from_folds(
        lambda x, y: nn.Linear(2, 2), x, y, folds=2, num_samples=4, progress_bar=False
    )
    prediction = ensemble.predict(x)
    assert prediction.ellipsoid(0.8).contains(y).double().mean() > 0.6
    assert covered(prediction.interval(0.8, joint=True), y) > 0.6


def test_files_and_ensembles_keep_groups_and_weights(blobs, tmp_path):
    la, x, y = blobs
    groups = (x[:, 0] > 1).long()
    la.calibrate(x[:300], y[:300], groups=groups[:300], weights=x[:300, 1].exp())
    la.save(tmp_path / "la.pt")
    loaded = LinearisedLaplace.load(tmp_path / "la.pt", la.model)
    stated = {"groups": groups[300:400], "weights": x[300:400, 1].exp()}
    ours, theirs = (each.predict(x[300:400], **stated) for each in (la, loaded))
    assert torch.equal(ours.p_value, theirs.p_value)
    assert torch.equal(ours.prediction_set(0.8), theirs.prediction_set(0.8))
    ensemble = LaplaceEnsemble([la, la]).calibrate(x[:300], y[:300], groups="classes")
    ensemble.save(tmp_path / "ensemble.pt")
    again = LaplaceEnsemble.load(tmp_path / "ensemble.pt", [la, la])
    found = (each.predict(x[300:400]).prediction_set(0.8) for each in (ensemble, again))
    assert torch.equal(*found)
    assert "each class" in str(la.calibrate(x[:300], y[:300], groups="classes"))
    assert "2 groups" in str(la.calibrate(x[:300], y[:300], groups=groups[:300]))


@pytest.mark.slow
def test_programs_have_the_sets_of_each_class(blobs):
    la, x, y = blobs
    la.calibrate(x[:400], y[:400], groups="classes")
    program = la.export(x[:5], level=0.8, p_value=True).module()
    found = program(x[400:450])
    prediction = la.predict(x[400:450])
    assert torch.equal(found["prediction_set"], prediction.prediction_set(0.8))
    assert_close(found["p_value"], prediction.p_value)
    la.calibrate(x[:400], y[:400], groups=y[:400])
    with pytest.raises(ValueError, match="Exported programs take no groups"):
        la.export(x[:5], level=0.8)


@pytest.mark.parametrize(
    "counts, words",
    [
        ((20, 18, 18), None),
        ((20, 18, 2), "fewer of class 2: the smallest has 1, for levels up to 0.5."),
        (
            (20, 4, 17),
            "fewer of class 1, 2: the smallest has 2, for levels up to 0.666.",
        ),
        ((20, 18, 0), "fewer of class 2: the smallest has 0, for levels up to 0."),
    ],
)
def test_classes_with_few_examples_are_named_when_calibrating(blobs, counts, words, caplog):
    la, x, y = blobs
    rows = torch.cat([(y == c).nonzero()[:count, 0] for c, count in enumerate(counts)])
    la.calibrate(x[rows], y[rows], groups="classes")
    assert sum("A level of 0.9" in message for message in caplog.messages) == (words is not None)
    assert words is None or words in caplog.text
    assert all(len(message.split()) <= 40 for message in caplog.messages if "A level" in message)
    if min(counts):
        least = min(counts) // 2
        la.predict(x[:3]).prediction_set(int(1000 * least / (least + 1)) / 1000)
    caplog.clear()
    la.calibrate(x[rows], y[rows], groups=y[rows])
    assert ("fewer of group" in caplog.text) == (0 < min(counts) < 18)


def test_what_does_not_fit_is_refused_with_the_remedy(blobs):
    la, x, y = blobs
    few = torch.cat([(y == c).nonzero()[:60, 0] for c in (0, 1)] + [(y == 2).nonzero()[:8, 0]])
    la.calibrate(x[few], y[few], groups="classes")
    with pytest.raises(ValueError, match="9 reference examples of class 2, and there are 4.*18"):
        la.predict(x[:3]).prediction_set(0.9)
    with pytest.raises(ValueError, match="19 reference examples of class 2.*38"):
        la.is_ood(x[:3])
    groups = (x[few, 0] > 1).long()
    la.calibrate(x[few], y[few], groups=groups)
    with pytest.raises(ValueError, match=r"la.predict\(x, groups=labels\)"):
        la.predict(x[:3]).prediction_set()
    with pytest.raises(ValueError, match=r"groups \[4\].*it had \[0, 1\]"):
        la.predict(x[:3], groups=[0, 4, 1]).p_value
    with pytest.raises(ValueError, match=r"shape \(2,\), but there are 3"):
        la.predict(x[:3], groups=[0, 1])
    with pytest.raises(TypeError, match="must be integers"):
        la.calibrate(x[few], y[few], groups=x[few, 0])
    with pytest.raises(ValueError, match="'class'"):
        la.calibrate(x[few], y[few], groups="class")
    with pytest.raises(ValueError, match="only one validation example of group 1"):
        la.calibrate(x[few], y[few], groups=(torch.arange(len(few)) == 3).long())
    with pytest.raises(ValueError, match="some must be positive"):
        la.calibrate(x[few], y[few], weights=0 * x[few, 0])
    for weights in (-x[few, 0].abs(), x[few, 0] * torch.nan):
        with pytest.raises(ValueError, match="finite and not negative"):
            la.calibrate(x[few], y[few], weights=weights)
    la.calibrate(x[few], y[few])
    with pytest.raises(ValueError, match="calibrate was not"):
        la.predict(x[:3], weights=[1.0, 2.0, 3.0]).p_value
    case, regression = tiny.fitted("regression", em_steps=0, prior_precision=1.0)
    with pytest.raises(TypeError, match="one class label"):
        regression.calibrate(case.x, case.y, groups="classes")
    compare([la], x[:50], y[:50])


def test_a_check_points_to_sets_by_class(blobs):
    la, x, y = blobs
    found = la.calibrate(x[:600], y[:600]).check(x[600:4000], y[600:4000])
    assert "class 2" in found.findings[0] and 'groups="classes"' in found.findings[0]
    la.calibrate(x[:600], y[:600], groups="classes")
    by_name = {g.name: g for g in la.check(x[600:4000], y[600:4000]).groups}
    assert not by_name["class 2"].is_low(0.9)


def test_examples_without_a_label_have_no_group(blobs):
    la, x, y = blobs
    y = y[:100].clone()
    y[::5] = -100
    groups = torch.arange(100) % 2
    la.calibrate(x[:100], y, groups=groups)
    assert la.reference.groups.bincount().tolist() == [20, 20]
    la.calibrate(list(zip(x[:100].split(30), y.split(30))), groups=groups)
    assert la.reference.groups.bincount().tolist() == [20, 20]
