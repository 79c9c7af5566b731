"""The pages of the site that are made, not written: API pages and tutorials.

MkDocs calls ``on_files``. A tutorial is a script of ``examples/`` in percent format; what its cells
printed and drew when ``python docs/pages.py [NAME ...]`` last ran them is kept in ``examples/shown/``.
``python docs/pages.py --notebooks FOLDER`` writes all tutorials as Jupyter notebooks.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import re
import time
from base64 import b64encode
from pathlib import Path
from typing import Any, NamedTuple

import griffe

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torch_lla_em"
EXAMPLES = ROOT / "examples"
SHOWN = EXAMPLES / "shown"


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each room and each example."""
    from mkdocs.structure.files import File

    nav = {title: pages for part in config.nav for title, pages in part.items()}
    examples = [Path(page).stem for page in nav["Tutorials"][1:]]
    pages = [Path(page).stem for part in nav["API"][1:] for page in part.values()]
    rooms = [page for page in pages if (PACKAGE / page).is_dir()]
    made: dict[str, str | bytes] = {**api_pages(rooms), **tutorial_pages(examples)}
    made |= {f"tutorials/{path.name}": path.read_bytes() for path in SHOWN.glob("*.png")}
    made |= {f"tutorials/{name}.ipynb": notebook(name) for name in examples if is_portable(name)}
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Keep the errors of a table's figures on their line."""
    return re.sub(r"(?m)^\|.* ± .*", lambda row: row[0].replace(" ± ", "\u00a0±\u00a0"), markdown)


class Listed(griffe.Extension):
    """Turn lines that begin with an argument into a list, and patterns into code."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            listed = re.sub(
                r"^``\w+``(?= \(|:)", r"- \g<0>", obj.docstring.value, flags=re.MULTILINE
            )
            obj.docstring.value = re.sub(r'"\*\w+\*"', r"`\g<0>`", listed)


def api_pages(rooms: list[str]) -> dict[str, str]:
    """Return the page of every room by its path: all that its face shows, from docstrings."""
    rows, pages = [], {}
    for room in rooms:
        face = PACKAGE / room / "__init__.py"
        names = public_names(face)
        purpose = (ast.get_docstring(ast.parse(face.read_text())) or "").splitlines()[0]
        blocks = "".join(f"\n::: torch_lla_em.{room}.{name}\n" for name in names)
        pages[f"api/{room}.md"] = f"# {room}\n\n{purpose}\n{blocks}"
        rows.append(f"| [{room}]({room}.md) | {', '.join(f'`{name}`' for name in names)} |")
    pages["api/index.md"] = API + "\n".join(rows) + "\n"
    return pages


API = """# API

Every public name stands on the page of the room it is made in, with arguments, defaults and
shapes; most are `torch_lla_em.NAME` too. Sizes: N data, B batch, C outputs, P weights, K samples.

| page | what is on it |
|---|---|
| [the root](laplace.md) | `LinearisedLaplace`, what a fit leaves, `botorch`, `exact` |
| [plot](plot.md) | pictures of a posterior |
| [sklearn](sklearn.md) | estimators of scikit-learn |
"""


def public_names(path: Path) -> list[str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return sorted(ast.literal_eval(node.value), key=str.lower)
    return []


class Cell(NamedTuple):
    """A cell of a script in percent format."""

    text: str
    """Markdown, or code."""

    is_code: bool


def cells(path: Path) -> list[Cell]:
    """Return the cells of a script; text is commented out in it."""
    found = []
    for part in re.split(r"^# %%", path.read_text(), flags=re.MULTILINE)[1:]:
        kind, _, body = part.partition("\n")
        is_code = "[markdown]" not in kind
        if not is_code:
            body = re.sub(r"^# ?", "", body, flags=re.MULTILINE)
        found.append(Cell(body.strip("\n"), is_code))
    return found


def tutorial_pages(names: list[str]) -> dict[str, str]:
    """Return the page of every example, and the list of all, by path."""
    rows, pages = [], {}
    for name in names:
        path = EXAMPLES / f"{name}.py"
        shown = json.loads((SHOWN / f"{name}.json").read_text())
        also = f", or as a [notebook]({name}.ipynb)" if is_portable(name) else ""
        source = f"`examples/{path.name}`{also}"
        head = f"\n*{source}; {shown['seconds']:.0f} s on one core.*\n"
        parts = [head]
        outputs = iter(shown["outputs"])
        for cell in cells(path):
            parts.append(f"\n```python\n{cell.text}\n```\n" if cell.is_code else f"\n{cell.text}\n")
            if cell.is_code:
                parts.append(as_markdown(next(outputs)))
        title = parts[1].strip().splitlines()[0]
        pages[f"tutorials/{name}.md"] = (
            title + "\n" + head + parts[1].replace(title, "", 1) + "".join(parts[2:])
        )
        rows.append(f"| [{title[2:]}]({name}.md) | {shown['seconds']:.0f} |")
    pages["tutorials/index.md"] = TUTORIALS + "\n".join(rows) + "\n"
    return pages


TUTORIALS = """# Tutorials

Each is a script: real data where there are some, one idea, no network of more than a minute's
training. Run one whole with `python examples/NAME.py`, or cell by cell in an editor that knows
`# %%`. `pip install -e ".[examples]"` brings what they need.

| | CPU seconds |
|---|---|
"""


def as_markdown(output: dict[str, Any]) -> str:
    text = f'\n```text title="Output"\n{output["text"].rstrip()}\n```\n' if output["text"] else ""
    return text + "".join(f"\n![]({picture})\n" for picture in output["pictures"])


def is_portable(name: str) -> bool:
    """Whether an example runs cell by cell: one that starts itself again needs its file."""
    return "__file__" not in (EXAMPLES / f"{name}.py").read_text()


def notebook(name: str) -> str:
    """Return an example as a Jupyter notebook, with what its cells printed and drew."""
    shown = iter(json.loads((SHOWN / f"{name}.json").read_text())["outputs"])
    found = [_cell("setup", "# %pip install 'torch_lla_em[examples]'", [])]
    for number, cell in enumerate(cells(EXAMPLES / f"{name}.py")):
        outputs = _outputs(next(shown)) if cell.is_code else None
        found.append(_cell(f"cell-{number}", cell.text, outputs))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    book = {"cells": found, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1) + "\n"


def _cell(key: str, text: str, outputs: list[Any] | None) -> dict[str, Any]:
    cell = {"id": key, "metadata": {}, "source": text.splitlines(keepends=True)}
    if outputs is None:
        return {"cell_type": "markdown", **cell}
    return {"cell_type": "code", "execution_count": None, **cell, "outputs": outputs}


def _outputs(shown: dict[str, Any]) -> list[Any]:
    text = {"output_type": "stream", "name": "stdout", "text": shown["text"]}
    images = (b64encode((SHOWN / name).read_bytes()).decode() for name in shown["pictures"])
    pictures = [
        {"output_type": "display_data", "data": {"image/png": image}, "metadata": {}}
        for image in images
    ]
    return [text] * bool(shown["text"]) + pictures


def record(name: str) -> None:
    """Run an example cell by cell, and keep what each printed and drew."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    SHOWN.mkdir(exist_ok=True)
    for old in SHOWN.glob(f"{name}-*.png"):
        old.unlink()
    path, outputs = EXAMPLES / f"{name}.py", []
    names = {"__name__": "__main__", "__file__": str(path)}
    began = time.process_time()
    for number, cell in enumerate(cell for cell in cells(path) if cell.is_code):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(cell.text, f"{path.name}, cell {number}", "exec"), names)
        pictures = []
        for figure in map(plt.figure, plt.get_fignums()):
            pictures.append(f"{name}-{number}-{figure.number}.png")
            figure.savefig(SHOWN / pictures[-1], dpi=110, bbox_inches="tight")
        plt.close("all")
        outputs.append({"text": printed.getvalue(), "pictures": pictures})
    shown = {"seconds": time.process_time() - began, "outputs": outputs}
    (SHOWN / f"{name}.json").write_text(json.dumps(shown, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="examples to run; all by default")
    parser.add_argument(
        "--notebooks", type=Path, help="write notebooks to this folder; run nothing"
    )
    asked = parser.parse_args()
    for name in asked.names or [path.stem for path in sorted(EXAMPLES.glob("*.py"))]:
        if asked.notebooks and is_portable(name):
            asked.notebooks.mkdir(parents=True, exist_ok=True)
            (asked.notebooks / f"{name}.ipynb").write_text(notebook(name))
        elif not asked.notebooks:
            record(name)
