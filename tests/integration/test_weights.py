"""Fits with a weight for each example, against the dense posterior."""

from dataclasses import replace

import pytest
import torch
from dense import ExactLaplace
from tiny import LOG_PROBS, likelihood_of, problem_of, tiny
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from torch_lla_em import BlockCG, Classification, LinearisedLaplace
from torch_lla_em.inference.options import FitOptions, choose_curvature
from torch_lla_em.problem import Loss

PRECISION = torch.tensor(5.0).double()
FIT = {"em_steps": 0, "prior_precision": 5.0, "progress_bar": False}


def weights_of(case):
    generator = torch.Generator().manual_seed(3)
    w = 3 * torch.rand(len(case.x), generator=generator).double()
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
    own = {"curvature": "network", "g_prior": False, "num_samples": 16, "tolerance": 1e-8}
    posterior = LinearisedLaplace(case.model, likelihood_of(case.name), **{**own, **(la or {})})
    return posterior.fit(*data, **{**FIT, **options})


@pytest.mark.parametrize("name", LOG_PROBS)
def test_products_and_fits_use_the_weights(name):
    case = tiny(name)
    w = weights_of(case)
    exact = dense(case, w)
    batches = [(case.x[a:b], case.y[a:b], w[a:b]) for a, b in ((0, 7), (7, 8), (8, 30))]
    problem = problem_of(case.model, likelihood_of(name), batches, weights="last")
    assert_close(problem.ggn_product(torch.eye(problem.size).double()), exact.ggn)
    rows = problem.rows()
    assert_close(rows.T @ rows, exact.ggn)
    loss, gradient = problem.loss_and_gradient(problem.w_MAP)
    assert loss == pytest.approx(exact.loss(problem.w_MAP).item())
    assert_close(gradient, torch.func.grad(exact.loss)(problem.w_MAP))
    if name.startswith("regression"):
        exact = dense(replace(case, y=case.exact().centred(w).y), w)
    mode, gamma = exact.mode(PRECISION), exact.effective_dims(PRECISION).sum()
    for curvature in ("network", "linear"):
        la = fit(case, (case.x, case.y), weights=w, la={"curvature": curvature})
        assert_close(la.w_lin, mode, rtol=1e-5, atol=1e-6)
        if curvature == "network":
            assert abs(la.effective_dim - gamma) < 5 * la.effective_dim_error


OPTIONS = [{"g_prior": False}, {"g_prior": True}, {"g_prior": False, "solver": BlockCG()}]


@pytest.mark.parametrize(
    "options",
    [
        *({"curvature": "network", **own} for own in OPTIONS),
        *({"curvature": "variational", "tolerance": None, **own} for own in OPTIONS[:2]),
    ],
)
def test_integer_weights_equal_repeated_examples(options):
    case = tiny("classification")
    count = torch.arange(30) % 3
    repeated = (case.x.repeat_interleave(count, 0), case.y.repeat_interleave(count, 0))
    options = {"la": {"num_samples": 256, **options}, "em_steps": 20, "prior_precision": None}
    own = fit(case, (case.x, case.y), weights=count, **options)
    other = fit(case, repeated, **options)
    # their noise differs, so λ agrees up to the Monte Carlo error of γ
    gap = (own.prior_precision / other.prior_precision).log().abs()
    error = sum(la.effective_dim_error / la.effective_dim for la in (own, other))
    assert (gap < 5 * error + 0.02).all()
    assert_close(own(case.x), other(case.x), rtol=0, atol=0.03)


@pytest.mark.parametrize("sites", [(), (3,), (2, 3)])
@pytest.mark.parametrize("name", ["classification", "bernoulli", "regression"])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_the_loss_and_its_derivatives_belong_together(name, sites, temperature):
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
        loss = Loss(likelihood, y, w, temperature)
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


@pytest.mark.parametrize("num_classes, curvature", [(200, "variational"), (300, "network")])
def test_weights_do_not_halve_the_limit_of_classes(num_classes, curvature, monkeypatch):
    monkeypatch.setattr(Classification, "keeps_functions", lambda *_: False)
    x, y = torch.randn(4, 2), torch.arange(4)
    problem = problem_of(nn.Linear(2, num_classes), likelihood_of("classification"), [(x, y)])
    weighted = problem_of(
        nn.Linear(2, num_classes), likelihood_of("classification"), [(x, y, y + 1)], weights="last"
    )
    for each in (problem, weighted):
        each.loss_and_gradient(each.zeros(1)[0])
        assert choose_curvature(each, FitOptions()) == curvature
        assert each.data.facts.num_targets == 4


def test_outputs_without_an_axis_take_weights():
    case = tiny("bernoulli")
    w, x, y = weights_of(case), case.x, case.y[:, :1]
    torch.manual_seed(0)
    column = nn.Linear(2, 1).double()
    flat = nn.Sequential(column, nn.Flatten(0))
    options = {"curvature": "variational", "g_prior": False, "num_samples": 8}
    one, other = (
        LinearisedLaplace(net, "bernoulli", **options).fit(x, t, weights=w, **FIT)
        for net, t in ((column, y), (flat, y[:, 0]))
    )
    assert_close(one.w_lin, other.w_lin)
    assert_close(one.w_samples, other.w_samples)


OF_CLASSES = torch.tensor([0.5, 2.0, 1.0]).double()


def test_weights_come_in_three_ways():
    case = tiny("classification")
    w = OF_CLASSES[case.y]
    known = fit(case, (case.x, case.y), weights=w)
    batches, by_class = [(case.x, case.y, w)], lambda y: OF_CLASSES[y]
    for data, weights, la in (
        (batches, "last", {}),
        (batches, "last", {"target_fn": lambda batch: batch[1]}),
        ([(case.x, case.y)], by_class, {}),
    ):
        found = fit(case, (data,), weights=weights, la=la)
        assert_close(found.w_samples, known.w_samples)
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(case.x, case.y, w), 7, shuffle=True)
    shuffled = fit(case, (loader,), weights="last")
    assert_close(shuffled.w_lin, known.w_lin, rtol=1e-5, atol=1e-6)


def test_labels_of_pixels_have_their_own_weights():
    """A 1 × 1 convolution is a linear layer on pixels."""
    torch.manual_seed(0)
    maps, pixels = nn.Conv2d(2, 3, 1).double(), nn.Linear(2, 3).double()
    pixels.weight.data, pixels.bias.data = maps.weight.data[:, :, 0, 0], maps.bias.data
    x, y = torch.randn(4, 2, 3, 3).double(), torch.randint(3, (4, 3, 3))
    y[0, 0] = -100
    kept = y != -100
    flat = x.movedim(1, -1)[kept], y[kept]
    options = {"num_samples": 4, "curvature": "network", "g_prior": False, "tolerance": 1e-8}
    la = LinearisedLaplace(maps, "classification", class_dim=1, **options)
    la.fit(x, y, weights=lambda y: OF_CLASSES[y.clamp(0)], **FIT)
    other = LinearisedLaplace(pixels, "classification", **options)
    other.fit(*flat, weights=OF_CLASSES[y[kept]], **FIT)
    assert_close(la.w_lin, other.w_lin, rtol=1e-5, atol=1e-6)


def test_invalid_weights_raise():
    case = tiny("classification")
    data, ones = (case.x, case.y), torch.ones(30)
    for weights, message in {
        -ones: "not negative",
        ones * torch.nan: "finite",
        ones[:5]: r"shape \(5,\), but the targets \(30,\)",
        "first": 'pass "last"',
        0 * ones: "None of the 30 training examples has a label",
    }.items():
        with pytest.raises(ValueError, match=message):
            fit(case, data, weights=weights)
    loader, weighted = DataLoader(TensorDataset(*data), 7), [(*data, ones)]
    for given, message in (((loader, ones), "weights=w"), (([data], "last"), "targets, weights")):
        with pytest.raises(TypeError, match=message):
            fit(case, given[:1], weights=given[1])
    with pytest.raises(ValueError, match="None of the 30 training examples has a label"):
        fit(case, (case.x, torch.full_like(case.y, -100)))
    la = fit(case, (weighted,), weights="last")
    batches = DataLoader(TensorDataset(*data, ones), 7)
    for call in (la, la.predict, la.is_ood, la.calibrate):  # which name a remedy
        with pytest.raises(TypeError, match=r"predict and calibrate, with x or batches \(x, y\)"):
            call(batches)
    for name in ("bernoulli", "regression"):  # weights of single outputs
        case = tiny(name)
        w = weights_of(case)[:, None].expand_as(case.y)
        one = fit(case, (case.x, case.y), weights=w[:, 0])
        assert_close(fit(case, (case.x, case.y), weights=w).w_lin, one.w_lin)
        with pytest.raises(ValueError, match=r"differ between its outputs.*\(30,\), not \(30, "):
            fit(case, (case.x, case.y), weights=w * torch.arange(w.shape[1]))
        with pytest.raises(ValueError, match="None of the 30 training examples has a label"):
            fit(case, (case.x, case.y), weights=torch.zeros(30))
    with pytest.raises(ValueError, match="sigma_noise"):
        LinearisedLaplace(case.model, "regression").fit(case.x, case.y, weights=ones)
