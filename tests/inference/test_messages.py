"""Fits tell each thing once and shortly, and advise only what helps."""

import logging
import re
import warnings

import pytest
import torch
from models import trained
from torch import nn
from torch.nn import functional as F

from torch_lla_em import BlockCG, Compute, LinearisedLaplace
from torch_lla_em.runtime import CALL

MOST = 40
"""Words of a message."""


@pytest.fixture(scope="module")
def odd():
    """Model, likelihood, data, arguments, arguments of ``fit``, and words of its message, if any."""
    torch.manual_seed(0)
    x = torch.randn(60, 3)
    real, label = (x[:, :1] + 0.3 * torch.randn(60, 1)), (x[:, 0] > 0).long()

    def net(out, width=8):
        return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, out))

    fitted, random = trained(net(2), x, label, steps=150), torch.randint(2, (60,))
    overfitted = trained(net(1, 60), x, real, 800, loss=F.mse_loss)
    classes = fitted, "classification", x, label
    untrained, line, plain = net(1), nn.Linear(3, 1), net(2)
    double = nn.Linear(3, 1).double(), "regression", x.double(), x[:, :1].double() + 7
    return {
        "untrained": (*classes[:3], 1 - label, {}, {}, "train it before fit"),
        "untrained regression": (untrained, "regression", x, 9 + real, {}, {}, "train it before"),
        "overfitted": (overfitted, "regression", x, real, {}, {}, "has overfitted"),
        "without noise": (line, "regression", x, x[:, :1] + 7, {}, {}, "lost to rounding.* convert to float64"),
        "without noise in float64": (*double, {}, {}, "lost to rounding.*Check that they vary.$"),
        "random labels": (*classes[:3], random, {}, {}, "is close to the prior"),
        "no memory": (*classes, {"compute": Compute(span_memory=1000)}, {}, "cannot be stored"),
        "few passes": (*classes, {"compute": Compute(solver=BlockCG(max_passes=1))}, {}, "more passes"),
        "stagnates": (*classes, {"compute": Compute(solver=BlockCG(), tolerance=1e-9)}, {}, "Increase Compute"),
        "few steps": (*classes, {}, {"em_steps": 1}, "Increase em_steps"),
        "no time": (*classes, {"compute": Compute(budget=1e-6)}, {}, "budget is spent"),
        "no prior": (plain, *classes[1:], {"layerwise": True}, {}, "reached a bound"),
        "wide": (*classes, {}, {"em_steps": 0, "prior_precision": 1e12}, "is close to the prior"),
        "usual": (*classes, {}, {}, None),
    }  # fmt: skip


NAMES = """untrained|untrained regression|overfitted|without noise|without noise in float64|random labels|no memory
few passes|stagnates|few steps|no time|no prior|wide|usual""".replace("\n", "|").split("|")


@pytest.mark.parametrize("name", NAMES)
def test_fits_tell_each_thing_once_and_shortly(odd, name, caplog):
    model, likelihood, x, y, options, how, words = odd[name]
    la = LinearisedLaplace(model, likelihood, num_samples=8, **options)
    with warnings.catch_warnings(record=True) as warned, caplog.at_level(logging.WARNING):
        warnings.simplefilter("always")
        la.fit(x, y, progress_bar=False, **how)
        told = [str(one.message) for one in warned]
        told += [one.getMessage() for one in caplog.records]
        shown = " ".join(repr(la).split())
        la.calibrate(x + 0.1, y)
    stored = la.messages[1:]
    assert bool(stored) == (words is not None) == any(map(re.compile(words or "$^").search, stored))
    assert not [words for words in stored if len(words.split()) > MOST]
    alike = [" ".join(words.split()[:5]) for words in stored]
    assert len(alike) == len(set(alike)), stored
    assert len(told) == len(set(told)), told
    assert shown.count(CALL) <= 1
    assert all(shown.count(words) == 1 for words in stored if words in told)


def test_only_training_labels_show_that_a_network_is_not_trained(odd, caplog):
    model, likelihood, x, y, *_ = odd["usual"]
    la = LinearisedLaplace(model, likelihood, num_samples=8).fit(x, y, progress_bar=False)
    la.calibrate(x + 0.1, 1 - y)
    assert "train it before" not in caplog.text
