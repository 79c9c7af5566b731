"""Every member of a Prediction against a direct formula."""

import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny import Binomial, draw, prediction_of
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
from torch_lla_em.prediction.functions import FUNCTIONS, JOINT, functions_of
from torch_lla_em.prediction.mixture import FunctionMixture

K, B, C = 9, 4, 3
LABELS = torch.tensor([0, 2, 1, 1])


def prediction(likelihood, *sites, outputs=C, class_dim=-1, samples=K):
    deviations = draw(samples, B, *sites, outputs, seed=1)
    return prediction_of(likelihood, draw(B, *sites, outputs), deviations, class_dim)


def parts_of(p):
    return p.mixture.likelihoods, p.mixture.centres, p.mixture.deviations


def mixture(likelihood, *sites, class_dim=-1, weights=(0.5, 0.2, 0.3), samples=10):
    """A mixture of a posterior and of functions without uncertainty."""
    plain = prediction(likelihood, *sites, class_dim=class_dim, samples=samples)
    (kinds, centres, (deviations,)), functions = (
        parts_of(plain),
        draw(2, *plain.centre.shape, seed=7),
    )
    parts = kinds * 3, (*centres, *functions), (deviations, deviations[:0], deviations[:0])
    own = FunctionMixture(*parts, torch.tensor(weights).double(), (0,) * 3)
    return replace(plain, mixture=own)


def together(*predictions):
    """The mixture of several posteriors, as an ensemble has it."""
    parts = (sum(each, ()) for each in zip(*map(parts_of, predictions)))
    owners = tuple(i for i, p in enumerate(predictions) for _ in p.mixture.centres)
    weights = torch.cat([p.mixture.weights for p in predictions]) / len(predictions)
    return replace(predictions[0], mixture=FunctionMixture(*parts, weights, owners))


def functions_and_mean(p, at_least=FUNCTIONS):
    """The functions of all components, and the mean over them by the components' weights."""
    each = [
        c + functions_of(d, at_least) if len(d) else c[None]
        for c, d in zip(p.mixture.centres, p.mixture.deviations)
    ]
    weights = torch.cat([(w / len(f)).expand(len(f)) for w, f in zip(p.mixture.weights, each)])
    return torch.cat(each), lambda values: torch.tensordot(weights, values, 1)


BOTH = pytest.mark.parametrize("make", [prediction, mixture])


@BOTH
@pytest.mark.parametrize("class_dim", [-1, 1])
def test_classes_average_over_functions(make, class_dim):
    p = make(Classification(), 2, class_dim=class_dim)
    functions, mean = functions_and_mean(p)
    probs = functions.softmax(-1)
    assert_close(p.probs.movedim(class_dim, -1), mean(probs))
    assert_close(p.log_probs, p.probs.log())
    assert_close(p.predictive_variance, p.probs - p.probs.square())
    assert_close(p.entropy, Categorical(mean(probs)).entropy())
    assert_close(p.aleatoric, mean(Categorical(probs).entropy()))
    assert_close(p.epistemic, p.entropy - p.aleatoric)
    assert_close(p.mean.movedim(class_dim, -1), mean(functions))
    assert_close(p.variance.movedim(class_dim, -1), mean(functions**2) - mean(functions) ** 2)
    apart = functions - mean(functions)
    apart = (apart if class_dim == -1 else apart.movedim(-1, 2)).flatten(1)
    assert_close(p.covariance, mean(apart[:, :, None] * apart[:, None]))
    y = torch.tensor([[0, 2], [1, 1], [2, 0], [-100, 0]])
    index = y.clamp_min(0).expand(len(functions), B, 2)[..., None]
    each = functions.log_softmax(-1).gather(-1, index)[..., 0].where(y >= 0, 0.0).sum(-1)
    assert_close(p.log_prob(y), mean(each.exp()).log())


@BOTH
def test_labels_and_counts_average_over_functions(make):
    b, q = make(Bernoulli()), make(Poisson())
    functions, mean = functions_and_mean(b)  # those of both
    labels, rates = functions.sigmoid(), functions.exp()
    assert_close(b.probs, mean(labels))
    assert_close(b.log_probs, b.probs.log())
    assert_close(b.entropy, distributions.Bernoulli(b.probs).entropy())
    assert_close(b.epistemic, b.entropy - mean(distributions.Bernoulli(labels).entropy()))
    assert_close(q.expectation, mean(rates))
    assert_close(q.aleatoric, mean(rates))
    assert_close(q.epistemic, mean(rates**2) - mean(rates) ** 2)
    assert_close(q.predictive_variance, q.aleatoric + q.epistemic)
    for p, values in ((b, labels), (q, rates)):
        for end, share in zip(p.credible_interval(0.8), (0.1, 0.9)):
            below = mean((values <= end + 1e-9).double())
            assert ((below - share).abs() < 0.31).all()  # a function beside holds that much


def test_entropies_and_log_probs_at_the_edges():
    for likelihood in (Classification(), Bernoulli()):
        p = prediction_of(likelihood, torch.tensor([[-500.0, 0.0]]), torch.zeros(2, 1, 2))
        assert torch.isfinite(p.log_probs).all()
        assert_close(p.log_probs[0, 0].item(), -500.0)


@pytest.mark.parametrize("has_axis", [True, False])
def test_regression_has_moments_and_gaussian_densities(has_axis):
    """Of several units and sites, and of outputs without an axis of their own."""
    if has_axis:
        sigma = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
        p, noise = prediction(Regression(sigma), 2, class_dim=1), sigma.square()[:, None]
    else:
        p = prediction_of(Regression(0.5), draw(B), draw(K, B, seed=1))
        noise = torch.tensor(0.25).double()
    shape = p.mean.shape
    noise, y = noise.expand(shape), draw(*shape, seed=2)
    total = Normal(p.mean, (p.variance + noise).sqrt())
    assert_close(p.aleatoric.expand(shape), noise)
    assert_close(p.epistemic, p.variance)
    assert_close(p.expectation, p.mean)
    assert_close(p.predictive_variance, p.variance + noise)
    assert_close(p.entropy, total.entropy())
    each = total.log_prob(y)
    assert_close(p.log_prob(y), each.flatten(1).sum(1) if has_axis else each)
    assert p.covariance.shape == (y.numel(), y.numel())
    for level in (0.5, 0.95):
        lower, upper = p.credible_interval(level)
        assert_close(total.cdf(upper) - total.cdf(lower), torch.full_like(lower, level))
        assert_close(lower + upper, 2 * p.mean)
    dense = MultivariateNormal(p.mean.flatten(), p.covariance + noise.flatten().diag())
    assert_close(p.joint_log_prob(y), dense.log_prob(y.flatten()))
    assert (p.standard_error == 0).all()


def test_predicted_noise_splits_the_variance():
    p = prediction(HeteroscedasticRegression(), 2, outputs=4, class_dim=1)
    assert p.samples.shape == (K, B, 4, 2)
    functions = functions_and_mean(p)[0].movedim(-1, 2)
    mu, variance = functions[:, :, :2], functions[:, :, 2:].exp()
    assert_close(p.expectation, p.mean[:, :2])
    assert_close(p.aleatoric, variance.mean(0))
    assert_close(p.epistemic, mu.var(0, correction=0))
    assert_close(p.predictive_variance, p.aleatoric + p.epistemic)
    total = Normal(p.expectation, p.predictive_variance.sqrt())
    assert_close(p.entropy, total.entropy())
    assert_close(p.cdf(p.credible_interval(0.9).upper), torch.full((B, 2, 2), 0.95).double())
    y = draw(B, 2, 2, seed=3)
    densities = Normal(mu, variance.sqrt()).log_prob(y).flatten(2).sum(2).exp()
    assert_close(p.log_prob(y), densities.mean(0).log())
    functions = functions_and_mean(p, JOINT)[0].movedim(-1, 2)
    mu, variance = functions[:, :, :2], functions[:, :, 2:].exp()
    densities = Normal(mu, variance.sqrt()).log_prob(y).flatten(1).sum(1).exp()
    assert_close(p.joint_log_prob(y), densities.mean().log())


def test_intervals_of_probabilities_and_rates_are_quantiles_over_functions():
    for likelihood in (Bernoulli(), Poisson(), Classification(), Binomial()):
        p, shares = prediction(likelihood), torch.tensor([0.1, 0.9], dtype=torch.float64)
        due = likelihood.mean(functions_and_mean(p)[0]).quantile(shares, dim=0)
        assert_close(torch.stack(p.credible_interval(0.8)), due)
        one = prediction(likelihood, samples=1)
        ends = likelihood.mean(functions_and_mean(one)[0]).sort(0).values
        due = ends[:1].lerp(ends[1:], shares.view(2, 1, 1))
        assert_close(torch.stack(one.credible_interval(0.8)), due)


def test_joint_probabilities_are_averages_of_products():
    p, q = prediction(Classification()), prediction(Poisson())
    functions = functions_and_mean(p, JOINT)[0]
    products = functions.softmax(-1)[:, torch.arange(B), LABELS].prod(1)
    assert_close(p.joint_log_prob(LABELS), products.mean().log())
    counts = torch.tensor([[0.0, 1, 2]]).expand(B, 3).double()
    functions = functions_and_mean(q, JOINT)[0]
    densities = distributions.Poisson(functions.exp()).log_prob(counts).sum((1, 2)).exp()
    assert_close(q.joint_log_prob(counts), densities.mean().log())
    m = mixture(Classification())
    first = prediction_of(*(each[0] for each in parts_of(m)))
    own = first.joint_log_prob(LABELS).exp()
    one, two = (
        f.log_softmax(-1).gather(1, LABELS[:, None]).sum().exp() for f in m.mixture.centres[1:]
    )
    assert_close(m.joint_log_prob(LABELS).exp(), 0.5 * own + 0.2 * one + 0.3 * two)
    assert_close(m.standard_error, 0.5 * first.standard_error)
    sure = prediction_of(Classification(), p.centre, torch.zeros(1, B, C).double())
    each = p.centre.log_softmax(-1).gather(1, LABELS[:, None])[:, 0]
    assert_close(sure.log_prob(LABELS), each)
    assert_close(sure.joint_log_prob(LABELS), each.sum())


REGRESSION = Regression(0.5)
REFUSED = [
    *((ValueError, "level", partial(prediction(REGRESSION).credible_interval, n)) for n in (0.0, 1, -1)),
    (ValueError, "reshape", lambda: prediction(REGRESSION, 2, class_dim=1).log_prob(torch.zeros(B, 1))),
    (ValueError, "outside", lambda: prediction(Classification()).joint_log_prob(torch.full((B,), 7))),
    *((TypeError, "expectation", partial(getattr, prediction(kind, outputs=4), name))
      for kind in (REGRESSION, Poisson(), HeteroscedasticRegression()) for name in ("probs", "log_probs")),
    (NotImplementedError, "epistemic", lambda: prediction(Binomial()).entropy),
    (NotImplementedError, "aleatoric and .epistemic", lambda: prediction(Poisson()).entropy),
    *((TypeError, "not continuous", partial(getattr(prediction(Classification()), name), of))
      for name, of in (("cdf", LABELS), ("quantile", 0.5), ("crps", LABELS))),
    (ValueError, "q must lie between 0 and 1", lambda: prediction(REGRESSION).quantile(1.0)),
]  # fmt: skip


@pytest.mark.parametrize("error, words, call", REFUSED)
def test_what_a_prediction_cannot_say_raises(error, words, call):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("count", [1, 2, 5, 32, 300])
def test_functions_keep_covariance_and_mean(count):
    deviations = draw(count, 3, 4)
    drawn = functions_of(deviations)
    flat, samples = drawn.flatten(1), deviations.flatten(1)
    assert len(drawn) == 2 if count == 1 else len(drawn) >= max(2 * count, FUNCTIONS)
    assert_close(flat.T @ flat / len(flat), samples.T @ samples / count)
    assert_close(flat.mean(0), torch.zeros(12).double(), rtol=0, atol=1e-12)
    assert_close(drawn[:count], deviations)
    assert len(functions_of(torch.zeros(4, 2, 3000))) == 8  # mirror images only


def test_samples_of_mixtures_come_in_its_shares():
    p, other = mixture(Classification(), samples=200), mixture(Classification(), samples=50)
    for first in (20, 200):
        counts = [
            (p.samples[:first] == f).all(-1).all(-1).sum().item() for f in p.mixture.centres[1:]
        ]
        assert counts == pytest.approx([0.2 * first, 0.3 * first], abs=2)
    both = together(p, other)
    assert_close(both.probs, (p.probs + other.probs) / 2)
    assert_close(both.samples, torch.cat([p.samples, other.samples]))


def of_root(count, root, seed):
    """A prediction of so many samples of the same posterior."""
    deviations = torch.tensordot(draw(count, 6, seed=seed), root, 1)
    return prediction_of(Classification(), draw(len(root[0]), 3), deviations)


def test_averages_are_nearer_to_those_of_the_gaussian_and_say_their_error():
    """Against many samples, the error falls by more than a half; over repeats it is the standard error."""
    root = draw(6, 40, 3, seed=1)
    exact, drawn = (
        of_root(20_000, root, 2).probs,
        [of_root(32, root, seed) for seed in range(3, 23)],
    )
    plain = sum((p.samples.softmax(-1).mean(0) - exact).square().mean() for p in drawn)
    better = sum((p.probs - exact).square().mean() for p in drawn)
    assert (better / plain).sqrt() < 0.5
    drawn = [of_root(16, root, seed) for seed in range(2, 152)]
    spread = torch.stack([p.probs for p in drawn]).var(0).mean()
    said = torch.stack([p.standard_error for p in drawn]).square().mean()
    assert 0.9 < (said / spread).sqrt() < 1.3
    assert of_root(1, root, 0).standard_error.isnan().all()


def test_neither_chunks_nor_garbage_matter(monkeypatch):
    """Averages do not depend on the chunk size; predictions are freed without a collection."""
    p, y = prediction_of(Classification(), draw(7, 3), draw(4, 7, 3, seed=1)), torch.arange(7) % 3

    def everything():
        values = [p.probs, p.log_probs, p.entropy, p.epistemic, p.aleatoric, p.log_prob(y)]
        return [*values, p.joint_log_prob(y), *p.credible_interval()]

    whole = everything()
    monkeypatch.setattr("torch_lla_em.prediction.mixture.NUMBERS", 1)
    assert_close(everything(), whole)
    for make in (prediction, mixture):
        other = make(Classification())
        freed = weakref.ref(other)
        assert other.probs.shape == (B, C)
        del other
        assert freed() is None


def test_functions_first_used_in_inference_mode_can_be_differentiated():
    with torch.inference_mode():
        functions_of(torch.randn(11, 3, 1).double())
    deviations = torch.randn(11, 3, 1).double().requires_grad_()
    functions_of(deviations).square().sum().backward()
    assert deviations.grad is not None


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("likelihood", [Regression(0.7), HeteroscedasticRegression()])
def test_continuous_targets_have_cdf_quantiles_and_crps(likelihood, several):
    """Against numerical integration of the density, which is that of log_prob."""
    p = prediction(likelihood, outputs=2)
    if several:  # of which the second has another σ
        (kind,), (centre,), (deviations,) = parts_of(p)
        kind = kind if kind.observation_noise is None else Regression(0.2)
        p = together(p, prediction_of(kind, centre + 1, deviations[:0]))
    outputs, step = p.expectation.shape[1], 0.01
    grid = torch.arange(-40, 40, step, dtype=torch.float64).view(-1, 1, 1)
    density = p.mixture.gaussians()
    each = Normal(density.means[:, None], density.deviations[:, None]).log_prob(grid).exp()
    whole = (density.weights.view(-1, 1, 1, 1) * each).sum(0)
    if outputs == 1:  # the same density as that of log_prob
        at = ((draw(B, 1, seed=3) - grid).abs().argmin(0))[0, 0]
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


def test_samples_are_joint_over_inputs_and_labels_of_classes():
    p, generator = prediction(Regression(0.5)), torch.Generator().manual_seed(0)
    drawn = p.sample(20_000, generator).flatten(1) - p.mean.flatten()
    products = drawn[:, :, None] * drawn[:, None]
    due = p.covariance + 0.25 * torch.eye(B * C).double()
    assert ((products.mean(0) - due).abs() < 5 * products.std(0) / 20_000**0.5).all()
    p = mixture(Classification())
    drawn = p.sample(20_000, generator)
    shares = torch.nn.functional.one_hot(drawn, C).double().mean(0)
    assert drawn.shape == (20_000, B) and ((shares - p.probs).abs() < 0.05).all()
