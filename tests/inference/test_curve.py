"""γ and the log evidence over a grid of λ, without a pass over data."""

import pytest
import torch
from tiny import tiny

from torch_lla_em.exact import gaussian_log_prob
from torch_lla_em.inference.evidence import Modes
from torch_lla_em.laplace import LinearisedLaplace
from torch_lla_em.problem.sweep import Sweep


def fitted(name, **options):
    problem = tiny(name)
    likelihood = "regression" if name == "regression" else name
    if name == "regression":
        options["sigma_noise"] = 0.4
    options = {"num_samples": 16, "tolerance": 1e-3, "curvature": "network", **options}
    la = LinearisedLaplace(problem.model, likelihood, **options)
    return la.fit([(problem.x, problem.y)], progress_bar=False)


def test_pieces_reproduce_a_cubic_and_its_slope():
    logs = torch.tensor([0.0, 0.5, 2.0]).double()
    modes = Modes(logs, 1 + logs**3, 3 * logs**2)
    at = torch.linspace(0, 2, 9).double()
    torch.testing.assert_close(modes.at(at), 1 + at**3)
    assert modes.at(torch.tensor([-0.1, 2.1]).double()).isnan().all()


def test_one_mode_is_known_at_itself_only():
    modes = Modes.of(*torch.tensor([[2.0], [3.0], [1.0]]).double())
    at = torch.tensor([2.0, 2.1]).double().log()
    assert modes.at(at)[0] == 4.0 and modes.at(at)[1].isnan()


def test_repeats_leave():
    modes = Modes.of(*torch.tensor([[2.0, 1.0, 2.0], [3.0, 5.0, 3.0], [1.0, 1.0, 1.0]]).double())
    assert len(modes.values) == 2 and (modes.log_precisions.diff() > 0).all()


@pytest.mark.parametrize("name", ["classification", "poisson", "regression"])
def test_the_curve_meets_the_fit_and_peaks_there(name):
    la = fitted(name)
    best = la.prior_precision.item()
    grid = best * torch.logspace(-0.45, 0.45, 19, dtype=torch.float64)
    curve = la.curve(grid)
    estimate = la.log_marginal_likelihood()
    torch.testing.assert_close(
        curve.log_evidence.value[9], estimate.value.cpu(), rtol=1e-3, atol=0.02
    )
    torch.testing.assert_close(
        curve.effective_dim.value[9], la.effective_dim.cpu(), rtol=1e-2, atol=1e-2
    )
    assert curve.log_evidence.value.isfinite().all()
    assert abs(curve.log_evidence.value.argmax().item() - 9) <= 2
    assert (curve.effective_dim.value.diff() < 0).all() and curve.best == best
    assert len(curve.path) == len(la.history)
    slope = curve.log_evidence.value[10] - curve.log_evidence.value[8]
    assert abs(slope / (grid[10] / grid[8]).log()) < 0.3


@pytest.mark.parametrize("name", ["classification", "regression"])
def test_the_curve_takes_no_pass(name, monkeypatch):
    la = fitted(name)

    def refuse(*arguments):
        raise AssertionError("a pass over the data")

    monkeypatch.setattr(Sweep, "batches", refuse)
    monkeypatch.setattr(torch.nn.Linear, "forward", refuse)
    grid = la.prior_precision.item() * torch.logspace(-0.4, 0.4, 5, dtype=torch.float64)
    assert la.curve(grid).log_evidence.value.isfinite().all()


@pytest.mark.parametrize("name", ["classification", "regression"])
def test_the_curve_against_dense_evidences(name):
    la = fitted(name)
    problem = tiny(name)
    exact = problem.exact(la.scale)
    if name == "regression":
        exact = exact.at_noise(gaussian_log_prob(la.sigma_noise))
    grid = la.prior_precision.cpu() * torch.tensor([0.4, 1.0, 2.5]).double()
    evidence = la.curve(grid).log_evidence
    dense = torch.stack([exact.log_evidence(precision) for precision in grid])
    assert ((evidence.value - dense).abs() <= 5 * evidence.standard_error + 0.05).all()


def test_the_evidence_ends_where_no_mode_was_visited():
    la = fitted("classification")
    curve = la.curve([1e-6, la.prior_precision.item(), 1e9])
    assert curve.log_evidence.value.isnan().tolist() == [True, False, True]
    assert curve.effective_dim.value.isfinite().all()
