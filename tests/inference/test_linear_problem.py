"""Every method of ``LinearProblem`` against dense matrices, also as solvers see it."""

import pytest
import torch
from steps import complete_span
from tiny import LOG_PROBS, basis_noise, draw, tiny
from torch.testing import assert_close

from torch_lla_em.inference import LinearProblem
from torch_lla_em.inference.em import e_step
from torch_lla_em.inference.linear_problem import Whitened


def whole(name):
    """The problem over uneven minibatches, the weights of its coordinates, and whether H moves."""
    problem = tiny(name).problem(7, 18)
    return problem, torch.eye(problem.size).double(), True


def span(name):
    """The problem over all directions, with H at the network's outputs."""
    problem = tiny(name).problem(7, 18)
    noise = basis_noise(problem, True, False)
    over, _ = complete_span(problem, noise)
    V = over.span.scaled(torch.eye(problem.size).double())
    return e_step(over, over.first(2.0)).span.problem, noise.prior.scale * V, False


@pytest.mark.parametrize("kind", [whole, span])
@pytest.mark.parametrize("name", LOG_PROBS)
def test_every_method_is_that_of_dense_matrices(name, kind):
    (problem, basis, moves), exact = kind(name), tiny(name).exact()
    w, deviation = draw(3, len(basis)), draw(len(basis), seed=1).exp()
    problem.ggn_product(w)
    G, at = basis @ exact.ggn @ basis.T, 0.1 * draw(len(basis), seed=2)
    own = basis @ torch.func.hessian(exact.loss)(at @ basis) @ basis.T if moves else G
    slope = basis @ torch.func.grad(exact.loss)(at @ basis)
    solver, D = Whitened(problem, deviation), deviation.diag()
    found = {
        "ggn_product": (problem.ggn_product(w), solver(w), G),
        "with_curvature_at": (
            problem.with_curvature_at(at).ggn_product(w), solver.hessian(at / deviation)(w), own,
        ),
        "minibatch_products": (
            sum(part(w) for part in problem.minibatch_products()[1]),
            sum(part(w) for part in solver.minibatches()[1]), G,
        ),
    }  # fmt: skip
    for plain, whitened, matrix in found.values():
        assert_close(plain, w @ matrix)
        assert_close(whitened, w @ D @ matrix @ D)
    loss, gradient = problem.loss_and_gradient(at)
    seen, whitened = solver.value_and_gradient(at / deviation)
    assert loss == pytest.approx(exact.loss(at @ basis).item()) and loss == pytest.approx(seen)
    assert_close((gradient, whitened), (slope, deviation * slope))
    assert_close(problem.zeros(2), torch.zeros(2, len(basis)).double())
    assert 0 < problem.rounding == solver.rounding < 1e-12
    for number, products in (problem.minibatch_products(), solver.minibatches()):
        assert number == len(list(products)) == (3 if moves else 1)
    others = {"loss_and_gradient", "zeros", "rounding"}
    assert {name for name in vars(LinearProblem) if name[0] != "_"} == {*found, *others}
