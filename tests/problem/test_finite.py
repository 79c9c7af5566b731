"""Numbers that are not finite end a fit; the first pass names the batch that they come from."""

from dataclasses import replace

import pytest
import torch
from models import Bent
from tiny import tiny

from torch_lla_em import BlockCG, FunctionSpace, LinearisedLaplace
from torch_lla_em.likelihoods import Classification

CUTS = 7, 14, 21


def bent(name, backwards_only=False):
    """A case whose fourth batch has a row without derivatives."""
    case = tiny(name)
    x = case.x.clone()
    x[23, 0] = 0
    return replace(case, x=x, model=Bent(case.model, backwards_only))


@pytest.mark.parametrize("backwards_only", [False, True])
def test_a_derivative_that_is_not_finite_names_its_batch(backwards_only):
    problem = bent("classification", backwards_only).problem(*CUTS)
    with pytest.raises(
        FloatingPointError, match="derivative of the network's outputs on batch 3 is not"
    ):
        problem.noise_features(3, 0)


@pytest.mark.parametrize("solver", [None, BlockCG(), FunctionSpace()])
def test_every_fit_finds_a_derivative_that_is_not_finite(solver):
    case = bent("classification", backwards_only=True)
    la = LinearisedLaplace(case.model, "classification", solver=solver)
    with pytest.raises(FloatingPointError, match="outputs on batch 0 to 4 is not"):
        la.fit(list(zip(case.x.split(7), case.y.split(7))), progress_bar=False)


PASSES = {
    "outputs along w": lambda p: p.push_forward(torch.ones(2, p.size).double()),
    "rows": lambda p: p.rows(),
}


@pytest.mark.parametrize("take", PASSES.values(), ids=PASSES)
def test_what_is_stored_for_all_examples_is_checked(take):
    problem = bent("classification").problem(*CUTS)
    with pytest.raises(FloatingPointError, match="or their derivatives, are not finite"):
        take(problem)


def test_outputs_that_are_not_finite_in_a_later_pass_are_refused():
    problem = tiny("classification").problem(*CUTS)
    w = torch.ones(2, problem.size).double()
    problem.ggn_product(w)
    problem.linear_model.network.module.register_forward_hook(lambda *given: given[-1] / 0)
    with pytest.raises(FloatingPointError, match="although they were in the first pass"):
        problem.ggn_product(w)


def test_a_likelihood_that_is_not_finite_names_its_batch(monkeypatch):
    def wrong(self, f, u):
        return u * torch.where((f - marked).norm(dim=-1, keepdim=True) < 1e-9, float("nan"), 1.0)

    case = tiny("classification")
    marked = case.model(case.x[15]).detach()
    monkeypatch.setattr(Classification, "hessian_sqrt_product", wrong)
    with pytest.raises(FloatingPointError, match="likelihood's curvature on batch 2 is not"):
        case.problem(*CUTS).noise_features(3, 0)


def test_steps_too_long_are_left_to_solvers():
    problem = tiny("poisson").problem(*CUTS)
    w = torch.full((problem.size,), 1e4).double()
    loss, gradient = problem.loss_and_gradient(w)
    assert not gradient.isfinite().all()


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
