"""The interface of laplace-torch: its numbers, its documentation's examples, and what is gone."""

import copy
import math

import pytest
import torch
from tiny import posterior_of, tiny
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from torch_lla_em import NotFittedError
from torch_lla_em.integrations.laplace_torch import Laplace

pytestmark = pytest.mark.filterwarnings("ignore")
NEAR = {"rtol": 1e-5, "atol": 1e-6}


def case_of(kind):
    case = tiny(kind)
    return case.model, case.x, DataLoader(TensorDataset(case.x, case.y), 7)


def fitted(*args, loader, **options):
    la = Laplace(*args, **options)
    la.fit(loader)
    return la


@pytest.fixture(scope="module")
def classified():
    """A posterior, its inputs and its loader, for tests that leave them alone."""
    model, x, loader = case_of("classification")
    return fitted(model, "classification", "all", num_samples=4, loader=loader), x, loader


def with_basis(ours, theirs, few=5):
    """Give a posterior a basis of the covariance of laplace-torch as its samples, after a comparison of both."""
    error = ours.posterior.log_marginal_likelihood().standard_error
    # the log det is a mean over samples; everything else is exact
    assert abs(ours.log_marginal_likelihood() - theirs.log_marginal_likelihood()) < few * error
    drawn, covariance = ours.posterior.w_samples, theirs.posterior_covariance
    # the variance of each sum of all weights, whose relative error is √(2/K)
    spread = drawn.sum(1).square().mean() / covariance.sum()
    assert abs(spread - 1) < few * (2 / len(drawn)) ** 0.5
    basis = len(covariance) ** 0.5 * torch.linalg.cholesky(covariance).T
    ours.posterior.load_state_dict({**ours.posterior.state_dict(), "w_samples": basis})


@pytest.mark.parametrize(
    "kind, subset",
    [("classification", "all"), ("regression", "all"), ("classification", "last_layer")],
)
def test_predictions_and_evidence_equal_those_of_laplace_torch(kind, subset):
    model, x, loader = case_of(kind)
    options = {"subset_of_weights": subset, "hessian_structure": "full", "prior_precision": 2.0}
    options |= {"temperature": 0.7, "prior_mean": 0.1}
    options |= {"sigma_noise": 0.4} if kind == "regression" else {}
    theirs = pytest.importorskip("laplace").Laplace(model, kind, **options)
    theirs.fit(loader)
    ours = fitted(model, kind, num_samples=len(theirs.mean), loader=loader, **options)
    with_basis(ours, theirs)
    if kind == "classification":
        assert_close(ours(x), theirs(x), **NEAR)
        assert (ours(x, link_approx="mc", n_samples=4000) - theirs(x)).abs().max() < 0.1
    else:
        for one, other in zip(ours(x), theirs(x), strict=True):
            assert_close(one, other.view_as(one), **NEAR)
    assert ours.n_data == theirs.n_data
    assert_close(ours.mean, theirs.mean)


def test_the_evidence_is_that_of_the_fitted_precision_and_noise():
    """Its differences are exact: of the prior's mean, and of σ as of the posterior at that σ."""
    model, x, loader = case_of("regression")
    given = (model, "regression", "all")
    own = {"prior_precision": 2.0, "loader": loader}
    la, other = (fitted(*given, prior_mean=mean, **own) for mean in (0.0, 0.5))
    due = 0.5 * 2 * ((la.mean - 0.5).square().sum() - la.mean.square().sum())
    assert_close(la.log_marginal_likelihood() - other.log_marginal_likelihood(), due)
    # every example counts half as with √2 of the noise, but for the constant
    warm = fitted(*given, loader=loader, sigma_noise=0.4, temperature=2.0)
    noisy = fitted(*given, loader=loader, sigma_noise=0.4 * 2**0.5)
    gap = warm.log_marginal_likelihood() - noisy.log_marginal_likelihood()
    assert_close(gap.item(), 0.5 * loader.dataset.tensors[1].numel() * math.log(2))
    la.sigma_noise, la.prior_precision = 0.4, 3.0
    with pytest.raises(NotFittedError, match="another prior or noise. Call"):
        la.log_marginal_likelihood()
    la.fit(loader)
    direct = fitted(*given, prior_precision=3.0, sigma_noise=0.4, loader=loader)
    assert la.log_marginal_likelihood() == direct.log_marginal_likelihood()
    la.optimize_prior_precision()
    assert la.posterior.prior_precision == la.prior_precision
    assert la.log_marginal_likelihood() > direct.log_marginal_likelihood()


@pytest.mark.parametrize("temperature, prior_mean", [(1.0, 0.0), (0.5, 0.1)])
def test_a_regression_has_the_evidence_and_bands_that_laplace_torch_finds(temperature, prior_mean):
    """As in its regression example, which maximises the evidence over λ and σ."""
    model, x, loader = case_of("regression")
    options = {"subset_of_weights": "all", "hessian_structure": "full"}
    options |= {"temperature": temperature, "prior_mean": prior_mean}
    theirs = pytest.importorskip("laplace").Laplace(model, "regression", **options)
    theirs.fit(loader)
    log_numbers = torch.zeros(2, 1, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([log_numbers], max_iter=100, line_search_fn="strong_wolfe")

    def loss():
        optimiser.zero_grad()
        value = -theirs.log_marginal_likelihood(*log_numbers.exp())
        value.backward()
        return value

    optimiser.step(loss)
    theirs.prior_precision, theirs.sigma_noise = log_numbers.detach().exp()
    ours = fitted(model, "regression", num_samples=256, loader=loader, **options)
    ours.optimize_prior_precision(method="marglik")
    gamma = ours.posterior.effective_dim
    error = (2 / (256 * gamma)).sqrt().item()  # of the estimate of γ, at most
    assert_close(ours.prior_precision, theirs.prior_precision[0], rtol=5 * error + 0.01, atol=0)
    assert_close(ours.sigma_noise, theirs.sigma_noise, rtol=0.02, atol=0)
    far = 10 * x
    ratio = ours(far)[1].sum() / theirs(far)[1].sum()
    assert abs(ratio - 1) < 5 * (2 / 256) ** 0.5 + 5 * error + 0.01


def test_a_classification_says_that_its_precision_is_that_of_the_linear_model(classified, caplog):
    la, x, loader = classified
    other = fitted(la.model, "classification", "all", num_samples=4, loader=loader)
    other.optimize_prior_precision(val_loader=loader)
    assert "by EM for the linear model. laplace-torch maximises" in caplog.text
    assert "'val_loader' has no effect: prior_precision is learnt" in caplog.text
    own = {"prior": "isotropic", "curvature": "network"}
    direct = posterior_of(la.model, "classification", loader, **own)
    assert_close(other.prior_precision, direct.prior_precision)


README = """
la = Laplace(model, "classification", subset_of_weights="all", hessian_structure="diag")
la.fit(train_loader)
how = {"method": "gridsearch", "pred_type": "glm", "link_approx": "probit"}
la.optimize_prior_precision(**how, val_loader=val_loader)
pred = la(x, pred_type="glm", link_approx="probit")
"""


def test_the_example_of_its_readme_runs_with_the_method_that_the_error_names():
    model, x, loader = case_of("classification")
    names = {"Laplace": Laplace, "model": model, "train_loader": loader, "x": x}
    names["val_loader"] = [(x + 0.1, loader.dataset.tensors[1])]
    with pytest.raises(ValueError, match="la.optimize_prior_precision()") as error:
        exec(README, names)
    exec(README.replace('"gridsearch"', '"marglik"'), names)
    la, pred = names["la"], names["pred"]
    assert la.posterior.history[-1]["data_passes"] < 100  # of one fit, where a grid takes 100
    assert_close(pred.sum(-1), torch.ones(len(x)).double())
    for call in ("la.posterior.calibrate(val_loader)", "la.posterior(x)"):
        assert call in str(error.value)
        found = eval(call, names)
    assert found.shape == pred.shape and la.posterior.calibration.num_rows == len(x)


def seeded():
    return torch.Generator().manual_seed(0)


def test_samples_have_the_mean_and_covariance_of_the_posterior(classified):
    la, few = classified[0], classified[1][:2]
    drawn, mean = la.functional_samples(few, n_samples=20_000), la.model(few)
    assert not torch.equal(drawn, la.functional_samples(few, n_samples=20_000))
    variance = (la.posterior.predict(few, "network").samples - mean).square().mean(0)
    assert ((drawn.mean(0) - mean).abs() / (variance / len(drawn)).sqrt()).max() < 5
    assert (drawn.var(0) / variance - 1).abs().max() < 5 * (2 / len(drawn)) ** 0.5
    how = {"n_samples": 3}
    soft, again = (la.predictive_samples(few, **how, generator=seeded()) for _ in "ab")
    assert torch.equal(soft, again)
    assert_close(soft.sum(-1), torch.ones(3, 2).double())


class OfDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 2)

    def forward(self, data):
        return self.body(data["input_ids"])


def test_batches_that_are_dicts_are_passed_whole_and_outputs_can_have_sites():
    torch.manual_seed(0)
    x = torch.randn(20, 3)
    batch = {"input_ids": x, "labels": (x[:, 0] + 0.5 * torch.randn(20) > 0).long()}
    model = OfDict()
    model.frozen = nn.Linear(2, 2).requires_grad_(False)  # as layers beside adapters
    la = fitted(model, "classification", "all", "gp", loader=[batch])
    assert len(la.mean) == 8
    la.optimize_prior_precision()
    precision, loader = la.prior_precision, [tuple(batch.values())]
    same = fitted(la.model.body, "classification", "all", prior_precision=precision, loader=loader)
    assert_close(la(batch), same(x))
    evidences = (each.log_marginal_likelihood() for each in (la, same))
    assert_close(*evidences, rtol=1e-4, atol=0)
    sites = x.view(4, 5, 3)
    dense = fitted(nn.Linear(3, 2), "regression", loader=[(sites, sites[..., :2])])
    mean, covariance = dense(sites)
    assert mean.shape == (4, 5, 2) and covariance.shape == (4, 5, 2, 2)


@pytest.mark.parametrize(
    "options", [{"temperature": 0.3}, {"prior_mean": 0.5, "prior_precision": torch.tensor(3.0)}]
)
def test_the_state_has_all_that_predictions_and_evidence_need(options, tmp_path):
    model, x, loader = case_of("regression")
    la = fitted(model, "regression", "all", sigma_noise=0.5, loader=loader, **options)
    torch.save(la.state_dict(), tmp_path / "state.bin")
    other = Laplace(model, "regression", "all")
    other.load_state_dict(torch.load(tmp_path / "state.bin"))
    assert_close(la(x), other(x))
    assert_close(la(x), copy.deepcopy(la)(x))
    assert other.log_marginal_likelihood() == la.log_marginal_likelihood()
    assert other.temperature == pytest.approx(la.temperature)
    with pytest.raises(NotFittedError, match="needs the training data"):
        other.optimize_prior_precision()
    with pytest.raises(ValueError, match="not saved by this class"):
        other.load_state_dict({"H": torch.eye(2)})


def test_a_changed_network_is_an_error_until_it_is_fitted_again(classified):
    la, x, loader = copy.deepcopy(classified[0]), *classified[1:]
    with torch.no_grad():
        la.model[0].weight.mul_(3)
    uses = la.log_marginal_likelihood, la.state_dict, la.optimize_prior_precision, lambda: la(x)
    for use in uses:
        with pytest.raises(NotFittedError, match="have changed"):
            use()
    for change in (lambda: la.prior_precision.mul_(2), lambda: setattr(la, "prior_precision", 5.0)):
        change()
        with pytest.raises(NotFittedError, match="another prior"):
            la(x)
    la.fit(loader)
    assert la(x).shape == (len(x), 3)


def test_the_example_of_expected_improvement_runs_with_its_own_enums():
    pytest.importorskip("laplace")
    from laplace.utils.enums import HessianStructure, Likelihood, PredType, SubsetOfWeights

    torch.manual_seed(123)
    model = nn.Sequential(nn.Linear(2, 10), nn.GELU(), nn.Linear(10, 1))
    loader = [(torch.randn(5, 2), torch.randn(5, 1))]
    chosen = SubsetOfWeights.ALL, HessianStructure.KRON
    la = fitted(model, Likelihood.REGRESSION, *chosen, enable_backprop=True, loader=loader)
    la.optimize_prior_precision(PredType.GLM, n_steps=10, lr=0.1)
    x = torch.randn(10, 2, requires_grad=True)
    samples = la.functional_samples(x, pred_type=PredType.GLM, n_samples=10)
    improvement = (samples - 0.123).clamp(0.0).mean(0)
    (gradient,) = torch.autograd.grad(improvement.sum(), x)
    assert improvement.shape == (10, 1) and gradient.abs().max() > 0
    assert not la.functional_samples(x.detach()).requires_grad
    with pytest.raises(ValueError, match='use "glm"'):
        la.functional_samples(x, pred_type=PredType.NN)


def test_what_is_gone_names_what_to_use(classified, caplog):
    (la, x, loader), own = classified, {"loader": classified[2]}
    model, new = la.model, Laplace(la.model, "classification", backend=object)
    assert "'backend' has no effect" in caplog.text
    for use in (lambda: new(x), new.log_marginal_likelihood, lambda: new.mean):
        with pytest.raises(NotFittedError, match="not fitted yet"):
            use()

    def made(likelihood="classification", **options):
        return lambda: Laplace(model, likelihood, **options)

    refused = {
        "likelihood='poisson' is not .*choose one": made("poisson"),
        "BradleyTerry": made("reward_modeling"),
        "parameters=": made(subset_of_weights="subnetwork"),
        "hessian_structure": made(hessian_structure="block"),
        "last_layer_name='head' is .*parameters=": made(last_layer_name="head"),
        "the adapter": made(feature_reduction="pick_last"),
        "prior_precision must be": lambda: fitted(model, "regression", prior_precision=-1.0, **own),
        "sigma_noise must be": lambda: fitted(model, "regression", sigma_noise=0.0, **own),
        "Only a regression has sigma_noise": made(sigma_noise=2.0),
        'use "glm"': lambda: la(x, pred_type="nn"),
        'use "probit"': lambda: la(x, link_approx="bridge"),
        "joint=True is not .*covariance": lambda: la(x, joint=True),
        "diagonal_output=True is not .*variance": lambda: la(x, diagonal_output=True),
        r"la.fit\(\[\*old_loader": lambda: la.fit(loader, override=False),
        "layerwise=True": lambda: la.optimize_prior_precision(prior_structure="diag"),
        "without derivatives": lambda: la.log_marginal_likelihood(torch.ones(1)),
        "'sample': use la.mean": lambda: la.sample,
        "covariance": lambda: la.functional_variance,
        "'H': la.posterior": lambda: la.H,
    }
    for match, use in refused.items():
        with pytest.raises((ValueError, AttributeError), match=match):
            use()
