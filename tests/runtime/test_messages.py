"""Warnings are stored before they are shown."""

import ast
import logging
import threading
import warnings
from pathlib import Path

import pytest
import tiny
import torch
from torch import nn

import torch_lla_em
from torch_lla_em import LinearisedLaplace
from torch_lla_em.runtime import collected, report


def test_lists_in_this_thread_get_each_text_once(caplog):
    outer, inner, elsewhere = [], [], []

    def other_thread():
        with collected(elsewhere):
            report("log", "of the other thread")

    with collected(outer):
        report("log", "first")
        with collected(inner), pytest.warns(UserWarning, match="second"):
            report("warn", "second")
        report("log", "first")
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
    report("log", "of nobody")
    assert (outer, inner, elsewhere) == (["first", "second"], ["second"], ["of the other thread"])
    assert caplog.messages == ["first", "of the other thread", "of nobody"]


def test_every_warning_of_a_fit_is_printed_although_all_are_switched_off(tmp_path):
    torch.manual_seed(0)
    x, net = tiny.draw(12, 2).float(), nn.Linear(2, 1)
    y = net(x).detach()  # without noise
    la = LinearisedLaplace(net, "regression", num_samples=4)
    logging.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            la.fit(x, y, progress_bar=False)
    finally:
        logging.disable(logging.NOTSET)
    raised, logged = "lost to rounding", "The network has overfitted"
    la.save(tmp_path / "la.pt")
    again = LinearisedLaplace.load(tmp_path / "la.pt", net)
    for words in (raised, logged, *la.messages[1:]):
        assert words in " ".join(la.messages)
        for each in (la, again):
            assert words[:20] in " ".join(repr(each).split()) and words in each._repr_html_()


def test_a_warning_that_is_raised_as_an_error_is_stored():
    found = []
    with collected(found), pytest.raises(UserWarning):
        report("warn", "stored")  # warnings are errors in these tests
    assert found == ["stored"]


def test_warnings_are_attributed_to_the_line_of_the_user():
    x, net = tiny.draw(12, 2).float(), nn.Linear(2, 1)
    y = net(x).detach()  # without noise
    with pytest.warns(UserWarning, match="lost to rounding") as seen:
        LinearisedLaplace(net, "regression", num_samples=2).fit(x, y, progress_bar=False)
    assert {warning.filename for warning in seen} == {__file__}


def test_there_is_no_other_channel():
    """Mixtures have no messages; a deprecation concerns the code that is read, not a fit."""
    package, found = Path(torch_lla_em.__file__).parent, []
    for path in set(package.rglob("*.py")) - {package / "runtime" / "messages.py"}:
        for call in (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)):
            name = ast.unparse(call.func)
            is_warning = name in ("logger.warning", "logger.error", "logger.log", "warnings.warn")
            if is_warning and "DeprecationWarning" not in ast.unparse(call):
                found.append(f"{path.relative_to(package)}:{call.lineno}")
    assert not [place for place in found if not place.startswith("mixtures")]
