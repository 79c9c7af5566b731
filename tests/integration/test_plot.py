"""Plots of a posterior show what it predicts."""

import functools

import pytest
import tiny
import torch
from torch import nn
from torch.testing import assert_close

pytest.importorskip("matplotlib")

from matplotlib import pyplot

from torch_lla_em import plot
from torch_lla_em.prediction import metrics, predicted_data


@functools.cache
def fitted(name, **options):
    case, la = tiny.fitted(name, num_samples=6, em_steps=3, **options)
    return case, la, [(case.x[:11], case.y[:11]), (case.x[11:], case.y[11:])]


def line(x):
    """The posterior of a linear network, and data that follow a line."""
    data = [(x, x + 0.1 * tiny.draw(*x.shape))]
    return tiny.fitted("regression", data, nn.Linear(1, 1).double(), em_steps=1)[1], data


@pytest.fixture(autouse=True)
def closed():
    pyplot.switch_backend("Agg")
    yield
    pyplot.close("all")


def labels(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_bins_with_few_examples_are_hollow_and_beside_the_line():
    _, la, data = fitted("classification")
    axes = plot.reliability(la, data)
    rows = predicted_data(la, data)
    stated, right = metrics.stated_and_right(rows.posterior, rows.targets)
    count = metrics.binned(stated, right, 10)[0]
    *_, sure, few, _ = axes.lines
    assert len(sure.get_xdata()) == (count >= 10).sum()
    assert len(few.get_xdata()) == ((count > 0) & (count < 10)).sum() > 0
    assert few.get_markerfacecolor() == "none" and labels(axes)[-1] == "under 10 examples"


@pytest.mark.parametrize("name", ["classification", "bernoulli"])
def test_reliability_is_of_the_network_and_of_the_posterior(name):
    case, la, data = fitted(name)
    axes = plot.reliability(la, data, bins=1)
    p = la.predict(case.x).probs
    if name == "classification":
        said, right = p.max(1).values, p.argmax(1) == case.y
    else:
        said, right = torch.maximum(p, 1 - p), (p > 0.5) == (case.y > 0.5)
    said, right = said.mean(), right.double().mean()
    of_network, of_posterior = labels(axes)[:2]
    assert of_posterior == f"posterior: ECE {(said - right).abs():.3f}"
    assert of_network.startswith("network: ECE")
    point = torch.tensor(axes.lines[3].get_xydata()[0])
    assert_close(point, torch.stack([said, right]))


def test_coverage_grows_with_the_level():
    case, la, data = fitted("regression per output")
    axes = plot.coverage(la, data)
    for drawn in axes.get_lines()[1:]:
        share = torch.tensor(drawn.get_ydata())
        assert (share.diff() >= 0).all() and share[-1] <= 1
    lower, upper = la.predict(case.x).credible_interval(0.5)
    expected = ((case.y >= lower) & (case.y <= upper)).double().mean()
    assert share[24].item() == pytest.approx(expected.item())


def test_bands_are_over_one_input_or_over_predictions():
    axes = plot.bands(*line(torch.linspace(-1, 1, 20).double()[:, None]))
    low, high = axes.get_lines()[0].get_xdata()[[0, -1]]
    assert (low, high) == pytest.approx((-1.6, 1.6)) and axes.get_xlabel() == "input"
    _, la, data = fitted("regression")
    assert plot.bands(la, data, output=1).get_xlabel() == "prediction"
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0)).double()
    data = [(x, x.sin().sum(1))]  # outputs without an axis
    model = nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)).double()
    _, la = tiny.fitted("regression", data, model, em_steps=1)
    assert plot.bands(la, data).has_data()


def test_two_data_sets_are_separated():
    case, la, data = fitted("classification")
    far = plot.out_of_distribution(la, data, 10 * case.x)
    assert float(far.get_title().split()[1]) > 0.5
    same = plot.out_of_distribution(la, predicted_data(la, data), data)
    assert float(same.get_title().split()[1]) == pytest.approx(0.5, abs=0.02)  # ties to rounding


def test_the_path_shows_every_em_step_of_every_precision():
    for prior, blocks in (("scalar", 1), ("layerwise", 4)):
        _, la, _ = fitted("regression", prior=prior)
        lines = plot.em_path(la).get_lines()
        assert len(lines) == blocks
        assert all(len(line.get_xdata()) == len(la.history) for line in lines)


def test_what_cannot_be_plotted_raises():
    case, la, data = fitted("classification")
    _, real, real_data = fitted("regression")
    for draw in (plot.coverage, plot.bands):
        with pytest.raises(TypeError, match="reliability"):
            draw(la, data)
    with pytest.raises(TypeError, match="coverage"):
        plot.reliability(real, real_data)
    student = la.distil(case.x, steps=1, num_inputs=20, progress_bar=False)
    for draw, more in (
        (plot.reliability, (data,)),
        (plot.em_path, ()),
        (plot.coverage, (data,)),
        (plot.out_of_distribution, (data, case.x)),
    ):
        with pytest.raises(TypeError, match="class Student is not.* it was distilled from"):
            draw(student, *more)
