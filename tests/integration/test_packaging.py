"""Metadata, the files that build the package, and what it can be installed with."""

import json
import re
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

import torch_lla_em

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs"))

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


def test_notebooks_hold_the_code_of_the_examples():
    pages = pytest.importorskip("pages", reason="the site is built with griffe")
    names = [path.stem for path in pages.EXAMPLES.glob("*.py") if pages.is_portable(path.stem)]
    stored = {path.stem: path for path in pages.NOTEBOOKS.glob("*.ipynb")}
    every = {path.stem for path in pages.EXAMPLES.glob("*.py")}
    assert len(names) >= 12 and stored.keys() == every
    for name in names:
        text = stored[name].read_text()
        book = json.loads(text)
        code = ["".join(c["source"]) for c in book["cells"] if c["cell_type"] == "code"]
        cells = pages.cells(pages.EXAMPLES / f"{name}.py")
        own = [re.sub("from helpers.*\n", "", cell.text) for cell in cells if cell.is_code]
        assert code[1:] == [*[pages.helper(name).rstrip("\n")] * bool(pages.helper(name)), *own]
        assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
        words = "".join("".join(c["source"]) for c in book["cells"] if c["cell_type"] == "markdown")
        for link in re.findall(r"\]\((?!http)([^)#]+)", words):
            assert (pages.NOTEBOOKS / link).exists(), f"{name}: {link}"
        try:
            import nbformat
        except ImportError:
            continue
        nbformat.validate(nbformat.from_dict(book))


def test_the_paper_has_what_its_journal_asks_for():
    text = (ROOT / "paper/paper.md").read_text()
    _, head, body = text.split("---\n", 2)
    for key in ("title", "tags", "authors", "affiliations", "date", "bibliography"):
        assert re.search(rf"^{key}:", head, re.MULTILINE), key
    assert re.findall(r"^# (.+)$", body, re.MULTILINE) == [
        "Summary",
        "Statement of need",
        "State of the field",
        "Results",
        "References",
    ]
    assert 500 < len(body.split()) < 1000
    entries = re.findall(r"^@\w+\{([^,]+),", (ROOT / "paper/paper.bib").read_text(), re.MULTILINE)
    cited = set(re.findall(r"@([a-z][\w-]*)", re.sub(r"`[^`]*`", "", body)))
    assert cited == set(entries) and len(entries) == len(cited)
    for picture in re.findall(r"!\[.+\]\((.+)\)", body):
        assert (ROOT / "paper" / picture).exists()


def test_import_needs_no_torchvision():
    package = Path(torch_lla_em.__file__).parent
    assert not [path for path in package.rglob("*.py") if "torchvision" in path.read_text()]
