"""Whole fits at the edges of size, scale and precision against the dense posterior in float64."""

import pytest
import torch
from daily import daily
from dense import ExactLaplace
from jacobians import Calls
from tiny import LOG_PROBS, draw, likelihood_of, problem_of
from torch import nn

from torch_lla_em import Compute, LinearisedLaplace
from torch_lla_em.inference.sto_samples import get_sto_samples

LAMBDA = 2.0


def linear(*sizes, **options):
    return nn.Linear(*sizes, **options, dtype=torch.float64)


def mlp(outputs=3):
    return nn.Sequential(linear(3, 4), nn.Tanh(), linear(4, outputs))


def labels(count=8, classes=3):
    return torch.randint(classes, (count,), generator=torch.Generator().manual_seed(1))


def scaled(factor):
    return Calls(lambda m, x: factor * m.a(x), a=mlp())


CLASSES = {"x": draw(8, 3), "y": labels(), "likelihood": "classification"}
NUMBERS = {"x": draw(8, 3), "y": draw(8, 3, seed=3), "likelihood": "regression"}
ONE = {"make": lambda: nn.Sequential(linear(1, 1, bias=False)), "x": draw(8, 1)}
WIDE = draw(3, 1000)
# allowed: the precision of the layers, or of G = 1e14 beside λ = 2
CASES = {
    "plain": CLASSES,
    "outputs × 1e6": NUMBERS | {"make": lambda: scaled(1e6), "y": 1e6 * NUMBERS["y"], "allowed": 0.1},
    "outputs × 1e-6": CLASSES | {"make": lambda: scaled(1e-6)},
    "float32": CLASSES | {"make": lambda: mlp().float(), "allowed": 1e-3},
    "inputs × 1e6": NUMBERS | {"make": lambda: nn.Sequential(linear(3, 3, bias=False)), "x": 1e6 * draw(8, 3), "allowed": 0.1},
    "one output, flat": NUMBERS | {"make": lambda: nn.Sequential(mlp(1), nn.Flatten(0)), "y": draw(8, 4)[:, 3]},
    "one example": CLASSES | {"x": draw(1, 3), "y": labels(1)},
    "one weight": ONE | {"y": draw(8, 2)[:, 1:], "likelihood": "regression"},
    "one weight, certain": ONE | {"y": labels(8, 2).double()[:, None], "likelihood": "bernoulli"},
    "more samples than weights": NUMBERS | {"make": lambda: nn.Sequential(linear(3, 1)), "y": draw(8, 4)[:, 3:], "options": {"num_samples": 9}},
    "last layer": CLASSES | {"options": {"parameters": "last_layer"}},
    "a thousand classes": CLASSES | {"make": lambda: Calls(lambda m, x: m.a(x) @ WIDE, a=linear(3, 3)), "x": draw(2, 3), "y": labels(2, 1000)},
}  # fmt: skip


# the last takes half of the time of all models
@pytest.mark.parametrize("name", daily(*[*CASES][:-1], rest=[*CASES][-1:]))
def test_the_posterior_is_the_dense_one(name):
    torch.manual_seed(0)
    case = CASES[name]
    model, x, y, allowed = case.get("make", mlp)(), case["x"], case["y"], case.get("allowed", 1e-6)
    own = {"num_samples": 3, "prior": "isotropic", "curvature": "network"}
    own |= case.get("options", {})
    likelihood = likelihood_of(case["likelihood"])
    la = LinearisedLaplace(model, likelihood, compute=Compute(tolerance=allowed / 5), **own)
    data = [(x.to(next(model.parameters()).dtype), y)]
    la.fit(data, em_steps=0, prior_precision=LAMBDA, progress_bar=False)
    problem = problem_of(model, likelihood, data, own.get("parameters"))
    noise = get_sto_samples(problem, own["num_samples"], 0, g_prior=False)
    right = (LAMBDA**0.5 * noise.xi + noise.eta).double()

    names = list(la._linear_model.layout.names)
    if "flat" in name:
        model, names, y = model[0], [name[2:] for name in names], y[:, None]
    exact = ExactLaplace.of(model.double(), x, y, LOG_PROBS[case["likelihood"]], names)
    w_lin, prior = la.w_lin.double(), LAMBDA * torch.eye(len(la.w_lin)).double()
    curvature = torch.func.hessian(exact.loss)(w_lin)
    H = prior + exact.ggn
    truth, root = torch.linalg.solve(H, right.T).T, torch.linalg.cholesky(H)
    error = ((la.w_samples - truth) @ root).norm(dim=1)
    assert (error <= allowed * (1 + truth @ root).norm(dim=1)).all()
    # one step of Newton's method from the mode that was found
    slope = torch.func.grad(exact.loss)(w_lin) + LAMBDA * w_lin
    root = torch.linalg.cholesky(curvature + prior)
    step = torch.linalg.solve_triangular(root, slope[:, None], upper=False)
    assert step.norm() <= 10 * allowed * (1 + (w_lin @ root).norm())
