"""The BoTorch adapter: shapes, jointness, and a real optimisation."""

import runpy
import sys

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from torch_lla_em import LinearisedLaplace

pytest.importorskip("botorch")

from botorch.acquisition import qLogExpectedImprovement, qUpperConfidenceBound
from botorch.acquisition.objective import LinearMCObjective
from botorch.optim import optimize_acqf

from torch_lla_em.botorch import LaplaceModel

BOUNDS = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)


def train(x, y, outputs=1, dtype=torch.float64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, outputs)).to(dtype)
    x, y = x.to(dtype), y.to(dtype)
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure():
        optimiser.zero_grad()
        decay = 1e-4 * sum(p.square().sum() for p in model.parameters())
        loss = (model(x) - y).square().mean() + decay
        loss.backward()
        return loss

    optimiser.step(closure)
    la = LinearisedLaplace(model, "regression", num_samples=24, sigma_noise=0.1)
    return la.fit([(x, y)], em_steps=5, progress_bar=False)


def objective(x):
    """Highest, 1, at (0.7, 0.2)."""
    bowl = (x - torch.tensor([0.7, 0.2], dtype=x.dtype)).square().sum(-1, keepdim=True)
    return 1 - 4 * bowl - 0.2 * (1 - (12 * bowl).cos())


def start(count=6):
    x = torch.rand(count, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return x, objective(x)


@pytest.fixture(scope="module")
def la():
    return train(*start())


@pytest.mark.parametrize("shape", [(5, 2), (3, 5, 2), (2, 3, 5, 2)])
def test_samples_are_those_of_the_posterior(la, shape):
    X = torch.rand(*shape, dtype=torch.float64)
    posterior = LaplaceModel(la).posterior(X)
    assert posterior.values.shape == (*shape[:-2], 24, 5, 1)
    flat = la.functional_samples(X.view(-1, 2)).view(24, *shape[:-1], 1)
    assert_close(posterior.values, flat.movedim(0, -3))
    assert_close(posterior.mean, flat.mean(0))
    assert posterior.rsample(torch.Size([7])).shape == (7, *shape[:-1], 1)


def test_draws_are_functions(la):
    """Inputs that are equal have equal values in every draw."""
    X = torch.rand(1, 2, dtype=torch.float64).expand(3, 2)
    draws = LaplaceModel(la).posterior(X).rsample(torch.Size([16]))
    assert_close(draws[:, 0], draws[:, 2])
    assert draws.std(0).min() > 0


def test_single_precision_networks_take_double_points():
    la = train(*start(), dtype=torch.float32)
    posterior = LaplaceModel(la).posterior(torch.rand(2, 2, dtype=torch.float64))
    assert posterior.mean.dtype == torch.float64


def test_several_outputs_are_scalarised():
    x, y = start()
    la = train(x, torch.cat([y, -y], 1), outputs=2)
    model = LaplaceModel(la, num_outputs=2)
    X = torch.rand(4, 2, dtype=torch.float64)
    assert model.posterior(X, output_indices=[1]).mean.shape == (4, 1)
    weights = LinearMCObjective(torch.tensor([1.0, 0.5], dtype=torch.float64))
    acquisition = qUpperConfidenceBound(model, beta=1.0, objective=weights)
    assert torch.isfinite(acquisition(X[:, None])).all()
    with pytest.raises(ValueError, match="num_outputs"):
        LaplaceModel(la).posterior(X)


def test_a_flat_output_has_one_column(la):
    class Flat(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)[:, 0]

    x, y = start()
    flat = LinearisedLaplace(Flat(la.model), "regression", num_samples=3)
    flat.fit([(x, y[:, 0])], em_steps=1, progress_bar=False)
    assert LaplaceModel(flat).posterior(x).mean.shape == (6, 1)


def test_acquisition_values_have_gradients(la):
    X = torch.rand(2, 1, 2, dtype=torch.float64, requires_grad=True)
    qUpperConfidenceBound(LaplaceModel(la), beta=1.0)(X).sum().backward()
    assert (X.grad.abs().sum((1, 2)) > 0).all()


def test_the_best_of_a_plane_is_its_corner():
    """UCB of a linear network is convex: where its slopes keep their signs, the corner is the best."""
    model = nn.Linear(2, 1).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[2.0, -1.0]]))
        model.bias.zero_()
    x = torch.rand(20, 2, generator=torch.Generator().manual_seed(0)).double()
    la = LinearisedLaplace(model, "regression", num_samples=8, sigma_noise=0.1)
    la.fit([(x, model(x).detach())], em_steps=0, prior_precision=1.0, progress_bar=False)
    corners = la.functional_samples(torch.tensor([[0, 0], [1, 0], [0, 1]]).double())[..., 0]
    slopes = corners[:, 1:] - corners[:, :1]
    beta = 0.1
    spread = (beta * torch.pi / 2) ** 0.5 * (slopes - slopes.mean(0)).abs().mean(0)
    assert (spread < slopes.mean(0).abs()).all()
    acquisition = qUpperConfidenceBound(LaplaceModel(la), beta=beta)
    best, _ = optimize_acqf(acquisition, BOUNDS, q=1, num_restarts=2, raw_samples=8)
    assert_close(best, torch.tensor([[1.0, 0.0]]).double())


def test_a_round_of_bayesian_optimisation_climbs(la):
    """A search that only climbs ends no lower than at any of its starts."""
    acquisition = qLogExpectedImprovement(LaplaceModel(la), best_f=start()[1].max())
    starts = torch.rand(3, 2, 2, generator=torch.Generator().manual_seed(0)).double()
    candidates, value = optimize_acqf(
        acquisition, BOUNDS, q=2, num_restarts=3, batch_initial_conditions=starts
    )
    assert ((candidates >= 0) & (candidates <= 1)).all()
    assert value >= acquisition(starts).max() - 1e-9


def test_a_missing_botorch_raises_with_the_command_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "botorch.models.ensemble", None)
    with pytest.raises(ImportError, match="pip install"):
        runpy.run_path(sys.modules["torch_lla_em.botorch"].__file__)
