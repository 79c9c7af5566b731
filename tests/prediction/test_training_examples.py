"""Training examples that a fit keeps: distances to them, and means that are shrunk far from them."""

import pytest
import torch
from models import trained
from tiny import draw
from torch import nn
from torch.testing import assert_close

from torch_lla_em import LaplaceEnsemble, LinearisedLaplace
from torch_lla_em.likelihoods import Bernoulli, Classification
from torch_lla_em.prediction.pushed import Products, push_forward
from torch_lla_em.prediction.training_examples import TrainingExamples, output_variance


@pytest.fixture(scope="module")
def fitted():
    torch.manual_seed(0)
    x = draw(60, 3)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    la = LinearisedLaplace(trained(net, x, y, 100), "classification", num_samples=8)
    return la.fit(x, y, progress_bar=False), x, y


def test_a_fit_keeps_the_products_of_its_training_examples(fitted):
    la, x, _ = fitted
    _, Jw = push_forward(la._linear_model, x, la.w_samples)
    assert_close(la.training_deviations, Jw.movedim(0, 1), rtol=1e-6, atol=1e-9)
    assert_close(la.largest_variance, output_variance(la.likelihood, Jw).max())


def test_the_distance_is_the_standard_deviation_of_a_difference():
    known, new = draw(5, 6, 3), draw(6, 4, 3, seed=1)

    def examples(likelihood, deviations=known):
        return TrainingExamples(likelihood, deviations, torch.tensor(1.0))

    apart = new[:, :, None] - known.movedim(0, 1)[:, None]  # (6, 4, 5, 3)
    every = apart.square().sum(-1).mean(0).sqrt()
    assert_close(examples(Bernoulli()).distance(new), every.min(1).values)
    shifted = examples(Classification()).distance(new + draw(6, 4, 1, seed=2))
    assert_close(shifted, examples(Classification()).distance(new))
    others = [
        examples(Bernoulli(), torch.cat([known[:i], known[i + 1 :]])).distance(
            known[i : i + 1].movedim(0, 1)
        )
        for i in range(5)
    ]
    assert_close(examples(Bernoulli()).distances(), torch.cat(others))


def test_means_are_shrunk_beyond_the_variance_of_training_examples_only(fitted):
    la, x, _ = fitted
    inside, far = la.predict(x), la.predict(20 * x)
    f, Jw = push_forward(la._linear_model, x, la.w_lin[None], la.w_samples)
    plain = Products(la.likelihood, f, Jw).prediction(la.mixture)
    assert_close(inside.probs, plain.probs)
    f, Jw = push_forward(la._linear_model, 20 * x, la.w_lin[None], la.w_samples)
    plain = Products(la.likelihood, f, Jw).prediction(la.mixture)
    variance = output_variance(la.likelihood, Jw[1:])
    share = (la.largest_variance / variance).clamp_max(1)
    assert (share < 0.5).any()
    assert_close(far.mean, share[:, None] * plain.mean)
    assert_close(far.deviations, plain.deviations)
    assert far.probs.max(1).values.mean() < plain.probs.max(1).values.mean() - 0.05


def test_functions_are_those_of_the_samples(fitted):
    la, x, _ = fitted
    at = torch.cat([x[:5], 20 * x[:5]])
    found = torch.stack([la.function_sample(k)(at) for k in range(8)])
    assert_close(found, la.predict(at).samples)


def test_an_ensemble_takes_the_mean_of_the_distances(fitted):
    la, x, y = fitted
    other = LinearisedLaplace(la.model, "classification", num_samples=4, seed=1)
    other.fit(x, y, progress_bar=False)
    ensemble = LaplaceEnsemble([la, other]).calibrate(draw(40, 3, seed=3), y[:40])
    distances = [member.predict(x).nearest() for member in (la, other)]
    assert_close(ensemble.predict(x)._ood_scores()[:, 0], torch.stack(distances).mean(0))
    assert (ensemble.predict(30 * x).p_value <= 0.1).double().mean() > 0.8
