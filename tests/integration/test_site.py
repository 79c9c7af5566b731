"""The site builds without warnings, and its search finds what users look for."""

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from fresh import run_python

import torch_lla_em

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow
BUILDERS = [name for name in ("properdocs", "mkdocs") if importlib.util.find_spec(name)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; it has no warnings."""
    if not BUILDERS or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("needs torch_lla_em[docs]")
    folder = tmp_path_factory.mktemp("site")
    command = "-m", BUILDERS[0], "build", "--strict", "-f", "mkdocs.yml", "-d", folder
    run_python(*command, cwd=ROOT, NO_MKDOCS_2_WARNING="1")
    return folder


# a page, and what a user types to whom the search has to show it first
OF_PAGES = {
    "reading_results/": "active learning, glossary, report",
    "tutorials/bayesian_optimisation/": "Bayesian optimisation, BoTorch",
    "calibration/": "calibration, conformal, coverage, ensemble, prediction sets",
    "cost/": "checkpoint, distributed, GPU, out of memory",
    "which_method/": "choosing a model, temperature scaling",
    "tutorials/class_balance/": "class weights, imbalanced",
    "tutorials/own_likelihood/": "custom likelihood",
    "serving/": "distillation, export, ONNX, serving",
    "tutorials/choosing/": "evidence",
    "tutorials/text_and_lora/": "fine-tuning, LoRA",
    "tutorials/heteroscedastic/": "heteroscedastic",
    "coming_from_laplace_torch/": "laplace-torch",
    "tutorials/lightning_callback/": "lightning",
    "benchmarks/": "MC dropout",
    "out_of_distribution/": "OOD, out-of-distribution",
    "method/": "prior precision, weight decay",
    "regression/": "regression",
    "tutorials/segmentation/": "segmentation",
    "tutorials/time_series/": "time series",
}
SOUGHT = {query: page for page, queries in OF_PAGES.items() for query in queries.split(", ")}


@pytest.fixture(scope="module")
def first_pages(site):
    """The first page that the site's own search finds for each query."""
    if shutil.which("node") is None:
        pytest.skip("needs Node.js, which runs the search of the theme")
    command = ["node", ROOT / "tests/search.js", site]
    typed = "\n".join(SOUGHT)
    answers = subprocess.run(command, input=typed, stdout=subprocess.PIPE, text=True, check=True)
    found = map(json.loads, answers.stdout.splitlines())
    return {query: (pages or [""])[0].partition("#")[0] for query, pages in zip(SOUGHT, found)}


@pytest.mark.parametrize("query", SOUGHT)
def test_the_search_finds_the_page_first(first_pages, query):
    assert first_pages[query] == SOUGHT[query]


def test_every_public_name_is_in_the_reference(site):
    pages = "".join(path.read_text() for path in (site / "api").rglob("index.html"))
    names = set(torch_lla_em.__all__)
    for path in (ROOT / "torch_lla_em").glob("*/__init__.py"):
        names |= set(importlib.import_module(f"torch_lla_em.{path.parent.name}").__all__)
    assert len(names) > 50
    missing = [n for n in names if not re.search(rf'id="torch_lla_em\.[\w.]*\b{n}"', pages)]
    assert not missing


def test_figures_have_alternative_texts(site):
    for path in site.rglob("index.html"):
        assert not re.search(r'<img alt=""|<img (?![^>]*alt=)', path.read_text()), path
