"""Labelled sites of dense outputs become rows with weights; of many, some at random."""

import pytest
import torch
from daily import daily
from models import trained
from tiny import batched, draw, posterior_of, problem_of
from torch import nn
from torch.testing import assert_close

from torch_lla_em import Classification, Compute
from torch_lla_em.data import Batch
from torch_lla_em.problem import sites
from torch_lla_em.problem.sites import Sites

IMAGES, SIDE = 16, 8


def segmentation():
    """Images with a label for most pixels, and a trained network of 1 x 1 convolutions, in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 1), nn.Tanh(), nn.Conv2d(4, 3, 1)).double()
    x = draw(IMAGES, 2, SIDE, SIDE)
    y = (x[:, 0] + 0.5 * draw(IMAGES, SIDE, SIDE, seed=1)).round().clamp(-1, 1).long() + 1
    y[:2, :4] = -100
    y[2:4] = -100
    return trained(model, x, y, 60, 0.03), x, y


def in_rows(model, x, y):
    """The same network with its labelled pixels as examples."""
    flat = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    for linear, conv in ((flat[0], model[0]), (flat[2], model[2])):
        linear.weight.data.copy_(conv.weight.data[..., 0, 0])
        linear.bias.data.copy_(conv.bias.data)
    known = y != -100
    return flat, x.movedim(1, -1)[known], y[known]


def fit(model, x, y, **options):
    options |= {"prior": "isotropic", "compute": Compute(tolerance=0.02)}
    return posterior_of(model, Classification(), batched(5, x, y), num_samples=6, **options)


@pytest.mark.parametrize("parameters", daily("last_layer", rest=[None]))
def test_all_labelled_sites_are_the_rows_if_there_is_room(parameters, monkeypatch):
    model, x, y = segmentation()
    flat, rows, labels = in_rows(model, x, y)
    monkeypatch.setattr(sites, "KEPT_OUTPUTS", 3 * len(labels))  # fewer than there are outputs
    la = fit(model, x, y, class_dim=1, parameters=parameters)
    due = fit(flat, rows, labels, parameters=parameters)
    # the random numbers of H's draws differ
    assert_close(la.effective_dim, due.effective_dim, rtol=0.03, atol=0)
    assert_close(la.prior_precision, due.prior_precision, rtol=0.1, atol=0)
    expected = due.predict(x[5:7].movedim(1, -1).flatten(0, -2)).probs
    apart = la.predict(x[5:7]).probs.movedim(1, -1).reshape(-1, 3) - expected
    assert apart.abs().mean() < 0.01 and apart.abs().max() < 0.1


def test_sums_over_sites_are_unbiased_and_respect_labels_and_weights(monkeypatch):
    model, x, y = segmentation()
    weights = 1 + torch.rand(y.shape, generator=torch.Generator().manual_seed(0)).double()
    flat, x = in_rows(model, x, y)[0], x.movedim(1, -1)
    problem = problem_of(flat, Classification(), [(x, y, weights)], weights="last")
    batch = Batch(0, torch.arange(IMAGES), x, y, weights=weights)
    f = flat(x).detach()
    problem.loss_and_gradient(problem.zeros(1)[0])
    whole, found = problem.loss(y, weights).value(f).item(), []
    monkeypatch.setattr(sites, "KEPT_OUTPUTS", 300)
    for seed in range(200):
        few = sites.sites_of(problem, seed)
        rows, at, Jw = few.take(problem, batch, f, f[None])
        assert (rows.targets != -100).all() and len(rows.rows) <= 1.3 * 100
        assert torch.equal(at, Jw[0]) and len(set(rows.rows.tolist())) == len(at)
        found.append(problem.loss(rows.targets, rows.weights).value(at).item())
    values = torch.tensor(found)
    assert abs(values.mean() - whole) < 4 * values.std() / 200**0.5
    assert values.std() < 0.3 * whole
    rest = batch._replace(rows=batch.rows[5:], targets=y[5:], weights=weights[5:])
    again = few.take(problem, rest, f[5:], f[None, 5:])
    assert torch.equal(again[1], at[rows.rows >= 5 * few.most])


def test_a_few_labels_in_one_image_are_all_kept():
    y = torch.full((3, 10), -100)
    y[1, [2, 7, 9]] = 1
    problem = problem_of(nn.Linear(2, 2), Classification(), [(torch.zeros(3, 10, 2), y)])
    batch = Batch(0, torch.arange(3), None, y)
    f, none = torch.arange(60.0).view(3, 10, 2), torch.zeros(1, 3, 10, 2)
    rows, f, _ = Sites(1.0, 3, 6, 0).take(problem, batch, f, none)
    assert rows.rows.tolist() == [3, 4, 5] and rows.weights.tolist() == [1, 1, 1]
    assert_close(f[:, 0], torch.tensor([24.0, 34.0, 38.0]))


def test_images_of_which_some_sites_were_kept_are_calibrated_and_have_distances(monkeypatch):
    torch.manual_seed(0)
    x, net = draw(10, 2, 6, 6).float(), nn.Conv2d(2, 2, 1)
    y = (x[:, 0] + draw(10, 6, 6, seed=1) > 0).long()
    for most in (200, sites.KEPT_OUTPUTS):
        monkeypatch.setattr(sites, "KEPT_OUTPUTS", most)
        la = posterior_of(net, Classification(), x[:7], y[:7], class_dim=1).calibrate(x[7:], y[7:])
        assert la.predict(x[:2]).p_value.isfinite().all()
    with pytest.raises(ValueError, match="their distances cannot be compared"):  # of another size
        la.predict(draw(2, 2, 8, 8).float()).p_value


@pytest.mark.slow
def test_some_sites_give_nearly_the_covariance_of_all(monkeypatch):
    model, x, y = segmentation()
    whole = fit(model, x, y, class_dim=1)
    monkeypatch.setattr(sites, "KEPT_OUTPUTS", IMAGES * 24 * 3)
    la = fit(model, x, y, class_dim=1)
    assert_close(la.prior_precision, whole.prior_precision, rtol=0.4, atol=0)
    assert (la(x) - whole(x)).abs().mean() < 0.05  # the mean is that of the kept sites
    # without the weights of sites, the variance would be 64 / 24 times as large
    spread = [fitted.predict(x).f_variance.mean().log() for fitted in (la, whole)]
    assert abs(spread[0] - spread[1]) < 0.5
