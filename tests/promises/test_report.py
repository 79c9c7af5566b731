"""The page about a fit, and the pictures on it."""

import copy
import re
from base64 import b64decode
from dataclasses import replace
from io import BytesIO
from math import log

import pytest
import torch
from daily import daily
from tiny import draw, fitted, known, posterior_of, prediction_of
from torch import nn
from torch.testing import assert_close

pytest.importorskip("matplotlib")

from matplotlib import pyplot

from torch_lla_em import plot
from torch_lla_em.prediction import binned, predicted_data, stated_and_right
from torch_lla_em.report import to_do_for as advice


@pytest.fixture(autouse=True)
def closed():
    pyplot.switch_backend("Agg")
    yield
    pyplot.close("all")


def page_of(la, data, path, *more, **options):
    la.report(data, path, *more, **options)
    return path.read_text(encoding="utf-8")


OTHERS = ["regression per output", "bernoulli", "poisson"]


@pytest.mark.parametrize("name", daily("classification", "regression", rest=OTHERS))
def test_a_page_is_complete(name, tmp_path):
    case, la = known(name)
    page = page_of(la, [(case.x, case.y)], tmp_path / "report.html", 5 * case.x)
    for tag in {*re.findall(r"</?(\w+)", page)} - {"img", "meta"}:
        assert len(re.findall(rf"<{tag}\b", page)) == page.count(f"</{tag}>"), tag
    most = la.suspicious(case.x, case.y).order[:12].tolist()
    listed = re.findall(r"<td>example (\d+)</td>", page)
    assert [int(i) for i in listed] == most and "Targets that may be wrong" in page
    for words in ("NLL", "samples of all 27 parameters", "memory plan", "effective dimension γ"):
        assert words in page
    assert ("temperature scaling" in page) == la.likelihood.gives_probabilities
    pictures = re.findall(r'<img [^>]*src="data:image/png;base64,([^"]+)"', page)
    assert len(pictures) == {"poisson": 1}.get(name, 2)
    assert len(re.findall(r'<img [^>]*alt="\w', page)) == page.count("<img") == len(pictures)
    for content in pictures:
        assert pyplot.imread(BytesIO(b64decode(content))).shape[1] > 200
    assert not re.search(r"https?://", page)


def test_coverage_of_classes_is_shown_and_inputs_that_are_not_finite_are_named(tmp_path):
    case, la = known()
    x = case.x.index_fill(0, torch.tensor([3]), float("nan"))
    with pytest.raises(FloatingPointError, match="outputs on batch 1 .*NaN"):
        la.report([(case.x, case.y), (x, case.y)])
    calibrated = copy.copy(la).calibrate(case.x + 0.1, case.y)
    page = page_of(calibrated, [(case.x, case.y)], tmp_path / "report.html")
    assert "Coverage at a level of 0.9" in page and "class 2" in page
    page = page_of(calibrated, [(case.x, (case.y + 2) % 3)], tmp_path / "report.html")
    to_do, covered = page.split("Coverage at a level of 0.9")
    assert "(low)" in covered and "<li>The coverage is clearly below 0.9 for: all" in to_do


def test_advice_follows_the_numbers():
    case, la = known()
    la, rows = copy.copy(la), predicted_data(la, [(case.x, case.y)])
    certain = 30.0 * nn.functional.one_hot(case.y, 3).double()
    right = prediction_of(la.likelihood, certain, certain[None] * 0)
    ahead = rows._replace(network=right)

    def advised(words, rows=rows):
        return any(re.search(words, line) for line in advice(la.posterior, rows))

    alone = "higher than that of the network alone"
    assert advised(f"{alone}.*Call la.calibrate", ahead)
    assert not advised(alone, rows._replace(network=rows.posterior, posterior=right))
    assert "are accurate" in repr(la) and advised("Call la.calibrate")
    worse = torch.full_like(la.certificate, 5.0)
    result = la.posterior.result._replace(certificate=worse)
    la.take(replace(la.posterior, result=result))
    assert "are not accurate" in repr(la)
    la.calibrate(case.x + 0.1, case.y)
    assert not advised("Call la.calibrate") and advised(f"{alone}.*Calibrate with other", ahead)


# pictures show what a posterior predicts


def labels(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def cut(case):
    return [(case.x[:11], case.y[:11]), (case.x[11:], case.y[11:])]


@pytest.mark.parametrize("name", ["classification", "bernoulli"])
def test_reliability_is_of_the_network_and_of_the_posterior(name):
    """Bins with few examples are hollow and beside the line."""
    case, la = known(name)
    axes, p = plot.reliability(la, cut(case), bins=1), la.predict(case.x).probs
    if name == "classification":
        said, right = p.max(1).values, p.argmax(1) == case.y
    else:
        said, right = torch.maximum(p, 1 - p), (p > 0.5) == (case.y > 0.5)
    said, right = said.mean(), right.double().mean()
    of_network, of_posterior = labels(axes)[:2]
    assert of_posterior == f"posterior: ECE {(said - right).abs():.3f}"
    assert of_network.startswith("network: ECE")
    assert_close(torch.tensor(axes.lines[3].get_xydata()[0]), torch.stack([said, right]))
    if name == "classification":
        rows = predicted_data(la, cut(case))
        count = binned(*stated_and_right(rows.posterior, rows.targets), 15)[0]
        axes = plot.reliability(la, cut(case))
        *_, sure, few, _ = axes.lines
        assert len(sure.get_xdata()) == (count >= 10).sum()
        assert len(few.get_xdata()) == ((count > 0) & (count < 10)).sum() > 0
        assert few.get_markerfacecolor() == "none" and labels(axes)[-1] == "under 10 examples"


def test_coverage_grows_with_the_level_and_other_data_are_separated():
    case, la = known("regression per output")
    for drawn in plot.coverage(la, cut(case)).get_lines()[1:]:
        share = torch.tensor(drawn.get_ydata())
        assert (share.diff() >= 0).all() and share[-1] <= 1
    lower, upper = la.predict(case.x).credible_interval(0.5)
    expected = ((case.y >= lower) & (case.y <= upper)).double().mean()
    assert share[24].item() == pytest.approx(expected.item())
    case, la = known()
    far = plot.out_of_distribution(la, cut(case), 10 * case.x)
    assert float(far.get_title().split()[1]) > 0.5
    same = plot.out_of_distribution(la, predicted_data(la, cut(case)), cut(case))
    assert float(same.get_title().split()[1]) == pytest.approx(0.5, abs=0.02)  # ties to rounding


def test_suspicious_images_have_their_labels(tmp_path):
    x, y = draw(20, 1, 4, 4), torch.arange(20) % 2
    x[:, 0, 0, 0] += 4 * y
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 2)).double()
    given = y.index_fill(0, torch.tensor([4]), 1)
    la = posterior_of(net, "classification", x, given, validation=False, at=1.0)
    axes, record = plot.suspicious(la, [(x, given)]), la.suspicious(x, given)
    i = int(record.order[0])
    words = [text.get_text() for text in axes.texts]
    assert len(words) == len(axes.images) == 12
    assert words[0] == f"{i}: {given[i]}, or {record.label[i]}?"
    shown = torch.tensor(axes.images[0].get_array().data).view(4, 4)
    low, high = x[i].min(), x[i].max()
    assert_close(shown, (x[i, 0] - low) / (high - low))
    page = page_of(la, [(x, given)], tmp_path / "report.html")
    assert 'alt="Labels that may be wrong"' in page
    with pytest.raises(ValueError, match="This plot needs images"):
        plot.suspicious(known()[1], [(known()[0].x, known()[0].y)])


def test_evidence_is_over_inputs_and_has_the_alarm():
    case, la = known()
    monitor = copy.copy(la).calibrate(draw(200, 2), torch.arange(200) % 3).monitor(0.001)
    monitor.update(draw(50, 2, seed=1))
    axes = plot.evidence(monitor)
    assert labels(axes) == ["alarm, rate 0.001"]
    assert axes.lines[0].get_xdata().tolist() == [0, 50]
    monitor.update(30 * draw(50, 2, seed=1))
    axes = plot.evidence(monitor)
    assert f"alarm since input {monitor.state['since']}" in labels(axes)
    assert axes.lines[0].get_ydata()[-1] == pytest.approx(monitor.state["evidence"] / log(10))


def test_bands_are_over_an_input_of_one_number():
    x = torch.linspace(-1, 1, 20).double()[:, None]
    for model, y in ((nn.Linear(1, 2), torch.cat([x, -x], 1)), (nn.Linear(1, 1), x[:, 0])):
        model = model if y.dim() == 2 else nn.Sequential(model, nn.Flatten(0))
        data = [(x, y + 0.1 * draw(*y.shape))]
        la = fitted("regression", data, model.double(), em_steps=1)[1]
        line, *_ = plot.bands(la, data, output=y.dim() - 1).get_lines()
        at, mean = (torch.from_numpy(values) for values in line.get_data())
        assert (at[0].item(), at[-1].item()) == pytest.approx((-1.6, 1.6))
        assert_close(mean, la.predict(at[:, None]).expectation.reshape(320, -1)[:, -1])
    case, la = known("regression")
    with pytest.raises(ValueError, match="single variable. For others, use coverage"):
        plot.bands(la, cut(case))


def test_what_cannot_be_plotted_raises():
    (case, la), (other, real) = known(), known("regression")
    data, student = cut(case), la.distil(case.x, steps=1, num_inputs=20, progress_bar=False)
    for draw_, given, words in (
        (plot.coverage, (la, data), "reliability"),
        (plot.bands, (la, data), "reliability"),
        (plot.reliability, (real, cut(other)), "coverage"),
        (plot.reliability, (student, data), "class Student is not.* it was distilled from"),
    ):
        with pytest.raises(TypeError, match=words):
            draw_(*given)
