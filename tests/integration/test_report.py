"""The page about a fit: what is on it."""

import logging
import re
from base64 import b64decode
from dataclasses import replace
from functools import partial
from io import BytesIO

import pytest
import torch
from daily import daily
from tiny import fitted
from torch import nn

pytest.importorskip("matplotlib")

from matplotlib import pyplot

from torch_lla_em import LinearisedLaplace
from torch_lla_em.prediction import predicted_data
from torch_lla_em.report import to_do_for as advice


@pytest.mark.parametrize(
    "name",
    daily("classification", "regression", rest=["regression per output", "bernoulli", "poisson"]),
)
def test_a_page_is_complete(name, tmp_path):
    case, la = fitted(name, em_steps=2)
    la.report([(case.x, case.y)], tmp_path / "report.html", 5 * case.x)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for tag in {*re.findall(r"</?(\w+)", page)} - {"img", "meta"}:
        assert len(re.findall(rf"<{tag}\b", page)) == page.count(f"</{tag}>"), tag
    for words in ("NLL", "samples of all 27 parameters", "memory plan", "effective dimension γ"):
        assert words in page
    pictures = re.findall(r'<img [^>]*src="data:image/png;base64,([^"]+)"', page)
    assert len(pictures) == {"classification": 3, "bernoulli": 3, "poisson": 2}.get(name, 4)
    assert len(re.findall(r'<img [^>]*alt="\w', page)) == page.count("<img") == len(pictures)
    for content in pictures:
        assert pyplot.imread(BytesIO(b64decode(content))).shape[1] > 200
    assert not re.search(r"https?://", page)


@pytest.mark.parametrize("name", ["classification", "regression per output", "poisson"])
@pytest.mark.filterwarnings("ignore")
def test_a_student_is_beside_its_posterior(name, tmp_path):
    case, la = fitted(name, em_steps=2)
    student = la.distil(case.x, steps=3, num_inputs=20, progress_bar=False)
    la.report([(case.x, case.y)], tmp_path / "report.html", student=student)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    found = re.search(r">network</t.>.{0,9}>posterior</t.>.{0,9}>student<.*?(>NLL<.*?</tr>)", page)
    each = (
        predicted_data(la, [(case.x, case.y)]).network,
        la.predict(case.x),
        student.predict(case.x),
    )
    due = [f"{-predicted.log_prob(case.y).mean():.4g}" for predicted in each]
    assert re.findall(r">(-?[\d.]+)</t", found[1]) == due
    assert "The student is not close to the posterior" in page and "held-out inputs" in page
    with pytest.raises(TypeError, match=r"what la\.distil has returned, not 3"):
        la.report([(case.x, case.y)], tmp_path / "report.html", student=3)


def test_coverage_of_classes_is_shown_and_inputs_that_are_not_finite_are_named(tmp_path):
    case, la = fitted("classification", em_steps=2)
    x = case.x.index_fill(0, torch.tensor([3]), float("nan"))
    for show in (la.report, partial(predicted_data, la)):
        with pytest.raises(ValueError, match="inputs of batch 1 hold NaN"):
            show([(case.x, case.y), (x, case.y)])
    la.calibrate(case.x, case.y).report([(case.x, case.y)], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Coverage at a level of 0.9" in page and "class 2" in page


def test_warnings_are_saved_with_the_posterior(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="torch_lla_em"):
        case, la = fitted(em_steps=0, prior_precision=1e9)
    assert "samples of 27 parameters" in la.messages[0] and len(la.messages) > 1
    assert all(words in caplog.text for words in la.messages[1:])
    assert not logging.getLogger("torch_lla_em").filters
    la.save(tmp_path / "posterior.pt")
    again = LinearisedLaplace.load(tmp_path / "posterior.pt", case.model)
    assert again.messages == la.messages
    again.report([(case.x, case.y)], tmp_path / "report.html")
    assert "determine hardly any parameters" in (tmp_path / "report.html").read_text()


def test_advice_follows_the_numbers():
    case, la = fitted("classification", em_steps=2)
    rows = predicted_data(la, [(case.x, case.y)])
    certain = 30.0 * nn.functional.one_hot(case.y, 3).double()
    right = type(rows.network).of(la.likelihood, certain, certain[None] * 0)

    def advised(words, rows=rows):
        return any(re.search(words, line) for line in advice(la, rows))

    alone = "higher than that of the network alone"
    assert advised(alone, rows._replace(network=right))
    assert advised(f"{alone}.*[Cc]all la.calibrate", rows._replace(network=right))
    assert not advised(alone, rows._replace(network=rows.posterior, posterior=right))
    assert not advised("not accurate") and advised("Call la.calibrate")
    worse = torch.full_like(la.certificate, 0.5)
    result = la._posterior.result._replace(certificate=worse)
    la._posterior = replace(la._posterior, result=result)
    assert advised("not accurate")
    la.calibrate(case.x, case.y)
    assert not advised("Call la.calibrate")
    assert advised(f"{alone}.*calibrate with other", rows._replace(network=right))
