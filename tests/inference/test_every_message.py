"""Warnings and advice: each is told once, in at most 40 words."""

import ast
import logging
import warnings
from pathlib import Path

import pytest
import torch
from models import trained
from torch import nn
from torch.nn import functional as F

import torch_lla_em
from torch_lla_em import BlockCG, Compute, LinearisedLaplace
from torch_lla_em.prediction import CALL

MOST = 40
"""Words of a message."""


def words_of(node, constants):
    """Return the words of a string in source, or None; what is filled in counts as one."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.split()
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(getattr(part, "value", "x")) if isinstance(part, ast.Constant) else "x"
            for part in node.values
        ).split()
    if isinstance(node, ast.BinOp):
        return words_of(node.left, constants)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return words_of(node.func.value, constants)
    return constants.get(node.id) if isinstance(node, ast.Name) else None


def test_no_message_in_the_source_is_long():
    found = {}
    for path in Path(torch_lla_em.__file__).parent.rglob("*.py"):
        tree, constants = ast.parse(path.read_text()), {}
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                constants[node.targets[0].id] = words_of(node.value, {})
        for node in ast.walk(tree):
            told = []
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("report", "warnings.warn"):
                told = node.args
            elif isinstance(node, ast.Yield) and node.value is not None:
                told = getattr(node.value, "elts", [node.value])
            for part in told:
                found[f"{path.name}:{part.lineno}"] = words_of(part, constants) or []
    assert sum(map(len, found.values())) > 500  # messages are found
    assert not {place: len(words) for place, words in found.items() if len(words) > MOST}


@pytest.fixture(scope="module")
def odd():
    """Fits with something to tell: model, likelihood, data, arguments, and arguments of ``fit``."""
    torch.manual_seed(0)
    x = torch.randn(60, 3)
    real, label = (x[:, :1] + 0.3 * torch.randn(60, 1)), (x[:, 0] > 0).long()

    def net(out, width=8):
        return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, out))

    fitted, random = trained(net(2), x, label, steps=150), torch.randint(2, (60,))
    overfitted = trained(net(1, 60), x, real, 800, loss=F.mse_loss)
    classes = fitted, "classification", x, label
    return {
        "untrained": (*classes[:3], 1 - label, {}, {}),
        "untrained regression": (net(1), "regression", x, 9 + real, {}, {}),
        "overfitted": (overfitted, "regression", x, real, {}, {}),
        "without noise": (nn.Linear(3, 1), "regression", x, x[:, :1] + 7, {}, {}),
        "random labels": (*classes[:3], random, {}, {}),
        "no memory": (*classes, {"compute": Compute(span_memory=1000)}, {}),
        "few passes": (*classes, {"compute": Compute(solver=BlockCG(max_passes=1))}, {}),
        "stagnates": (*classes, {"compute": Compute(solver=BlockCG(), tolerance=1e-9)}, {}),
        "few steps": (*classes, {}, {"em_steps": 1}),
        "no time": (*classes, {"compute": Compute(budget=1e-6)}, {}),
        "no prior": (net(2), *classes[1:], {"layerwise": True}, {}),
        "wide": (*classes, {}, {"em_steps": 0, "prior_precision": 1e12}),
    }


NAMES = """untrained|untrained regression|overfitted|without noise|random labels|no memory|few passes|stagnates|few steps
no time|no prior|wide""".replace("\n", "|").split("|")


@pytest.mark.parametrize("name", NAMES)
def test_fits_tell_each_thing_once_and_shortly(odd, name, caplog):
    model, likelihood, x, y, options, how = odd[name]
    la = LinearisedLaplace(model, likelihood, num_samples=8, **options)
    with warnings.catch_warnings(record=True) as warned, caplog.at_level(logging.WARNING):
        warnings.simplefilter("always")
        la.fit(x, y, progress_bar=False, **how)
        told = [
            *(str(one.message) for one in warned),
            *(one.getMessage() for one in caplog.records),
        ]
        shown = " ".join(repr(la).split())
        la.calibrate(x + 0.1, y)
    stored = la.messages[1:]
    assert stored and not [words for words in stored if len(words.split()) > MOST]
    alike = [" ".join(words.split()[:5]) for words in stored]
    assert len(alike) == len(set(alike)), stored
    assert len(told) == len(set(told)), told
    assert shown.count(CALL) <= 1 and all(
        shown.count(words) == 1 for words in stored if words in told
    )
