"""Every member of a Prediction against a direct formula."""

import weakref
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
from torch_lla_em.prediction import Prediction, functions_of
from torch_lla_em.prediction.mixture import FUNCTIONS, JOINT, Component, Mixture, rotated

K, B, C = 9, 4, 3
LABELS = torch.tensor([0, 2, 1, 1])


def prediction(likelihood, *sites, outputs=C, class_dim=-1, samples=K):
    deviations = draw(samples, B, *sites, outputs, seed=1)
    return prediction_of(likelihood, draw(B, *sites, outputs), deviations, class_dim)


def mixture(likelihood, *sites, outputs=C, class_dim=-1, weights=(0.5, 0.2, 0.3), samples=10):
    """A mixture of a posterior and of functions without uncertainty."""
    plain = prediction(likelihood, *sites, outputs=outputs, class_dim=class_dim, samples=samples)
    (first,), functions = plain._mixture.components, draw(2, *plain._f.shape, seed=7)
    none = first.deviations[:0]
    parts = [first._replace(weight=weights[0])]
    for f, weight in zip(functions, weights[1:], strict=True):
        parts.append(Component(likelihood, f, none, weight))
    return Prediction(Mixture(tuple(parts)), class_dim)


def together(*predictions):
    """The mixture of several posteriors, as an ensemble has it."""
    every = [(i, part) for i, p in enumerate(predictions) for part in p._mixture.components]
    share = len(predictions)
    parts = (part._replace(weight=part.weight / share, owner=i) for i, part in every)
    return Prediction(Mixture(tuple(parts)), predictions[0]._class_dim)


def functions_and_mean(p, at_least=FUNCTIONS):
    """The functions of all components, and the mean over them by the components' weights."""
    parts = [(c, d) for _, c, d, *_ in p._mixture.components]
    each = [c + rotated(d, at_least) if len(d) else c[None] for c, d in parts]
    pairs = zip(p._mixture.weights, each, strict=True)
    weights = torch.cat([(w / len(f)).expand(len(f)) for w, f in pairs])
    return torch.cat(each), lambda values: torch.tensordot(weights, values, 1)


def of_heteroscedastic(f):
    mean, log_variance = f.chunk(2, -1)
    return Normal(mean, (0.5 * log_variance).exp())


# likelihood: (the distribution of y given f, targets of two sites, or of none)
KINDS = {
    Classification(): (lambda f: Categorical(logits=f), torch.tensor([[0, 2], [1, 1], [2, 0], [-100, 0]])),
    Bernoulli(): (lambda f: distributions.Bernoulli(logits=f), (draw(B, 2, 4, seed=5) > 0).double()),
    Poisson(): (lambda f: distributions.Poisson(f.exp()), draw(B, 2, 4, seed=5).exp().round()),
    Binomial(): (lambda f: distributions.Binomial(3, logits=f), 3 * (draw(B, 4, seed=5) > 0).double()),
    HeteroscedasticRegression(): (of_heteroscedastic, draw(B, 2, 2, seed=5)),
}  # fmt: skip


@pytest.mark.parametrize("make", [prediction, mixture])
@pytest.mark.parametrize("class_dim", [-1, 1])
@pytest.mark.parametrize("likelihood", KINDS, ids=lambda kind: type(kind).__name__)
def test_members_are_averages_over_functions(likelihood, class_dim, make):
    """By the distributions of torch, of the functions that a mixture stands for, with their weights."""
    of, y = KINDS[likelihood]
    p = make(likelihood, *[2] * (type(likelihood) is not Binomial), outputs=4, class_dim=class_dim)
    last = lambda value: value.movedim(class_dim, -1)  # noqa: E731
    functions, mean = functions_and_mean(p)
    f, weights = functions_of(p)
    assert_close(f, functions)
    assert weights is None or torch.allclose(weights.sum(), torch.ones(()).double())
    average = functions.mean(0) if weights is None else torch.tensordot(weights, functions, 1)
    assert_close(average, mean(functions))
    given, is_labels = of(functions), likelihood.gives_probabilities
    is_class = is_labels and not likelihood.elementwise
    means = given.probs if is_labels else given.mean
    assert_close(last(p.f_mean), mean(functions))
    assert_close(last(p.f_variance), mean(functions**2) - mean(functions) ** 2)
    apart = functions - mean(functions)
    apart = (apart if class_dim == -1 else apart.movedim(-1, 2)).flatten(1)
    assert_close(p.f_covariance, mean(apart[:, :, None] * apart[:, None]))
    assert_close(last(p.expectation), mean(means))
    own = (lambda value: value) if is_class else last
    if is_labels:
        total = type(given)(probs=mean(means)).entropy()
        assert_close(own(p.entropy), total)
        assert_close(own(p.aleatoric), mean(given.entropy()))
        assert_close(own(p.epistemic), total - mean(given.entropy()))
        assert_close(p.predictive_variance, p.probs * (1 - p.probs))
        assert_close(p.log_probs, p.probs.log())
    elif type(likelihood) is not Binomial:
        if isinstance(likelihood, HeteroscedasticRegression):
            assert_close(last(p.log_variance), last(p.f_mean).chunk(2, -1)[1])
        assert_close(last(p.aleatoric), mean(given.variance))
        assert_close(last(p.epistemic), mean(means**2) - mean(means) ** 2)
        assert_close(p.predictive_variance, p.aleatoric + p.epistemic)

    def each(given):  # the log-probability of every example
        if not is_class:
            return given.log_prob(y).flatten(2).sum(2)
        return torch.where(y >= 0, given.log_prob(y.clamp_min(0)), 0.0).sum(-1)

    targets = y if is_class else y.movedim(-1, class_dim)
    assert_close(p.log_prob(targets), mean(each(given).exp()).log())
    together = 0.0
    for _, centre, deviations, weight, _ in p._mixture.components:
        f = centre + rotated(deviations, JOINT) if len(deviations) else centre[None]
        together = together + weight * each(of(f)).sum(1).exp().mean()
    assert_close(p.joint_log_prob(targets), together.log())


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
    shape = p.f_mean.shape
    noise, y = noise.expand(shape), draw(*shape, seed=2)
    total = Normal(p.f_mean, (p.f_variance + noise).sqrt())
    assert_close(p.aleatoric.expand(shape), noise)
    assert_close(p.epistemic, p.f_variance)
    assert_close(p.expectation, p.f_mean)
    assert_close(p.predictive_variance, p.f_variance + noise)
    assert_close(p.entropy, total.entropy())
    each = total.log_prob(y)
    assert_close(p.log_prob(y), each.flatten(1).sum(1) if has_axis else each)
    assert p.f_covariance.shape == (y.numel(), y.numel())
    for level in (0.5, 0.95):
        lower, upper = p.credible_interval(level)
        assert_close(total.cdf(upper) - total.cdf(lower), torch.full_like(lower, level))
        assert_close(lower + upper, 2 * p.f_mean)
    dense = MultivariateNormal(p.f_mean.flatten(), p.f_covariance + noise.flatten().diag())
    assert_close(p.joint_log_prob(y), dense.log_prob(y.flatten()))
    assert (p.standard_error == 0).all()


def test_single_functions_are_certain_and_others_have_their_error():
    m = mixture(Classification())
    first = prediction_of(*m._mixture.components[0][:3])
    assert_close(m.standard_error, 0.5 * first.standard_error)
    sure = prediction_of(Classification(), m._f, torch.zeros(1, B, C).double())
    each = m._f.log_softmax(-1).gather(1, LABELS[:, None])[:, 0]
    assert_close(sure.log_prob(LABELS), each)
    assert_close(sure.joint_log_prob(LABELS), each.sum())
    p = prediction(HeteroscedasticRegression(), 2, outputs=4, class_dim=1)
    total = Normal(p.expectation, p.predictive_variance.sqrt())
    assert_close(p.entropy, total.entropy())
    assert_close(p.cdf(p.credible_interval(0.9).upper), torch.full((B, 2, 2), 0.95).double())


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
      for name, of in (("cdf", LABELS), ("quantile", 0.5), ("crps", LABELS), ("credible_interval", 0.9))),
    *((ValueError, words, partial(prediction(REGRESSION).quantile, q)) for words, q in
      (("q must lie between 0 and 1", 1.0), ("between 0 and 1", [0.5, 1.0]), ("a list", []), ("a list", [[0.5]]))),
    (TypeError, "predicts no noise", lambda: prediction(REGRESSION).log_variance),
    (AttributeError, "no attribute 'nothing'", lambda: prediction(REGRESSION).nothing),
]  # fmt: skip


@pytest.mark.parametrize("error, words, call", REFUSED)
def test_what_a_prediction_cannot_say_raises(error, words, call):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("count", [1, 2, 5, 32, 300])
def test_functions_keep_covariance_and_mean(count):
    deviations = draw(count, 3, 4)
    drawn = rotated(deviations)
    flat, samples = drawn.flatten(1), deviations.flatten(1)
    assert len(drawn) == 2 if count == 1 else len(drawn) >= max(2 * count, FUNCTIONS)
    assert_close(flat.T @ flat / len(flat), samples.T @ samples / count)
    assert_close(flat.mean(0), torch.zeros(12).double(), rtol=0, atol=1e-12)
    assert_close(drawn[:count], deviations)
    assert len(rotated(torch.zeros(4, 2, 3000))) == 8  # mirror images only


def test_samples_of_mixtures_come_in_its_shares():
    p, other = mixture(Classification(), samples=200), mixture(Classification(), samples=50)
    for first in (20, 200):
        few, alone = p.samples[:first], [f for _, f, *_ in p._mixture.components[1:]]
        counts = [(few == f).all(-1).all(-1).sum().item() for f in alone]
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
    exact = of_root(20_000, root, 2).probs
    drawn = [of_root(32, root, seed) for seed in range(3, 23)]
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
        return [*values, p.joint_log_prob(y)]

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
        rotated(torch.randn(11, 3, 1).double())
    deviations = torch.randn(11, 3, 1).double().requires_grad_()
    rotated(deviations).square().sum().backward()
    assert deviations.grad is not None


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("likelihood", [Regression(0.7), HeteroscedasticRegression()])
def test_continuous_targets_have_cdf_quantiles_and_crps(likelihood, several):
    """Against numerical integration of the density, which is that of log_prob."""
    p = prediction(likelihood, outputs=2)
    if several:  # of which the second has another σ
        kind, centre, deviations = p._mixture.components[0][:3]
        kind = kind if kind.observation_noise is None else Regression(0.2)
        p = together(p, prediction_of(kind, centre + 1, deviations[:0]))
    outputs, step = p.expectation.shape[1], 0.01
    grid = torch.arange(-40, 40, step, dtype=torch.float64).view(-1, 1, 1)
    weights, means, deviations = p._mixture.gaussians()
    each = Normal(means[:, None], deviations[:, None]).log_prob(grid).exp()
    whole = (weights.view(-1, 1, 1, 1) * each).sum(0)
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


@pytest.mark.parametrize("likelihood", [Regression(0.7), HeteroscedasticRegression()])
def test_quantiles_of_mixtures_have_gradients(likelihood):
    """By finite differences of the quantile; several levels at once are those of each."""
    start, deviations = draw(2, 2), draw(3, 2, 2, seed=1)

    def ends(f):
        first = prediction_of(likelihood, f, deviations * (1 + f.square()))
        second = prediction_of(likelihood, f.sin() + 1, deviations[:0])
        return together(first, second).quantile([0.1, 0.8])

    assert torch.autograd.gradcheck(ends, start.requires_grad_())
    p = together(*(prediction_of(likelihood, start + k, deviations) for k in range(2)))
    assert_close(torch.stack(p.credible_interval(0.6)), p.quantile(torch.tensor([0.2, 0.8])))
    assert_close(p.quantile([0.2, 0.8])[1], p.quantile(0.8), rtol=0, atol=0)


def test_names_of_earlier_versions_raise_an_error_with_their_replacement():
    p = prediction(Regression(0.5))
    for name, remedy in (("mean", "f_mean.*expectation"), ("variance", "predictive_variance")):
        with pytest.raises(AttributeError, match=f"no attribute '{name}' any more: .*{remedy}"):
            getattr(p, name)
    with pytest.raises(AttributeError, match="'Prediction' object has no attribute 'maen'"):
        p.maen


def test_a_prediction_has_few_public_names():
    assert len([name for name in dir(Prediction) if name[0] != "_"]) <= 28


def test_samples_are_joint_over_inputs_and_labels_of_classes():
    p, generator = prediction(Regression(0.5)), torch.Generator().manual_seed(0)
    drawn = p.sample(20_000, generator).flatten(1) - p.f_mean.flatten()
    products = drawn[:, :, None] * drawn[:, None]
    due = p.f_covariance + 0.25 * torch.eye(B * C).double()
    assert ((products.mean(0) - due).abs() < 5 * products.std(0) / 20_000**0.5).all()
    p = mixture(Classification())
    drawn = p.sample(20_000, generator)
    shares = torch.nn.functional.one_hot(drawn, C).double().mean(0)
    assert drawn.shape == (20_000, B) and ((shares - p.probs).abs() < 0.05).all()
