"""Outputs of another kind than the likelihood needs are noticed, and those of trained networks are not."""

import logging
from functools import partial

import pytest
import torch
from models import gaussian_nll, trained
from tiny import posterior_of
from torch import nn
from torch.nn.functional import (
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
    mse_loss,
    poisson_nll_loss,
)

from torch_lla_em.likelihoods import LIKELIHOODS, Likelihood, warn_if_mistaken


def plain(*last, outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, outputs), *last)


def data(kind, shift=0.0, count=300):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 2, generator=generator)
    mean, noise = 2 * x[:, :1].sin() + shift, torch.randn(count, 1, generator=generator)
    if kind == "bernoulli":
        return x, (mean + noise > 0).float()
    if kind == "poisson":
        return x, torch.poisson(mean.exp(), generator=generator)
    return x, mean + (0.1 + x[:, 1:].exp() * (shift > 0)) * noise


WRONG = {
    "bernoulli": (plain(nn.Sigmoid()), binary_cross_entropy, "last sigmoid"),
    "poisson": (plain(nn.Softplus()), partial(poisson_nll_loss, log_input=False), "last exp"),
    "heteroscedastic": (plain(outputs=2), lambda f, y: mse_loss(f[:, :1], y), "squared error"),
}
RIGHT = {
    "bernoulli": (1, binary_cross_entropy_with_logits),
    "poisson": (1, poisson_nll_loss),
    "heteroscedastic": (2, gaussian_nll),
}


@pytest.mark.parametrize("kind", WRONG)
def test_outputs_of_another_kind_are_reported_with_a_remedy(kind, caplog):
    network, loss, words = WRONG[kind]
    x, y = data(kind)
    trained(network, x, y, 200, 0.01, loss)
    with caplog.at_level(logging.WARNING):
        la = posterior_of(network, kind, x, y, num_samples=2, at=1.0)
    (found,) = [message for message in la.messages if words in message]
    assert found in caplog.text and len(found.split()) <= 40


@pytest.mark.parametrize("steps", [5, 50, 1000])
@pytest.mark.parametrize("shift", [0.0, 3.0])
@pytest.mark.parametrize("kind", RIGHT)
def test_networks_that_are_trained_as_they_should_be_are_not(kind, shift, steps, monkeypatch):
    """Little or much trained, with rare or common events, constant noise or not; variances are learnt after the means."""
    said = []
    reported = "torch_lla_em.likelihoods.checks.report"
    monkeypatch.setattr(reported, lambda _, words: said.append(words))
    outputs, loss = RIGHT[kind]
    steps = 1000 if kind == "heteroscedastic" else steps
    x, y = data(kind, shift)
    f = trained(plain(outputs=outputs), x, y, steps, 0.01, loss)(x).detach()
    for count in (300, 30):
        warn_if_mistaken(LIKELIHOODS[kind](), f[:count], y[:count])
    assert not said


def test_other_likelihoods_have_no_other_meaning():
    f, y = torch.rand(30, 3), torch.arange(30) % 3
    assert Likelihood().mistaken(f, y) is None
    warn_if_mistaken(LIKELIHOODS["classification"](), f, y)
