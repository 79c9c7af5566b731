"""Products, noise and scalings of a problem against dense matrices; numbers that are not finite end a fit."""

from dataclasses import replace

import pytest
import torch
from direct import Direct, rows_of
from models import Bent
from tiny import LOG_PROBS, batched, draw, likelihood_of, problem_of, tiny
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from torch_lla_em import BlockCG, LinearisedLaplace
from torch_lla_em.data import Data, Identity
from torch_lla_em.data.share import Share
from torch_lla_em.inference.prior import absorbed_units, g_prior_scale
from torch_lla_em.inference.sto_samples import get_sto_samples
from torch_lla_em.jacobian.parameters import ParameterLayout
from torch_lla_em.likelihoods import Classification, Regression
from torch_lla_em.problem import prepare, pull_back
from torch_lla_em.problem.problem import Problem
from torch_lla_em.runtime.group import Group
from torch_lla_em.runtime.options import Compute

NAMES = list(LOG_PROBS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cuts", [(), (7, 8, 22)])
def test_products_equal_the_dense_ones(name, cuts):
    case = tiny(name)
    problem, exact = case.problem(*cuts), case.exact()
    w = draw(5, problem.size)
    assert_close(problem.ggn_product(w), w @ exact.ggn)
    rows = rows_of(problem)
    assert_close(rows.T @ rows, exact.ggn)
    limits, hessian = problem.sweep.plan, torch.func.hessian(exact.loss)(0.1 * w[0])
    for columns in (2, None):
        problem.sweep.take(limits._replace(columns=columns))
        assert_close(problem.with_curvature_at(0.1 * w[0]).ggn_product(w), w @ hessian)
    before = problem.sweep.columns
    assert_close(sum(product(w) for product in problem.minibatch_products()[1]), w @ exact.ggn)
    assert problem.sweep.columns - before == pytest.approx(len(w))  # as one product counts
    parts = list(problem.push_forward(w))
    assert_close(torch.cat([f for _, f, _ in parts]), exact.f)
    Jw = torch.cat([Jw for _, _, Jw in parts], dim=1)
    assert_close(Jw, torch.einsum("ncp,kp->knc", exact.J, w))


@pytest.mark.parametrize("name", NAMES)
def test_products_with_the_transpose_share_nothing_with_an_entry_for_each_example(name):

    class Recorded(Group):
        def sum(self, total):
            crossed.append(total.numel())
            return total

    case, crossed = tiny(name), []
    exact, problem = case.exact(), case.problem(7, 8)
    problem.data.group = Recorded()
    u = draw(2, *exact.f.shape)
    pulled = pull_back(problem, u, Share(torch.arange(30), 30))
    assert_close(pulled, torch.einsum("ncp,knc->kp", exact.J, u))
    assert max(crossed) == pulled.numel() and sum(crossed) <= pulled.numel() + 8


def test_minibatches_of_a_loader_that_shuffles_are_not_those_kept():
    """Whose places in a pass they have, but not their rows."""
    case = tiny("classification")
    loader = DataLoader(TensorDataset(case.x, case.y), 10, shuffle=True)
    problem = problem_of(case.model, likelihood_of(case.name), loader)
    prepare(problem, 2, Compute())
    problem.data.merge_rows = 0
    w = draw(1, problem.size)
    at = problem.with_curvature_at(w[0])
    for _ in range(4):
        Gw = at.ggn_product(w)
    assert problem.data.kept and problem.sweep.plan.factors
    assert_close(sum(product(w) for product in at.minibatch_products()[1]), Gw)


def test_the_trunk_of_a_last_layer_runs_in_one_pass():
    case = tiny("classification")
    batches, rows = batched(10, case.x, case.y), []
    given = case.model, likelihood_of(case.name), batches, ["2.*"]
    problem, other = (problem_of(*given) for _ in "ab")
    prepare(problem, 2, Compute())
    w = draw(1, problem.size)
    with torch.no_grad():
        expected = other.probe_features(2, 0)[:2], other.ggn_product(w)
        handle = case.model[0].register_forward_hook(lambda *call: rows.append(len(call[2])))
        found = problem.probe_features(2, 0)[:2], problem.ggn_product(w)
        problem.loss_and_gradient(w[0])
        handle.remove()
    assert_close(found, expected)
    assert sum(rows) == 30


def test_the_first_pass_finds_the_facts_and_no_other_changes_them():
    case = tiny("classification")
    problem = replace(case, y=case.y.index_fill(0, torch.tensor([1, 4]), -100)).problem(10, 20)
    w = draw(1, problem.size)
    with pytest.raises(ZeroDivisionError):
        problem.push_forward(w, lambda *_: 1 / 0)
    assert problem.data.facts == Identity()
    for _ in range(2):
        problem.ggn_product(w)
        facts = problem.data.facts
        found = facts.num_rows, facts.num_targets, facts.num_outputs, facts.num_labelled
        assert found == (30, 30, 90, 28)


# noise and the scaling of the prior


@pytest.mark.parametrize("name", ["classification", "regression per output"])
def test_noise_does_not_depend_on_batches(name):
    case = tiny(name)
    whole, cut = (get_sto_samples(case.problem(*cuts), 4, 7) for cuts in ((), (7, 8, 22)))
    assert_close(whole.xi, cut.xi)
    assert_close(whole.eta, cut.eta)
    assert not torch.isclose(get_sto_samples(case.problem(), 4, 8).eta, whole.eta).any()
    with pytest.raises(ValueError, match="num_samples"):
        get_sto_samples(case.problem(), 0)
    for unknown in ("root", 0):
        with pytest.raises(ValueError, match="g_prior must be None, True or False"):
            get_sto_samples(case.problem(), 4, g_prior=unknown)


@pytest.mark.parametrize("name", ["classification", "regression"])
def test_drawing_changes_nothing_of_the_problem(name):
    case = tiny(name)
    likelihood = Regression() if name == "regression" else likelihood_of(name)
    problem = problem_of(case.model, likelihood, [(case.x, case.y)])
    first, again = (get_sto_samples(problem, 3) for _ in "ab")
    assert_close(first.eta, again.eta, rtol=0, atol=0)
    assert (problem.likelihood, problem.moments, problem.network_noise) == (likelihood, None, None)
    known = problem.with_targets(first.targets)
    if name == "regression":
        assert_close(known.moments[0], case.y.mean(0))
        errors = (case.model(case.x).detach() - case.y).square().mean()
        assert_close(known.network_noise, errors.sqrt())
        assert_close(known.likelihood.observation_noise, first.targets.sigma)
    found = known.probe_features(3, 0)[:2]  # η and s² at that σ
    assert_close(found, problem.probe_features(3, 0)[:2])
    assert_close(found[0], first.eta)


def test_few_targets_have_no_mean_in_however_many_groups_of_columns_they_are_read():
    batches = [(draw(4, 2), draw(4, 3, seed=1))]
    problem = problem_of(nn.Linear(2, 3).double(), Regression(1.0), batches)
    problem.sweep.take(problem.sweep.plan._replace(columns=1))
    assert problem.probe_features(5, 0).targets.moments is None


def repeated(name):
    """More rows than one group has, no two alike."""
    case = tiny(name)
    x = torch.cat([case.x, case.x.flip(1), case.x + 0.1])[:70]
    return replace(case, x=x, y=case.y.repeat(3, *[1] * (case.y.dim() - 1))[:70])


@pytest.mark.parametrize("name", NAMES)
def test_squares_are_exact_by_factors_however_rows_are_batched(name):
    case = repeated(name)
    for cuts, columns in (((), None), (range(1, 70), None), ((1, 2, 33), None), ((), 1)):
        problem = case.problem(*cuts)
        problem.linear_model.probe(case.x)
        problem.sweep.take(problem.sweep.plan._replace(columns=columns))
        assert_close(problem.probe_features(5, 0)[1], case.exact().expected_squared_features)


def test_the_squares_of_groups_are_those_of_32_rows_on_average():
    case, K = repeated("classification"), 400
    problem = case.problem(50)
    problem.linear_model.probe(case.x)
    problem.linear_model.leave_factors()
    ratio = problem.probe_features(K, 0)[1] / case.exact().expected_squared_features
    # chi-squared with at least one degree of freedom a group and sample
    assert ((ratio - 1).abs() < 5 * (2 / (K * 70 / 32)) ** 0.5).all()


def scale_of(squares, sizes, g_prior, w=None):
    """The scale of tensors of these sizes, and their layout."""
    shapes = tuple(torch.Size([1, size]) for size in sizes)
    layout = ParameterLayout(tuple("abc"[: len(sizes)]), shapes)
    w = torch.ones_like(squares) if w is None else w
    return g_prior_scale(squares, layout, w, g_prior), layout


@pytest.mark.parametrize("g_prior", [None, True])
def test_rare_features_do_not_take_over(g_prior):
    scale, _ = scale_of(torch.tensor([4.0, 4.0, 1e-14, 0.0]), [4], g_prior)
    assert scale[3] == 0 and scale[2] < 15 * scale[0]


def test_scalings_keep_the_balance_of_tensors_that_they_promise():
    squares = torch.tensor([4.0, 1.0, 0.25, 1e-3, 4e-3], dtype=torch.float64)
    w, sizes = torch.tensor([0.1, 0.2, 0.4, 5.0, 3.0], dtype=torch.float64), torch.tensor([3, 2])
    norms = torch.tensor([0.21, 34.0], dtype=torch.float64)
    for g_prior, expected in ((True, 0.0), (None, norms)):
        scale, layout = scale_of(squares, [3, 2], g_prior, w)
        mean = layout.block_sums(squares) / sizes
        factor = mean * norms if g_prior is None else mean**expected
        # the prior's variance of the outputs, by tensor
        own = layout.block_sums(scale.square() * squares) / sizes
        assert_close(own / factor, torch.ones_like(own), rtol=0.05, atol=0)


def test_rows_and_columns_of_one_matrix_may_both_have_units():
    w, s = draw(3, 4).abs() + 1, draw(3, 4, seed=1).abs() + 1
    unit = torch.tensor([1.0, 1e3, 1.0]).double()[:, None] * torch.tensor([1.0, 1.0, 1e4, 1.0])
    layout = ParameterLayout(("a.weight", "a.bias"), (torch.Size([3, 4]), torch.Size([3])))
    squares = torch.cat([(s / unit).square().flatten(), unit[:, 0].pow(-2)])
    found = absorbed_units(squares, layout, torch.cat([(w * unit).flatten(), unit[:, 0]]))
    assert_close(found, torch.cat([unit.flatten(), unit[:, 0]]))  # a bias has those of its rows


def test_weights_of_zero_have_the_scale_of_their_layer_or_one_below_the_others():
    """A bias has that of its matrix, an untrained matrix .1 of others; of an untrained head nothing is known."""
    squares, w = torch.ones(4, dtype=torch.float64), torch.tensor([1.0, 1.0, 0.0, 0.0]).double()
    layout = ParameterLayout(("0.weight", "0.bias"), (torch.Size([1, 2]), torch.Size([2])))
    trained = g_prior_scale(squares, layout, w)
    assert_close(trained, trained[:1].expand(4))
    partly, _ = scale_of(squares, [2, 2], None, w)
    assert_close(partly[2] / partly[0], partly.new_tensor((0.005 / 1.005) ** 0.5))
    untrained, _ = scale_of(squares, [2, 2], None, 0 * w)
    assert_close(untrained, torch.ones(4).double())


def test_dead_weights_have_no_scale():
    case = tiny("classification")
    with torch.no_grad():
        case.model[2].weight[:, 1] = 0  # the second hidden unit moves no output
    noise = get_sto_samples(case.problem(), 3)
    assert noise.prior.layout.unflatten(noise.prior.scale)["0.bias"][1] == 0
    assert (noise.xi[:, noise.prior.scale == 0] == 0).all()
    assert torch.isfinite(noise.right_hand_side(torch.tensor(2.0))).all()


# numbers that are not finite; the first pass names the batch that they come from

CUTS = 7, 14, 21


def at(row, value, name="classification", wrap=lambda model: model):
    """A case with this number in a row, which is batch 0 to 3, and a network around its own."""
    case = tiny(name)
    x = case.x.clone()
    x[row, 0] = value
    return replace(case, x=x, model=wrap(case.model))


class Imputed(nn.Sequential):
    """A network that has its own way with what is missing."""

    def forward(self, x):
        return super().forward(torch.nan_to_num(x))


@pytest.mark.parametrize("backwards_only", [False, True])
def test_a_derivative_that_is_not_finite_names_its_batch(backwards_only):
    case = at(23, 0.0, wrap=lambda model: Bent(model, backwards_only))
    with pytest.raises(FloatingPointError, match="derivative of the network's outputs on batch 3"):
        case.problem(*CUTS).probe_features(3, 0)
    if not backwards_only:  # what is stored for all examples is checked as a whole
        for take in (lambda p: p.push_forward(draw(2, p.size)), rows_of):
            with pytest.raises(FloatingPointError, match="or their derivatives, are not finite"):
                take(case.problem(*CUTS))
        return
    batches = batched(7, case.x, case.y)
    for solver in (None, BlockCG(), Direct()):
        la = LinearisedLaplace(case.model, "classification", compute=Compute(solver=solver))
        with pytest.raises(FloatingPointError, match="outputs on batch 0 to 4 is not"):
            la.fit(batches, progress_bar=False)


def test_outputs_and_likelihoods_that_are_not_finite_are_refused(monkeypatch):
    problem = tiny("classification").problem(*CUTS)
    w = torch.ones(2, problem.size).double()
    problem.ggn_product(w)
    problem.linear_model.network.module.register_forward_hook(lambda *given: given[-1] / 0)
    with pytest.raises(FloatingPointError, match="although they were in the first pass"):
        problem.ggn_product(w)
    case = tiny("classification")
    marked = case.model(case.x[15]).detach()

    def wrong(self, f, u):
        return u * torch.where((f - marked).norm(dim=-1, keepdim=True) < 1e-9, float("nan"), 1.0)

    monkeypatch.setattr(Classification, "hessian_sqrt_product", wrong)
    with pytest.raises(FloatingPointError, match="likelihood's curvature on batch 2 is not"):
        case.problem(*CUTS).probe_features(3, 0)
    problem = tiny("poisson").problem(*CUTS)  # steps too long are left to solvers
    w = torch.full((problem.size,), 1e4).double()
    assert not problem.loss_and_gradient(w)[1].isfinite().all()


@pytest.mark.parametrize("row, batch", [(2, 0), (15, 2)])
def test_inputs_that_are_not_finite_name_their_batch_unless_the_network_imputes_them(row, batch):
    with pytest.raises(FloatingPointError, match=f"outputs on batch {batch} .*Remove examples"):
        at(row, torch.nan).problem(*CUTS).probe_features(2, 0)
    imputed = at(row, torch.nan, wrap=Imputed).problem(*CUTS)
    assert imputed.probe_features(2, 0)[0].isfinite().all()


@pytest.mark.cuda
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("curved", [False, True])
def test_the_host_waits_for_the_end_of_a_pass_alone(name, curved, simulated):
    """And in the first pass for each check of a batch's targets: that they are finite, or labels."""
    case, checks = tiny(name), 2 if name in ("bernoulli", "poisson") else 1
    batches = batched(3, case.x, case.y)
    made = problem_of(case.model.cuda(), likelihood_of(name), batches)
    problem = Problem(made.linear_model, made.likelihood, Data(batches, torch.device("cuda")))
    prepare(problem, 3, Compute())
    problem.data.merge_rows = 0
    w = draw(3, problem.size).cuda()
    for limit in (checks * len(batches) + 3, 2, 2):
        with simulated.watched() as seen:
            problem.ggn_product(w)
        assert simulated.waits(seen) <= limit, seen
    assert problem.data.kept
    problem = problem.with_curvature_at(w[0]) if curved else problem
    for run in (
        lambda: problem.ggn_product(w),
        lambda: problem.ggn_product(w[:1]),
        lambda: problem.probe_features(3, 0),
        lambda: problem.loss_and_gradient(w[0]),
        lambda: problem.push_forward(w),
    ):
        with simulated.watched() as seen:
            run()
        assert 0 < simulated.waits(seen) <= 3, seen
