"""The page about a fit: what is on it, and that a browser shows it."""

import logging
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
import torch
from daily import daily
from tiny import fitted, tiny
from torch import nn

pytest.importorskip("matplotlib")

from torch_lla_em import LinearisedLaplace
from torch_lla_em.prediction import predicted_data
from torch_lla_em.report import advice


class Page(HTMLParser):
    """What a page holds: open tags, pictures, and words."""

    def __init__(self, path):
        super().__init__()
        self.open, self.pictures, self.words = [], [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        if tag == "img":
            self.pictures.append(dict(attributes))
        elif tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.mark.parametrize(
    "name",
    daily("classification", "regression", rest=["regression per output", "bernoulli", "poisson"]),
)
def test_a_page_is_complete(name, tmp_path):
    case, la = fitted(name, em_steps=2)
    la.report([(case.x, case.y)], tmp_path / "report.html", 5 * case.x)
    page = Page(tmp_path / "report.html")
    assert not page.open
    text = " ".join(page.words)
    assert (
        "NLL" in text
        and "samples of 27 parameters" in text
        and "parameters in the posterior" in text
    )
    assert len(page.pictures) == {"classification": 5, "bernoulli": 5, "poisson": 4}.get(name, 6)
    assert all(p["src"].startswith("data:image/png;base64,") and p["alt"] for p in page.pictures)
    assert not re.search(r"https?://", (tmp_path / "report.html").read_text())


def test_inputs_that_are_not_finite_are_named(tmp_path):
    case, la = fitted("classification", em_steps=2)
    x = case.x.clone()
    x[3] = float("nan")
    for show in (
        lambda data: la.report(data, tmp_path / "report.html"),
        lambda d: predicted_data(la, d),
    ):
        with pytest.raises(ValueError, match="inputs of batch 1 hold NaN"):
            show([(case.x, case.y), (x, case.y)])
    assert not (tmp_path / "report.html").exists()


def test_warnings_are_saved_with_the_posterior(tmp_path, caplog):
    case = tiny("classification")
    la = LinearisedLaplace(case.model, "classification", num_samples=4)
    with caplog.at_level(logging.WARNING, logger="torch_lla_em"):
        la.fit(case.x, case.y, em_steps=0, prior_precision=1e9, progress_bar=False)
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
    worse = rows._replace(network=rows.posterior, posterior=rows.network)
    certain = 30.0 * nn.functional.one_hot(case.y, 3).double()
    sure = rows._replace(network=type(rows.network)(la.likelihood, certain, certain[None] * 0))
    assert any("higher than that of the network alone" in line for line in advice(la, sure))
    assert not any(
        "network alone" in line for line in advice(la, worse._replace(posterior=sure[2]))
    )
    assert not any("have a relative error" in line for line in advice(la, rows))
    la.certificate = torch.full_like(la.certificate, 0.5)
    assert any("have a relative error" in line for line in advice(la, rows))
    la.calibrate(case.x, case.y)
    assert not any("Call la.calibrate" in line for line in advice(la, rows))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser is at hand")
def test_the_report_is_shown_by_a_browser(tmp_path):
    case, la = fitted("classification", em_steps=2)
    la.report([(case.x, case.y)], tmp_path / "report.html", 5 * case.x)
    quiet = "--disable-quic --no-first-run --disable-background-networking --disable-sync".split()
    quiet += ["--disable-component-update", f"--user-data-dir={tmp_path / 'browser'}"]
    headless = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", *quiet]
    page = f"file://{tmp_path / 'report.html'}"
    shot = f"--screenshot={tmp_path / 'page.png'}"
    subprocess.run([*headless, shot, page], check=True, timeout=120, capture_output=True)
    assert (tmp_path / "page.png").stat().st_size > 10_000
    count = (
        "<script>document.title=[...document.images].filter(i=>i.naturalWidth>200).length</script>"
    )
    with (tmp_path / "report.html").open("a") as file:
        file.write(count)
    dom = subprocess.run(
        [*headless, "--dump-dom", page], check=True, timeout=120, capture_output=True, text=True
    ).stdout
    assert re.search(r"<title>5</title>", dom)
