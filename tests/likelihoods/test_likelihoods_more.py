"""Predicted noise, preferences, temperature, weight decay, and gradients in the inputs."""

import pytest
import torch
from tiny import basis_noise, tiny
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

from torch_lla_em import Classification, Likelihood, LinearisedLaplace, Regression
from torch_lla_em.data.loader import Data
from torch_lla_em.exact import ExactLaplace
from torch_lla_em.inference.linear_mode import optimise_MAP
from torch_lla_em.inference.prior import prior_precision_from_weight_decay
from torch_lla_em.jacobian.linear_model import LinearModel
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.parameters import ParameterLayout, select_parameters
from torch_lla_em.likelihoods import (
    BradleyTerry,
    HeteroscedasticRegression,
    Tempered,
    compare,
    preferred,
    tempered,
)
from torch_lla_em.problem.problem import Problem
from torch_lla_em.solvers import Newton

FIXED = {"em_steps": 0, "prior_precision": 20.0, "progress_bar": False}


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def net(inputs, outputs, hidden=4, seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()


def test_predicted_noise_is_the_gaussian_loss():
    likelihood, f, y = HeteroscedasticRegression(), draw(5, 4), draw(5, 2, seed=1)
    mu, s = f.chunk(2, -1)
    loss = functional.gaussian_nll_loss(mu, y, s.exp(), full=True, reduction="none").sum(1)
    assert_close(likelihood.log_prob(f, y), -loss)
    assert_close(
        likelihood.gradient(f, y), torch.func.grad(lambda f: -likelihood.log_prob(f, y).sum())(f)
    )


def test_curvature_is_the_fisher_information():
    likelihood, f = HeteroscedasticRegression(), draw(1, 4)
    basis = torch.eye(4).double()[:, None]
    H = likelihood.hessian_product(f, basis)[:, 0]
    # the Hessian's mean over y, exact by Gauss and Hermite since it is a polynomial in y
    mu, s = f[0].chunk(2)
    nodes = torch.tensor([-(3**0.5), 0, 3**0.5], dtype=torch.float64)
    weights = torch.tensor([1 / 6, 2 / 3, 1 / 6], dtype=torch.float64)
    expected = torch.zeros(4, 4, dtype=torch.float64)
    for node, weight in zip(nodes, weights):
        y = mu + node * (0.5 * s).exp()
        hessian = torch.func.hessian(lambda f, y=y: -likelihood.log_prob(f[None], y[None]).sum())
        expected += weight * hessian(f[0])
    assert_close(H, expected)
    root = likelihood.hessian_sqrt_product(f, basis)[:, 0]
    assert_close(root.T @ root, H)
    assert (torch.linalg.eigvalsh(H) > 0).all()


def heteroscedastic_case():
    model, x = net(1, 2, hidden=5), draw(40, 1)
    y = (2 * x).sin() + (0.1 + 0.5 * x.abs()) * draw(40, 1, seed=2)
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=200)

    def closure():
        optimiser.zero_grad()
        mu, s = model(x).chunk(2, -1)
        loss = functional.gaussian_nll_loss(mu, y, s.exp()) + 1e-3 * sum(
            p.square().sum() for p in model.parameters()
        )
        loss.backward()
        return loss

    optimiser.step(closure)
    return model, x, y


def log_prob(f, y):
    return -0.5 * (
        f[1] + (y[0] - f[0]) ** 2 * (-f[1]).exp() + torch.log(torch.tensor(2 * torch.pi))
    )


def test_predicted_noise_has_the_dense_posterior():
    model, x, y = heteroscedastic_case()
    layout = ParameterLayout.of(model, select_parameters(model))
    linear = LinearModel(Network(model), layout)
    problem = Problem(
        linear, HeteroscedasticRegression(), Data([(x[:17], y[:17]), (x[17:], y[17:])], x.device)
    )
    exact = ExactLaplace.of(model, x, y, log_prob, list(layout.names))
    s = exact.f[:, 1]
    fisher = torch.diag_embed(torch.stack([(-s).exp(), torch.full_like(s, 0.5)], 1))
    G = torch.einsum("ncp,ncd,ndq->pq", exact.J, fisher, exact.J)
    rows = problem.rows()
    assert_close(rows.T @ rows, G)
    precision = torch.tensor(5.0, dtype=torch.float64)
    noise = basis_noise(problem, g_prior=False, layerwise=False)
    mode = optimise_MAP(problem, noise.prior, precision, Newton(1e-2))
    loss, gradient = problem.loss_and_gradient(mode.w)
    assert_close(loss, exact.loss(mode.w).item())
    assert (
        gradient + precision * mode.w
    ).norm() * precision**-0.5 <= 1e-2 * precision**0.5 * mode.w.norm()


@pytest.mark.parametrize("curvature", ["network", "linear"])
def test_predicted_noise_is_found(curvature):
    model, x, y = heteroscedastic_case()
    la = LinearisedLaplace(model, "heteroscedastic", num_samples=16, curvature=curvature)
    la.fit([(x, y)], progress_bar=False)
    mean, variance = la(x)
    assert mean.shape == variance.shape == (40, 1)
    assert_close(mean, model(x)[:, :1])
    prediction = la.predict(x)
    assert_close(variance, prediction.aleatoric + prediction.epistemic)
    assert variance[x[:, 0].abs() > 1].mean() > 2 * variance[x[:, 0].abs() < 0.3].mean()
    assert torch.isfinite(la.joint_log_prob(x, y))
    fresh = draw(200, 1, seed=7)
    target = (2 * fresh).sin() + (0.1 + 0.5 * fresh.abs()) * draw(200, 1, seed=8)
    before = la.predict(fresh).log_prob(target).sum()
    la.calibrate([(fresh, target)])
    assert la.predict(fresh).log_prob(target).sum() >= before


def test_heads_may_be_channels():
    torch.manual_seed(0)
    model = nn.Conv2d(1, 4, 3, padding=1).double()
    x, y = draw(6, 1, 4, 4), draw(6, 2, 4, 4, seed=1)
    la = LinearisedLaplace(
        model, "heteroscedastic", curvature="network", num_samples=3, class_dim=1
    )
    la.fit([(x, y)], **FIXED)
    mean, variance = la(x)
    assert mean.shape == variance.shape == (6, 2, 4, 4)
    assert_close(mean, model(x)[:, :2])
    assert torch.isfinite(la.predict(x).log_prob(y)).all()


def test_predicted_noise_is_drawn():
    f = torch.tensor([0.5, -1.0, 2.0, 0.0]).double().expand(20000, 4)
    y = HeteroscedasticRegression().sample(f, torch.Generator().manual_seed(0))
    for column, mu, sigma in ((0, 0.5, 2.718281828), (1, -1.0, 1.0)):
        assert abs(y[:, column].mean() - mu) < 5 * sigma / 20000**0.5
        assert abs(y[:, column].std() - sigma) < 5 * sigma / 40000**0.5


@pytest.mark.parametrize("f, y", [((3, 3), (3, 1)), ((3, 2), (3, 2)), ((3, 4), (3, 1))])
def test_heads_come_in_pairs(f, y):
    with pytest.raises(ValueError, match="twice as many outputs"):
        HeteroscedasticRegression().check(torch.zeros(f), torch.zeros(y))


def test_real_targets_are_finite():
    with pytest.raises(ValueError, match="finite"):
        HeteroscedasticRegression().check(torch.zeros(1, 2), torch.tensor([[float("nan")]]))


def pairs():
    a, b = draw(30, 3), draw(30, 3, seed=1)
    return a, b, (b.sum(1) > a.sum(1)).long()


def test_preferences_are_bernoulli_in_the_difference():
    a, b, y = pairs()
    model = net(3, 1)
    la = LinearisedLaplace(
        model, "reward_modeling", curvature="network", num_samples=4, tolerance=1e-9, g_prior=False
    )
    la.fit([(a, b, y)], **FIXED)
    difference = LinearisedLaplace(
        model,
        "bernoulli",
        curvature="network",
        num_samples=4,
        tolerance=1e-9,
        g_prior=False,
        forward_fn=lambda model, pair: model(pair[1]) - model(pair[0]),
    )
    difference.fit([((a, b), y[:, None].double())], **FIXED)
    assert_close(la.w_lin, difference.w_lin, rtol=1e-5, atol=1e-7)
    f = model(b) - model(a)
    assert_close(la.predict((a, b)).mean.diff(dim=1), f)
    with torch.no_grad():
        expected = (la.predict((a, b)).functions.diff(dim=-1)).sigmoid().mean(0)
    assert_close(la((a, b))[:, 1:], expected)


def test_a_reward_alone_has_a_variance():
    a, b, y = pairs()
    model = net(3, 1)
    la = LinearisedLaplace(model, BradleyTerry(), curvature="network", num_samples=8).fit(
        [((a, b), y)], progress_bar=False
    )
    prediction = la.predict(a)
    assert_close(prediction.mean, model(a))
    assert prediction.variance.shape == (30, 1)
    assert_close(la.functional_samples((a, b))[..., :1], la.functional_samples(a))
    with pytest.raises(ValueError, match="several candidates"):
        la(a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_no_preference_tells_keeps_its_size(dtype):
    """The last bias moves all rewards alike: up to rounding it has no feature."""
    a, b, y = pairs()
    model = net(3, 1).to(dtype)
    la = LinearisedLaplace(model, "reward_modeling", num_samples=8)
    la.fit([((a.to(dtype), b.to(dtype)), y)], progress_bar=False)
    assert la._linear_model.layout.unflatten(la.scale)["2.bias"] == 0
    spread = la.predict(a.to(dtype)).variance.sqrt().mean()
    assert spread < 100 * la.predict((a.to(dtype), b.to(dtype))).variance.sqrt().mean()


def test_chosen_and_rejected_are_a_pair():
    a, b, _ = pairs()
    model = net(3, 1)
    by_name = LinearisedLaplace(
        model, "reward_modeling", curvature="network", num_samples=2, tolerance=1e-9
    )
    by_name.fit([{"chosen": a, "rejected": b}], **FIXED)
    by_place = LinearisedLaplace(
        model, "reward_modeling", curvature="network", num_samples=2, tolerance=1e-9
    )
    by_place.fit([((a, b), torch.zeros(30).long())], **FIXED)
    assert_close(by_name.w_lin, by_place.w_lin)
    assert torch.equal(preferred((a, torch.ones(2))), torch.ones(2))


def test_the_last_layer_compares_too():
    a, b, y = pairs()
    model = net(3, 1)
    la = LinearisedLaplace(
        model, "reward_modeling", curvature="network", num_samples=4, parameters="last_layer"
    )
    la.fit([(a, b, y)], progress_bar=False)
    assert_close(la.predict((a, b)).mean, torch.cat([model(a), model(b)], 1))
    full = LinearisedLaplace(
        model, "reward_modeling", curvature="network", num_samples=4, parameters=["2.*"]
    )
    full.fit([(a, b, y)], progress_bar=False)
    assert_close(la.w_samples, full.w_samples)


def test_several_candidates_compete():
    a, b, y = pairs()
    la = LinearisedLaplace(net(3, 1), "reward_modeling", num_samples=4)
    la.fit([((a, b, a + b), y)], progress_bar=False)
    assert_close(la((a, b, a + b)).sum(1), torch.ones(30).double())


def test_saved_preferences_come_back(tmp_path):
    a, b, y = pairs()
    model = net(3, 1)
    la = LinearisedLaplace(model, "reward_modeling", num_samples=4, temperature=0.5)
    la.fit([(a, b, y)], progress_bar=False).save(tmp_path / "posterior.pt")
    loaded = LinearisedLaplace.load(tmp_path / "posterior.pt", model)
    assert_close(loaded((a, b)), la((a, b)))
    assert loaded.temperature == 0.5


def test_rewards_are_single_numbers():
    a, b, y = pairs()
    with pytest.raises(ValueError, match="one number per example"):
        compare(net(3, 2), (a, b))
    assert compare(lambda x: x[:, 0], (a, b)).shape == (30, 2)
    with pytest.raises(ValueError, match="tuple of candidates"):
        LinearisedLaplace(net(3, 1), "reward_modeling").fit([(a, y)], **FIXED)
    with pytest.raises(ValueError, match="outside of 0 to 1"):
        BradleyTerry().check(torch.zeros(2, 2), torch.tensor([0, 2]))


@pytest.mark.parametrize("temperature", [0.3, 4.0])
def test_temperature_divides_the_curvature(temperature):
    case = tiny("classification")
    exact, problem = case.exact(), case.problem(7, 8)
    problem = problem.with_likelihood(tempered(problem.likelihood, temperature))
    w = draw(3, problem.size)
    assert_close(problem.ggn_product(w), w @ exact.ggn / temperature)
    rows = problem.rows()
    assert_close(rows.T @ rows, exact.ggn / temperature)
    loss, gradient = problem.loss_and_gradient(0.1 * w[0])
    assert_close(loss, exact.loss(0.1 * w[0]).item() / temperature)
    assert_close(gradient, torch.func.grad(exact.loss)(0.1 * w[0]) / temperature)


def test_temperature_is_a_scale_at_another_precision():
    """(G / T + Λ)⁻¹ = T (G + T Λ)⁻¹."""
    case, T = tiny("classification"), 0.25
    options = {"curvature": "network", "num_samples": 6, "tolerance": 1e-9, "g_prior": False}
    cold = LinearisedLaplace(case.model, "classification", temperature=T, **options)
    cold.fit([(case.x, case.y)], **FIXED)
    plain = LinearisedLaplace(case.model, "classification", **options)
    plain.fit([(case.x, case.y)], **{**FIXED, "prior_precision": 20.0 * T})
    assert_close(cold.w_samples, T**0.5 * plain.w_samples, rtol=1e-5, atol=1e-8)
    assert_close(cold.w_lin, plain.w_lin, rtol=1e-5, atol=1e-7)
    assert_close(cold.effective_dim, plain.effective_dim)
    # predictions keep the likelihood as it is
    p = cold.predict(case.x)
    assert isinstance(p.likelihood, Classification)
    assert_close(p.probs, p.functions.softmax(-1).mean(0))


def test_temperature_holds_the_noise():
    case = tiny("regression")
    la = LinearisedLaplace(
        case.model, "regression", sigma_noise=0.4, temperature=2.0, num_samples=4
    )
    la.fit([(case.x, case.y)], progress_bar=False)
    assert_close(la.sigma_noise.item(), 0.4)
    mean, variance = la(case.x)
    assert_close(variance, la.predict(case.x).variance + 0.16)
    other = LinearisedLaplace(case.model, "regression", sigma_noise=0.4, temperature=2.0)
    other.load_state_dict(la.state_dict())
    assert_close(other(case.x)[1], variance)


def test_a_tempered_likelihood_is_whole():
    f, y = draw(3, 2), draw(3, 2, seed=1)
    t = Tempered(Regression(0.5), 2.0)
    assert t.is_quadratic and t.elementwise
    assert_close(t.mean(f), f)
    assert t.mask(y) is None
    u = draw(4, 3, 2, seed=2)
    assert_close(Likelihood.hessian_product(t, f, u), t.hessian_product(f, u))
    with pytest.raises(ValueError, match="reshape"):
        t.check(f, y[:, :1])
    assert isinstance(tempered(Regression(), 1.0), Regression)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf"), float("nan")])
def test_temperatures_are_positive(temperature):
    with pytest.raises(ValueError, match="temperature"):
        LinearisedLaplace(net(2, 2), "classification", temperature=temperature)


@pytest.mark.parametrize("kind", ["cross-entropy", "mse", "bce"])
def test_weight_decay_is_a_prior_precision(kind):
    """Training a linear model with weight decay ends at the mode under that precision."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2, bias=False).double(), draw(25, 3)
    decay, sigma = 0.02, 0.7
    if kind == "cross-entropy":
        y, loss, likelihood = (x[:, 0] > 0).long(), nn.CrossEntropyLoss(), "classification"
        precision = prior_precision_from_weight_decay(decay, 25)
    elif kind == "mse":
        y, loss, likelihood = draw(25, 2, seed=1), nn.MSELoss(), Regression(sigma)
        precision = prior_precision_from_weight_decay(
            decay, 25, loss="mse", sigma_noise=sigma, num_outputs=2
        )
    else:
        y, loss, likelihood = (x[:, :2] > 0).double(), nn.BCEWithLogitsLoss(), "bernoulli"
        precision = prior_precision_from_weight_decay(decay, 25, num_outputs=2)
    optimiser = torch.optim.SGD(model.parameters(), 0.5, weight_decay=decay)
    for _ in range(3000):
        optimiser.zero_grad()
        loss(model(x), y).backward()
        optimiser.step()
    la = LinearisedLaplace(
        model, likelihood, g_prior=False, curvature="network", num_samples=2, tolerance=1e-7
    )
    la.fit([(x, y)], em_steps=0, prior_precision=precision, progress_bar=False)
    assert_close(la.w_lin, model.weight.detach().flatten(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "arguments",
    [{"loss": "l1"}, {"num_data": 0}, {"num_outputs": 0}, {"weight_decay": -1}, {"sigma_noise": 0}],
)
def test_weight_decay_is_checked(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        prior_precision_from_weight_decay(**{"weight_decay": 0.1, "num_data": 3, **arguments})


@pytest.fixture(scope="module")
def differentiable():
    case = tiny("classification")
    la = LinearisedLaplace(case.model, "classification", num_samples=3)
    return la.fit([(case.x, case.y)], **FIXED), case.x[:2]


@pytest.mark.parametrize("link", ["mc", "probit", "probit_shared"])
def test_predictions_are_differentiable_in_x(differentiable, link):
    la, x = differentiable
    assert torch.autograd.gradcheck(lambda x: la(x, link_approx=link), x.clone().requires_grad_())


def test_functions_are_differentiable_in_x(differentiable):
    la, x = differentiable
    x = x.clone().requires_grad_()
    assert torch.autograd.gradcheck(la.functional_samples, x)
    assert torch.autograd.gradcheck(la.function_sample(1), x)
    assert torch.autograd.gradcheck(lambda x: la.predict(x, mean="linear").entropy, x)
    assert torch.autograd.gradcheck(lambda x: la.predict(x).epistemic, x)


def test_gradients_are_taken_on_request_only(differentiable):
    la, x = differentiable
    assert not la(x).requires_grad
    asking = x.clone().requires_grad_()
    with torch.no_grad():
        prediction = la.predict(asking)
        assert not prediction.centre.requires_grad and not prediction.deviations.requires_grad
    assert_close(la(asking).detach(), la(x))
    loss = la(asking).square().sum()
    loss.backward()
    assert all(p.grad is None for p in la.model.parameters())
    assert asking.grad.abs().sum() > 0


@pytest.mark.parametrize("parameters", ["last_layer", ["0.*"]], ids=["last layer", "first layer"])
def test_gradients_pass_subsets(parameters):
    case = tiny("regression")
    la = LinearisedLaplace(case.model, "regression", num_samples=2, parameters=parameters)
    la.fit([(case.x, case.y)], **FIXED)
    x = case.x[:2].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: la(x)[1], x)


def test_gradients_pass_two_reverse_passes():
    """weight_norm has no forward mode."""
    torch.manual_seed(0)
    case = tiny("regression")
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)), nn.Tanh(), nn.Linear(3, 3)
    )
    la = LinearisedLaplace(model.double(), "regression", num_samples=2)
    la.fit([(case.x, case.y)], **FIXED)
    assert not la._linear_model.path.forward
    x = case.x[:2].clone().requires_grad_()
    assert torch.autograd.gradcheck(la.functional_samples, x)


@pytest.mark.parametrize("margin", [1.0, 20.0, 60.0])
def test_certain_softmax_keeps_its_digits(margin):
    """Where p is near 1, H u, S ε and the gradient are as exact as their entries, in float32."""
    generator = torch.Generator().manual_seed(0)
    f, u = torch.randn(2, 50, 4, generator=generator)
    f[torch.arange(50), torch.arange(50) % 4] += margin
    y, likelihood = torch.arange(50) % 4, Classification()
    p = f.double().softmax(-1)
    rest = p.scatter(-1, y[:, None], 0).sum(-1, keepdim=True)  # 1 - p without a difference
    v = (u - u.gather(-1, y[:, None])).double()
    H = p * (v - (p * v).sum(-1, keepdim=True))
    torch.testing.assert_close(likelihood.hessian_product(f, u).double(), H, rtol=1e-4, atol=0)
    gradient = p.scatter(-1, y[:, None], -rest)
    torch.testing.assert_close(likelihood.gradient(f, y).double(), gradient, rtol=1e-4, atol=0)
    S = likelihood.hessian_sqrt_product(f[:, None], torch.eye(4).expand(50, 4, 4)).double()
    H = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    at = torch.arange(50)
    H[at, y, y] = (p.gather(-1, y[:, None]) * rest)[:, 0]
    torch.testing.assert_close(S.mT @ S, H, rtol=1e-3, atol=1e-6 * rest.max().item())
