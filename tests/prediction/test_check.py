"""Coverage within groups: what is measured and advised; and sets of pixels whose expected loss is bounded."""

from dataclasses import replace

import pytest
import torch
from models import trained
from tiny import batched, draw, posterior_of
from torch import nn
from torch.testing import assert_close

from torch_lla_em import Adapter, LaplaceEnsemble, LinearisedLaplace, RiskControl
from torch_lla_em.prediction.check import Check, GroupCoverage

FIRST = lambda model, inputs: model(inputs[0])  # noqa: E731
FIXED = {"em_steps": 0, "prior_precision": 1.0, "progress_bar": False}


def fitted(likelihood, outputs, y):
    """A posterior of a linear network on inputs with one extreme feature, inputs and targets."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1200, 3, generator=generator)
    x[:, 1] = x[:, 1] ** 3
    y = y(x, torch.randn(1200, generator=generator))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Linear(3, outputs)
    loss = nn.functional.cross_entropy if likelihood == "classification" else nn.functional.mse_loss
    trained(net, x[:300], y[:300], 200, 0.05, loss)
    la = LinearisedLaplace(net, likelihood, num_samples=4).fit(x[:300], y[:300], **FIXED)
    return la, x, y


def test_a_rare_class_is_found():
    rare = fitted("classification", 2, lambda x, noise: ((x[:, 0] + 0.8 * noise) > 1.6).long())
    la, x, y = rare
    with pytest.raises(ValueError, match="calibrate"):
        la.check(x[600:], y[600:])
    la.calibrate(x[300:600], y[300:600])
    with pytest.raises(ValueError, match="No example has a label"):
        la.check(x[600:], torch.full((600,), -100), level=0.5)
    found = la.check(batched(70, x[600:], y[600:]))
    inside = la.predict(x[600:]).prediction_set(0.9).gather(1, y[600:, None])[:, 0].double()
    by_name = {group.name: group for group in found.groups}
    assert by_name["all"].coverage == pytest.approx(inside.mean().item())
    assert by_name["class 1"].coverage == pytest.approx(inside[y[600:] == 1].mean().item())
    assert by_name["class 1"].is_low(0.9) and not by_name["all"].is_low(0.9)
    (line, *_) = found.findings
    assert "clearly below 0.9 for: class 1" in line and 'groups="classes"' in line
    ensemble = LaplaceEnsemble([la, la]).calibrate(x[300:600], y[300:600])
    assert ensemble.check(x[600:], y[600:]).groups[0].number == 600
    la.calibrate(x[300:600], y[300:600], groups="classes")
    assert not {g.name: g for g in la.check(x[600:], y[600:]).groups}["class 1"].is_low(0.9)


def test_noise_that_depends_on_the_inputs_or_the_group_is_found():
    la, x, y = fitted("regression", 1, lambda x, e: (x + e[:, None] * x.abs())[:, 1:2])
    found = la.calibrate(x[300:600], y[300:600]).check(x[600:], y[600:])
    lower, upper = la.predict(x[600:]).interval(0.9)
    inside = ((lower <= y[600:]) & (y[600:] <= upper)).double().mean().item()
    assert found.groups[0].coverage == pytest.approx(inside)
    assert found.residuals.most == "the distance of the predicted mean from its median"
    assert found.residuals.p_value == pytest.approx(0.002)  # the least of two families
    assert "size of residuals" in str(found)
    assert 'likelihood="heteroscedastic"' in found.problems[-1]
    low = {g.name for g in found.groups if g.is_low(0.9)}
    assert low >= {f"predicted mean, {name} quarter" for name in ("lowest", "highest")}
    loud = (x[:, 1].abs() > 1).long()
    shown = repr(la.check(x[600:], y[600:], groups=loud[600:]))
    assert "group 1" in shown and "groups=labels" in shown
    la.calibrate(x[300:600], y[300:600], groups=loud[300:600])
    found = la.check(x[600:], y[600:], groups=loud[600:])
    assert not {g.name: g for g in found.groups}["group 1"].is_low(0.9)
    la, x, y = fitted("regression", 1, lambda x, e: x[:, :1] + e[:, None])
    found = la.calibrate(x[300:600], y[300:600]).check(x[600:], y[600:])
    assert found.residuals.p_value > 0.01 and "No group" in repr(found)


def test_only_one_noise_for_all_inputs_is_tested():
    """Columns of inputs can be what sizes depend on; a network that predicts the noise, and counts, are not tested."""
    la, x, y = fitted("regression", 1, lambda x, e: x[:, :1] + e[:, None] * (1 + x[:, 2:] ** 2))
    found = la.calibrate(x[300:600], y[300:600]).check(x[600:], y[600:]).residuals
    assert found.most == "the distance of x[:, 2] from its median" and found.correlation > 0.2
    rows = [((x, x), y) for x, y in batched(70, x[600:], y[600:])]
    by_mean = LinearisedLaplace(la.model, "regression", num_samples=4, adapter=Adapter(FIRST))
    by_mean.fit([((x[:300], x[:300]), y[:300])], **FIXED).calibrate(rows)
    assert by_mean.check(rows).residuals.most.endswith("predicted mean from its median")
    generator = torch.Generator().manual_seed(0)
    rates = torch.poisson(torch.ones(1200, 1), generator)
    for likelihood, outputs, targets in (("heteroscedastic", 2, y), ("poisson", 1, rates)):
        net = nn.Linear(3, outputs)
        own = LinearisedLaplace(net, likelihood, num_samples=4).fit(x[:300], targets[:300], **FIXED)
        own.calibrate(x[300:600], targets[300:600])
        assert own.check(x[600:], targets[600:]).residuals is None


WITHOUT_LIGHT = "blank image", "faint contrast"


def test_inputs_that_flags_miss_are_named():
    """Rotations of images that are the same in all directions cannot be seen, and noise can."""
    generator, y = torch.Generator().manual_seed(0), torch.arange(600) % 2
    places = torch.arange(8) - 3.5
    radius = (places[:, None] ** 2 + places**2).sqrt()
    x = torch.cos(radius * (1 + 0.3 * y[:, None, None]))[:, None]
    x = x + 0.1 * torch.randn(600, 1, 8, 8, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    net, fit = trained(net, x[:200], y[:200], 60, 0.01), (x[:200], y[:200])
    la = posterior_of(net, "classification", *fit, num_samples=8).calibrate(x[200:400], y[200:400])
    found = la.check(x[400:], y[400:])
    shifts = {*WITHOUT_LIGHT, "rotation by 90°", "blur", "noise", "inverted values"}
    assert set(found.shifted) == shifts
    again, known = (la.predict(z).p_value for z in (x[400:].rot90(dims=(2, 3)), x[400:]))
    above = (again[:, None] < known).double() + 0.5 * (again[:, None] == known)
    assert found.shifted["rotation by 90°"] == pytest.approx(above.mean().item())
    assert found.shifted["rotation by 90°"] < 0.6 and found.shifted["noise"] > 0.9
    (line,) = [words for words in found.findings if "OOD flags miss" in words]
    assert "rotation by 90°" in line and "noise (" not in line
    blank = x[400:].amin().expand(1, 1, 8, 8)
    is_flagged = (la.predict(blank).p_value <= 0.05).double().item()
    assert found.flagged["blank image"] == is_flagged
    missed = replace(found, shifted={"blank image": 0.95}, flagged={"blank image": 0.0})
    assert "blank image (AUROC 0.95, 0% flagged)" in missed.problems[-1]


def test_labels_of_pixels_have_no_coverage_but_flags():
    x = draw(120, 1, 8, 8).float()
    y = (x[:, 0] > 0).long()
    net = nn.Conv2d(1, 2, 1)
    la = posterior_of(net, "classification", x[:40], y[:40], class_dim=1, **FIXED)
    found = la.calibrate(x[40:80], y[40:80]).check(x[80:], y[80:])
    assert not found.groups and "blank image" in found.shifted
    assert found.flagged["blank image"] > 0.9
    assert "RiskControl(la, validation_loader)" in found.findings[0]
    assert "blank image" in repr(found)


@pytest.mark.parametrize(
    "shape, names",
    [
        ((3,), set()),
        # a blur of one pixel
        ((1, 4, 4), {*WITHOUT_LIGHT, "rotation by 90°", "noise", "inverted values"}),
        ((1, 8, 9), {*WITHOUT_LIGHT, "rotation by 180°", "blur", "noise", "inverted values"}),
        (None, {*WITHOUT_LIGHT, "noise"}),  # images of one value
    ],
)
def test_only_copies_of_images_that_are_shifted_are_made(shape, names):
    x = torch.arange(280.0).view(-1, 1, 1, 1).expand(-1, 1, 8, 8)
    x = x if shape is None else draw(280, *shape).float()
    net = nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 1))
    y = x.flatten(1).sum(1, keepdim=True)
    la = LinearisedLaplace(net, "regression", num_samples=4).fit(x[:30], y[:30], **FIXED)
    assert set(la.calibrate(x[30:80], y[30:80]).check(x[80:], y[80:]).shifted) == names


def test_the_error_of_the_calibration_set_counts():
    for coverage, references, low in ((0.87, 1e9, True), (0.87, 200, False), (0.8, 200, True)):
        assert GroupCoverage("all", 10_000, coverage, 1.0, references).is_low(0.9) == low


def test_nothing_is_advised_that_is_so_or_cannot_help():
    la, x, y = fitted("classification", 2, lambda x, noise: (x[:, 0] + noise > 0.5).long())
    own, parts, classes = "same distribution", "groups=labels", 'groups="classes"'
    average = "calibrate has none for inputs"
    quarter, groups = "entropy, highest quarter", torch.arange(300) % 2
    for by, words in (
        (None, {"class 1": classes, "group 1": parts, quarter: average, "all": own}),
        ("classes", {"class 1": own, quarter: average}),
        (groups, {"class 1": parts, "group 1": own}),
    ):
        la.calibrate(x[300:600], y[300:600], groups=by)
        prediction = la.predict(x[:5], groups=groups[:5] if by is groups else None)
        for low, advice in words.items():
            found = [GroupCoverage("all", 9_999, 0.9, 1.0), GroupCoverage(low, 2_000, 0.5, 1.0)]
            (line,) = Check(0.9, found, {}, {}, prediction).findings
            assert low in line and advice in line and len(line.split()) <= 40


# the loss of sets of pixels


def images(count, seed=0):
    """Probabilities for 3 classes and labels, whose images are of different difficulty."""
    logits = 3 * draw(count, 3, 4, 5, seed=seed) * draw(count, 1, 1, 1, seed=seed + 1).exp()
    return logits.softmax(1), (logits + draw(count, 3, 4, 5, seed=seed + 2)).argmax(1)


def control_of(*data, **options):
    return RiskControl(lambda x: x, *data, **options)


def test_the_threshold_is_the_largest_that_is_allowed():
    p, y = images(40)
    y[0, 0] = -100
    control = control_of(batched(7, p, y), level=0.15)
    losses = control.loss(p, y)
    assert control.num_images == 40 and control.threshold > 0
    inside = control.sets(p).gather(1, y.clamp_min(0)[:, None])[:, 0]
    assert_close(losses[1:], 1 - inside[1:].flatten(1).double().mean(1))
    assert_close(losses[0], 1 - inside[0, 1:].double().mean())
    assert_close(losses.mean().item(), control.risk)
    assert (40 * control.risk + 1) / 41 <= 0.15
    larger = torch.tensor(control.threshold).logit() + 0.01  # one step of the grid is 0.0078
    control.threshold = larger.sigmoid().item()
    assert (control.loss(p, y).sum() + 1) / 41 > 0.15


def test_pixels_of_some_classes_alone_can_count_and_nan_is_missed():
    p, y = images(40)
    some = y.where(y > 0, -100)
    control = control_of([(p, some)], level=0.15)
    missed = ~control.sets(p).gather(1, y[:, None])[:, 0] & (y > 0)
    shares = missed.flatten(1).sum(1) / (y > 0).flatten(1).sum(1)
    assert_close(control.loss(p, some), shares.double())
    assert_close(control.risk, shares.double().mean().item())
    control = control_of([(p, y)], level=0.15)
    p[:, :, 0, 0] = torch.nan
    missed = ~control.sets(p).gather(1, y[:, None])[:, 0]
    assert_close(control.loss(p, y), missed.double().mean((1, 2)))
    with pytest.raises(ValueError, match="NaN"):
        control_of([(p, y)], level=0.15)
    y[:, 0, 0] = -100  # pixels without a label do not count
    assert control_of([(p, y)], level=0.15).risk <= 0.15


def test_what_cannot_be_guaranteed_is_refused():
    p, y = images(8)
    last = p.movedim(1, -1)
    for probs, level, words in (
        (p, 0.1, "with 8 validation images: it needs 9 or more"),
        (p, 1.5, "between 0 and 1"),
        (last, 0.2, "pass class_dim"),
    ):
        with pytest.raises(ValueError, match=words):
            control_of([(probs, y)], level=level)
    assert control_of([(last, y)], level=0.2, class_dim=-1).num_images == 8
