"""Fits with more classes than samples, whose H is kept in blocks, or as draws if memory is short."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torch_lla_em import Compute, LinearisedLaplace

CLASSES = 70


def table(n, seed):
    generator = torch.Generator().manual_seed(seed)
    x, noise = torch.randn(n, 2, generator=generator), torch.randn(n, CLASSES, generator=generator)
    W = torch.randn(2, CLASSES, generator=torch.Generator().manual_seed(99))
    return x, (x @ W + 0.3 * noise).argmax(1)


@pytest.fixture(scope="module")
def trained():
    x, y = table(100, 2)
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    optimiser = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(60):
        optimiser.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimiser.step()
    return net, x, y


# six copies of blocks of 100 x 70 x 70 numbers, 11.8 MB, may take half of the memory
@pytest.mark.parametrize("memory", [2e7, pytest.param(1e8, marks=pytest.mark.slow)])
def test_the_evidence_does_not_fall_far_below_one_that_a_fit_has_passed(trained, memory):
    net, x, y = trained
    la = LinearisedLaplace(
        net,
        "classification",
        num_samples=8,
        parameters="last_layer",
        seed=2,
        g_prior="root",
        compute=Compute(span_memory=memory),
    )
    la.fit(x, y, progress_bar=False)
    evidence = [step["log_evidence"] for step in la.history]
    assert evidence[-1] > max(evidence) - 10
    x, y = table(500, 102)
    assert -la.predict(x, mean="linear").log_prob(y).mean() < 2.3  # a network of zeros has 4.2
