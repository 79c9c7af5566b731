from dataclasses import replace

import pytest
import torch
from tiny import LOG_PROBS, draw, likelihood_of, tiny
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from torch_lla_em.data.loader import Data, Facts
from torch_lla_em.data.share import Share
from torch_lla_em.inference.prior import g_prior_scale
from torch_lla_em.inference.stochastic_prior import get_sto_samples
from torch_lla_em.jacobian.linear_model import LinearModel
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.parameters import ParameterLayout
from torch_lla_em.problem import Outputs, prepare, pull_back
from torch_lla_em.problem.problem import Problem
from torch_lla_em.runtime.group import Group
from torch_lla_em.runtime.options import Compute

NAMES = list(LOG_PROBS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cuts", [(), (7, 8, 22)])
def test_products_equal_the_dense_ones(name, cuts):
    case = tiny(name)
    problem, exact = case.problem(*cuts), case.exact()
    w = torch.randn(5, problem.size, dtype=torch.float64)
    assert_close(problem.ggn_product(w), w @ exact.ggn)
    rows = problem.rows()
    assert_close(rows.T @ rows, exact.ggn)
    loss, gradient = problem.loss_and_gradient(0.1 * w[0])
    assert_close(loss, exact.loss(0.1 * w[0]).item())
    assert_close(gradient, torch.func.grad(exact.loss)(0.1 * w[0]))
    at = problem.with_curvature_at(0.1 * w[0]).ggn_product(w)
    assert_close(at, w @ torch.func.hessian(exact.loss)(0.1 * w[0]))


def test_minibatches_sum_to_the_whole():
    problem = tiny("classification").problem(7, 8, 22)
    w = torch.randn(2, problem.size, dtype=torch.float64)
    products = [(rows, product(w)) for rows, product in problem.minibatch_products()]
    assert [rows for rows, _ in products] == [7, 1, 14, 8]
    assert_close(sum(product for _, product in products), problem.ggn_product(w))


def test_minibatches_of_a_loader_that_shuffles_are_not_those_kept():
    """Whose places in a pass they have, but not their rows."""
    case = tiny("classification")
    loader = DataLoader(TensorDataset(case.x, case.y), 10, shuffle=True)
    problem = case.problem()
    problem = Problem(problem.linear_model, problem.likelihood, Data(loader, problem.device))
    prepare(problem, 2, Compute())
    problem.data.merge_rows = 0
    w = torch.randn(1, problem.size, dtype=torch.float64)
    at = problem.with_curvature_at(w[0])
    for _ in range(4):
        Gw = at.ggn_product(w)
    assert problem.data.cache and problem.sweep.factors.known
    assert_close(sum(product(w) for _, product in at.minibatch_products()), Gw)


def test_the_trunk_of_a_last_layer_runs_in_one_pass():
    case = tiny("classification")
    layout = ParameterLayout.of(case.model, ["2.weight", "2.bias"])
    linear, batches = LinearModel(Network(case.model), layout), list(zip(*parts(case, 10)))
    problem = Problem(linear, case.problem().likelihood, Data(batches, torch.device("cpu")))
    prepare(problem, 2, Compute())
    w, rows = torch.randn(1, problem.size, dtype=torch.float64), []
    with torch.no_grad():
        expected = Problem(linear, problem.likelihood, Data(batches, problem.device))
        expected = expected.noise_features(2, 0), expected.ggn_product(w)
        handle = case.model[0].register_forward_hook(lambda *call: rows.append(len(call[2])))
        found = problem.noise_features(2, 0), problem.ggn_product(w)
        problem.loss_and_gradient(w[0])
        handle.remove()
    assert_close(found, expected)
    assert sum(rows) == 30


def test_the_first_pass_finds_the_facts_and_no_other_changes_them():
    case = tiny("classification")
    y = case.y.clone()
    y[[1, 4]] = -100
    batches = list(zip(case.x.split(10), y.split(10)))
    linear = LinearModel(Network(case.model), case.layout)
    problem = Problem(linear, likelihood_of("classification"), Data(batches, torch.device("cpu")))
    data, w = problem.data, torch.randn(1, problem.size, dtype=torch.float64)

    def stop(*_):
        assert data.facts == Facts()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        problem.push_forward(w, stop)
    assert data.facts == Facts()
    problem.ggn_product(w)
    found = data.facts
    assert found == Facts(30, 30, 30 * case.exact().f.shape[1], 28)
    problem.noise_features(2, 0)
    assert data.facts is found
    with pytest.raises(AttributeError):
        found.num_rows = 3


def parts(case, size):
    return case.x.split(size), case.y.split(size)


def test_push_forward_yields_outputs_and_features():
    case = tiny("regression")
    w = torch.randn(2, case.layout.size, dtype=torch.float64)
    parts = list(case.problem(7, 8).push_forward(w))
    assert_close(torch.cat([f for _, f, _ in parts]), case.exact().f)
    expected = torch.einsum("ncp,kp->knc", case.exact().J, w)
    assert_close(torch.cat([Jw for _, _, Jw in parts], dim=1), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_product_with_the_transpose_notices_another_order(name):
    """Of what crosses ranks, nothing has an entry for each example."""

    class Recorded(Group):
        def sum(self, total):
            crossed.append(total.numel())
            return total

    case, crossed = tiny(name), []
    exact, problem = case.exact(), case.problem(7, 8)
    problem.data.group = Recorded()
    u = draw(2, *exact.f.shape)
    known = Outputs(Share.whole(len(exact.f)), exact.f, case.y, u)
    pulled = pull_back(problem, u, known)
    assert_close(pulled, torch.einsum("ncp,knc->kp", exact.J, u))
    assert max(crossed) == pulled.numel() and sum(crossed) <= pulled.numel() + 8
    assert pull_back(problem, u, known._replace(f=exact.f + 0.009 * exact.f)) is not None
    assert pull_back(problem, u, known._replace(f=exact.f.roll(1, 0))) is None
    others = Share(torch.arange(1, len(exact.f) + 1), len(exact.f))
    assert pull_back(problem, u, known._replace(share=others)) is None


@pytest.mark.parametrize("name", ["classification", "regression per output"])
def test_noise_does_not_depend_on_batches(name):
    case = tiny(name)
    whole, cut = (get_sto_samples(case.problem(*cuts), 4, 7) for cuts in ((), (7, 8, 22)))
    assert_close(whole.xi, cut.xi)
    assert_close(whole.eta, cut.eta)
    other = get_sto_samples(case.problem(), 4, 8)
    assert not torch.isclose(other.eta, whole.eta).any()


CUTS = {"one batch": (), "two": (11,), "single rows": range(1, 70), "uneven": (1, 2, 33, 40, 66)}


def repeated(name):
    """More rows than one group has, no two alike."""
    case = tiny(name)
    x = torch.cat([case.x, case.x.flip(1), case.x + 0.1])[:70]
    return replace(case, x=x, y=case.y.repeat(3, *[1] * (case.y.dim() - 1))[:70])


@pytest.mark.parametrize("name", NAMES)
def test_squares_are_exact_by_factors_however_rows_are_batched(name):
    case = repeated(name)
    for cuts, columns in [*((cuts, None) for cuts in CUTS.values()), ((), 1)]:
        problem = case.problem(*cuts)
        problem.linear_model.probe(case.x)
        problem.sweep.take(problem.sweep.limits._replace(columns=columns))
        assert_close(problem.noise_features(5, 0).squares, case.exact().expected_squared_features)


def test_the_squares_of_groups_are_those_of_32_rows_on_average():
    case = repeated("classification")
    problem = case.problem(50)
    problem.linear_model.probe(case.x)
    problem.linear_model.factored = None
    K = 400
    found = problem.noise_features(K, 0).squares
    expected = case.exact().expected_squared_features
    # chi-squared with at least one degree of freedom a group and sample
    assert ((found / expected - 1).abs() < 5 * (2 / (K * 70 / 32)) ** 0.5).all()


@pytest.mark.slow
def test_many_outputs_take_the_draws_of_single_rows(monkeypatch):
    monkeypatch.setattr("torch_lla_em.problem.curvature._EXACT_OUTPUTS", 0)
    case, seeds, K = repeated("classification"), 100, 2
    expected, found = case.exact().expected_squared_features, 0
    for seed in range(seeds):
        problem = case.problem(50)
        problem.linear_model.probe(case.x)
        found = found + problem.noise_features(K, seed).squares / seeds
    assert not torch.allclose(found, expected)
    # chi-squared with at least one degree of freedom a sample
    assert ((found / expected - 1).abs() < 5 * (2 / (K * seeds)) ** 0.5).all()


def scale_of(squares, sizes, g_prior, w=None):
    """The scale of tensors of these sizes, and their layout."""
    names, shapes = "abc"[: len(sizes)], [torch.Size([1, size]) for size in sizes]
    layout = ParameterLayout(tuple(names), tuple(shapes))
    w = torch.ones_like(squares) if w is None else w
    return g_prior_scale(squares, layout, w, g_prior), layout


@pytest.mark.parametrize("g_prior", [None, True, "tensor", "half", "root"])
def test_rare_features_do_not_take_over(g_prior):
    scale, _ = scale_of(torch.tensor([4.0, 4.0, 1e-14, 0.0]), [4], g_prior)
    assert scale[3] == 0
    assert scale[2] < 15 * scale[0]


def test_scalings_keep_the_balance_of_tensors_that_they_promise():
    squares = torch.tensor([4.0, 1.0, 0.25, 1e-3, 4e-3], dtype=torch.float64)
    w = torch.tensor([0.1, 0.2, 0.4, 5.0, 3.0], dtype=torch.float64)
    norms = torch.tensor([0.21, 34.0], dtype=torch.float64)
    for g_prior, expected in (("tensor", 1.0), ("half", 0.5), (True, 0.0), (None, norms)):
        scale, layout = scale_of(squares, [3, 2], g_prior, w)
        mean = layout.block_sums(squares) / torch.tensor([3, 2])
        factor = mean * norms if g_prior is None else mean**expected
        # the prior's variance of the outputs, by tensor
        own = layout.block_sums(scale.square() * squares) / torch.tensor([3.0, 2.0])
        assert_close(own / factor, torch.ones_like(own), rtol=0.05, atol=0)


def test_root_lies_between_the_plain_prior_and_tensor():
    squares = torch.rand(7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    root, tensor = (scale_of(squares, [3, 4], name)[0] for name in ("root", "tensor"))
    assert_close(root.square(), tensor)


def test_weights_of_zero_have_the_scale_of_their_layer_or_one_below_the_others():
    """A bias has that of its matrix, an untrained matrix .1 of others; of an untrained head nothing is known."""
    squares, zero, one = torch.ones(4, dtype=torch.float64), torch.zeros(2), torch.ones(2)
    layout = ParameterLayout(("0.weight", "0.bias"), (torch.Size([1, 2]), torch.Size([2])))
    trained = g_prior_scale(squares, layout, torch.cat([one, zero]).double())
    assert_close(trained, trained[:1].expand(4))
    partly, _ = scale_of(squares, [2, 2], None, torch.cat([one, zero]).double())
    assert_close(partly[2] / partly[0], partly.new_tensor((0.005 / 1.005) ** 0.5))
    untrained, _ = scale_of(squares, [2, 2], None, torch.zeros(4).double())
    assert_close(untrained, torch.ones(4).double())


def test_dead_weights_have_no_scale():
    case = tiny("classification")
    with torch.no_grad():
        case.model[2].weight[:, 1] = 0  # the second hidden unit moves no output
    noise = get_sto_samples(case.problem(), 3)
    dead = noise.prior.layout.unflatten(noise.prior.scale)["0.bias"][1]
    assert dead == 0
    assert (noise.xi[:, noise.prior.scale == 0] == 0).all()
    assert torch.isfinite(noise.at(torch.tensor(2.0))).all()


def test_samples_must_be_counted():
    with pytest.raises(ValueError, match="num_samples"):
        get_sto_samples(tiny("regression").problem(), 0)


@pytest.mark.cuda
@pytest.mark.parametrize("name", LOG_PROBS)
@pytest.mark.parametrize("curved", [False, True])
def test_the_host_waits_for_the_end_of_a_pass_alone(name, curved, simulated):
    """And in the first pass for each check of a batch's targets: that they are finite, or labels."""
    case, checks = tiny(name), 2 if name in ("bernoulli", "poisson") else 1
    linear = LinearModel(Network(case.model.cuda()), case.layout)
    batches = list(zip(case.x.split(3), case.y.split(3)))
    problem = Problem(linear, likelihood_of(name), Data(batches, torch.device("cuda")))
    prepare(problem, 3, Compute())
    problem.data.merge_rows = 0
    w = torch.randn(3, problem.size, dtype=torch.float64, device="cuda")
    limits = [checks * len(batches) + 3, 2, 2]
    for limit in limits:
        with simulated.watched() as seen:
            problem.ggn_product(w)
        assert simulated.waits(seen) <= limit, seen
    assert problem.data.cache
    problem = problem.with_curvature_at(w[0]) if curved else problem
    for run in (
        lambda: problem.ggn_product(w),
        lambda: problem.ggn_product(w[:1]),
        lambda: problem.noise_features(3, 0),
        lambda: problem.loss_and_gradient(w[0]),
        lambda: problem.push_forward(w),
    ):
        with simulated.watched() as seen:
            run()
        assert 0 < simulated.waits(seen) <= 3, seen
