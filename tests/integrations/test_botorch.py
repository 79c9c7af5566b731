"""The BoTorch adapter: shapes, jointness, and a real optimisation."""

import pytest
import torch
from tiny import fitted
from torch import nn
from torch.testing import assert_close

pytest.importorskip("botorch")

from botorch.acquisition import qUpperConfidenceBound
from botorch.acquisition.objective import LinearMCObjective
from botorch.optim import optimize_acqf

from torch_lla_em.integrations.botorch import LaplaceModel

BOUNDS = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()
X = torch.rand(6, 2, generator=torch.Generator().manual_seed(3)).double()
Y = 1 - 4 * (X - torch.tensor([0.7, 0.2])).square().sum(-1, keepdim=True)


FIXED = {"em_steps": 0, "prior_precision": 1.0, "num_samples": 24}


def fit(model=None, y=Y, dtype=torch.float64):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, y.shape[1]))
    return fitted("regression", [(X.to(dtype), y.to(dtype))], model.to(dtype), **FIXED)[1]


@pytest.fixture(scope="module")
def la():
    return fit()


def test_samples_are_those_of_the_posterior(la):
    for shape in ((5, 2), (2, 3, 5, 2)):
        X = torch.rand(*shape, dtype=torch.float64)
        posterior = LaplaceModel(la).posterior(X)
        assert posterior.values.shape == (*shape[:-2], 24, 5, 1)
        flat = la.functional_samples(X.view(-1, 2)).view(24, *shape[:-1], 1)
        assert_close(posterior.values, flat.movedim(0, -3))
        assert_close(posterior.mean, flat.mean(0))
        assert posterior.rsample(torch.Size([7])).shape == (7, *shape[:-1], 1)
    X = torch.rand(2, 1, 2, dtype=torch.float64, requires_grad=True)
    qUpperConfidenceBound(LaplaceModel(la), beta=1.0)(X).sum().backward()
    assert (X.grad.abs().sum((1, 2)) > 0).all()


def test_outputs_may_be_flat_several_or_in_single_precision(la):
    flat = fit(nn.Sequential(la.model, nn.Flatten(0)), Y[:, 0])
    assert LaplaceModel(flat).posterior(X).mean.shape == (6, 1)
    assert LaplaceModel(fit(dtype=torch.float32)).posterior(X).mean.dtype == torch.float64
    both = fit(y=torch.cat([Y, -Y], 1))
    model = LaplaceModel(both, num_outputs=2)
    assert model.posterior(X, output_indices=[1]).mean.shape == (6, 1)
    weights = LinearMCObjective(torch.tensor([1.0, 0.5], dtype=torch.float64))
    acquisition = qUpperConfidenceBound(model, beta=1.0, objective=weights)
    assert torch.isfinite(acquisition(X[:, None])).all()
    with pytest.raises(ValueError, match="num_outputs"):
        LaplaceModel(both).posterior(X)


def test_the_best_of_a_plane_is_its_corner():
    """UCB of a linear network is convex: where its slopes keep their signs, the corner is the best."""
    model = nn.Linear(2, 1).double()
    model.load_state_dict({"weight": torch.tensor([[2.0, -1.0]]), "bias": torch.zeros(1)})
    la, beta = fit(model, model(X).detach()), 0.1
    corners = la.functional_samples(torch.tensor([[0, 0], [1, 0], [0, 1]]).double())[..., 0]
    slopes = corners[:, 1:] - corners[:, :1]
    spread = (beta * torch.pi / 2) ** 0.5 * (slopes - slopes.mean(0)).abs().mean(0)
    assert (spread < slopes.mean(0).abs()).all()
    acquisition = qUpperConfidenceBound(LaplaceModel(la), beta=beta)
    best, _ = optimize_acqf(acquisition, BOUNDS, q=1, num_restarts=2, raw_samples=8)
    assert_close(best, torch.tensor([[1.0, 0.0]]).double())
