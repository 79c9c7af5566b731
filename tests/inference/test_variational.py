import math
import warnings

import numpy
import pytest
import torch
from daily import daily
from loaders import InAnyOrder
from models import trained
from steps import Alone, begin, complete_span, posterior_at
from tiny import basis_noise, batched, likelihood_of, posterior_of, problem_of, tiny
from tiny import fitted as tiny_fit
from torch import nn

from torch_lla_em import BlockCG, Compute, LinearisedLaplace
from torch_lla_em.data import Share
from torch_lla_em.inference import fit as fits
from torch_lla_em.inference.em import e_step
from torch_lla_em.inference.expectations import Expectations
from torch_lla_em.inference.over_span import OverSpan
from torch_lla_em.inference.schedule import SpanFit
from torch_lla_em.inference.span_problem import log_dets
from torch_lla_em.inference.state import Fate, FitOptions
from torch_lla_em.inference.sto_samples import get_sto_samples
from torch_lla_em.likelihoods import Classification
from torch_lla_em.problem import Loss, root_of
from torch_lla_em.runtime import DoesNotFit

VARIATIONAL = {"curvature": "variational"}
KINDS = ["classification", "bernoulli", "poisson", "binomial"]
NODES = 8


def quadrature(C):
    """Nodes (S, C) and weights (S,) of a standard normal in C dimensions."""
    x, w = (torch.tensor(part) for part in numpy.polynomial.hermite_e.hermegauss(NODES))
    grids = torch.meshgrid(*[x] * C, indexing="ij")
    weights = torch.meshgrid(*[w / w.sum()] * C, indexing="ij")
    return torch.stack(grids, -1).reshape(-1, C), torch.stack(weights).prod(0).reshape(-1)


class Dense:
    """The bound of any Gaussian over the weights, by quadrature, and its maximum."""

    def __init__(self, problem, scale):
        batches = problem.push_forward(torch.diag(scale))
        self.J = torch.cat([Jw for _, _, Jw in batches], 1).permute(1, 2, 0)
        self.y = torch.cat([batch.targets for batch, _, _ in batches])
        self.likelihood = problem.likelihood
        # of outputs on their own only the variances matter
        C = 1 if self.likelihood.elementwise else self.J.shape[1]
        self.nodes, self.weights = quadrature(C)

    def outputs(self, mean, covariance):
        """(S, N, C)"""
        of_outputs = self.J @ covariance @ self.J.mT
        if self.likelihood.elementwise:
            deviations = of_outputs.diagonal(dim1=1, dim2=2).sqrt()
            return self.J @ mean + deviations * self.nodes[:, None]
        root = torch.linalg.cholesky(of_outputs)
        return self.J @ mean + torch.einsum("ncd,sd->snc", root, self.nodes)

    def bound(self, mean, covariance, precision):
        log_prob = self.likelihood.log_prob(self.outputs(mean, covariance), self.y).sum(1)
        trace = precision * (covariance.trace() + mean @ mean) - len(mean)
        log_det = -torch.logdet(precision * covariance)
        return self.weights @ log_prob - 0.5 * (trace + log_det)

    def best(self, precision=None):
        """Return the largest bound, at this λ or at the best."""
        P = self.J.shape[2]
        log_lam = torch.zeros(()).double() if precision is None else precision.log()
        learnt = [torch.zeros(P).double(), 0.3 * torch.eye(P).double(), log_lam.clone()]
        for part in learnt[: 3 if precision is None else 2]:
            part.requires_grad_()
        mean, root, log_lam = learnt
        free = [part for part in learnt if part.requires_grad]
        search = torch.optim.LBFGS(free, max_iter=100, line_search_fn="strong_wolfe")

        def objective():
            search.zero_grad()
            L = root.tril()
            loss = -self.bound(mean, L @ L.T, log_lam.exp())
            loss.backward()
            return loss

        search.step(objective)
        return -objective().item(), log_lam.exp().item()


def with_basis(name, draws, monkeypatch, em_steps=0, many=False):
    """The problem over all of weight space with a basis as noise, and so many draws, and the schedule of a fit."""
    problem = tiny(name).problem(9, 20)
    noise = basis_noise(problem, g_prior=False, layerwise=False)
    monkeypatch.setattr("torch_lla_em.inference.over_span.form_of_H", lambda *_: (many, draws, 1.0))
    over, schedule = complete_span(problem, noise, curvature="variational", em_steps=em_steps)
    return problem, noise, over, schedule


def settled(over, schedule, precision):
    q = e_step(over, over.first(precision))
    for _ in range(6):
        q = schedule.solved(q)
    return e_step(over, q._replace(fate=Fate(converged=True)))


@pytest.mark.parametrize("name", KINDS[:3])
def test_the_mean_is_exact_whatever_h_the_search_begins_with(name, monkeypatch):
    _, _, over, _ = with_basis(name, 100, monkeypatch)
    q = e_step(over, over.first(0.03)._replace(fate=Fate(converged=True)))
    assert over.measured(q).errors[1] < 1e-7


def test_the_mean_is_accurate_after_the_last_step_of_em(monkeypatch):
    """λ has not converged, but it does not move any more."""
    monkeypatch.setattr("torch_lla_em.inference.over_span.form_of_H", lambda *_: (True, 16, 1.0))
    compute = Compute(tolerance=1e-4)
    _, la = tiny_fit(em_steps=1, num_samples=8, curvature="variational", compute=compute)
    assert la.accuracy.is_reached and la.history[-1]["why"] == "accurate"
    assert not any("accur" in words for words in la.messages[1:])


def in_weights(steps, q):
    w = steps.span.prior.scale * steps.span.scaled(torch.cat([q.mean[None], q.samples]))
    return w[0], w[1:].T @ w[1:] / len(q.samples)


@pytest.mark.parametrize(
    ("name", "many"), daily(*((name, False) for name in KINDS[:3]), rest=[("classification", True)])
)
def test_it_is_the_dense_variational_posterior(name, many, monkeypatch):
    problem, noise, steps, schedule = with_basis(name, 40 if many else 100, monkeypatch, many=many)
    q = settled(steps, schedule, 3.0)
    mean, covariance = in_weights(steps, q)
    dense = Dense(problem, noise.prior.scale)
    best, _ = dense.best(torch.tensor(3.0).double())
    ours = dense.bound(mean, covariance, torch.tensor(3.0).double()).item()
    assert best - 2 * 0.05 < ours <= best + 1e-6
    # with the noise as a basis the samples are exact at their own curvature
    J = dense.J
    H = q.span.H.values.diag_embed() if problem.likelihood.elementwise else q.span.H.values
    if many:
        H = H.sum(1).mul(H.sum(2).mean(1, keepdim=True)).diag_embed() - H.mT @ H
    G = torch.einsum("ncp,ncd,ndq->pq", J, H, J)
    exact = torch.linalg.inv(G + 3 * torch.eye(len(G)))
    torch.testing.assert_close(covariance, exact, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["classification", "bernoulli"])
def test_lambda_is_where_the_bound_is_largest(name, monkeypatch):
    problem, noise, steps, schedule = with_basis(name, 100, monkeypatch, em_steps=20)
    q = settled(steps, schedule, 30.0)
    mean, covariance = in_weights(steps, q)
    dense = Dense(problem, noise.prior.scale)
    best, _ = dense.best()
    ours = dense.bound(mean, covariance, q.precision).item()
    assert best - 2 * 0.05 < ours <= best + 1e-6


def three_classes(count=300, steps=15):
    """A network of 45 weights, fewer than the directions of 32 samples, and its separable data."""
    torch.manual_seed(0)
    x, model = torch.randn(count, 3), nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3))
    y = (x @ torch.randn(3, 3)).argmax(1)
    return trained(model, x, y, steps, 0.05), x, y


def test_a_complete_span_comes_to_rest(monkeypatch):
    found, curved = [], OverSpan.curved
    monkeypatch.setattr(OverSpan, "curved", lambda *a, **b: found.append(1) or curved(*a, **b))
    model, x, y = three_classes(steps=200)  # so certain that the map of H is rough
    la = posterior_of(model, "classification", x, y, num_samples=8, seed=1)
    assert len(found) < 100 and not la.messages[1:]


@pytest.mark.slow
def test_lambda_does_not_depend_on_its_start_once_the_span_is_complete():
    model, x, y = three_classes()
    found = []
    for start in (None, 1e-4, 1e4):
        la = posterior_of(model, "classification", x, y, prior_precision=start, num_samples=32)
        assert not la.messages[1:]
        found.append(la.prior_precision)
    logs = torch.stack(found).log()
    assert logs.max() - logs.min() < 0.03


def test_the_bound_is_that_of_its_samples(monkeypatch):
    problem, noise, steps, schedule = with_basis("bernoulli", 300, monkeypatch)
    q = settled(steps, schedule, 3.0)
    mean, covariance = in_weights(steps, q)
    dense = Dense(problem, noise.prior.scale)
    exact = dense.bound(mean, covariance, torch.tensor(3.0).double()).item()
    f = dense.outputs(mean, covariance)
    log_prob = dense.likelihood.log_prob(f, dense.y)
    spread = (dense.weights @ (log_prob - dense.weights @ log_prob) ** 2).sum().sqrt().item()
    assert abs(q.bounds.mean().item() - exact) < 5 * spread / 300**0.5


def expectations(mean, draws, many=False):
    """E[H] of three classes with so many draws."""
    return Expectations(mean, Share(torch.arange(30), 30), 0, draws, many)


@pytest.mark.parametrize("many", [False, True])
def test_draws_do_not_depend_on_pieces(many, monkeypatch):
    mean, pushed = torch.randn(30, 3).double(), torch.randn(30, 3, 4).double()
    loss = Loss(likelihood_of("classification"), tiny("classification").y, torch.rand(30).double())
    expected = expectations(mean, 5, many)
    draws, w = expected.deviations(pushed), torch.randn(90, 2).double()

    def found():
        H = expected.H(loss, mean, draws)
        of_H = H.values, H.product(w), H.root(mean[None])
        return *of_H, *expected.loss_and_slope(loss, mean, draws), expected.deviations(pushed)

    whole = found()
    monkeypatch.setattr("torch_lla_em.problem.hessian.ENTRIES", 20)
    torch.testing.assert_close(found(), whole)


def test_draws_have_the_covariance_of_the_samples():
    torch.manual_seed(0)
    mean, pushed = torch.zeros(30, 3), torch.randn(30, 3, 2)
    pushed[:, 1] = 2 * pushed[:, 0]  # outputs that vary together, and fewer samples than outputs
    h = expectations(mean, 4000).deviations(pushed).double()
    covariance = torch.einsum("snc,snd->ncd", h, h) / len(h)
    exact = (pushed @ pushed.mT).double() / 2
    variances = exact.diagonal(dim1=1, dim2=2)
    error = (variances[:, :, None] * variances[:, None] + exact**2).div(len(h)).sqrt()
    assert ((covariance - exact).abs() < 5 * error).all()
    torch.testing.assert_close(h[:, :, 1], 2 * h[:, :, 0], rtol=1e-4, atol=1e-4)
    assert torch.corrcoef(h[:, :, 0].T).fill_diagonal_(0).abs().max() < 5 / len(h) ** 0.5


def test_many_draws_have_the_second_moments_of_the_samples_exactly():
    pushed = torch.randn(30, 3, 4).double()
    h = expectations(torch.zeros(30, 3).double(), 32).deviations(pushed)
    covariance = torch.einsum("snc,snd->ncd", h, h) / len(h)
    torch.testing.assert_close(covariance, pushed @ pushed.mT / 4, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_have_roots_also_where_they_are_singular_or_rounded(dtype):
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(4, 3, 1, generator=generator).double()
    singular, tiny_blocks = u @ u.mT, torch.tensor([[[0.0, -4e-44], [-4e-44, 0.0]]])
    for blocks in (singular, tiny_blocks, torch.ones(1, 2, 2) + 1e-7 * torch.eye(2).flip(0)):
        R = root_of(blocks)
        torch.testing.assert_close(R @ R.mT, blocks, rtol=1e-5, atol=1e-6)
    # what is left of a block that was larger before, as after a damped step of H
    left = torch.tensor([[[1e-19, -6e-11], [-6e-11, 0.0]], [[1.0, 0.0], [0.0, -1e-4]]])
    assert root_of(left).square().sum((1, 2)).tolist() == pytest.approx([6e-11, 1.0])
    assert root_of(torch.full((1, 2, 2), math.nan)).isnan().any()
    # those of a softmax do not move all outputs alike, which over millions of examples would count
    p = (5 * torch.randn(200, 6, generator=generator)).to(dtype).softmax(-1)
    blocks = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    R, size = root_of(blocks), blocks.diagonal(dim1=1, dim2=2).mean(1)
    accuracy = 100 * torch.finfo(dtype).eps
    assert (R.sum(1).abs().amax(1) < accuracy * size.sqrt()).all()
    error = (R @ R.mT - blocks).abs().amax((1, 2))  # blocks have rounding errors too
    assert (error < max(accuracy, 2e-9) * size + accuracy / 100).all()
    other = blocks + 0.01 * torch.eye(6, dtype=dtype)
    torch.testing.assert_close(root_of(other) @ root_of(other).mT, other, rtol=1e-4, atol=1e-6)


def fitted(name, **options):
    case = tiny(name)
    batches = batched(13, case.x, case.y)
    return tiny_fit(name, batches, curvature="variational", **options)


@pytest.mark.parametrize("name", KINDS)
def test_a_fit_is_as_exact_as_was_asked(name):
    case, la = fitted(name, num_samples=16)
    assert la.history[-1]["log_evidence"] <= la.log_marginal_likelihood().value + 1
    error = la.certificate.square().mean().sqrt() / la.effective_dim.sqrt()
    assert error <= 1e-2 and la(case.x).isfinite().all()


def test_the_evidence_over_a_complete_span_has_no_error_of_samples(monkeypatch):
    problem, noise, steps, schedule = with_basis("classification", 64, monkeypatch)
    exact = settled(steps, schedule, 3.0)
    found = []
    for seed in range(8):
        few = get_sto_samples(problem, 32, seed, g_prior=False)
        found.append(posterior_at(problem, few, 3.0, 1e-3, curvature=None).log_evidence)
    values = torch.stack([one.value for one in found])
    error = values.std().item() / len(values) ** 0.5
    assert abs(values.mean().item() - exact.bounds.mean().item()) < 5 * error + 2 * 0.05
    # the covariance itself gives γ and the log det: what is left is that of the draws of H
    assert values.std() < 0.1 and all(one.standard_error == 0 for one in found)


def test_curvature_comes_to_rest_at_a_given_precision_too():
    x, y = torch.randn(120, 6, generator=torch.Generator().manual_seed(0)), torch.arange(120) % 6
    x[:, :6] += 2 * torch.eye(6)[y]
    torch.manual_seed(0)
    network = trained(nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 6)), x, y, 60)
    learnt = posterior_of(network, "classification", x, y, num_samples=8)
    given = posterior_of(network, "classification", x, y, num_samples=8, at=learnt.prior_precision)
    assert given.effective_dim.item() == pytest.approx(learnt.effective_dim.item(), rel=0.03)


def test_predictions_are_averages_with_the_network():
    case, la = fitted("classification", num_samples=8)
    own, alone = case.model(case.x).softmax(-1), la.predict(case.x, mean="linear")
    q, mean, network = la.mixture[:, 0].tolist()
    assert q + mean + network == pytest.approx(1) and mean == network > 0
    average = q * alone.expectation + mean * alone.f_mean.softmax(-1) + network * own
    torch.testing.assert_close(la(case.x), average.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weights", [None, 2.0])
@pytest.mark.slow
def test_noisy_labels_leave_the_prediction_to_the_posterior(weights):
    generator, shares, scales = torch.Generator().manual_seed(0), [], []
    x = torch.randn(200, 2, generator=generator, dtype=torch.float64)
    network = nn.Linear(2, 2, bias=False, dtype=torch.float64)
    for flipped in (0.0, 0.3):
        y = (x[:, 0] > 0) ^ (torch.rand(200, generator=generator) < flipped)
        with torch.no_grad():
            network.weight.copy_((2 - 4 * flipped) * torch.tensor([[-1.0, 0], [1, 0]]))
        la = LinearisedLaplace(network, "classification", num_samples=8)
        la.fit(x, y.long(), weights=weights, progress_bar=False)
        shares.append(1 - la.mixture[0, 0].item())
        scales.append(la.posterior_scale.item())
    assert shares[1] < 0.1 < shares[0]
    assert scales == [1, 2]


def test_a_posterior_that_has_collapsed_to_its_prior_has_a_third_of_the_weight():
    _, la = fitted("classification", em_steps=0, prior_precision=1e12)
    assert la.mixture[:, 0].tolist() == pytest.approx([1 / 3] * 3)


def test_networks_more_certain_than_their_features_are_trusted_less():
    case, weights = tiny("classification"), []
    for factor in (1.0, 30.0):
        with torch.no_grad():
            case.model[2].weight *= factor
        la = posterior_of(case.model, "classification", [(case.x, case.y)], num_samples=8)
        mixture = la.posterior.result.mixture
        weights.append(mixture[2, 0].item())
        assert mixture[:, 0].sum() == pytest.approx(1)
    assert 10 * weights[1] < weights[0]


def test_a_precision_for_each_tensor_is_refused():
    with pytest.raises(ValueError, match="one precision"):
        LinearisedLaplace(nn.Linear(2, 2), "classification", layerwise=True, **VARIATIONAL)


@pytest.mark.parametrize(
    "name, options, fit, expected",
    [
        ("poisson", {}, {}, "linear"),
        ("classification", {"layerwise": True}, {}, "network"),
        ("classification", {"compute": Compute(span_memory=1e6)}, {}, "linear"),
        ("classification", {"compute": Compute(solver=BlockCG())}, {}, "network"),
        ("regression", {}, {}, "linear"),
        ("regression", {}, {"em_steps": 0, "prior_precision": 1.0}, "network"),
    ],
)
def test_it_is_the_default_where_it_applies(name, options, fit, expected):
    case = tiny(name)
    la = LinearisedLaplace(case.model, name, num_samples=2, **options)
    la.fit([(case.x, case.y)], progress_bar=False, **{"em_steps": 1, **fit})
    assert la.mean == expected


def test_without_a_span_the_network_is_gone_on_with(monkeypatch):
    case = tiny("bernoulli")
    la = LinearisedLaplace(case.model, "bernoulli", num_samples=4)
    by_solver = Compute(solver=BlockCG())
    plain = LinearisedLaplace(case.model, "bernoulli", num_samples=4, compute=by_solver)

    def none(*_):  # as in an order that changes
        raise DoesNotFit("they change")

    monkeypatch.setattr(OverSpan, "measured", none)
    for one in (la, plain):
        one.fit([(case.x, case.y)], progress_bar=False)
    torch.testing.assert_close(la.w_samples, plain.w_samples)
    assert [step["step"] for step in la.history] == list(range(1, len(la.history) + 1))


def test_rows_in_another_order_are_told(caplog):
    case = tiny("classification")
    la = LinearisedLaplace(case.model, "classification", curvature="variational", num_samples=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la.compute = la.compute.__class__(keep_data=False)
        la.fit(InAnyOrder(case, 15), em_steps=1, progress_bar=False)
    assert "change their order" in caplog.text and la.prior_precision > 0


def five_classes():
    """A network of 941 parameters that is trained on 300 examples of five classes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 8, generator=generator).double()
    scores = [part @ torch.randn(8, 5, generator=generator).double() for part in (x, 0.7 * x**2)]
    y = (sum(scores) + torch.randn(300, 5, generator=generator)).argmax(1)
    torch.manual_seed(0)
    layers = [nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 5)]
    return trained(nn.Sequential(*layers).double(), x, y, 60, rate=0.01), x, y


@pytest.fixture
def states_of(monkeypatch):
    """Fit five classes; return the problem, its probes and the states over the growing span."""
    model, x, y = five_classes()
    problem = problem_of(model, Classification(), [(x, y)])
    noise = get_sto_samples(problem, 8)
    states, run = [], SpanFit.run

    def noted(schedule, *start):
        for state in run(schedule, *start):
            states.append(state)
            yield state

    def fit(**options):
        options = FitOptions(tolerance=0.06, **options)
        fits.over_span(problem, noise, options, Alone(), begin(problem, noise))
        return problem, noise, states

    monkeypatch.setattr(SpanFit, "run", noted)
    return fit


def test_lambda_does_not_fall_below_a_third_while_directions_are_missing(states_of):
    *_, states = states_of(prior_precision=torch.tensor(1e5))
    path = [state.precision.item() for state in states]
    assert path[-1] < path[0] / 10
    assert all(there > here / 3.01 for here, there in zip(path, path[1:], strict=False))


def test_the_log_det_of_a_small_span_is_that_of_all_parameters(states_of):
    problem, noise, states = states_of()
    q, lam = states[-1], states[-1].precision.item()
    assert len(q.mean) < problem.size / 5
    J = torch.cat([Jw for _, _, Jw in problem.push_forward(torch.diag(noise.prior.scale))], 1)
    J = J.movedim(0, -1)
    G = torch.einsum("ncp,ncd,ndq->pq", J, q.span.H.values, J)
    exact = torch.linalg.slogdet(torch.eye(len(G)) + G / lam)[1]
    theta, vectors = q.span.problem.theta, q.span.problem.vectors
    xi, eta = q.span.problem.span.xi @ vectors, q.span.eta @ vectors
    found = log_dets(theta, xi, eta, lam)
    of_xi = (xi.square() * (theta / lam).log1p()).sum(1)
    error = 5 * of_xi.std() / len(of_xi) ** 0.5  # Monte Carlo error of the probes
    assert abs(found.mean() - exact) < min(error, 0.06 * exact)
    assert of_xi.mean() > 1.08 * exact
    # E[loss] varies with the samples as the log det does: the half from ξ stands for both
    spread = q.bounds - q.bounds.mean()
    torch.testing.assert_close(spread, 0.5 * (of_xi.mean() - of_xi), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_lambda_is_the_same_for_other_random_numbers_and_starts():
    model, x, y = five_classes()
    options = {"num_samples": 16}
    fits = [LinearisedLaplace(model, "classification", seed=s, **options) for s in range(5)]
    found = torch.stack([la.fit(x, y).prior_precision.log() for la in fits])
    assert found.std() < 0.12
    far = fits[0].fit(x, y, prior_precision=1e6).prior_precision.log()
    assert abs(far - found.mean()) < 0.3
