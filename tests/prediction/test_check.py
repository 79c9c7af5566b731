"""Coverage within groups: what is measured, and what is advised where it is too low."""

import pytest
import torch
from torch import nn

from torch_lla_em import LaplaceEnsemble, LinearisedLaplace
from torch_lla_em.prediction.check import Check, GroupCoverage

FIXED = {"em_steps": 0, "prior_precision": 1.0, "progress_bar": False}


def calibrated(likelihood, outputs, y):
    """A posterior of a linear network on inputs with one extreme feature."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1200, 3, generator=generator)
    x[:, 1] = x[:, 1] ** 3
    y = y(x, torch.randn(1200, generator=generator))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Linear(3, outputs)
    loss = nn.functional.cross_entropy if likelihood == "classification" else nn.functional.mse_loss
    optimiser = torch.optim.Adam(net.parameters(), 0.05)
    for _ in range(200):
        optimiser.zero_grad()
        loss(net(x[:300]), y[:300]).backward()
        optimiser.step()
    la = LinearisedLaplace(net, likelihood, num_samples=4).fit(x[:300], y[:300], **FIXED)
    return la, x, y


def test_a_rare_class_is_found():
    def labels(x, noise):
        return ((x[:, 0] + 0.8 * noise) > 1.6).long()

    la, x, y = calibrated("classification", 2, labels)
    with pytest.raises(ValueError, match="calibrate"):
        la.check(x[600:], y[600:])
    la.calibrate(x[300:600], y[300:600])
    found = la.check(list(zip(x[600:].split(70), y[600:].split(70))))
    sets = la.predict(x[600:]).prediction_set(0.9)
    inside = sets.gather(1, y[600:, None])[:, 0].double()
    by_name = {group.name: group for group in found.groups}
    assert by_name["all"].coverage == pytest.approx(inside.mean().item())
    assert by_name["class 1"].coverage == pytest.approx(inside[y[600:] == 1].mean().item())
    assert by_name["class 1"].is_low(0.9) and not by_name["all"].is_low(0.9)
    shown = repr(found)
    assert "clearly below 0.9 for: class 1" in shown and 'groups="classes"' in shown
    assert any(name.startswith("feature 1, highest") for name in by_name)
    ensemble = LaplaceEnsemble([la, la]).calibrate(x[300:600], y[300:600])
    assert ensemble.check(x[600:], y[600:]).groups[0].number == 600


def test_noise_that_depends_on_the_inputs_is_found():
    la, x, y = calibrated(
        "regression", 1, lambda x, noise: x[:, :1] + noise[:, None] * x[:, 1:2].abs()
    )
    found = la.calibrate(x[300:600], y[300:600]).check(x[600:], y[600:])
    lower, upper = la.predict(x[600:]).interval(0.9)
    inside = ((lower <= y[600:]) & (y[600:] <= upper)).double().mean().item()
    assert found.groups[0].coverage == pytest.approx(inside)
    assert 'likelihood="heteroscedastic"' in repr(found)
    even = calibrated("regression", 1, lambda x, noise: x[:, :1] + noise[:, None])
    found = even[0].calibrate(x[300:600], even[2][300:600]).check(x[600:], even[2][600:])
    assert "No group" in repr(found)


def test_inputs_that_flags_miss_are_named():
    """Rotations of images that are the same in all directions cannot be seen, and noise can."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(600) % 2
    places = torch.arange(8) - 3.5
    radius = (places[:, None] ** 2 + places**2).sqrt()
    x = torch.cos(radius * (1 + 0.3 * y[:, None, None]))[:, None]
    x = x + 0.1 * torch.randn(600, 1, 8, 8, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    optimiser = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x[:200]), y[:200]).backward()
        optimiser.step()
    la = LinearisedLaplace(net, "classification", num_samples=8)
    la.fit(x[:200], y[:200], progress_bar=False).calibrate(x[200:400], y[200:400])
    found = la.check(x[400:], y[400:])
    assert set(found.shifted) == {"rotation by 90°", "blur", "noise", "inverted values"}
    again = la.predict(x[400:].rot90(dims=(2, 3))).p_value
    known = la.predict(x[400:]).p_value
    above = (again[:, None] < known).double() + 0.5 * (again[:, None] == known)
    assert found.shifted["rotation by 90°"] == pytest.approx(above.mean().item())
    assert found.shifted["rotation by 90°"] < 0.6 and found.shifted["noise"] > 0.9
    (line,) = [words for words in found.findings if "OOD flags miss" in words]
    assert "rotation by 90°" in line and "noise (" not in line


def shifts(x):
    """The names of the copies that are made of inputs, and that differ from them."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 1))
    y = x.flatten(1).sum(1, keepdim=True)
    la = LinearisedLaplace(net, "regression", num_samples=4).fit(x[:30], y[:30], **FIXED)
    return set(la.calibrate(x[30:80], y[30:80]).check(x[80:], y[80:]).shifted)


def test_only_copies_that_are_shifted_are_made():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(280, 3, generator=generator)
    noise = {"noise of 3 standard deviations"}
    assert shifts(x[:, :1]) == shifts(x) == noise  # independent columns
    assert shifts(torch.cat([x, x[:, :1] + 0.3 * x[:, 1:2]], 1)) == noise | {"permuted columns"}
    assert shifts(torch.cat([x[:, :1], x[:, :1] ** 2], 1)) == noise | {"permuted columns"}
    images = torch.randn(280, 1, 4, 4, generator=generator)
    assert shifts(images) == {"rotation by 90°", "noise", "inverted values"}  # a blur of one pixel
    wide = torch.randn(280, 1, 8, 9, generator=generator)
    assert shifts(wide) == {"rotation by 180°", "blur", "noise", "inverted values"}
    assert shifts(torch.arange(280.0).view(-1, 1, 1, 1).expand(-1, 1, 8, 8)) == {"noise"}


def test_the_error_of_the_calibration_set_counts():
    assert GroupCoverage("all", 10_000, 0.87, 1.0).is_low(0.9)
    assert not GroupCoverage("all", 10_000, 0.87, 1.0, references=200).is_low(0.9)
    assert GroupCoverage("all", 10_000, 0.8, 1.0, references=200).is_low(0.9)


@pytest.fixture(scope="module")
def calibrated_by():
    """Predictions of the same classifier, by what it was calibrated with."""
    la, x, y = calibrated("classification", 2, lambda x, noise: (x[:, 0] + noise > 0.5).long())
    groups = torch.arange(300) % 2
    found = {}
    for name, given in (("nothing", None), ("classes", "classes"), ("groups", groups)):
        la.calibrate(x[300:600], y[300:600], groups=given)
        inputs = {} if name != "groups" else {"groups": groups[:5]}
        found[name] = la.predict(x[:5], **inputs)
    return found


@pytest.mark.parametrize(
    "low, by, words",
    [
        ("class 1", "nothing", 'groups="classes"'),
        ("class 1", "classes", "calibration examples of their own"),
        ("class 1", "groups", "number of each example's part"),
        ("group 1", "nothing", "groups=labels"),
        ("group 1", "groups", "calibration examples of their own"),
        ("entropy, highest quarter", "nothing", "number of each example's part"),
        ("entropy, highest quarter", "classes", "number of each example's part"),
        ("all", "nothing", "same distribution"),
    ],
)
def test_nothing_is_advised_that_is_so_or_cannot_help(calibrated_by, low, by, words):
    groups = [GroupCoverage("all", 9_999, 0.9, 1.0), GroupCoverage(low, 2_000, 0.5, 1.0)]
    (line,) = Check(0.9, groups, {}, calibrated_by[by]).findings
    assert low in line and words in line and len(line.split()) <= 40
