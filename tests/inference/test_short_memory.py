"""Short of memory, a fit takes fewer directions, then fewer samples, and says so."""

import weakref

import pytest
import torch
from models import trained
from tiny import posterior_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_lla_em import Compute, LinearisedLaplace
from torch_lla_em.inference.span import Span
from torch_lla_em.problem import COPIES

N, C, K = 200, 3, 8


def classifier():
    """A trained network and its data."""
    torch.manual_seed(0)
    x, model = torch.randn(N, 6), nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, C))
    y = (x @ torch.randn(6, C) + torch.randn(N, C)).argmax(1)
    return trained(model, x, y, 40), x, y


@pytest.fixture
def fit(monkeypatch):
    """Fit with memory for so many directions."""
    model, x, y = classifier()
    restarts, restart = [], Span.restart

    def counted(space, coordinates):
        restarts.append(space.size)
        return restart(space, coordinates)

    def run(directions, **options):
        P = sum(p.numel() for p in model.parameters())
        bytes_ = 4 * (directions * (P + 2 * N * C) + 6 * N * C**2)
        monkeypatch.setattr("torch_lla_em.inference.fit.free_for_each", lambda *_: 2.0 * bytes_)
        monkeypatch.setattr(Span, "restart", counted)
        la = LinearisedLaplace(model, "classification", **{"num_samples": K, **options})
        la.fit(x, y, validation=False, progress_bar=False)
        la.restarts = len(restarts)
        return la, la(x)

    return run


def test_fewer_directions_find_the_same_posterior(fit):
    whole, expected = fit(10_000, compute=Compute(tolerance=0.01))
    la, found = fit(5 * K + 5, compute=Compute(tolerance=0.01))
    assert whole.restarts == 0 < la.restarts and not la.messages[1:]
    assert len(la.w_samples) == K and la.mean == "linear"
    log_ratio = (la.prior_precision / whole.prior_precision).log().abs()
    assert log_ratio < 3 * (K * whole.effective_dim).rsqrt()
    assert (found - expected).abs().max() < 0.05
    assert la.certificate.square().mean().sqrt() <= la.tolerance * la.effective_dim.sqrt()


def test_fewer_samples_are_taken_with_a_warning(fit):
    la, _ = fit(5 * 5 + 1)
    assert len(la.w_samples) == 4 and la.mean == "linear"
    assert "memory for 4 posterior samples" in la.messages[1]
    assert "memory for 4 posterior" in " ".join(str(la).split())
    assert la.predict(torch.randn(2, 6)).samples.shape[0] == 4
    # options stay as they were, for another fit, and accuracy is what this one was to have
    assert la.num_samples == K and la.tolerance == la.accuracy.tolerance


def test_the_network_comes_last_with_a_warning_that_stays(fit):
    la, _ = fit(10)
    # with the prior's scaling of all other fits
    torch.testing.assert_close(la.scale, fit(10_000)[0].scale)
    assert la.mean == "network" and len(la.w_samples) == K
    assert any("H at the network's outputs" in line for line in la.messages)
    assert "whose predictions are mostly worse" in " ".join(str(la).split())


class Blocks(TorchDispatchMode):
    """Counts the results with this many entries that are in memory at once."""

    def __init__(self, numel):
        super().__init__()
        self.numel, self.held, self.peak = numel, set(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() == self.numel:
            key = result.untyped_storage().data_ptr()
            if key not in self.held:
                self.held.add(key)
                weakref.finalize(result, self.held.discard, key)
            self.peak = max(self.peak, len(self.held))
        return result


@pytest.mark.parametrize("hidden", [3, 40])  # a span that is complete, and one that is not
def test_a_fit_holds_as_many_blocks_of_h_as_are_planned(hidden, monkeypatch):
    monkeypatch.setattr("torch_lla_em.problem.hessian.ENTRIES", 20_000)
    torch.manual_seed(0)
    x, last = torch.randn(N, 6), nn.Linear(hidden, 7)
    model = nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), last)
    y = (x @ torch.randn(6, 7) + torch.randn(N, 7)).argmax(1)
    la = LinearisedLaplace(trained(model, x, y, 40), "classification", num_samples=K)
    with Blocks(N * 7**2) as blocks:
        la.fit(x, y, em_steps=4, progress_bar=False)
    assert 2 <= blocks.peak <= COPIES


def table(n, classes, seed):
    generator = torch.Generator().manual_seed(seed)
    x, noise = torch.randn(n, 2, generator=generator), torch.randn(n, classes, generator=generator)
    W = torch.randn(2, classes, generator=torch.Generator().manual_seed(99))
    return x, (x @ W + 0.3 * noise).argmax(1)


# six copies of blocks of n x C x C numbers fit into half of the second memory, and not of the others
@pytest.mark.parametrize(
    "n, classes, hidden, memory",
    [(60, 36, 6, 3e6), *(pytest.param(100, 70, 8, m, marks=pytest.mark.slow) for m in (1e8, 2e7))],
)
def test_the_evidence_does_not_fall_far_below_one_that_a_fit_has_passed(n, classes, hidden, memory):
    x, y = table(n, classes, 2)
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, classes))
    options = {"num_samples": 8, "parameters": "last_layer", "compute": Compute(span_memory=memory)}
    la = posterior_of(trained(net, x, y, 60), "classification", x, y, seed=2, **options)
    best = max(la.history[::-1], key=lambda step: step["log_evidence"])  # others may be NaN
    last = la.history[-1]
    assert last["why"] == "accurate" and last["step"] < 40
    assert last["log_evidence"] > best["log_evidence"] - 16
    xt, yt = table(500, classes, 102)
    assert -la.predict(xt, mean="linear").log_prob(yt).mean() < (2.0 if n == 60 else 2.8)
    if n == 60:
        return
    # evidences over few directions are too high: over all that a fit needs, λ is at the best
    at = {"em_steps": 0, "prior_precision": best["prior_precision"]}
    held, error = la.fit(x, y, progress_bar=False, **at), last["log_evidence_error"]
    assert last["log_evidence"] > held.history[-1]["log_evidence"] - max(2, 2 * error)
