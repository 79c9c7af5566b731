"""Metadata, the files that build the package, and what it can be installed with."""

import re
from configparser import ConfigParser
from pathlib import Path

import pytest

import torch_lla_em

ROOT = Path(__file__).parents[2]

SETUP = ConfigParser()
SETUP.read(ROOT / "setup.cfg")
META = SETUP["metadata"]
REQUIRED = SETUP["options"]["install_requires"].split()


def test_the_version_is_the_same_everywhere():
    assert META["version"] == "attr: torch_lla_em.__version__"
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1]
    conda = (ROOT / "conda/recipe.yaml").read_text()
    recipe = re.search(r'^  version: "(.+)"$', conda, re.MULTILINE)
    released = re.search(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert torch_lla_em.__version__ == cited == recipe[1] == released


def test_the_conda_recipe_renders_and_requires_the_same():
    render = pytest.importorskip("rattler_build").Stage0Recipe.from_file(ROOT / "conda/recipe.yaml")
    (variant,) = render.render()
    recipe = variant.recipe.to_dict()
    needed = {r.replace(" ", "").replace("pytorch", "torch") for r in recipe["requirements"]["run"]}
    assert needed == {*REQUIRED, f"python{SETUP['options']['python_requires']}"}
    assert recipe["package"]["version"] == torch_lla_em.__version__


def test_the_paper_has_what_its_journal_asks_for():
    text = (ROOT / "paper/paper.md").read_text()
    _, head, body = text.split("---\n", 2)
    keys = re.findall(r"^(\w+):", head, re.MULTILINE)
    assert {*keys} >= {"title", "tags", "authors", "affiliations", "date", "bibliography"}
    parts = "Summary", "Statement of need", "State of the field", "Results", "References"
    assert tuple(re.findall(r"^# (.+)$", body, re.MULTILINE)) == parts
    assert 500 < len(body.split()) < 1000
    entries = re.findall(r"^@\w+\{([^,]+),", (ROOT / "paper/paper.bib").read_text(), re.MULTILINE)
    cited = set(re.findall(r"@([a-z][\w-]*)", re.sub(r"`[^`]*`", "", body)))
    assert cited == set(entries) and len(entries) == len(cited)
    for picture in re.findall(r"!\[.+\]\((.+)\)", body):
        assert (ROOT / "paper" / picture).exists()


def test_import_needs_no_torchvision():
    package = Path(torch_lla_em.__file__).parent
    assert not [path for path in package.rglob("*.py") if "torchvision" in path.read_text()]
