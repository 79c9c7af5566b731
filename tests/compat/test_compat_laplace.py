"""The drop-in for laplace-torch: the same numbers beside the package itself, and its examples."""

import warnings

import pytest
import torch
from tiny import tiny
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torch_lla_em import LinearisedLaplace, NotFittedError
from torch_lla_em.compat import Laplace
from torch_lla_em.compat.evidence import quadrature_of

KINDS = [("classification", "all"), ("regression", "all"), ("classification", "last_layer")]


def laplace_torch():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("laplace").Laplace


def case_of(kind):
    case = tiny(kind)
    return case.model, case.x, DataLoader(TensorDataset(case.x, case.y), 7)


@pytest.fixture(scope="module", params=KINDS, ids=" ".join)
def both(request):
    """laplace-torch's full posterior, and ours with a basis of its covariance as samples."""
    kind, subset = request.param
    model, x, loader = case_of(kind)
    noise = {"sigma_noise": 0.4} if kind == "regression" else {}
    options = {"subset_of_weights": subset, "hessian_structure": "full", "prior_precision": 2.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = laplace_torch()(model, kind, temperature=0.7, **options, **noise)
        theirs.fit(loader)
    covariance = theirs.posterior_covariance
    ours = Laplace(model, kind, temperature=0.7, num_samples=len(covariance), **options, **noise)
    ours.fit(loader)
    drawn = ours.posterior.w_samples
    # the variance of each sum of all weights, whose relative error is √(2/K)
    spread = drawn.sum(1).square().mean() / covariance.sum()
    assert abs(spread - 1) < 5 * (2 / len(drawn)) ** 0.5
    basis = len(covariance) ** 0.5 * torch.linalg.cholesky(covariance).T
    ours.posterior.load_state_dict({**ours.posterior.state_dict(), "w_samples": basis})
    return theirs, ours, x


@pytest.mark.filterwarnings("ignore")
def test_predictions_equal_those_of_laplace_torch(both):
    theirs, ours, x = both
    if ours.likelihood == "classification":
        for link in ("probit", "bridge", "bridge_norm"):
            torch.testing.assert_close(
                ours(x, link_approx=link), theirs(x, link_approx=link), rtol=1e-5, atol=1e-6
            )
    else:
        for options in ({}, {"joint": True}, {"diagonal_output": True}):
            for one, other in zip(ours(x, **options), theirs(x, **options), strict=True):
                torch.testing.assert_close(one, other.view_as(one), rtol=1e-5, atol=1e-6)
    assert ours.n_params == theirs.n_params and ours.n_data == theirs.n_data
    assert ours.n_outputs == theirs.n_outputs
    torch.testing.assert_close(ours.mean, theirs.mean)


@pytest.mark.filterwarnings("ignore")
def test_the_log_marginal_likelihood_and_its_gradient_equal_those_of_laplace_torch(both):
    values = []
    for la in both[:2]:
        hyper = [torch.tensor(v).double().requires_grad_() for v in (0.3, 0.6)]
        given = hyper if la.likelihood == "regression" else hyper[:1]
        before = la.prior_precision, la.sigma_noise
        value = la.log_marginal_likelihood(*given)
        value.backward()
        values.append(torch.stack([value.detach(), *(h.grad for h in given)]))
        la.prior_precision, la.sigma_noise = before
    torch.testing.assert_close(values[1], values[0], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_the_prior_precision_equals_that_of_laplace_torch():
    Theirs, (model, _, loader) = laplace_torch(), case_of("classification")
    found = []
    for Class in (Theirs, Laplace):
        la = Class(model, "classification", "all", "full")
        la.fit(loader)
        la.optimize_prior_precision(method="marglik")
        found.append(la.prior_precision.double())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=0)
    assert la.posterior.prior_precision == pytest.approx(found[1].item())


def test_the_quadrature_is_exact_for_its_probes(monkeypatch):
    case = tiny("classification")
    problem, precision = case.problem(), torch.tensor(0.5).double()
    exact = quadrature_of(problem, 0.5, 3)
    G = problem.ggn_product(torch.eye(problem.size).double())
    log_det = torch.logdet(torch.eye(problem.size) + G / precision)
    torch.testing.assert_close(exact.log_det(precision), log_det)
    # a basis as the probes: the average over them is the trace divided by their number
    size = problem.size
    monkeypatch.setattr("torch_lla_em.compat.evidence._DENSE", 0)
    probes = size**0.5 * torch.eye(size).double()
    monkeypatch.setattr(
        "torch_lla_em.compat.evidence.normal", lambda seed, stream, k, row, P: probes[k][None]
    )
    torch.testing.assert_close(quadrature_of(problem, 0.5, size).log_det(precision), log_det)
    # three probes, by several products
    few = quadrature_of(problem, 0.5, 3).log_det(precision)
    values, vectors = torch.linalg.eigh(torch.eye(size) + G / precision)
    log = vectors @ values.log().diag() @ vectors.T
    torch.testing.assert_close(few, size * log.diagonal()[:3].mean(), rtol=1e-3, atol=0)


README = """
la = Laplace(model, "classification",
             subset_of_weights="all",
             hessian_structure="diag")
la.fit(train_loader)
la.optimize_prior_precision(
    method="gridsearch",
    pred_type="glm",
    link_approx="probit",
    val_loader=val_loader
)
pred = la(x, pred_type="glm", link_approx="probit")
"""


def test_the_example_of_its_readme_runs_and_finds_the_best_prior_precision():
    model, x, loader = case_of("classification")
    names = {"Laplace": Laplace, "model": model, "train_loader": loader, "val_loader": loader}
    names["x"] = x
    exec(README.replace("val_loader=val_loader", "val_loader=val_loader, grid_size=12"), names)
    la, pred = names["la"], names["pred"]
    torch.testing.assert_close(pred.sum(-1), torch.ones(len(x)).double())
    losses = []
    for precision in torch.logspace(-4, 4, 12, dtype=torch.float64):
        other = Laplace(model, "classification", "all", prior_precision=precision)
        other.fit(loader)
        losses.append((-other(x).log().gather(1, loader.dataset.tensors[1][:, None])).mean())
    best = torch.logspace(-4, 4, 12, dtype=torch.float64)[torch.stack(losses).argmin()]
    assert la.prior_precision.item() == pytest.approx(best.item())


def test_the_loop_over_hyperparameters_of_its_documentation_runs():
    model, x, loader = case_of("regression")
    la = Laplace(model, "regression", subset_of_weights="all", hessian_structure="full")
    la.fit(loader)
    log_prior, log_sigma = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    hyper_optimizer = torch.optim.Adam([log_prior, log_sigma], lr=1e-1)
    for _ in range(200):
        hyper_optimizer.zero_grad()
        neg_marglik = -la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())
        neg_marglik.backward()
        hyper_optimizer.step()
    assert max(log_prior.grad.abs(), log_sigma.grad.abs()) < 0.05
    f_mu, f_var = la(x)
    assert f_mu.shape == (len(x), 3) and f_var.shape == (len(x), 3, 3)
    assert la.posterior.sigma_noise == pytest.approx(la.sigma_noise.item())
    assert la.posterior.prior_precision == pytest.approx(la.prior_precision.item())


def test_samples_have_the_mean_and_covariance_of_the_posterior():
    model, x, loader = case_of("classification")
    la = Laplace(model, "classification", "all", num_samples=4)
    la.fit(loader)
    few = x[:2]
    drawn = la.functional_samples(few, n_samples=20_000)
    assert not torch.equal(drawn, la.functional_samples(few, n_samples=20_000))
    variance = la.functional_variance(few).diagonal(dim1=1, dim2=2)
    apart = (drawn.mean(0) - model(few)).abs() / (variance / len(drawn)).sqrt()
    assert apart.max() < 5
    ratio = drawn.var(0) / variance - 1
    assert ratio.abs().max() < 5 * (2 / len(drawn)) ** 0.5
    soft = la.predictive_samples(few, n_samples=3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(soft.sum(-1), torch.ones(3, 2).double())
    assert la.sample(5).shape == (5, la.n_params)


def test_batches_that_are_dicts_are_passed_whole():
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(3, 2)

        def forward(self, data):
            return self.body(data["input_ids"])

    x, y = torch.randn(20, 3), torch.arange(20) % 2
    la = Laplace(Model(), "classification", subset_of_weights="all", hessian_structure="diag")
    la.fit([{"input_ids": x, "labels": y}])
    la.optimize_prior_precision()
    same = Laplace(la.model.body, "classification", "all", prior_precision=la.prior_precision)
    same.fit([(x, y)])
    torch.testing.assert_close(la({"input_ids": x, "labels": y}), same(x))


def test_the_state_is_saved_as_tensors(tmp_path):
    model, x, loader = case_of("regression")
    la = Laplace(model, "regression", "all", prior_precision=3.0, sigma_noise=0.5)
    la.fit(loader)
    torch.save(la.state_dict(), tmp_path / "state.bin")
    other = Laplace(model, "regression", "all")
    other.load_state_dict(torch.load(tmp_path / "state.bin"))
    for one, same in zip(la(x), other(x), strict=True):
        torch.testing.assert_close(one, same)
    assert other.log_marginal_likelihood() == la.log_marginal_likelihood()
    other.prior_precision = 1.0
    with pytest.raises(NotFittedError, match="has changed since the posterior was saved"):
        other(x)
    with pytest.raises(ValueError, match="not saved by torch_lla_em.compat.Laplace"):
        other.load_state_dict({"H": torch.eye(2)})


def test_one_prior_precision_per_tensor_gives_the_layerwise_posterior():
    model, x, loader = case_of("classification")
    precision = torch.tensor([0.5, 1.0, 2.0, 4.0]).double()
    la = Laplace(model, "classification", "all", prior_precision=precision)
    la.fit(loader)
    ours = LinearisedLaplace(
        model, "classification", prior="layerwise", g_prior=False, curvature="network"
    )
    ours.fit(loader, em_steps=0, prior_precision=precision, progress_bar=False)
    torch.testing.assert_close(
        la.functional_variance(x),
        la.posterior.predict(x)
        .covariance.view(len(x), 3, len(x), 3)
        .diagonal(dim1=0, dim2=2)
        .movedim(-1, 0),
    )
    torch.testing.assert_close(la.posterior.w_samples, ours.w_samples)
    with pytest.raises(ValueError, match="available for one prior precision"):
        la.log_marginal_likelihood()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"likelihood": "poisson"}, "likelihood"),
        ({"subset_of_weights": "subnetwork"}, "parameters="),
        ({"hessian_structure": "block"}, "hessian_structure"),
        ({"sigma_noise": 2.0}, "observation noise of a regression"),
        ({"prior_precision": -1.0}, "must be positive"),
        ({"last_layer_name": "head"}, "parameters="),
        ({"feature_reduction": "pick_last"}, "forward_fn"),
    ],
)
def test_arguments_without_a_meaning_are_refused(options, match):
    given = {"model": nn.Linear(2, 2), "likelihood": "classification"} | options
    with pytest.raises(ValueError, match=match):
        Laplace(**given)


def test_calls_without_a_meaning_are_refused():
    model, x, loader = case_of("classification")
    with pytest.raises(TypeError, match="no argument 'nonsense'"):
        Laplace(model, "classification", nonsense=1)
    with pytest.raises(ValueError, match="sigma_noise must be one number"):
        Laplace(model, "regression", sigma_noise=torch.ones(2))
    with pytest.raises(ValueError, match="sigma_noise must be positive"):
        Laplace(model, "regression", sigma_noise=0.0)
    la = Laplace(model, "classification", backend=object)
    for use in (lambda: la(x), la.log_marginal_likelihood, lambda: la.mean):
        with pytest.raises(NotFittedError, match="not fitted yet"):
            use()
    la.fit(loader)
    refused = {
        'only "glm"': lambda: la(x, pred_type="nn"),
        "Pass all inputs": lambda: la(x, mask=1),
        "joint over outputs": lambda: la.functional_samples(x, diagonal_output=True),
        "override=False": lambda: la.fit(loader, override=False),
        "only 'scalar'": lambda: la.optimize_prior_precision(prior_structure="diag"),
        "needs a validation set": lambda: la.optimize_prior_precision(method="gridsearch"),
        "noise of a regression": lambda: la.log_marginal_likelihood(None, torch.ones(1)),
    }
    for match, use in refused.items():
        with pytest.raises(ValueError, match=match):
            use()
    with pytest.raises(AttributeError, match="functional_variance"):
        la.posterior_covariance
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        la.nothing
    per_token = Laplace(nn.Linear(3, 2), "classification", "all")
    per_token.fit([(torch.randn(4, 5, 3), torch.zeros(4, 5, dtype=torch.long))])
    with pytest.raises(ValueError, match=r"laplace-torch's are \(B, C\)"):
        per_token(torch.randn(4, 5, 3))
