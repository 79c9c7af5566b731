"""Fits of a last layer by products of its features, against dense matrices in double precision."""

import copy
from functools import partial

import pytest
import torch
from tiny import basis_noise, batched, likelihood_of, problem_of, tiny
from torch import nn
from torch.testing import assert_close

from torch_lla_em import Compute, LinearisedLaplace
from torch_lla_em.inference import fit as fits
from torch_lla_em.inference import over_head
from torch_lla_em.inference.em import e_step, em
from torch_lla_em.inference.head import Head
from torch_lla_em.inference.over_head import OverHead, Settings, updated
from torch_lla_em.solvers import log_dets


def fit_of(name, draws=40, many=False, memory=1e9, em_steps=0, precision=3.0):
    """The problem of a last layer with a basis as noise, EM on it by products of its features, and the posterior."""
    case = tiny(name)
    pieces = batched((9, 20), case.x, case.y)
    problem = problem_of(case.model, likelihood_of(name), pieces, ["2.*"])
    return posterior_of(problem, draws, many, memory, em_steps, precision)


def posterior_of(problem, draws=0, many=False, memory=1e9, em_steps=0, precision=3.0):
    problem.loss_and_gradient(problem.zeros(1)[0])
    noise = basis_noise(problem, g_prior=True, layerwise=False)
    settings = Settings(1e-7, memory, draws, many)
    over = OverHead(problem, noise, Head.of(problem, None), settings)
    q = over.first(precision)
    for _, following in em(over, q, partial(updated, em_steps=em_steps)):
        q = following
    return over, e_step(over, over.curved(q, q.in_head.H))


def jacobian(problem):
    J = torch.cat([Jw for _, _, Jw in problem.push_forward(torch.eye(problem.size).double())], 1)
    return J.permute(1, 2, 0)


@pytest.mark.parametrize("memory", [1e9, 0])
@pytest.mark.parametrize(
    ("name", "many"),
    [
        *((name, False) for name in ("classification", "bernoulli", "poisson", "binomial")),
        ("classification", True),
    ],
)
def test_it_is_the_dense_posterior_at_its_curvature(name, many, memory):
    over, q = fit_of(name, many=many, memory=memory)
    problem, scale = over.problem, over.noise.prior.scale
    assert q.fate.why == "converged" and max(q.errors) < 1e-6
    H = q.in_head.H.values.diag_embed() if problem.likelihood.elementwise else q.in_head.H.values
    if many:
        H = H.sum(1).mul(H.sum(2).mean(1, keepdim=True)).diag_embed() - H.mT @ H
    J = jacobian(problem) * scale
    G = torch.einsum("ncp,ncd,ndq->pq", J, H, J)
    A = G + 3 * torch.eye(len(G)).double()
    z = q.samples / scale
    assert_close(z.T @ z / len(z), torch.linalg.inv(A), rtol=1e-6, atol=1e-8)
    gamma = torch.trace(torch.linalg.solve(A, G))
    assert_close(q.gamma.mean(), gamma, rtol=1e-6, atol=0)
    # the mean is where the expected gradient vanishes
    m = q.mean / scale
    deviations = over.expected.deviations((J @ z.T).view(*over.f.shape, len(z)))
    loss, slope = over.expected.loss_and_slope(over.loss, J @ m, deviations)
    assert_close(torch.einsum("ncp,nc->p", J, slope), -3 * m, rtol=1e-6, atol=1e-6)
    kl = 3 * m @ m + torch.logdet(A / 3) - gamma
    assert_close(q.bounds.mean(), -loss - 0.5 * kl, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["classification", "bernoulli", "poisson"])
def test_it_is_the_dense_posterior_at_the_networks_outputs(name):
    over, q = fit_of(name, draws=0)
    scale, eye = over.noise.prior.scale, torch.eye(over.problem.size).double()
    J = jacobian(over.problem) * scale
    H = over.loss.expected_hessian(over.f[None])
    H = H.diag_embed() if over.problem.likelihood.elementwise else H
    A = torch.einsum("ncp,ncd,ndq->pq", J, H, J) + 3 * eye
    z, m = q.samples / scale, q.mean / scale
    assert_close(z.T @ z / len(z), torch.linalg.inv(A), rtol=1e-6, atol=1e-8)
    loss, slope = over.expected.loss_and_slope(over.loss, J @ m, None)
    assert_close(torch.einsum("ncp,nc->p", J, slope), -3 * m, rtol=1e-6, atol=1e-6)
    kl = 3 * m @ m + torch.logdet(A / 3)
    assert_close(q.bounds.mean(), -loss - 0.5 * kl, rtol=1e-4, atol=1e-4)
    _, q = fit_of(name, draws=0, em_steps=20, precision=30.0)
    assert abs((q.gamma.mean() / q.norm / q.precision).log()) < 0.06


@pytest.mark.parametrize("form", ["weights", "unlabelled", "sites", "no bias", "bias fixed"])
def test_every_form_of_a_last_layer_is_the_dense_posterior(form):
    case, weights = tiny("classification"), None
    model, x, y = copy.deepcopy(case.model), case.x, case.y
    if form == "weights":
        weights = torch.rand(30, generator=torch.Generator().manual_seed(0)).double() + 0.1
    elif form == "unlabelled":
        y = torch.where(torch.arange(30) % 3 == 0, -100, y)
    elif form == "sites":
        x, y = x.view(10, 3, 2), y.view(10, 3).clone()
        y[:4, 1] = -100
    elif form == "no bias":
        model[2] = nn.Linear(4, 3, bias=False).double()
    names = ["2.weight" if form == "bias fixed" else "2.*"]
    parts, last = ((x, y), None) if weights is None else ((x, y, weights), "last")
    pieces = batched((3, 7), *parts)
    problem = problem_of(model, likelihood_of("classification"), pieces, names, last)
    over, q = posterior_of(problem)
    sizes, scale = over.span.sizes, over.noise.prior.scale

    def loss(w, shift=0):
        parts = dict(zip(problem.layout.names, w.split(sizes), strict=True))
        parts = {name: part.view_as(model.get_parameter(name)) for name, part in parts.items()}
        f = (torch.func.functional_call(model, parts, x) - shift).flatten(0, -2)
        losses = nn.functional.cross_entropy(f, y.flatten(), reduction="none")
        return losses.sum() if weights is None else losses @ weights

    A = scale[:, None] * torch.func.hessian(loss)(problem.w_MAP) * scale + 3 * torch.eye(len(scale))
    z, m = q.samples / scale, q.mean / scale
    assert_close(z.T @ z / len(z), torch.linalg.inv(A), rtol=1e-6, atol=1e-8)
    shift = model[2].bias.detach() if form == "bias fixed" else 0  # which is no part of J w
    assert_close(scale * torch.func.grad(loss)(q.mean, shift), -3 * m, rtol=1e-6, atol=1e-6)
    assert_close(q.gamma.mean(), len(A) - 3 * torch.linalg.inv(A).trace(), rtol=1e-6, atol=0)
    assert q.loss == pytest.approx(loss(q.mean, shift).item(), rel=1e-6)


@pytest.mark.parametrize("name", ["bernoulli", "classification"])
def test_lambda_rests_where_the_evidence_is_highest(name):
    _, q = fit_of(name, draws=100, em_steps=20, precision=30.0)
    assert abs((q.gamma.mean() / q.norm / q.precision).log()) < 0.06


@pytest.mark.parametrize("memory", [1e9, 0])
@pytest.mark.parametrize("name", ["classification", "bernoulli"])
def test_the_preconditioner_inverts_the_matrix_of_its_determinant(name, memory):
    over, q = fit_of(name, memory=memory)
    inverse = over.at(q)[2].preconditioner
    eye = torch.eye(over.problem.size).double()
    dense = inverse(eye)
    assert_close(dense, dense.T)
    assert torch.linalg.eigvalsh(dense).min() > 0
    assert inverse.log_det() == pytest.approx(-torch.logdet(dense).item(), rel=1e-6)


def test_log_determinants_of_a_dense_matrix():
    root = torch.randn(12, 12, generator=torch.Generator().manual_seed(0)).double()
    A, M = root @ root.T, torch.diag(torch.linspace(0.1, 1, 12)).double()
    whole = A + torch.eye(12)
    b = 12**0.5 * torch.linalg.cholesky(whole).T  # the mean over rows is that over N(0, A + I)
    found = log_dets(lambda x: x @ A, b, lambda x: x @ M, error=1e-8)
    assert_close(found.mean(), torch.logdet(whole @ M))


def blobs(rows=400, classes=4, features=24, sites=()):
    torch.manual_seed(0)
    x = torch.randn(rows, *sites, 6)
    y = (x @ torch.randn(6, classes) + 0.7 * torch.randn(rows, *sites, classes)).argmax(-1)
    model = nn.Sequential(nn.Linear(6, features), nn.Tanh(), nn.Linear(features, classes))
    optimiser = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        optimiser.step()
    return model, x, y


def fitted(model, x, y, head=True, monkeypatch=None, **options):
    if not head:
        monkeypatch.setattr(fits, "_head_of", lambda *_: None)
    of_fit = {"weights": options.pop("weights", None)}
    options = {"parameters": "last_layer", "num_samples": 8, **options}
    la = LinearisedLaplace(model, "classification", **options)
    return la.fit(x, y, progress_bar=False, validation=False, **of_fit)


@pytest.mark.parametrize("case", ["plain", "weights", "sites", "network"])
def test_it_agrees_with_a_fit_over_a_span(case, monkeypatch):
    model, x, y = blobs(sites=(3,) if case == "sites" else (), rows=150 if case == "sites" else 400)
    if case == "sites":
        y[:, 0] = -100  # without labels
    options = (
        {"num_samples": 12, "weights": torch.rand(len(x)) + 0.5}
        if case == "weights"
        else {"num_samples": 12}
    )
    if case == "network":
        options["curvature"] = "network"
    by_head = fitted(model, x, y, **options)
    by_span = fitted(model, x, y, False, monkeypatch, **options)
    assert by_head.history[-1]["data_passes"] < by_span.history[-1]["data_passes"] + 2
    assert (by_head.prior_precision / by_span.prior_precision).log().abs() < 0.25
    assert_close(by_head.effective_dim, by_span.effective_dim, rtol=0.15, atol=0)
    p, q = by_head(x), by_span(x)
    assert (p - q).abs().mean() < 0.02
    evidences = [la.log_marginal_likelihood() for la in (by_head, by_span)]
    apart = abs(evidences[0].value - evidences[1].value)
    assert apart < 4 * (evidences[0].standard_error + evidences[1].standard_error)


@pytest.mark.parametrize("seed", [0, 1])
def test_lambda_of_separable_labels_comes_to_rest(seed, monkeypatch):
    monkeypatch.setattr(fits, "COMPLETE", 0)
    torch.manual_seed(0)
    x = torch.randn(300, 6)
    y = (x @ torch.randn(6, 4)).argmax(-1)
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 4))
    optimiser = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(150):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    la = fitted(model, x, y, num_samples=32, seed=seed)
    assert len(la.history) < 40 and not any("converged" in words for words in la.messages)
    # plain EM on dense matrices rests at 4.9 after hundreds of steps
    assert 4.9 / 1.7 < float(la.prior_precision) < 4.9 * 1.7


def test_a_secant_comes_closer_to_the_place_of_rest_in_fewer_steps(monkeypatch):
    ends = {}
    for longer in (1, over_head.LONGER):
        monkeypatch.setattr(over_head, "LONGER", longer)
        names = "classification", "bernoulli"
        ends[longer] = [fit_of(name, draws=100, em_steps=20, precision=30.0)[1] for name in names]
    plain, lengthened = (
        [(q.fate.number, abs((q.gamma.mean() / q.norm / q.precision).log())) for q in every]
        for every in ends.values()
    )
    assert sum(number for number, _ in lengthened) < sum(number for number, _ in plain)
    assert sum(left for _, left in lengthened) < sum(left for _, left in plain)


def test_a_prior_precision_without_bound_ends_the_fit():
    """Labels that do not depend on inputs: what is left of γ does not matter."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(120, 6, generator=generator), torch.randint(12, (120,), generator=generator)
    la = fitted(nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 12)), x, y)
    assert len(la.history) < 30 and la.effective_dim < 1


def test_every_step_has_its_evidence():
    la = fitted(*blobs(), num_samples=16)
    evidence = torch.tensor([entry["log_evidence"] for entry in la.history])
    assert evidence.isfinite().all() and evidence[-1] > evidence[0]
    error = la.log_marginal_likelihood().standard_error
    assert abs(evidence[-1] - evidence[-2]) < 4 * error + 1  # by few samples, and by all


def test_a_killed_fit_ends_with_the_same_posterior(tmp_path):
    model, x, y = blobs()
    compute = Compute(checkpoint=tmp_path / "fit", budget=1e-3)
    for _ in range(40):
        la = fitted(model, x, y, compute=compute)
        if la.history[-1]["why"] != "budget":
            break
    assert la.history[-1]["why"] == "accurate"
    whole = fitted(model, x, y)
    assert_close(la.w_samples, whole.w_samples, rtol=1e-3, atol=1e-4)
    assert_close(la.prior_precision, whole.prior_precision, rtol=1e-3, atol=0)
