"""Numbers that are not finite end a fit with the batch that they come from."""

from dataclasses import replace

import pytest
import torch
from models import Bent
from tiny import tiny

from torch_lla_em.jacobian import Rows
from torch_lla_em.likelihoods import Classification

CUTS = 7, 14, 21


def bent(name, backwards_only=False):
    """A case whose fourth batch has a row without derivatives."""
    case = tiny(name)
    x = case.x.clone()
    x[23, 0] = 0
    return replace(case, x=x, model=Bent(case.model, backwards_only))


PASSES = {
    "a product": lambda p, w: p.ggn_product(w),
    "a gradient": lambda p, w: p.loss_and_gradient(w[0]),
    "noise": lambda p, w: p.noise_features(3, 0),
    "rows": lambda p, w: p.rows(),
}


@pytest.mark.parametrize("backwards_only", [False, True])
@pytest.mark.parametrize("take", PASSES.values(), ids=PASSES)
def test_a_derivative_that_is_not_finite_names_its_batch(take, backwards_only):
    problem = bent("classification", backwards_only).problem(*CUTS)
    w = torch.randn(2, problem.size, generator=torch.Generator().manual_seed(0)).double()
    with pytest.raises(
        FloatingPointError, match="derivative of the network's outputs on batch 3 is not"
    ):
        take(problem, w)


def test_outputs_along_w_name_their_batch():
    problem = bent("classification").problem(*CUTS)
    with pytest.raises(FloatingPointError, match="derivative of the network's outputs on batch 3"):
        problem.push_forward(torch.ones(2, problem.size).double())


@pytest.mark.parametrize("take", ["a product", "noise", "rows"])
def test_a_likelihood_that_is_not_finite_names_its_batch(take, monkeypatch):
    def wrong(self, f, u):
        return u * torch.where((f - marked).norm(dim=-1, keepdim=True) < 1e-9, float("nan"), 1.0)

    case = tiny("classification")
    marked = case.model(case.x[15]).detach()
    monkeypatch.setattr(Classification, "hessian_product", wrong)
    monkeypatch.setattr(Classification, "hessian_sqrt_product", wrong)
    problem = case.problem(*CUTS)
    with pytest.raises(FloatingPointError, match="likelihood's curvature on batch 2 is not"):
        PASSES[take](problem, torch.ones(2, problem.size).double())


def test_steps_too_long_are_left_to_solvers():
    problem = tiny("poisson").problem(*CUTS)
    w = torch.full((problem.size,), 1e4).double()
    loss, gradient = problem.loss_and_gradient(w)
    assert not gradient.isfinite().all()


@pytest.mark.parametrize("size", [float("nan"), 1e308])
def test_vectors_that_are_not_finite_are_left_to_solvers(size):
    problem = tiny("classification").problem(*CUTS)
    w = torch.full((2, problem.size), size, dtype=torch.float64)
    assert not problem.ggn_product(w).isfinite().all()
    assert not sum(product(w) for _, product in problem.minibatch_products()).isfinite().all()


def test_a_fault_that_is_not_found_again_is_left_as_it_was(monkeypatch):
    problem = tiny("classification").problem(*CUTS)
    w = torch.ones(2, problem.size).double()
    calls, pull = [], Rows.pull

    def faulty(self, u, total):
        pull(self, u, total)
        calls.append(1)
        if len(calls) == 2:
            total[0, 0] = float("nan")

    problem.ggn_product(w)
    monkeypatch.setattr(Rows, "pull", faulty)
    assert problem.ggn_product(w).isnan().any()
    assert len(calls) == 8  # two passes
    assert problem.ggn_product(w).isfinite().all()


class Imputed(torch.nn.Module):
    """A network that has its own way with what is missing."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(torch.nan_to_num(x))


@pytest.mark.parametrize("row, batch", [(2, 0), (15, 2)])
def test_inputs_that_are_not_finite_name_their_batch(row, batch):
    case = tiny("classification")
    x = case.x.clone()
    x[row, 0] = float("nan")
    problem = replace(case, x=x).problem(*CUTS)
    with pytest.raises(ValueError, match=f"inputs of batch {batch} hold NaN"):
        problem.noise_features(2, 0)


@pytest.mark.parametrize("row", [2, 15])
def test_what_is_missing_may_be_imputed_by_the_network(row):
    case = tiny("classification")
    x = case.x.clone()
    x[row, 0] = float("nan")
    case = replace(case, x=x, model=Imputed(case.model))
    assert case.problem(*CUTS).noise_features(2, 0).eta.isfinite().all()
