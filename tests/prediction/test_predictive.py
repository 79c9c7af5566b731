"""Every member of a Prediction against a direct formula."""

import weakref
from dataclasses import replace
from math import log

import pytest
import torch
from tiny import Binomial, draw
from torch import distributions
from torch.distributions import Categorical, MultivariateNormal, Normal
from torch.testing import assert_close

from torch_lla_em.likelihoods import (
    Bernoulli,
    Classification,
    HeteroscedasticRegression,
    Poisson,
    Regression,
)
from torch_lla_em.prediction.functions import (
    FUNCTIONS,
    JOINT,
    functions_of,
    number_of_functions,
    redrawn,
)
from torch_lla_em.prediction.mixture import FunctionMixture
from torch_lla_em.prediction.prediction import Prediction

K, B, C = 9, 4, 3


def prediction(likelihood, *sites, outputs=C, class_dim=-1):
    return Prediction.of(
        likelihood, draw(B, *sites, outputs), draw(K, B, *sites, outputs, seed=1), class_dim
    )


def mixture(likelihood, *sites, class_dim=-1):
    plain = prediction(likelihood, *sites, class_dim=class_dim)
    plain = with_samples(plain, draw(10, *plain.centre.shape, seed=1))
    return with_certain(plain, draw(2, B, *sites, C, seed=7))


def with_samples(p, deviations):
    return Prediction.of(p.likelihood, p.centre, deviations, p.class_dim)


def with_certain(posterior, functions, weights=(0.5, 0.2, 0.3)):
    """A mixture of a posterior and of functions without uncertainty."""
    (part,) = posterior.mixture.components
    certain = (part._replace(centre=f, deviations=part.deviations[:0]) for f in functions)
    mixture = FunctionMixture((part, *certain), torch.tensor(weights).double())
    return replace(posterior, mixture=mixture)


def together(*predictions):
    """The mixture of several posteriors, as an ensemble has it."""
    parts = [
        part._replace(posterior=number)
        for number, p in enumerate(predictions)
        for part in p.mixture.components
    ]
    weights = torch.cat([p.mixture.weights for p in predictions]) / len(predictions)
    return replace(predictions[0], mixture=FunctionMixture(tuple(parts), weights))


def reweighted(p, *weights):
    return replace(p, mixture=replace(p.mixture, weights=torch.tensor(weights).double()))


def deviations_of(p):
    return p.mixture.components[0].deviations


BOTH = pytest.mark.parametrize("make", [prediction, mixture])


@BOTH
@pytest.mark.parametrize("class_dim", [-1, 1])
def test_classes_average_over_functions(make, class_dim):
    p = make(Classification(), 2, class_dim=class_dim)
    assert make is prediction or len(p.functions) == 2 * number_of_functions(deviations_of(p))
    functions = p.functions.movedim(class_dim if class_dim < 0 else class_dim + 1, -1)
    probs = functions.softmax(-1)
    assert_close(p.probs.movedim(class_dim, -1), probs.mean(0))
    assert_close(p.log_probs, p.probs.log())
    assert_close(p.predictive_variance, p.probs - p.probs.square())
    assert_close(p.entropy, Categorical(probs.mean(0)).entropy())
    assert_close(p.aleatoric, Categorical(probs).entropy().mean(0))
    assert_close(p.epistemic, p.entropy - p.aleatoric)
    assert_close(p.mean.movedim(class_dim, -1), functions.mean(0))
    assert_close(p.variance.movedim(class_dim, -1), functions.var(0, correction=0))
    apart = (p.functions - p.mean).flatten(1)
    assert_close(p.covariance, apart.T @ apart / len(apart))
    y = torch.tensor([[0, 2], [1, 1], [2, 0], [-100, 0]])
    index = y.clamp_min(0).expand(len(functions), B, 2)[..., None]
    each = functions.log_softmax(-1).gather(-1, index)[..., 0].where(y >= 0, 0.0).sum(-1)
    assert_close(p.log_prob(y), each.exp().mean(0).log())


@BOTH
def test_labels_and_counts_average_over_functions(make):
    b, q = make(Bernoulli()), make(Poisson())
    labels, rates = b.functions.sigmoid(), q.functions.exp()
    assert_close(b.probs, labels.mean(0))
    assert_close(b.log_probs, b.probs.log())
    assert_close(b.entropy, distributions.Bernoulli(b.probs).entropy())
    assert_close(b.epistemic, b.entropy - distributions.Bernoulli(labels).entropy().mean(0))
    assert_close(q.expectation, rates.mean(0))
    assert_close(q.aleatoric, rates.mean(0))
    assert_close(q.epistemic, rates.var(0, correction=0))
    assert_close(q.predictive_variance, rates.mean(0) + rates.var(0, correction=0))


def test_intervals_of_mixtures_are_quantiles():
    for p, link in ((mixture(Bernoulli()), torch.sigmoid), (mixture(Poisson()), torch.exp)):
        for end, share in zip(p.credible_interval(0.8), (0.1, 0.9)):
            below = (link(p.functions) <= end + 1e-9).double().mean(0)
            assert ((below - share).abs() < 0.31).all()  # a function beside holds that much


def test_log_probs_of_certain_outputs_are_finite():
    centre = torch.tensor([[500.0, 0.0]])
    for likelihood in (Classification(), Bernoulli()):
        p = Prediction.of(likelihood, -centre, torch.zeros(2, 1, 2))
        assert torch.isfinite(p.log_probs).all()
        assert_close(p.log_probs[0, 0].item(), -500.0)


def test_entropy_of_counts_sums_over_counts():
    p = prediction(Poisson())
    counts = torch.arange(200.0, dtype=torch.float64).view(-1, 1, 1, 1)
    mixture = distributions.Poisson(p.functions.exp()).log_prob(counts).exp().mean(1)
    assert_close(p.entropy, -torch.special.xlogy(mixture, mixture).sum(0))
    with pytest.raises(ValueError, match="too many counts"):
        Prediction.of(Poisson(), torch.full((1, 1), 20.0), torch.zeros(2, 1, 1)).entropy


def test_regression_has_moments():
    sigma = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    p = prediction(Regression(sigma), 2, class_dim=1)
    noise = (sigma**2).view(1, 3, 1).expand(B, 3, 2)
    assert_close(p.aleatoric, noise)
    assert_close(p.epistemic, p.variance)
    assert_close(p.expectation, p.mean)
    assert_close(p.predictive_variance, p.variance + noise)
    total = Normal(p.mean, (p.variance + noise).sqrt())
    assert_close(p.entropy, total.entropy())
    for level in (0.5, 0.95):
        lower, upper = p.credible_interval(level)
        assert_close(total.cdf(upper) - total.cdf(lower), torch.full_like(lower, level))
        assert_close(lower + upper, 2 * p.mean)


def test_predicted_noise_splits_the_variance():
    p = prediction(HeteroscedasticRegression(), 2, outputs=4, class_dim=1)
    assert p.samples.shape == (K, B, 4, 2)
    samples = p.functions
    mu, variance = samples[:, :, :2], samples[:, :, 2:].exp()
    assert_close(p.expectation, p.mean[:, :2])
    assert_close(p.aleatoric, variance.mean(0))
    assert_close(p.epistemic, mu.var(0, correction=0))
    assert_close(p.predictive_variance, p.aleatoric + p.epistemic)
    total = Normal(p.expectation, p.predictive_variance.sqrt())
    assert_close(p.entropy, total.entropy())
    assert_close(p.credible_interval(0.9).upper, total.icdf(torch.tensor(0.95).double()))
    y = draw(B, 2, 2, seed=3)
    densities = Normal(mu, variance.sqrt()).log_prob(y).flatten(2).sum(2).exp()
    assert_close(p.log_prob(y), densities.mean(0).log())
    functions = (p.centre + functions_of(deviations_of(p), JOINT)).movedim(-1, 2)
    mu, variance = functions[:, :, :2], functions[:, :, 2:].exp()
    densities = Normal(mu, variance.sqrt()).log_prob(y).flatten(1).sum(1).exp()
    assert_close(p.joint_log_prob(y), densities.mean().log())


@pytest.mark.parametrize("likelihood", [Bernoulli(), Poisson()])
def test_intervals_of_monotone_links_are_those_of_f(likelihood):
    p = prediction(likelihood)
    f = Normal(p.mean, p.variance.sqrt())
    ends = [likelihood.mean(f.icdf(torch.tensor(q, dtype=torch.float64))) for q in (0.1, 0.9)]
    for end, expected in zip(p.credible_interval(0.8), ends):
        assert_close(end, expected)


@pytest.mark.parametrize("likelihood", [Classification(), Binomial()])
def test_intervals_of_other_links_are_quantiles(likelihood):
    p = prediction(likelihood)
    expected = likelihood.mean(p.functions).quantile(
        torch.tensor([0.1, 0.9], dtype=torch.float64), dim=0
    )
    assert_close(torch.stack(p.credible_interval(0.8)), expected)
    one = with_samples(p, deviations_of(p)[:1])
    ends = likelihood.mean(one.functions).sort(0).values
    assert_close(
        torch.stack(one.credible_interval(0.9)),
        ends[:1].lerp(ends[1:], torch.tensor([0.05, 0.95]).double().view(2, 1, 1)),
    )


@pytest.mark.parametrize("level", [0.0, 1.0, -1, 2])
def test_levels_are_probabilities(level):
    with pytest.raises(ValueError, match="level"):
        prediction(Regression()).credible_interval(level)


def test_log_prob_of_continuous_targets_is_gaussian():
    p = prediction(Regression(0.7), 2, class_dim=1)
    y = draw(B, C, 2, seed=2)
    expected = Normal(p.mean, (p.variance + 0.49).sqrt()).log_prob(y).flatten(1).sum(1)
    assert_close(p.log_prob(y), expected)


@pytest.mark.parametrize("class_dim", [-1, 1])
def test_joint_density_is_the_dense_gaussian(class_dim):
    p = prediction(Regression(0.7), 2, class_dim=class_dim)
    y = draw(*p.mean.shape, seed=2)
    dense = p.covariance + 0.49 * torch.eye(B * C * 2).double()
    expected = MultivariateNormal(p.mean.flatten(), dense).log_prob(y.flatten())
    assert_close(p.joint_log_prob(y), expected)


def test_joint_probability_is_the_average_of_products():
    p = prediction(Classification())
    y = torch.tensor([0, 2, 1, 1])
    functions = p.centre + functions_of(deviations_of(p), JOINT)
    product = torch.ones(len(functions), dtype=torch.float64)
    for row in range(B):
        product *= functions[:, row].softmax(-1)[:, y[row]]
    assert_close(p.joint_log_prob(y), product.mean().log())
    counts = torch.tensor([[0.0, 1, 2]]).expand(B, 3).double()
    q = prediction(Poisson())
    functions = q.centre + functions_of(deviations_of(q), JOINT)
    densities = distributions.Poisson(functions.exp()).log_prob(counts).sum((1, 2)).exp()
    assert_close(q.joint_log_prob(counts), densities.mean().log())


def test_outputs_without_an_axis_of_their_own():
    centre, deviations, y = draw(B), draw(K, B, seed=1), draw(B, seed=2)
    p = Prediction.of(Regression(0.5), centre, deviations)
    total = Normal(centre, (deviations.square().mean(0) + 0.25).sqrt())
    assert_close(p.log_prob(y), total.log_prob(y))
    assert_close(p.entropy, total.entropy())
    assert p.joint_log_prob(y).shape == ()
    assert p.covariance.shape == (B, B)


def test_targets_are_checked():
    p = prediction(Regression(0.5), 2, class_dim=1)
    with pytest.raises(ValueError, match="reshape"):
        p.log_prob(torch.zeros(B, 1))
    with pytest.raises(ValueError, match="outside"):
        prediction(Classification()).joint_log_prob(torch.full((B,), 7))


def test_probit_uses_the_variance_alone():
    p = prediction(Classification(), 2, class_dim=1)
    scaled = p.mean / (1 + torch.pi / 8 * p.variance).sqrt()
    assert_close(p.smoothed(), scaled.softmax(1))
    q = prediction(Poisson())
    assert_close(q.smoothed(), (q.mean + 0.5 * q.variance).exp())


@pytest.mark.parametrize("likelihood", [Regression(), Poisson(), HeteroscedasticRegression()])
@pytest.mark.parametrize("name", ["probs", "log_probs"])
def test_probs_raise_for_other_likelihoods(likelihood, name):
    with pytest.raises(TypeError, match="expectation"):
        getattr(prediction(likelihood, outputs=4), name)


def test_a_likelihood_without_an_entropy_raises():
    with pytest.raises(NotImplementedError, match="epistemic"):
        prediction(Binomial()).entropy


def test_fresh_samples_keep_the_covariance():
    p = prediction(Classification())
    generator = torch.Generator().manual_seed(0)
    many = torch.stack([redrawn(deviations_of(p), generator) for _ in range(1000)]).flatten(0, 1)
    products = many.flatten(1)[:, :, None] * many.flatten(1)[:, None]
    error = products.std(0) / len(many) ** 0.5
    assert ((products.mean(0) - p.covariance).abs() < 5 * error).all()


def test_one_sample_is_enough_for_a_density():
    p = prediction(Classification())
    one = with_samples(p, 0 * deviations_of(p)[:1])
    y = torch.tensor([0, 2, 1, 1])
    assert_close(one.log_prob(y), p.centre.log_softmax(-1).gather(1, y[:, None])[:, 0])
    assert_close(one.log_prob(y).sum() - log(1), one.joint_log_prob(y))


def test_joint_probabilities_of_mixtures_are_averages_of_products():
    p, y = mixture(Classification()), torch.tensor([0, 2, 1, 1])
    first, *rest = p.mixture.components
    own = Prediction.of(*first[:3]).joint_log_prob(y).exp()
    certain = [torch.log_softmax(part.centre, -1) for part in rest]
    probs = [each.gather(1, y[:, None]).sum().exp() for each in certain]
    assert_close(p.joint_log_prob(y).exp(), 0.5 * own + 0.2 * probs[0] + 0.3 * probs[1])


def test_samples_of_mixtures_come_in_its_shares():
    plain = with_samples(prediction(Classification()), draw(200, B, C, seed=1))
    certain = draw(2, B, C, seed=7)
    p = with_certain(plain, certain)
    for first in (20, 200):
        counts = [(p.samples[:first] == f).all(-1).all(-1).sum().item() for f in certain]
        assert counts == pytest.approx([0.2 * first, 0.3 * first], abs=2)


def test_smoothed_mixtures_average_the_parts():
    p = mixture(Classification())
    first, *rest = p.mixture.components
    own = Prediction.of(*first[:3])
    parts = [own.smoothed(), *(part.centre.softmax(-1) for part in rest)]
    assert_close(p.smoothed(), sum(w * part for w, part in zip(p.mixture.weights, parts)))
    assert_close(p.standard_error, 0.5 * own.standard_error)


def test_the_standard_error_is_that_of_the_samples():
    """Of many draws of K samples the probabilities spread by it."""
    centre, root = draw(30, 3), draw(6, 30, 3, seed=1)
    drawn = []
    for seed in range(2, 202):
        drawn.append(
            Prediction.of(
                Classification(), centre, torch.tensordot(draw(16, 6, seed=seed), root, 1)
            )
        )
    spread = torch.stack([p.probs for p in drawn]).std(0)
    said = torch.stack([p.standard_error for p in drawn]).square().mean(0).sqrt()
    ratio = (said.square().mean() / spread.square().mean()).sqrt()
    assert 0.9 < ratio < 1.3
    one = Prediction.of(Classification(), centre, root[:1])
    assert one.standard_error.isnan().all()
    assert (prediction(Regression()).standard_error == 0).all()


def test_functions_of_a_rare_posterior_stay_few():
    p = reweighted(mixture(Classification()), 0.01, 0.49, 0.5)
    assert_close(p.functions.softmax(-1).mean(0), p.probs, rtol=0, atol=0.01)
    assert len(p.functions) < 1100


def test_functions_of_mixtures_of_mixtures_have_equal_weights():
    p = mixture(Classification())
    rare = reweighted(p, 0.05, 0.45, 0.5)
    both = together(p, rare)
    assert_close(both.functions.softmax(-1).mean(0), both.probs, rtol=0, atol=0.01)
    assert_close(both.probs, (p.probs + rare.probs) / 2)


@pytest.mark.parametrize("count", [1, 2, 5, 32, 300])
def test_functions_keep_covariance_and_mean(count):
    deviations = draw(count, 3, 4)
    drawn = functions_of(deviations)
    flat, samples = drawn.flatten(1), deviations.flatten(1)
    assert len(drawn) == 2 if count == 1 else len(drawn) >= max(2 * count, FUNCTIONS)
    assert_close(flat.T @ flat / len(flat), samples.T @ samples / count)
    assert_close(flat.mean(0), torch.zeros(12).double(), rtol=0, atol=1e-12)
    assert_close(drawn[:count], deviations)


def test_many_outputs_use_mirror_images_only():
    assert len(functions_of(torch.zeros(4, 2, 3000))) == 8


def test_averages_do_not_depend_on_the_chunk_size(monkeypatch):
    p, y = Prediction.of(Classification(), draw(7, 3), draw(4, 7, 3, seed=1)), torch.arange(7) % 3

    def everything():
        values = [p.probs, p.log_probs, p.entropy, p.epistemic, p.aleatoric, p.log_prob(y)]
        return [*values, p.joint_log_prob(y), *p.credible_interval()]

    whole = everything()
    monkeypatch.setattr("torch_lla_em.prediction.mixture._NUMBERS", 1)
    for few, all_at_once in zip(everything(), whole):
        assert_close(few, all_at_once)


def test_averages_are_nearer_to_those_of_the_gaussian():
    """Against many samples: the error of probabilities falls by more than a half."""
    centre, root = draw(40, 3), draw(6, 40, 3, seed=1)
    truth = Prediction.of(
        Classification(), centre, torch.tensordot(draw(20_000, 6, seed=2), root, 1)
    )
    exact, plain, better = truth.probs, 0.0, 0.0
    for seed in range(3, 23):
        p = Prediction.of(
            Classification(), centre, torch.tensordot(draw(32, 6, seed=seed), root, 1)
        )
        plain += (p.predictive_samples.mean(0) - exact).square().mean()
        better += (p.probs - exact).square().mean()
    assert (better / plain).sqrt() < 0.5


@BOTH
def test_predictions_are_freed_without_garbage_collection(make):
    p = make(Classification())
    freed = weakref.ref(p)
    assert p.probs.shape == (B, C) and len(p.functions) > K
    del p
    assert freed() is None


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("likelihood", [Regression(0.7), HeteroscedasticRegression()])
def test_continuous_targets_have_cdf_quantiles_and_crps(likelihood, several):
    """Against numerical integration of the density, which is that of log_prob."""
    p = Prediction.of(likelihood, draw(B, 2), draw(K, B, 2, seed=1))
    if several:  # of which the second has another σ
        (part,) = prediction(likelihood, outputs=2).mixture.components
        other = part._replace(centre=part.centre + 1, deviations=part.deviations[:0])
        if likelihood.observation_noise is not None:
            other = other._replace(likelihood=Regression(0.2))
        p = together(p, replace(p, mixture=FunctionMixture((other,), torch.ones(1).double())))
    outputs = p.expectation.shape[1]
    step = 0.01
    grid = torch.arange(-40, 40, step, dtype=torch.float64).view(-1, 1, 1)
    density = p.mixture.gaussians()
    each = Normal(density.means[:, None], density.deviations[:, None]).log_prob(grid).exp()
    whole = (density.weights.view(-1, 1, 1, 1) * each).sum(0)
    if outputs == 1:  # the same density as that of log_prob
        y = draw(B, 1, seed=3)
        at = ((y - grid).abs().argmin(0))[0, 0]
        assert_close(whole[at, 0, 0].log(), p.log_prob(grid[at].expand(B, 1))[0], rtol=1e-6, atol=0)
    cdf = (step * whole).cumsum(0) - 0.5 * step * whole
    for y in (draw(B, outputs, seed=3), 5 * draw(B, outputs, seed=4)):
        at = (y - grid).abs().argmin(0)
        near = grid[:, 0, 0][at]
        assert_close(p.cdf(near), cdf.gather(0, at[None])[0], rtol=0, atol=1e-4)
        crps = (step * (cdf - (grid >= near).double()).square()).sum(0)
        assert_close(p.crps(near), crps, rtol=0, atol=1e-2)
    for share in (0.02, 0.5, 0.9):
        assert_close(p.cdf(p.quantile(share)), torch.full((B, outputs), share).double())
    drawn = p.sample(4000, torch.Generator().manual_seed(0))
    assert drawn.shape == (4000, B, outputs)
    below = (drawn <= p.quantile(0.3)).double().mean(0)
    assert ((below - 0.3).abs() < 5 * (0.21 / 4000) ** 0.5 + 0.03).all()


def test_samples_of_targets_are_labels_and_other_targets_have_no_cdf():
    p = mixture(Classification())
    drawn = p.sample(20_000, torch.Generator().manual_seed(0))
    shares = torch.nn.functional.one_hot(drawn, C).double().mean(0)
    assert drawn.shape == (20_000, B) and ((shares - p.probs).abs() < 0.05).all()
    for ask in (lambda: p.cdf(drawn[0]), lambda: p.quantile(0.5), lambda: p.crps(drawn[0])):
        with pytest.raises(TypeError, match="not continuous"):
            ask()
    with pytest.raises(ValueError, match="q must lie between 0 and 1"):
        prediction(Regression(0.7)).quantile(1.0)
