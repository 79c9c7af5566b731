"""Every stage and solver against the dense posterior, with a basis in place of random noise."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from daily import daily
from dense import dense_fixed_point, dense_step, gaussian_log_prob
from direct import Direct
from steps import complete_span
from tiny import LOG_PROBS, basis_noise, draw, fitted, tiny
from torch.testing import assert_close

from torch_lla_em import SGD, BlockCG, LinearisedLaplace
from torch_lla_em.inference.em import e_step, em, m_step
from torch_lla_em.inference.mackay import accelerated, function_space_Mackay_update, mackay_noise
from torch_lla_em.inference.map import optimise_MAP
from torch_lla_em.inference.samples import optimise_samples
from torch_lla_em.inference.state import State
from torch_lla_em.inference.whole import Whole, starting_precision, updated
from torch_lla_em.problem import TargetFacts
from torch_lla_em.runtime import Group
from torch_lla_em.solvers import Newton

NAMES = list(LOG_PROBS)
SOLVERS = [BlockCG(1e-10), Direct(1e-10)]
PRIORS = [(False, False), (True, False), (False, True), (True, True)]
CASES = [(name, *prior) for name in NAMES for prior in PRIORS]
EVERY_DAY = [case for case in CASES if case[0] == "classification" or case[1:] == (True, True)]
EM_EVERY_DAY = [("classification", False, False), *((name, True, True) for name in NAMES[:3])]
GRID = pytest.mark.parametrize(
    "name, g_prior, layerwise",
    daily(*EVERY_DAY, rest=[case for case in CASES if case not in EVERY_DAY]),
)


def prior_precision(layerwise):
    if layerwise:
        return torch.tensor([3.0, 0.5, 8.0, 2.0], dtype=torch.float64)
    return torch.tensor(2.5, dtype=torch.float64)


def setting(name, g_prior, layerwise, cuts=(7, 8, 22)):
    """The problem, its basis noise, λ, and the dense posterior with λ per weight."""
    case = tiny(name)
    problem = case.problem(*cuts)
    noise = basis_noise(problem, g_prior, layerwise)
    precision = prior_precision(layerwise) * (30 if g_prior else 1)
    per_weight = noise.prior.layout.expand(precision) if layerwise else precision
    return problem, noise, precision, case.exact(noise.prior.scale), per_weight


def dense_samples(exact, noise, precision, per_weight):
    """Return the samples that the noise has in the dense posterior, in units of the weights."""
    w0 = noise.prior.deviation(precision) * noise.right_hand_side(precision)
    return w0 * per_weight / exact.scale**2 @ exact.covariance(per_weight)


@GRID
def test_samples_and_mode_are_those_of_the_dense_posterior(name, g_prior, layerwise):
    problem, noise, precision, exact, per_weight = setting(name, g_prior, layerwise)
    gamma = exact.effective_dims(per_weight)
    expected = noise.prior.layout.block_sums(gamma) if layerwise else gamma.sum()
    for solver in SOLVERS:
        samples = optimise_samples(problem, noise, precision, solver)
        assert samples.error <= solver.tolerance
        assert_close(samples.w.T @ samples.w / len(samples.w), exact.covariance(per_weight))
        assert_close(samples.w, dense_samples(exact, noise, precision, per_weight))
        assert_close(samples.effective_dims.mean(0), expected)
    passes = problem.data.num_passes
    again = optimise_samples(problem, noise, precision, BlockCG(1e-6), samples.w)
    assert_close(again.w, samples.w, rtol=1e-5, atol=1e-6)
    assert problem.data.num_passes == passes + 1  # which finds that nothing is left
    mode = optimise_MAP(problem, noise.prior, precision, Newton(1e-9))
    assert_close(mode.w, exact.mode(per_weight))
    assert_close(mode.loss, exact.loss(exact.mode(per_weight)).item())
    assert optimise_MAP(problem, noise.prior, precision, Newton(1e-9), mode.w).passes == 1


def test_a_secant_leads_to_the_fixed_point_and_no_further_than_it_may():
    """MacKay's update of log λ, x -> 3 + s (x - 3): the next step of a secant ends at 3."""
    for slope in (-0.5, 0.0, 0.5, 0.8):
        points = [(x, 3 + slope * (x - 3)) for x in (2.0, 2.6)]
        assert 2.6 + accelerated(*points[1], points[0]) == pytest.approx(3)
    almost = (2.0, 2.1), (2.1, 2.2 - 1e-6)  # parallel updates, of which the secant is far away
    assert accelerated(*almost[1], almost[0]) == pytest.approx(math.log(2))
    assert accelerated(*almost[1], almost[0], most=0.2) == pytest.approx(0.2)
    assert accelerated(2.0, 2.1, None) == accelerated(2.0, 2.1, (2.0, 5.0)) == pytest.approx(0.1)


def test_em_by_a_solver_takes_no_step_that_a_secant_alone_suggests(monkeypatch):
    """Updates that are nearly parallel: the secant's fixed point is a factor of e^10 away."""
    problem, noise, precision, *_ = setting("classification", False, False)
    updates = iter([1.1, 1.1 * (1 - 1e-9), 1.0])
    monkeypatch.setattr(
        "torch_lla_em.inference.whole.m_step", lambda model, q: (q.precision * next(updates), None)
    )
    every = em(Whole(problem, noise, BlockCG()), State(precision), partial(updated, em_steps=3))
    path = [q.precision for _, q in every]
    assert path[0] / precision == pytest.approx(1.1)
    assert 1.1 < path[1] / path[0] <= 2.0 + 1e-9


@pytest.mark.parametrize("name", daily("classification", rest=["regression"]))
def test_sgd_finds_the_same_samples(name):
    problem, noise, precision, exact, per_weight = setting(name, True, False)
    noise = noise._replace(xi=noise.xi[:6], eta=noise.eta[:6])
    samples = optimise_samples(problem, noise, precision, SGD(2e-2, epochs=150))
    dense = dense_samples(exact, noise, precision, per_weight)
    root = torch.linalg.cholesky(torch.linalg.inv(exact.covariance(per_weight)))
    assert samples.error <= 2e-2
    error = ((samples.w - dense) @ root).norm(dim=1)
    assert (error <= samples.certificate * (1 + 1e-9)).all()
    with pytest.warns(UserWarning, match="Allow BlockCG more passes"):
        optimise_samples(problem, noise, precision, BlockCG(1e-6, max_passes=3))


@pytest.mark.parametrize(
    "name, g_prior, layerwise",
    daily(*EM_EVERY_DAY, rest=[case for case in CASES if case not in EM_EVERY_DAY]),
)
def test_em_follows_the_dense_path(name, g_prior, layerwise):
    problem, noise, precision, exact, _ = setting(name, g_prior, layerwise)
    sigma, layout = problem.sigma, noise.prior.layout
    model, state = _BasisModel(problem, noise, BlockCG(), (1e-9, 1e-9)), State(precision, sigma)
    for _ in range(5):
        found = e_step(model, state)
        new = m_step(model, found)
        state = found._replace(precision=new[0], sigma=new[1])
        precision, sigma, gamma, _ = dense_step(exact, precision, sigma, layout, layerwise)
        # the mode is known to 1e-6, and pruned blocks are all but gone
        assert_close(state.precision, precision, rtol=1e-3, atol=0)
        assert_close(found.gamma.mean(0).sum(), gamma.sum(), rtol=1e-4, atol=0)
        if sigma is not None:
            assert_close(state.sigma, sigma, rtol=1e-4, atol=0)


class _BasisModel(Whole):
    """Draws no noise when σ of an output changes, but takes the basis again."""

    def at(self, q):
        if q.sigma is None or not q.sigma.dim():
            return super().at(q)
        problem = self.problem
        facts = TargetFacts(q.sigma, problem.moments, problem.network_noise)
        problem = problem.with_targets(facts)
        g_prior = not (self.probes.prior.scale == 1).all()
        noise = basis_noise(problem, g_prior, self.probes.prior.layerwise)
        noise = noise._replace(prior=self.probes.prior)
        return Whole.at(_BasisModel(problem, noise, BlockCG(), (1e-9, 1e-9)), q)


@pytest.mark.parametrize(
    "name", daily("classification", "regression", rest=["bernoulli", "poisson", "binomial"])
)
@pytest.mark.parametrize("g_prior", [False, True])
@pytest.mark.parametrize("solver", ["span", "block CG"])
def test_em_converges_to_the_dense_fixed_point(name, g_prior, solver):
    problem, noise, precision, exact, _ = setting(name, g_prior, False)
    if solver == "span":
        over, schedule = complete_span(problem, noise, 0.03, em_steps=60)
        last = e_step(over, over.first(precision.item()))
        for _ in range(20):
            last = schedule.solved(last)
    else:
        model = Whole(problem, noise, BlockCG(), (0.01, 0.03))
        last = State(precision, problem.sigma)
        for _ in range(8):  # a basis has no Monte Carlo error, by which a fit says that λ rests
            fate = last.fate._replace(why="", number=0, converged=False)
            again = last._replace(fate=fate)
            *_, (_, last) = em(model, again, partial(updated, em_steps=60))
    aside = last.precision * 1.5, problem.sigma  # from aside, to save steps
    expected, sigma, gamma = dense_fixed_point(exact, *aside, noise.prior.layout, False)
    # EM stops once λ moves by less than one per cent
    assert_close(last.precision, expected, rtol=0.02, atol=0)
    assert_close(last.gamma.mean(), gamma.sum(), rtol=0.02, atol=0)
    if sigma is not None:
        assert_close(last.sigma, sigma, rtol=0.01, atol=0)


def test_precision_starts_at_the_mean_where_zero_is_the_mode():
    """So do the precisions of tensors, wherever the mode is."""
    case = tiny("regression")
    for y, layerwise in ((torch.zeros_like(case.y), False), (case.y, True)):
        problem = replace(case, y=y).problem(10)
        start = starting_precision(problem, basis_noise(problem, False, layerwise), layerwise)
        assert_close(start, case.exact().ggn.diagonal().mean().item())


def test_updates_are_their_formulas_within_their_bounds():
    gamma, norm, precision = torch.tensor([3.0, 2.0, 5.0]).double()
    assert_close(function_space_Mackay_update(gamma, norm, precision), gamma / norm)
    facts = SimpleNamespace(facts=SimpleNamespace(num_targets=20), group=Group())
    problem = SimpleNamespace(dtype=torch.float64, data=facts, moments=None)
    y = draw(20, 1)
    for freedom, left in ((gamma, 17), (6 * gamma, 2)):  # γ may come close to N
        one = y.new_ones(())
        learnt, is_lost = mackay_noise(problem, one, freedom.expand(20), [(y, 0.8 * y, ())])
        assert_close(learnt, 0.2 * (y.square().sum() / left).sqrt())
        assert not is_lost
    gamma, norm = torch.tensor([[1.0, 1.0, 0.0], [1e-30, 1.0, 0.0]]).double()
    precision = torch.full((3,), 7.0).double()
    updated = function_space_Mackay_update(gamma, norm, precision)
    assert_close(updated, torch.tensor([1e20, 1.0, 7.0]).double())
    x = torch.linspace(-1, 1, 20)[:, None]
    la = LinearisedLaplace(torch.nn.Linear(1, 1), "regression", num_samples=4)
    with pytest.warns(UserWarning, match="reached a bound"):
        y, quiet = 1e-3 * draw(20, 1).float(), {"progress_bar": False, "em_steps": 1}
        la.fit(x, y, prior_precision=1e20, **quiet)


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("name", ["classification", "regression"])
def test_a_whole_fit_is_the_dense_posterior(name, layerwise):
    options = {"num_samples": 64, "tolerance": 1e-5, "curvature": "network"}
    case, la = fitted(name, layerwise=layerwise, **options)
    precision, layout, gamma = la.prior_precision, la._linear_model.layout, la.effective_dim
    total = layout.block_sums if precision.dim() else torch.sum
    # the last step of log λ is below the Monte Carlo error of γ
    step = gamma / (precision * total((la.w_lin / la.scale).square()))
    assert (step.log().abs() <= (64 * gamma).rsqrt() + 0.01).all()
    exact = case.exact(la.scale)
    if name == "regression":
        exact = exact.at_noise(gaussian_log_prob(la.sigma_noise)).centred()
        residual = (exact.y - exact.J @ la.w_lin).square().sum()
        variance = residual / (exact.y.numel() - gamma.sum())
        assert variance.item() == pytest.approx(la.sigma_noise.item() ** 2, rel=0.02)
    precision = layout.expand(precision) if precision.dim() else precision
    mode = exact.mode(precision, start=la.w_lin)
    assert_close(la.w_lin, mode, rtol=1e-3, atol=1e-4)
    error = la.effective_dim_error.square().sum().sqrt()
    assert (gamma.sum() - exact.effective_dims(precision).sum()).abs() < 5 * error + 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["classification", "regression", "bernoulli", "poisson"])
@pytest.mark.parametrize("g_prior", [False, True])
def test_functions_of_random_samples_have_the_dense_covariance(name, g_prior, count=2000):
    """What is truly random, once."""
    options = {"num_samples": count, "tolerance": 1e-8, "curvature": "network"}
    own = {"prior": "g", "at": 30.0} if g_prior else {"prior": "isotropic", "at": 2.0}
    case, la = fitted(name, **own, **options)
    exact = case.exact(la.scale)
    covariance = exact.covariance(la.prior_precision)
    J = exact.J[:4].flatten(0, 1)  # four inputs, jointly
    expected = J @ covariance @ J.T
    prediction = la.predict(case.x[:4])
    deviations = (prediction.samples - prediction.f_mean).flatten(1)
    products = deviations[:, :, None] * deviations[:, None, :]
    error = products.std(0) / count**0.5
    assert ((products.mean(0) - expected).abs() < 5.5 * error).all()
    gamma = exact.effective_dims(la.prior_precision).sum()
    assert (la.effective_dim - gamma).abs() < 5 * la.effective_dim_error
