"""Package structure: a file imports its own subpackage, or the ``__init__`` of an earlier one; and it does not grow."""

import ast
import importlib
import inspect
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import torch
from torch import nn

import torch_lla_em

PACKAGE = Path(torch_lla_em.__file__).parent
TREES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
NODES = [(path, node) for path, tree in TREES.items() for node in ast.walk(tree)]
ROOT = "laplace"  # stands for the modules at the package's root, which are not a subpackage
SUBPACKAGES = (
    "runtime data solvers likelihoods jacobian problem inference prediction distil".split()
)
SUBPACKAGES += [ROOT, "integrations"]
BESIDE = {"mixtures": ("runtime", "data", "jacobian")}
# the most classes, functions, tuned numbers, and different functions that a fit and a prediction call
BOUNDS = {
    "classes": 157,
    "functions": 1196,
    "numbers": 163,
    "fit": 343,
    "predict": 58,
    "arguments": 7,
    "of the constructor": 11,
}
BY_POSITION = 0
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef


def _subpackage(path):
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ROOT


def _imported(node):
    """Return the modules of this package that a statement imports."""
    names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    return [name for name in names if name.startswith("torch_lla_em")]


def test_imports_follow_the_order_of_subpackages():
    faults, found = [], {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert found == {*SUBPACKAGES, *BESIDE} - {ROOT}
    for path, node in NODES:
        own = _subpackage(path)
        earlier = BESIDE.get(own) or SUBPACKAGES[: SUBPACKAGES.index(own)]
        earlier = [*earlier, *BESIDE] if own == ROOT else earlier
        for name in _imported(node):
            _, *parts = name.split(".")
            is_own = not parts or parts[0] == own or (own == ROOT and parts[0] not in SUBPACKAGES)
            if not is_own and (parts[0] not in earlier or len(parts) > 1):
                faults.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not faults, faults


def test_imports_have_no_cycle():
    """Imports under ``TYPE_CHECKING`` count too."""
    names = {}
    for path in TREES:
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names[path] = ".".join(parts).removesuffix(".__init__")
    graph, modules = {name: set() for name in names.values()}, {*names.values()}
    for path, node in NODES:
        if isinstance(node, ast.ImportFrom) and (node.module or "") in modules:
            parts = {f"{node.module}.{alias.name}" for alias in node.names} & modules
            whole = set() if len(parts) == len(node.names) else {node.module}
            graph[names[path]] |= parts | whole
    assert list(TopologicalSorter(graph).static_order())


def test_integrations_use_public_names_only():
    """Those of ``__all__``, and no ``_name`` of another object, of this package or of another library."""
    faults = []
    for path, node in NODES:
        if _subpackage(path) != "integrations":
            continue
        if isinstance(node, ast.ImportFrom):
            is_ours = (node.module or "").startswith("torch_lla_em")
            public = importlib.import_module(node.module).__all__ if is_ours else ()
            names = [alias.name for alias in node.names]
            wrong = [n for n in names if (n not in public if is_ours else n.startswith("_"))]
            faults += [f"{path.name}: {node.module}.{name}" for name in wrong]
        elif isinstance(node, ast.Attribute) and not node.attr.startswith("__"):
            owner = ast.unparse(node.value)
            if node.attr.startswith("_") and owner not in ("self", "cls"):
                faults.append(f"{path.name}: {owner}.{node.attr}")
    assert not faults, faults


def _targets(statement):
    return getattr(statement, "targets", None) or [getattr(statement, "target", None)]


def _numbers(statement):
    """Return how many numbers an assignment to a constant has; 1 << 20 is one."""
    parts = [part for each in _targets(statement) for part in ast.walk(each or ast.Pass())]
    names = [part.id for part in parts if isinstance(part, ast.Name)]
    if not names or not all(name.lstrip("_").isupper() for name in names) or not statement.value:
        return 0
    nodes = [*ast.walk(statement.value)]
    shifts = sum(isinstance(getattr(n, "op", None), ast.LShift) for n in nodes)
    return sum(type(getattr(n, "value", None)) in (int, float) for n in nodes) - shifts


def _called(call):
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
    torch.manual_seed(0)
    x, y = torch.randn(200, 5), torch.randint(3, (200,))
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    la = torch_lla_em.LinearisedLaplace(model, "classification", num_samples=8)
    found = {
        "classes": sum(isinstance(node, ast.ClassDef) for _, node in NODES),
        "functions": sum(isinstance(node, FUNCTIONS) for _, node in NODES),
        "numbers": sum(_numbers(statement) for tree in TREES.values() for statement in tree.body),
        "fit": _called(lambda: la.fit(x, y, validation=False, progress_bar=False)),
        "predict": _called(lambda: la(x[:10])),
    }
    called = {"arguments": type(la).fit, "of the constructor": type(la).__init__}
    for name, function in called.items():
        named = inspect.signature(function).parameters.values()
        found[name] = sum(p.name != "self" and p.kind != p.VAR_KEYWORD for p in named)
    print(found)  # shown if it fails, and by pytest -s
    assert not {name: n for name, n in found.items() if n > BOUNDS[name]}
    assert len([*PACKAGE.glob("*.py")]) <= 8
    classes = [
        node.name for tree in TREES.values() for node in tree.body if isinstance(node, ast.ClassDef)
    ]
    assert not {name for name in classes if classes.count(name) > 1}


def test_methods_of_posteriors_are_defined_by_their_classes_and_typed():
    """So that ``help`` shows their arguments, and editors find them and know what they return."""
    faults, kinds = [], (torch_lla_em.LinearisedLaplace, torch_lla_em.LaplaceEnsemble)
    for kind in kinds:
        for name in dir(kind):
            value = inspect.getattr_static(kind, name)
            value = getattr(value, "__func__", value)
            value = value.fget if isinstance(value, property) else value
            if name[0] == "_" or not getattr(value, "__module__", "").startswith("torch_lla_em"):
                continue
            owner = value.__qualname__.split(".")[0]
            signature = inspect.signature(value)
            typed = all(p.annotation is not p.empty for p in [*signature.parameters.values()][1:])
            is_typed = typed and signature.return_annotation is not signature.empty
            if owner not in {each.__name__ for each in kind.__mro__} or not is_typed:
                faults.append(f"{kind.__name__}.{name}")
            assert value.__doc__, name
    assert not faults, faults


def test_no_message_is_long():
    """Warnings and advice have at most 40 words; those that are yielded are checked by fits."""
    words, calls = {}, ("report", "warnings.warn")
    for path, node in NODES:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in calls:
            texts = [part for text in node.args for part in ast.walk(text)]
            texts = [part.value for part in texts if isinstance(getattr(part, "value", 0), str)]
            words[f"{path.name}:{node.lineno}"] = sum(len(text.split()) for text in texts)
    assert len(words) > 20 and not {place: n for place, n in words.items() if n > 41}, words


FACTORIES = (
    "arange as_tensor empty eye full linspace logspace ones rand randint randn randperm".split()
)
FACTORIES += ["tensor", "zeros"]


def test_every_tensor_factory_has_a_device():
    """Otherwise ``torch.set_default_device`` would choose it; estimators create data as their user does."""
    unnamed = []
    for path, call in NODES:
        if isinstance(call, ast.Call) and path != PACKAGE / "integrations" / "sklearn.py":
            owner, _, name = ast.unparse(call.func).rpartition(".")
            named = {"device", None} & {keyword.arg for keyword in call.keywords}
            named = named or (name == "Generator" and call.args)
            if owner == "torch" and name in (*FACTORIES, "Generator") and not named:
                unnamed.append(f"{path.name}:{call.lineno}")
    assert not unnamed


def _reached_from(node):
    """Return the name that attributes and items start from, and whether there is more than one step."""
    steps = 0
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        steps, node = steps + isinstance(node, ast.Attribute), node.value
    return (node.id if isinstance(node, ast.Name) else None), steps > 1


def _assigned(node):
    """Return the attributes that a statement assigns to or deletes."""
    targets, found = list(_targets(node)), []
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
    statements, faults = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete, ast.For), []
    for path, function in NODES:
        if not isinstance(function, FUNCTIONS):
            continue
        own = function.args
        others = {each.arg for each in (*own.posonlyargs, *own.args, *own.kwonlyargs)}
        others = others - {"self", "cls"} | _from_others(function)
        for node in ast.walk(function):
            for attribute in _assigned(node) if isinstance(node, statements) else ():
                name, is_deep = _reached_from(attribute)
                if name in others or (name == "self" and is_deep):
                    faults.append(f"{path.name}:{node.lineno} {ast.unparse(attribute)}")
            by_name = isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr"
            if by_name and _reached_from(node.args[0])[0] in others:
                faults.append(f"{path.name}:{node.lineno} {ast.unparse(node)}")
    assert not faults, faults


def _is_bool(node):
    """Return whether an expression looks like a Python bool; masks of tensors are comparisons by size."""
    if isinstance(node, ast.Compare):
        return isinstance(node.ops[0], (ast.Is, ast.IsNot, ast.In, ast.NotIn))
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in ("all", "any", "bool", "callable", "isinstance")
    name = getattr(node, "id", getattr(node, "attr", ""))
    is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return isinstance(node, ast.BoolOp) or is_not or name.startswith(("is_", "has_"))


def test_nothing_is_multiplied_by_a_bool():
    """A condition is written as one."""
    faults = []
    for path, node in NODES:
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.Mult):
            parts = [getattr(node, part, None) for part in ("left", "right", "value")]
            if any(_is_bool(part) for part in parts if part is not None):
                faults.append(f"{path.name}:{node.lineno} {ast.unparse(node)}")
    assert not faults, faults


def test_records_are_built_by_name():
    """One that is built by position breaks when it gets a field; ruff sees to zip (B905)."""
    by_position = []
    for path, call in NODES:
        if not isinstance(call, ast.Call):
            continue
        owner, _, name = ast.unparse(call.func).rpartition(".")
        is_splat = any(isinstance(argument, ast.Starred) for argument in call.args)
        if name[:1].isupper() and is_splat and owner not in ("nn", "torch"):
            by_position.append(f"{path.name}:{call.lineno} {ast.unparse(call)}")
    assert len(by_position) <= BY_POSITION, by_position
