"""The site builds without warnings, and its search finds what users look for."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from fresh import run_python

import torch_lla_em

ROOT = Path(__file__).parents[2]


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


SOUGHT = "OOD GPU conformal calibration coverage checkpoint ensemble choosing laplace-torch".split()


@pytest.mark.parametrize("words", SOUGHT)
def test_a_heading_names_what_users_search_for(site, words):
    index = json.loads((site / "search/search_index.json").read_text())["docs"]
    guide = [entry for entry in index if not entry["location"].startswith("api/")]
    assert any(words.lower() in entry["title"].lower() for entry in guide)


def test_every_public_name_is_in_the_reference(site):
    pages = "".join(path.read_text() for path in (site / "api").rglob("index.html"))
    names = set(torch_lla_em.__all__)
    for path in (ROOT / "torch_lla_em").glob("*/__init__.py"):
        names |= set(importlib.import_module(f"torch_lla_em.{path.parent.name}").__all__)
    assert len(names) > 50
    missing = [n for n in names if not re.search(rf'id="torch_lla_em\.[\w.]*\b{n}"', pages)]
    assert not missing


def test_former_addresses_redirect(site):
    assert "../gpu/" in (site / "cards/index.html").read_text()


def test_figures_have_alternative_texts(site):
    for path in site.rglob("index.html"):
        assert not re.search(r'<img alt=""|<img (?![^>]*alt=)', path.read_text()), path
