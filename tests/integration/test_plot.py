"""Plots of a posterior show what it predicts."""

import functools
import re

import pytest
import tiny
import torch
from tiny import LOG_PROBS
from torch.testing import assert_close

pytest.importorskip("matplotlib")

from matplotlib import pyplot
from torch import nn

from torch_lla_em import LinearisedLaplace, plot, plot_curve
from torch_lla_em.prediction import predicted_data


@functools.cache
def fitted(name, **options):
    return tiny.fitted(name, num_samples=6, em_steps=3, **options)


@pytest.fixture(autouse=True)
def closed():
    pyplot.switch_backend("Agg")
    yield
    pyplot.close("all")


def noise(examples):
    """Return observation noise, (examples, 1)."""
    generator = torch.Generator().manual_seed(1)
    return 0.1 * torch.randn(examples, 1, generator=generator, dtype=torch.float64)


def labels(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


@pytest.mark.parametrize("name", LOG_PROBS)
def test_rows_are_what_is_predicted(name):
    case, la = fitted(name)
    rows = predicted_data(la, [(case.x[:11], case.y[:11]), (case.x[11:], case.y[11:])])
    assert_close(rows.inputs, case.x)
    assert_close(rows.targets, case.y)
    assert_close(rows.posterior.expectation, la.predict(case.x).expectation)
    assert_close(rows.network.mean, case.model(case.x).detach())
    assert rows.network.variance.abs().max() == 0


@pytest.mark.parametrize("name", ["classification", "bernoulli"])
def test_reliability_is_of_the_network_and_of_the_posterior(name):
    case, la = fitted(name)
    axes = plot.reliability(la, [(case.x, case.y)], bins=1)
    p = la.predict(case.x).probs
    if name == "classification":
        said, right = p.max(1).values, p.argmax(1) == case.y
    else:
        said, right = torch.maximum(p, 1 - p), (p > 0.5) == (case.y > 0.5)
    gap = (said.mean() - right.double().mean()).abs()
    assert labels(axes)[1] == f"posterior: ECE {gap:.3f}"
    assert labels(axes)[0].startswith("network: ECE")
    assert_close(
        torch.tensor(axes.collections[1].get_offsets()[0].data),
        torch.stack([said.mean(), right.double().mean()]),
    )


def test_coverage_grows_with_the_level():
    case, la = fitted("regression per output")
    axes = plot.coverage(la, [(case.x, case.y)])
    for line in axes.get_lines()[1:]:
        share = torch.tensor(line.get_ydata())
        assert (share.diff() >= 0).all() and share[-1] <= 1
    lower, upper = la.predict(case.x).credible_interval(0.5)
    expected = ((case.y >= lower) & (case.y <= upper)).double().mean()
    assert share[24].item() == pytest.approx(expected.item())


def test_bands_are_over_one_input_or_over_predictions():
    x = torch.linspace(-1, 1, 20).double()[:, None]
    y = 2 * x + noise(20)
    network = nn.Linear(1, 1).double()
    la = LinearisedLaplace(network, "regression", num_samples=4)
    la.fit(x, y, em_steps=1, progress_bar=False)
    axes = plot.bands(la, [(x, y)])
    low, high = axes.get_lines()[0].get_xdata()[[0, -1]]
    assert (low, high) == pytest.approx((-1.6, 1.6)) and axes.get_xlabel() == "input"
    case, la = fitted("regression")
    assert plot.bands(la, [(case.x, case.y)], output=1).get_xlabel() == "prediction"


def test_bands_of_many_examples_are_sorted_and_thinned():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 3, generator=generator).double()
    network = nn.Linear(3, 1).double()
    la = LinearisedLaplace(network, "regression", num_samples=4)
    y = x[:, :1] + noise(2000)
    la.fit(x[:50], y[:50], em_steps=1, progress_bar=False)
    axes = plot.bands(la, [(x, y)])
    assert labels(axes) == ["90 %, 200 of 2,000 examples"]
    shown, every = axes.containers[0].lines[0].get_xdata(), la(x)[0][:, 0]
    assert len(shown) == 200 and (shown[1:] >= shown[:-1]).all()
    assert shown[[0, -1]] == pytest.approx([every.min().item(), every.max().item()])


@pytest.mark.parametrize("kind", ["classification", "bernoulli", "regression"])
def test_confidence_is_over_two_inputs(kind):
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0)).double()
    y = x[:, :1] + noise(20) if kind == "regression" else (x[:, :1] > 0).double()
    outputs, y = (2, y[:, 0].long()) if kind == "classification" else (1, y)
    la = LinearisedLaplace(nn.Linear(2, outputs).double(), kind, num_samples=4)
    la.fit(x, y, em_steps=1, progress_bar=False)
    assert plot.confidence(la, [(x, y)]).get_xlim()[0] < x[:, 0].min()
    rows = predicted_data(la, [(x, y)])
    with pytest.raises(ValueError, match="two numbers"):
        plot.confidence(la, rows._replace(inputs=x[:, :1]))


@pytest.mark.parametrize("name", LOG_PROBS)
def test_extremes_are_ordered_by_uncertainty(name):
    case, la = fitted(name)
    if name == "binomial":
        return  # of a likelihood without variance nothing is known but its samples
    axes = plot.extremes(la, [(case.x, case.y)], count=3)
    assert len(axes.images) == 6
    if name == "classification":
        said = [float(re.match(r"\d: ([.\d]+)\nx\d: ", t.get_text())[1]) for t in axes.texts]
        assert min(said[:3]) >= max(said[3:])
        entropy = la.predict(case.x).entropy
        red = [text.get_color() == "C3" for text in axes.texts]
        order = [*entropy.argsort()[:3], *entropy.argsort(descending=True)[:3]]
        best = la(case.x).argmax(1)
        assert red == [bool(best[row] != case.y[row]) for row in order]


@pytest.mark.parametrize("shape", [(1, 4, 4), (3, 4, 4), (4, 4), (16,), (5,)])
def test_inputs_are_shown_as_images_or_columns(shape):
    images = plot._images(torch.randn(6, *shape))
    assert images.min() == 0 and images.max() == 1
    assert images.shape[1:] == {3: (4, 4, 3), 1: (4, 4), 4: (4, 4), 16: (4, 4), 5: (5, 1)}[shape[0]]


def test_two_data_sets_are_separated():
    case, la = fitted("classification")
    far = plot.out_of_distribution(la, [(case.x, case.y)], 10 * case.x)
    assert float(far.get_title().split()[1]) > 0.5
    rows = predicted_data(la, [(case.x, case.y)])
    with pytest.warns(DeprecationWarning, match="out_of_distribution"):
        same = plot.unfamiliarity(la, rows, [(case.x, case.y)])
    assert float(same.get_title().split()[1]) == pytest.approx(0.5, abs=0.02)  # ties to rounding


def test_the_path_is_over_the_curve_where_it_is_known():
    for options in ({}, {"prior": "layerwise"}):
        _, la = fitted("regression", **options)
        axes = plot.em_path(la)
        assert (axes.get_ylabel() == "log evidence") == (not options)


def test_the_plot_marks_the_path_and_the_best():
    _, la = fitted("regression")
    axes = plot_curve(la.curve(la.prior_precision.item() * torch.logspace(-1, 1, 9).double()))
    assert any(label.startswith("λ* =") for label in labels(axes)) and "EM" in labels(axes)
    assert "log evidence" in labels(axes) and "effective dimension γ" in labels(axes)
    assert axes.get_xscale() == "log"


def test_plots_raise_for_other_likelihoods():
    case, la = fitted("classification")
    for draw in (plot.coverage, plot.bands):
        with pytest.raises(TypeError, match="reliability"):
            draw(la, [(case.x, case.y)])
    case, la = fitted("regression")
    with pytest.raises(TypeError, match="coverage"):
        plot.reliability(la, [(case.x, case.y)])
