"""Package structure: a file imports its own subpackage, or the ``__init__`` of an earlier one."""

import ast
import importlib
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import torch
from torch import nn

import torch_lla_em

PACKAGE = Path(torch_lla_em.__file__).parent
SUBPACKAGES = (
    "runtime data solvers likelihoods jacobian problem inference prediction distil laplace integrations"
).split()
ROOT = "laplace"
"""Stands for the modules at the package's root, which are not a subpackage."""

BESIDE = {"mixtures": ("runtime", "data", "jacobian")}
BOUNDS = {"classes": 200, "functions": 1650, "numbers": 300, "fit": 600, "predict": 90}
"""The most classes, functions, tuned numbers, and different functions that a fit and a prediction call."""

MOVED = {"botorch.py", "compat.py", "lightning.py", "sklearn.py"}
"""Former names of modules at the root."""


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith("torch_lla_em")}


def _subpackage(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ROOT


def test_imports_follow_the_order_of_subpackages():
    faults = []
    for path in sorted(PACKAGE.rglob("*.py")):
        subpackage = _subpackage(path)
        earlier = BESIDE.get(subpackage) or SUBPACKAGES[: SUBPACKAGES.index(subpackage)]
        if subpackage == ROOT:
            earlier = [*earlier, *BESIDE]
        for name in _imports(path):
            _, *parts = name.split(".")
            own = (
                not parts
                or parts[0] == subpackage
                or (subpackage == ROOT and parts[0] not in SUBPACKAGES)
            )
            if not own and (parts[0] not in earlier or len(parts) > 1):
                faults.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not faults, faults


def test_every_subpackage_has_a_place_in_the_order():
    found = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert found == {*SUBPACKAGES, *BESIDE} - {ROOT}


def test_integrations_use_public_names_only():
    """Those of ``torch_lla_em`` and those that a subpackage's ``__all__`` offers to later ones; no ``_name``.

    ``_name`` is that of another object of this package, or of another library, by import or attribute.
    """
    faults = []
    for path in sorted((PACKAGE / "integrations").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch_lla_em"):
                public = importlib.import_module(node.module).__all__
                names = [alias.name for alias in node.names if alias.name not in public]
                faults += [f"{path.name}: {node.module}.{name}" for name in names]
            elif isinstance(node, ast.ImportFrom):
                names = [alias.name for alias in node.names if alias.name.startswith("_")]
                faults += [f"{path.name}: {node.module}.{name}" for name in names]
            elif isinstance(node, ast.Attribute) and not node.attr.startswith("__"):
                owner = ast.unparse(node.value)
                if node.attr.startswith("_") and owner not in ("self", "cls"):
                    faults.append(f"{path.name}: {owner}.{node.attr}")
    assert not faults, faults


def _numbers(statement: ast.stmt) -> int:
    """Return how many numbers an assignment to a constant has."""
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
    names = [
        part.id
        for each in targets
        for part in ast.walk(each or ast.Pass())
        if isinstance(part, ast.Name)
    ]
    if not names or not all(name.lstrip("_").isupper() for name in names) or not statement.value:
        return 0
    return sum(type(getattr(n, "value", None)) in (int, float) for n in ast.walk(statement.value))


def _called(call) -> int:
    """Return how many different functions of the package a call goes through."""
    seen = set()

    def see(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_name[0] != "<" and str(PACKAGE) in code.co_filename:
            seen.add((code.co_filename, code.co_firstlineno))

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(seen)


def test_the_package_does_not_grow():
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    kinds = [type(node) for tree in trees for node in ast.walk(tree)]
    torch.manual_seed(0)
    x, y = torch.randn(200, 5), torch.randint(3, (200,))
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    la = torch_lla_em.LinearisedLaplace(model, "classification", num_samples=8)
    found = {
        "classes": kinds.count(ast.ClassDef),
        "functions": kinds.count(ast.FunctionDef) + kinds.count(ast.AsyncFunctionDef),
        "numbers": sum(_numbers(statement) for tree in trees for statement in tree.body),
        "fit": _called(lambda: la.fit(x, y, validation=False, progress_bar=False)),
        "predict": _called(lambda: la(x[:10])),
    }
    print(found)  # shown if it fails, and by pytest -s
    assert not {name: n for name, n in found.items() if n > BOUNDS[name]}
    assert len({path.name for path in PACKAGE.glob("*.py")} - MOVED) <= 7


FACTORIES = """arange as_tensor empty eye full linspace logspace ones rand randint randn randperm
    tensor zeros""".split()


def test_every_class_has_a_name_of_its_own():
    found = [
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    assert not {name for name in found if found.count(name) > 1}


def test_every_tensor_factory_has_a_device():
    """Otherwise ``torch.set_default_device`` would choose it; estimators create data as their user does."""
    unnamed = []
    for path in set(PACKAGE.rglob("*.py")) - {PACKAGE / "integrations" / "sklearn.py"}:
        for call in (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)):
            owner, _, name = ast.unparse(call.func).rpartition(".")
            named = {"device", None} & {keyword.arg for keyword in call.keywords}
            if owner == "torch" and (name in FACTORIES and not named):
                unnamed.append(f"{path.name}:{call.lineno}")
            if owner == "torch" and name == "Generator" and not (call.args or named):
                unnamed.append(f"{path.name}:{call.lineno}")
    assert not unnamed


def test_imports_have_no_cycle():
    """Imports under ``TYPE_CHECKING`` count too."""
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


def _reached_from(node):
    """Return the name that attributes and items start from, and whether there is more than one step."""
    steps = 0
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        steps, node = steps + isinstance(node, ast.Attribute), node.value
    return (node.id if isinstance(node, ast.Name) else None), steps > 1


def _assigned(node):
    """Return the attributes that a statement assigns to or deletes."""
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    found = []
    while targets:
        target = targets.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            targets += target.elts
        elif isinstance(target, ast.Attribute) and target.attr != "grad":  # which optimisers read
            found.append(target)
    return found


def _from_others(function):
    """Return the names that a function gives to results of methods; those of ``copy`` are its own."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            owner, _, name = ast.unparse(node.value.func).rpartition(".")
            if owner and name.islower() and owner not in ("copy", "object"):
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def test_no_function_sets_the_attributes_of_another_object():
    """Those of arguments, of what it reaches or gets through them or ``self``, or by ``setattr``."""
    statements = ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete, ast.For
    faults = []
    for path in sorted(PACKAGE.rglob("*.py")):
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, functions):
                continue
            arguments = function.args
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            others = {argument.arg for argument in every} - {"self", "cls"}
            others |= _from_others(function)
            for node in ast.walk(function):
                for attribute in _assigned(node) if isinstance(node, statements) else ():
                    name, is_deep = _reached_from(attribute)
                    if name in others or (name == "self" and is_deep):
                        faults.append(f"{path.name}:{node.lineno} {ast.unparse(attribute)}")
                by_name = isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr"
                if by_name and _reached_from(node.args[0])[0] in others:
                    faults.append(f"{path.name}:{node.lineno} {ast.unparse(node)}")
    assert not faults, faults
