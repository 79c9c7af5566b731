"""Weights of examples and of sites against the dense posterior, and what is refused."""

from dataclasses import replace

import pytest
import torch
from dense import ExactLaplace
from direct import rows_of
from tiny import LOG_PROBS, batched, likelihood_of, posterior_of, problem_of, tiny
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from torch_lla_em import Adapter, BlockCG, Compute, LinearisedLaplace
from torch_lla_em.problem import Loss

PRECISION = torch.tensor(5.0).double()
FIT = {"em_steps": 0, "prior_precision": 5.0, "progress_bar": False}
OF_CLASSES = torch.tensor([0.5, 2.0, 1.0]).double()


def weights_of(case):
    w = 3 * torch.rand(len(case.x), generator=torch.Generator().manual_seed(3)).double()
    return w.where(w > 0.5, 0.0)  # some weights are 0


def dense(case, w):
    """The dense posterior, whose log p is weighted; its targets are indices."""
    log_prob, index = LOG_PROBS[case.name], torch.arange(len(case.x))

    def weighted(f, i):
        y = case.y.index_select(0, i.reshape(1)).squeeze(0)
        return w.index_select(0, i.reshape(1)).squeeze(0) * log_prob(f, y)

    names = [name for name, _ in case.model.named_parameters()]
    return ExactLaplace.of(case.model.eval(), case.x, index, weighted, names)


def fit(case, data, la=None, **options):
    own = {"curvature": "network", "prior": "isotropic", "num_samples": 16}
    own |= {"compute": Compute(tolerance=1e-8), **(la or {})}
    return posterior_of(case.model, likelihood_of(case.name), *data, **own, **{**FIT, **options})


@pytest.mark.parametrize("name", LOG_PROBS)
def test_products_and_fits_use_the_weights(name):
    case = tiny(name)
    w = weights_of(case)
    exact = dense(case, w)
    batches = batched((7, 8), case.x, case.y, w)
    problem = problem_of(case.model, likelihood_of(name), batches, weights="last")
    assert_close(problem.ggn_product(torch.eye(problem.size).double()), exact.ggn)
    rows = rows_of(problem)
    assert_close(rows.T @ rows, exact.ggn)
    loss, gradient = problem.loss_and_gradient(problem.w_MAP)
    assert loss == pytest.approx(exact.loss(problem.w_MAP).item())
    assert_close(gradient, torch.func.grad(exact.loss)(problem.w_MAP))
    if name.startswith("regression"):
        exact = dense(replace(case, y=case.exact().centred(w).y), w)
    mode, gamma = exact.mode(PRECISION), exact.effective_dims(PRECISION).sum()
    la = fit(case, (case.x, case.y), weights=w)
    assert_close(la.w_lin, mode, rtol=1e-5, atol=1e-6)
    assert abs(la.effective_dim - gamma) < 5 * la.effective_dim_error


REPEATED = [{"compute": Compute(solver=BlockCG())}]
REPEATED += [{"curvature": "variational", "compute": Compute(), "prior": "g"}]


@pytest.mark.parametrize("options", REPEATED, ids=str)
def test_integer_weights_equal_repeated_examples(options):
    case, count = tiny("classification"), torch.arange(30) % 3
    repeated = (case.x.repeat_interleave(count, 0), case.y.repeat_interleave(count, 0))
    options = {"la": {"num_samples": 256, **options}, "em_steps": 20, "prior_precision": None}
    own = fit(case, (case.x, case.y), weights=count, **options)
    other = fit(case, repeated, **options)
    # their noise differs, so λ agrees up to the Monte Carlo error of γ
    gap = (own.prior_precision / other.prior_precision).log().abs()
    error = sum(la.effective_dim_error / la.effective_dim for la in (own, other))
    assert (gap < 5 * error + 0.02).all()
    assert_close(own(case.x), other(case.x), rtol=0, atol=0.03)


@pytest.mark.parametrize("sites", [(), (2, 3)])
@pytest.mark.parametrize("name", ["classification", "bernoulli", "regression"])
def test_the_loss_and_its_derivatives_belong_together(name, sites):
    """Weights of examples or of sites: gradient, H and S Sᵀ are those of the value."""
    likelihood, generator = likelihood_of(name), torch.Generator().manual_seed(0)
    f = torch.randn(4, *sites, 3, generator=generator).double()
    y = torch.randint(3, (4, *sites), generator=generator)
    if likelihood.elementwise:
        y = torch.randint(2, f.shape, generator=generator).double()
    else:
        y[0] = -100
    of_examples = torch.rand(4, generator=generator).double()
    of_sites = torch.rand(y.shape, generator=generator).double()
    if likelihood.elementwise:  # one weight for all outputs of an example
        of_sites = of_examples.view(4, *(1,) * (y.dim() - 1)).expand_as(y)
    for w in (None, of_examples, of_sites):
        loss = Loss(likelihood, y, w)
        gradient, hessian = (d(loss.value)(f) for d in (torch.func.grad, torch.func.hessian))
        hessian, unit = hessian.view(f.numel(), -1), torch.eye(f.numel()).view(-1, *f.shape).to(f)
        assert_close(loss.gradient(f), gradient)
        assert_close(loss.product(f, unit).flatten(1), hessian)
        root = loss.root(f, unit).flatten(1)
        assert_close(root.T @ root, hessian)
        H = loss.expected_hessian(f[None])
        H = H.diag_embed() if likelihood.elementwise else H
        assert_close(torch.block_diag(*H.flatten(0, -3)), hessian)
        parts = [loss.part(some).value(f[some]) for some in (slice(0, 1), slice(1, 4))]
        assert_close(sum(parts), loss.value(f))
        assert loss.labelled().tolist() == [likelihood.elementwise, True, True, True]


def test_weights_come_in_three_ways():
    case = tiny("classification")
    w = OF_CLASSES[case.y]
    known = fit(case, (case.x, case.y), weights=w)
    batches, by_class = [(case.x, case.y, w)], lambda y: OF_CLASSES[y]
    for data, weights, la in (
        (batches, "last", {}),
        (batches, "last", {"adapter": Adapter(targets=lambda batch: batch[1])}),
        ([(case.x, case.y)], by_class, {}),
        (DataLoader(TensorDataset(case.x, case.y, w), 7, shuffle=True), "last", {}),
    ):
        found = fit(case, (data,), weights=weights, la=la)
        assert_close(found.w_lin, known.w_lin, rtol=1e-5, atol=1e-6)
        assert isinstance(data, DataLoader) or torch.equal(found.w_samples, known.w_samples)


@pytest.mark.parametrize("count, size", [(30, 1e-3), (4, 1e3)])
def test_targets_with_a_weight_are_counted_whatever_their_weights_are(count, size):
    """The mean of the targets is the constant of the linear model if it is of enough of them."""
    case = tiny("regression")
    x, y, w = case.x[:count], case.y[:count], size * (1 + torch.arange(count)).double()
    problem = problem_of(case.model, likelihood_of(case.name), [(x, y, w)], weights="last")
    moments = problem.probe_features(2, 0).targets.moments
    if count == 4:
        assert moments is None
    else:
        assert_close(moments[0], w @ y / w.sum())


def test_invalid_weights_raise():
    case = tiny("classification")
    data, ones = (case.x, case.y), torch.ones(30)
    loader = DataLoader(TensorDataset(*data), 7)
    none = "None of the 30 training examples has a label"
    for error, words, given, weights in (
        (ValueError, "not negative", data, -ones),
        (ValueError, "finite", data, ones * torch.nan),
        (ValueError, r"shape \(5,\), but the targets \(30,\)", data, ones[:5]),
        (TypeError, 'or "last" for a loader', data, "first"),
        (ValueError, none, data, 0 * ones),
        (ValueError, none, (case.x, torch.full_like(case.y, -100)), None),
        (TypeError, "weights=w", (loader,), ones),
        (TypeError, "targets, weights", ([data],), "last"),
    ):
        with pytest.raises(error, match=words):
            fit(case, given, weights=weights)
    la = fit(case, ([(*data, ones)],), weights="last")
    batches = DataLoader(TensorDataset(*data, ones), 7)
    for call in (la, la.predict, la.is_ood, la.calibrate):  # which name a remedy
        with pytest.raises(TypeError, match=r"predict and calibrate, with x or batches \(x, y\)"):
            call(batches)
    for name in ("bernoulli", "regression"):  # weights of single outputs
        case = tiny(name)
        w, data = weights_of(case)[:, None].expand_as(case.y), (case.x, case.y)
        assert_close(fit(case, data, weights=w).w_lin, fit(case, data, weights=w[:, 0]).w_lin)
        with pytest.raises(ValueError, match=r"differ between its outputs.*\(30,\), not \(30, "):
            fit(case, data, weights=w * torch.arange(w.shape[1]))
    with pytest.raises(ValueError, match="sigma_noise"):
        LinearisedLaplace(case.model, "regression").fit(*data, weights=ones)
