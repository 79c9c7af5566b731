"""Fits to networks with many outputs keep the outputs of some sites only."""

from types import SimpleNamespace

import pytest
import torch
from tiny import draw
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

from torch_lla_em import Classification, LinearisedLaplace
from torch_lla_em.inference.all_sites import AllSites
from torch_lla_em.problem import sites
from torch_lla_em.problem.sites import Sites
from torch_lla_em.runtime import Budget

ROWS = torch.tensor([3, 0, 7])


def test_sites_are_drawn_once_in_each_part_and_do_not_depend_on_the_batch():
    few = Sites(4, 20, seed=1)
    index = few.of(ROWS)
    assert ((index // 5) == torch.arange(4)).all()
    assert torch.equal(index[1:], few.of(ROWS[1:])) and not torch.equal(index[0], index[1])
    assert torch.equal(Sites(20, 20, 0).of(ROWS), torch.arange(20).expand(3, 20))
    often = torch.stack([Sites(4, 20, seed).of(ROWS) for seed in range(400)])
    counts = often.flatten().bincount(minlength=20) / 1200  # each with probability 4 / 20
    assert (counts - 0.2).abs().max() < 5 * (0.16 / 1200) ** 0.5


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_put_is_the_transpose_of_take(shape):
    few, f = Sites(4, 6, seed=0), draw(3, *shape, 2)
    u = draw(5, 3, 4, 2, seed=1)
    assert_close((few.put(u, ROWS, f) * f).sum(), (u * few.take(f, ROWS)).sum())
    y = torch.arange(18).view(3, *shape)
    assert torch.equal(few.take_targets(y, ROWS), few.take(y[..., None], ROWS)[..., 0])
    weighed = torch.stack([y, 2 * y], -1)  # targets with weights
    assert torch.equal(few.take_targets(weighed, ROWS)[..., 1], 2 * few.take_targets(y, ROWS))


def segmentation():
    """Images with a label for every pixel, and a trained network, in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1)).double()
    x = functional.interpolate(draw(16, 1, 3, 3), (8, 8), mode="bilinear")
    y = (2 * x[:, 0] + 0.5 * draw(16, 8, 8, seed=1)).round().clamp(-1, 1).long() + 1
    y[:2, :4] = -100
    optimiser = torch.optim.Adam(model.parameters(), 0.03)
    for _ in range(60):
        optimiser.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model, x, y


@pytest.mark.parametrize("parameters", ["last_layer", None])
def test_some_sites_give_the_mean_of_all_and_nearly_their_covariance(parameters, monkeypatch):
    model, x, y = segmentation()

    def fit():
        options = {"class_dim": 1, "num_samples": 6, "g_prior": False, "tolerance": 0.02}
        la = LinearisedLaplace(model, Classification(), parameters=parameters, **options)
        return la.fit(list(zip(x.split(5), y.split(5))), progress_bar=False)

    whole = fit()
    monkeypatch.setattr(sites, "KEPT_OUTPUTS", 16 * 24 * 3)
    la = fit()
    assert "24 of 64 sites" in la.messages[-1] and "24 of" not in " ".join(whole.messages)
    names = [n for n, _ in model.named_parameters() if parameters is None or n.startswith("2.")]

    def outputs(w):
        parts = w.split([model.get_parameter(n).numel() for n in names])
        tangents = {n: part.view_as(model.get_parameter(n)) for n, part in zip(names, parts)}
        base = {n: model.get_parameter(n).detach() for n in names}
        forward = lambda p: torch.func.functional_call(model, p, (x,))  # noqa: E731
        return torch.func.jvp(forward, (base,), (tangents,))[1]

    def gap(w):
        """‖∇loss + Λ w‖ relative to ‖Λ w‖ without the variance of q: small but not 0."""
        w = w.clone().requires_grad_()
        loss = functional.cross_entropy(outputs(w), y, reduction="sum")
        gradient = torch.autograd.grad(loss, w)[0] + la.prior_precision * w.detach()
        return gradient.norm() / (la.prior_precision * w).norm()

    assert_close(la.prior_precision, whole.prior_precision, rtol=0.25, atol=0)
    assert gap(la.w_lin) < 2 * gap(whole.w_lin) + 0.1
    assert (la(x) - whole(x)).abs().max() < 0.1
    # without the weights of sites, the variance would be 64 / 24 times as large
    spread = [fitted.predict(x).variance.mean().log() for fitted in (la, whole)]
    assert abs(spread[0] - spread[1]) < 0.5


def test_the_search_for_a_mean_takes_as_many_passes_as_pay():
    scales, passes = torch.logspace(0, 3, 30).double(), []

    def objective(mean, *_):
        passes.append(mean)
        return 0.5 * (scales * (mean - 1) ** 2).sum().item(), scales * (mean - 1)

    def minimum(ends):
        passes.clear()
        search = AllSites(SimpleNamespace(dtype=torch.float64), None, None, None)
        search._objective = objective
        return search.minimum(torch.zeros(30).double(), 1.0, None, lambda g, _: g, ends)

    mean = minimum(lambda square: square < 1e-10)
    assert 20 < len(passes) < 200
    assert_close(mean, torch.ones(30).double(), rtol=1e-4, atol=0)
    minimum(lambda square: False)
    assert len(passes) < 250  # rounding is all that is left


@pytest.mark.slow
def test_the_search_for_a_mean_ends_in_time(monkeypatch):
    model, x, y = segmentation()
    monkeypatch.setattr(sites, "KEPT_OUTPUTS", 16 * 2 * 3)
    passes, objective = [], AllSites._objective
    monkeypatch.setattr(AllSites, "_objective", lambda *a: passes.append(a) or objective(*a))
    la = LinearisedLaplace(model, Classification(), class_dim=1, num_samples=4, g_prior=False)
    la.fit(list(zip(x.split(5), y.split(5))), progress_bar=False, budget=1e-3)
    assert len(passes) == 4  # at zero and at the trained weights, and one for each search
    assert any("budget" in text for text in la.messages)


@pytest.mark.slow
def test_a_fit_of_some_sites_resumes(monkeypatch, tmp_path):
    """The curvature that the search for the mean has learnt is not saved: it is learnt again."""
    model, x, y = segmentation()
    monkeypatch.setattr(sites, "KEPT_OUTPUTS", 16 * 24 * 3)

    def fit(**options):
        la = LinearisedLaplace(model, Classification(), class_dim=1, num_samples=6, g_prior=False)
        return la.fit(list(zip(x.split(5), y.split(5))), progress_bar=False, **options)

    whole, ends = fit(), iter([False, False, True])
    with monkeypatch.context() as patched:
        patched.setattr(Budget, "ends", lambda _: next(ends))
        cut = fit(budget=1e6, checkpoint=tmp_path)
    assert 0 < len(cut.history) < len(whole.history)
    la = fit(budget=1e6, checkpoint=tmp_path)
    assert len(la.history) >= len(whole.history) - 1 and la.accuracy.is_reached
    assert_close(la.prior_precision, whole.prior_precision, rtol=0.02, atol=0)
    spread = whole.predict(x).variance.sqrt()
    outputs = [each.predict(x, mean="linear").mean for each in (la, whole)]
    # means within the tolerance of a fit, in standard deviations of the posterior
    assert ((outputs[0] - outputs[1]) / spread).square().mean().sqrt() < 2 * la.accuracy.tolerance


def test_the_mean_is_that_of_all_sites_if_the_feature_of_a_few_is_not_kept(monkeypatch):
    torch.manual_seed(0)
    model, x = nn.Conv2d(4, 3, 1).double(), draw(12, 4, 16, 16)
    rare = torch.rand(12, 256) < 0.01
    rare = rare.scatter(1, Sites(8, 256, 0).of(torch.arange(12)), False).view(12, 16, 16)
    x[:, 3] = 20 * rare * (1 + draw(12, 16, 16, seed=1).abs())
    y = (x[:, :3] + draw(12, 3, 16, 16, seed=2)).argmax(1)
    y[rare] = torch.randint(3, (int(rare.sum()),))
    monkeypatch.setattr(sites, "KEPT_OUTPUTS", 12 * 8 * 3)
    options = {"class_dim": 1, "num_samples": 4, "g_prior": False, "parameters": "last_layer"}
    la = LinearisedLaplace(model, Classification(), **options)
    la.fit(list(zip(x.split(5), y.split(5))), progress_bar=False)

    def objective(w):
        f = functional.conv2d(x, w[:12].view(3, 4, 1, 1), w[12:])
        return functional.cross_entropy(f, y, reduction="sum") + la.prior_precision / 2 * w @ w

    gradient = torch.func.grad(objective)(la.w_lin)
    step = torch.linalg.solve(torch.func.hessian(objective)(la.w_lin), gradient)
    # the variance of q, which this objective has not, moves the mean by less than a standard deviation
    assert (gradient @ step).sqrt() < 1
