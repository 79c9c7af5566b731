"""Generates the API pages and the tutorial pages of the documentation site.

ProperDocs (and MkDocs) call the functions whose names begin with ``on_``. A tutorial is a script in
``examples/`` with ``# %%`` cells. The text and figures that its cells produced are stored once, in
its notebook in ``examples/notebooks/``, from which its page is made. ``python docs/pages.py`` runs
the scripts, or those that are named, and writes their notebooks; with ``--keep`` the stored outputs
are kept and only the cells are written again.
"""

from __future__ import annotations

import argparse
import ast
import configparser
import contextlib
import io
import json
import re
import sys
import time
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any, NamedTuple

import griffe

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torch_lla_em"
EXAMPLES = ROOT / "examples"
NOTEBOOKS = EXAMPLES / "notebooks"

PUBLIC = "prediction", "distil", "likelihoods", "solvers", "inference", "mixtures"
"""Subpackages for users, in the order of the navigation."""

INTERNAL = "data", "jacobian", "problem", "checkpoint", "runtime", "integrations"
"""Subpackages that only developers of the library import from."""

FOR_USERS = {
    "likelihoods": {"compare_with_log_prob"},
    "inference": {"Estimate"},
}
"""Names of subpackages for users that the package itself does not export. Mixtures have only such
names."""

INHERITING = "Prediction", "StudentPrediction"
"""Classes whose pages have the members of their base class."""

MODULES = (
    "ensemble",
    "plot",
    "integrations.sklearn",
    "integrations.lightning",
    "integrations.botorch",
    "integrations.estimators",
    "integrations.laplace_torch",
)
"""Modules with an API page of their own."""


def on_config(config: Any) -> Any:
    """Show the version, link the repository, and add the API pages to the navigation."""
    config.copyright = f"torch_lla_em {version()}, MIT licence"
    config.repo_url = config.repo_url or repository()
    *_, api = config.nav
    public, internal = subpackages()
    pages = [name for name in MODULES if (module_path(name)).exists()]
    api["API"] += [{name: f"api/{name}.md"} for name in public + pages]
    api["API"].append({"Internals": [{name: f"api/{name}.md"} for name in internal]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the API pages, and the tutorials with their figures and notebooks."""
    File = type(next(iter(files)))
    nav = {title: pages for part in config.nav for title, pages in part.items()}
    examples = [Path(page).stem for page in nav["Tutorials"][1:]]
    made: dict[str, str | bytes] = {**api_pages(), **tutorial_pages(examples)}
    for name in examples:
        made |= {f"tutorials/{file}": content for file, content in pictures(name).items()}
        if is_portable(name):
            made[f"tutorials/{name}.ipynb"] = (NOTEBOOKS / f"{name}.ipynb").read_text()
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Insert the version, link pages of the site, and keep ± and its two numbers on one line in
    tables."""
    markdown = markdown.replace("{{ version }}", version())
    markdown = of_site(markdown)
    return re.sub(r"(?m)^\|.* ± .*", lambda row: row[0].replace(" ± ", "\u00a0±\u00a0"), markdown)


def of_site(markdown: str) -> str:
    """Return text whose links to notebooks and modules, which the repository has, are to their
    pages."""
    markdown = markdown.replace("](../examples/notebooks)", "](tutorials/index.md)")
    markdown = re.sub(r"\]\(\.\./examples/notebooks/(\w+)\.ipynb", r"](tutorials/\1.md", markdown)
    return re.sub(
        r"\]\(\.\./torch_lla_em/([\w/]+)\.py\)",
        lambda link: f"](api/{link[1].replace('/', '.')}.md)",
        markdown,
    )


def on_page_content(html: str, **_: Any) -> str:
    """Label the cells of tables, which may become lists on narrow screens, and link figures to
    their files."""
    html = re.sub(r'<img [^>]*src="([^"]*)"[^>]*>', r'<a href="\1">\g<0></a>', html)
    # griffe writes types such as "str, list or callable" as a tuple, in brackets
    html = re.sub(
        r"<code>\((((?!</code>).)* or ((?!</code>).)*)\)</code>", r"<code>\1</code>", html
    )
    return re.sub(r"<table>.*?</table>", lambda table: labelled(table[0]), html, flags=re.DOTALL)


def labelled(table: str) -> str:
    """Return an HTML table whose cells have the titles of their columns as an attribute."""
    titles = re.findall(r"<th\b[^>]*>(.*?)</th>", table, re.DOTALL)
    titles = [re.sub(r"<.*?>", "", title).replace('"', "&quot;") for title in titles]
    if len(titles) < 2:
        return table

    def label(row: re.Match) -> str:
        remaining = iter(titles)
        return re.sub(r"<td", lambda _: f'<td data-label="{next(remaining, "")}"', row[0])

    cells = re.findall(r"<td\b[^>]*>(.*?)</td>", table, re.DOTALL)
    others = [re.sub(r"<.*?>", "", cell) for i, cell in enumerate(cells) if i % len(titles)]
    is_short = len(titles) > 2 and sum(map(len, others)) <= _SHORT * len(others)
    table = re.sub(r"<tr>.*?</tr>", label, table, flags=re.DOTALL)
    kind = "data-numbers" if is_short else "data-stack"
    return table.replace("<table>", f"<table {kind}{' data-wide' * (len(titles) > 8)}>")


_SHORT = 8
"""Mean number of characters of cells up to which the rows of a table are not shown as lists on
narrow screens."""


def version() -> str:
    return re.search(r'__version__ = "(.*?)"', (PACKAGE / "__init__.py").read_text())[1]


def repository() -> str | None:
    """Return the address of the repository, once setup.cfg states one."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    urls = dict(
        re.findall(r"^(.+?) = (.+)$", setup["metadata"].get("project_urls", ""), re.MULTILINE)
    )
    return urls.get("Repository")


class Docstrings(griffe.Extension):
    """Let griffe read ``Example:`` as a section with code, and patterns such as "*lora*" as
    code."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.name == "__init__" and obj.docstring and "Args:" not in obj.docstring.value:
            obj.docstring = None  # the class documents the arguments
        if obj.docstring:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            # arguments that are described one by one in text become a list
            text = re.sub(r"^``\w+``(?= \(|:)", r"- \g<0>", text, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r'"\*\w+\*"', r"`\g<0>`", text)


def subpackages() -> tuple[list[str], list[str]]:
    """Return the names of the subpackages: those for users and the internal ones."""
    names = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    first = [name for name in PUBLIC if name in names]
    public = first + [name for name in names if name not in PUBLIC + INTERNAL]
    return public, [name for name in INTERNAL if name in names]


def api_pages() -> dict[str, str]:
    """Return the API pages by their paths: every public name, from its docstring."""
    public, internal = subpackages()
    rows, pages = {}, {}
    for name in public + internal:
        path = PACKAGE / name / "__init__.py"
        exported = {*public_names(PACKAGE / "__init__.py"), *FOR_USERS.get(name, ())}
        every = public_names(path)
        names = [member for member in every if member in exported or name == "mixtures"] or every
        others = [member for member in every if member not in names]
        purpose = (ast.get_docstring(ast.parse(path.read_text())) or name).splitlines()[0]
        blocks = "".join(block(name, member) for member in names)
        if others:
            blocks += DEVELOPERS + "".join(block(name, member, level=3) for member in others)
        pages[f"api/{name}.md"] = f"{LESS}# torch_lla_em.{name}\n\n{purpose}\n{blocks}"
        rows[name] = f"| [{name}]({name}.md) | {', '.join(f'`{member}`' for member in names)} |"
    for name in MODULES:
        if (module_path(name)).exists():
            options = "    options:\n      show_root_heading: false\n"
            pages[f"api/{name}.md"] = (
                f"{LESS}# torch_lla_em.{name}\n\n::: torch_lla_em.{name}\n{options}"
            )
            members = (f"`{member}`" for member in defined_names(module_path(name)))
            rows[name] = f"| [{name}]({name}.md) | {', '.join(members)} |"
    users = "\n".join(rows[name] for name in rows if name not in internal)
    developers = "\n".join(rows[name] for name in internal)
    pages["api/index.md"] = API.format(users=users, developers=developers)
    return pages


def block(subpackage: str, member: str, level: int = 2) -> str:
    """Return the directive that documents a public name."""
    options = f"    options:\n      heading_level: {level}\n"
    if member in INHERITING:
        options += "      inherited_members: true\n"
    return f"\n::: {address(subpackage, member)}\n{options}"


def module_path(name: str) -> Path:
    return PACKAGE / f"{name.replace('.', '/')}.py"


def address(subpackage: str, member: str) -> str:
    """Return the dotted name of a public name, also if a module of its subpackage is called
    alike."""
    module = PACKAGE / subpackage / f"{member}.py"
    alike = module.exists() and member in defined_names(module)
    return f"torch_lla_em.{subpackage}.{member}" + f".{member}" * alike


DEVELOPERS = """
## For developers of the library

These names can change in any release.
"""

LESS = "---\nsearch:\n  boost: 0.3\n---\n\n"
"""In searches, the reference comes after the guide and the tutorials."""

API = """# API reference

Most names can be imported from `torch_lla_em` directly, for example
`from torch_lla_em import LinearisedLaplace, LaplaceEnsemble, compare`. Shapes use these letters:
N examples, B examples in a batch, C outputs, P parameters in the posterior, K posterior samples.

| module | contents |
|---|---|
| [LinearisedLaplace](laplace.md) | `LinearisedLaplace`, `NotFittedError` |
{users}

## Internals

These modules are for developers of the library. Their names can change in any release.

| module | contents |
|---|---|
{developers}
"""


def public_names(path: Path) -> list[str]:
    """Return ``__all__`` of a file."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return sorted(ast.literal_eval(node.value), key=str.lower)
    return []


def defined_names(path: Path) -> list[str]:
    """Return the public functions and classes that a file defines."""
    kinds = ast.FunctionDef, ast.ClassDef
    body = ast.parse(path.read_text()).body
    return [n.name for n in body if isinstance(n, kinds) and not n.name.startswith("_")]


class Cell(NamedTuple):
    """A cell of a script with ``# %%`` cells."""

    text: str
    """Markdown, or code."""

    is_code: bool


def cells(path: Path) -> list[Cell]:
    """Return the cells of a script. The text of Markdown cells stands in comments."""
    found = []
    for part in re.split(r"^# %%", path.read_text(), flags=re.MULTILINE)[1:]:
        kind, _, body = part.partition("\n")
        is_code = "[markdown]" not in kind
        if not is_code:
            body = re.sub(r"^# ?", "", body, flags=re.MULTILINE)
        found.append(Cell(body.strip("\n"), is_code))
    return found


_HELPER = re.compile(r"^from helpers\.(\w+) import .*\n", re.MULTILINE)


def helper(name: str) -> str:
    """Return the code of the data and the training of an example, if they are in a module of their
    own."""
    found = _HELPER.search((EXAMPLES / f"{name}.py").read_text())
    return (EXAMPLES / "helpers" / f"{found[1]}.py").read_text() if found else ""


def tutorial_pages(names: list[str]) -> dict[str, str]:
    """Return the page of every example, and the index of all tutorials, by their paths."""
    rows, pages = [], {}
    for name in names:
        path = EXAMPLES / f"{name}.py"
        seconds, shown = stored(name)
        also = f", [Jupyter notebook]({name}.ipynb)" if is_portable(name) else ""
        source = f"Source: `examples/{path.name}`{also}"
        head = f"\n*{source}. Run time: {seconds:.0f} s on one CPU core.*\n"
        parts = [head]
        outputs = iter(enumerate(shown))
        for cell in cells(path):
            parts.append(f"\n```python\n{cell.text}\n```\n" if cell.is_code else f"\n{cell.text}\n")
            if cell.is_code:
                parts.append(as_markdown(name, *next(outputs)))
        if helper(name):
            parts.append(f"\n## Data and training\n\n```python\n{helper(name)}```\n")
        title = parts[1].strip().splitlines()[0]
        pages[f"tutorials/{name}.md"] = (
            title + "\n" + head + parts[1].replace(title, "", 1) + "".join(parts[2:])
        )
        rows.append(f"| [{title[2:]}]({name}.md) | {seconds:.0f} |")
    pages["tutorials/index.md"] = TUTORIALS + "\n".join(rows) + "\n"
    return pages


TUTORIALS = """# Tutorials

Each tutorial is a script in `examples/` that runs in minutes or less on one CPU core. Run it with
`python examples/NAME.py`, cell by cell in an editor that supports `# %%` cells, or as a Jupyter
notebook. `pip install "torch_lla_em[examples]"` installs everything that they import.

| tutorial | CPU seconds |
|---|---|
"""


Outputs = list[dict[str, Any]]
"""What a cell produced, as notebooks store it: a stream of text, and figures with their alternative
texts."""


def stored(name: str) -> tuple[float, list[Outputs]]:
    """Return the run time of an example, and the outputs of its code cells, from its notebook."""
    book = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())
    own = (cell for cell in book["cells"] if cell["id"].startswith("cell-"))
    return book["metadata"]["seconds"], [cell["outputs"] for cell in own if "outputs" in cell]


def pictures(name: str) -> dict[str, bytes]:
    """Return the figures of an example by the names of their files."""
    return {
        f"{name}-{number}-{k}.png": b64decode(output["data"]["image/png"])
        for number, outputs in enumerate(stored(name)[1])
        for k, output in enumerate(outputs)
        if "data" in output
    }


def as_markdown(name: str, number: int, outputs: Outputs) -> str:
    """Return the outputs of a code cell as Markdown."""
    parts = []
    for k, output in enumerate(outputs):
        if "data" in output:
            parts.append(f"\n![{output['metadata']['alt']}]({name}-{number}-{k}.png)\n")
        else:
            parts.append(f'\n```text title="Output"\n{output["text"].rstrip()}\n```\n')
    return "".join(parts)


def is_portable(name: str) -> bool:
    """Whether an example runs as a notebook: one that starts itself again needs its file."""
    return "__file__" not in (EXAMPLES / f"{name}.py").read_text()


INSTALL = """# Colab and other machines: install the library, with all that the tutorials import
from importlib.util import find_spec

if find_spec("torch_lla_em") is None:
    %pip install -q "torch_lla_em[examples]{origin}\""""


def notebook(name: str, seconds: float, outputs: list[Outputs]) -> str:
    """Return an example as a Jupyter notebook, with the outputs of its code cells."""
    remaining = iter(outputs)
    origin = f" @ git+{repository()}" if repository() else ""
    found = [_cell("setup", INSTALL.format(origin=origin), [])]
    if helper(name):
        found.append(_cell("helper", helper(name).rstrip("\n"), []))
    for number, cell in enumerate(cells(EXAMPLES / f"{name}.py")):
        code = _HELPER.sub("", cell.text)
        text = code if cell.is_code else re.sub(r"\]\(\.\./", "](../../docs/", cell.text)
        text = text.replace("](index.md)", "](../)")
        found.append(_cell(f"cell-{number}", text, next(remaining) if cell.is_code else None))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernel, "seconds": seconds}
    book = {"cells": found, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1) + "\n"


def _cell(key: str, text: str, outputs: Outputs | None) -> dict[str, Any]:
    cell = {"id": key, "metadata": {}, "source": text.splitlines(keepends=True)}
    if outputs is None:
        return {"cell_type": "markdown", **cell}
    return {"cell_type": "code", "execution_count": None, **cell, "outputs": outputs}


def run(name: str) -> tuple[float, list[Outputs]]:
    """Run an example cell by cell, and return its run time, and the text and figures of each code
    cell."""
    import matplotlib
    import torch

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    torch.set_default_dtype(torch.float32)  # an example before may have set another one
    path, outputs = EXAMPLES / f"{name}.py", []
    sys.path.insert(0, str(EXAMPLES))  # as python examples/NAME.py does
    names = {"__name__": "__main__", "__file__": str(path)}
    began = time.process_time()
    for number, cell in enumerate(cell for cell in cells(path) if cell.is_code):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(cell.text, f"{path.name}, cell {number}", "exec"), names)
        text = {"output_type": "stream", "name": "stdout", "text": printed.getvalue()}
        outputs.append(
            [text] * bool(text["text"]) + [*map(_figure, map(plt.figure, plt.get_fignums()))]
        )
        plt.close("all")
    return time.process_time() - began, outputs


def _figure(figure: Any) -> dict[str, Any]:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=110, bbox_inches="tight")
    data, alt = {"image/png": b64encode(drawn.getvalue()).decode()}, {"alt": description(figure)}
    return {"output_type": "display_data", "data": data, "metadata": alt}


def description(figure: Any) -> str:
    """Return the alternative text of a figure, from the titles and labels of its axes."""
    if figure.get_suptitle():
        return figure.get_suptitle()
    texts = []
    for axes in figure.axes:
        if axes.get_title():
            texts.append(axes.get_title())
        elif axes.get_xlabel() and axes.get_ylabel():  # not those of a colour bar
            texts.append(f"{axes.get_ylabel()} by {axes.get_xlabel()}")
    return "; ".join(texts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="examples to run (default: all)")
    parser.add_argument("--keep", action="store_true", help="run nothing: keep stored outputs")
    asked = parser.parse_args()
    for name in asked.names or [path.stem for path in sorted(EXAMPLES.glob("*.py"))]:
        text = notebook(name, *(stored if asked.keep else run)(name))
        (NOTEBOOKS / f"{name}.ipynb").write_text(text)
