"""The house: a file imports its own room, or the face of one that stands earlier."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import torch_lla_em

PACKAGE = Path(torch_lla_em.__file__).parent
ROOMS = (
    "runtime data solvers likelihoods jacobian problem inference checkpoint prediction laplace"
).split()
BESIDE = {"mixtures": ("runtime", "data", "inference")}
LONGEST = 400
ADAPTERS = {"botorch.py", "hub.py", "lightning.py", "sklearn.py", "torch_uncertainty.py"}
"""Files at the root that each need another library."""


def _imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {
        node.module if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
        if (node.module if isinstance(node, ast.ImportFrom) else alias.name)
        and (node.module if isinstance(node, ast.ImportFrom) else alias.name).startswith(
            "torch_lla_em"
        )
    }


def _room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "laplace"


def test_imports_go_to_the_own_room_or_to_the_face_of_an_earlier_one():
    faults = []
    for path in sorted(PACKAGE.rglob("*.py")):
        room = _room(path)
        earlier = BESIDE.get(room) or ROOMS[: ROOMS.index(room)]
        if room == "laplace":
            earlier = [*earlier, *BESIDE]
        for name in _imports(path):
            _, *parts = name.split(".")
            own = (
                not parts or parts[0] == room or (room == "laplace" and parts[0] not in ROOMS[:-1])
            )
            if not own and (parts[0] not in earlier or len(parts) > 1):
                faults.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not faults, faults


def test_every_room_is_on_the_list():
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert rooms == {*ROOMS[:-1], *BESIDE}


def test_no_file_is_too_long():
    lengths = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert not {path.name: n for path, n in lengths.items() if n > LONGEST}
    assert len({path.name for path in PACKAGE.glob("*.py")} - ADAPTERS) <= 6


FACTORIES = """arange as_tensor empty eye full linspace logspace ones rand randint randn randperm
    tensor zeros""".split()


def test_every_factory_names_its_device():
    """Or ``torch.set_default_device`` would choose it; estimators make data as their user does."""
    unnamed = []
    for path in set(PACKAGE.rglob("*.py")) - {PACKAGE / "sklearn.py"}:
        for call in (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)):
            owner, _, name = ast.unparse(call.func).rpartition(".")
            named = {"device", None} & {keyword.arg for keyword in call.keywords}
            if owner == "torch" and (name in FACTORIES and not named):
                unnamed.append(f"{path.name}:{call.lineno}")
            if owner == "torch" and name == "Generator" and not (call.args or named):
                unnamed.append(f"{path.name}:{call.lineno}")
    assert not unnamed


def test_no_imports_go_in_a_circle():
    """Nor is a circle hidden behind ``TYPE_CHECKING``, which ``_imports`` reads like any other."""
    names = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in PACKAGE.rglob("*.py")
    }
    graph = {}
    for name, path in names.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "") in names:
                parts = {f"{node.module}.{alias.name}" for alias in node.names}
                own = parts & names.keys()
                found |= own if len(own) == len(node.names) else own | {node.module}
        graph[name] = found
    assert list(TopologicalSorter(graph).static_order())
