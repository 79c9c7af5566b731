"""Gaussian mixtures: closed forms, the bound, batches, labels, and what is refused."""

import pickle
from random import Random

import pytest
import torch
from clusters import draw, steps_from
from daily import daily
from torch.distributions import Dirichlet, MultivariateNormal, Wishart

from torch_lla_em.mixtures import GaussianMixture, Gaussians, VariationalGaussianMixture, em, starts

STRUCTURES = "full", "diagonal"
KINDS = "ml", "map", "vb"
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
EVERY_STRUCTURE = pytest.mark.parametrize("structure", STRUCTURES)


def made(kind, num_components, **options):
    if kind == "vb":
        return VariationalGaussianMixture(num_components, **options)
    return GaussianMixture(num_components, prior=kind == "map", **options)


def as_matrices(parameters, structure):
    covariances = parameters.covariances
    return covariances if structure == "full" else torch.diag_embed(covariances)


def path(mixture):
    return torch.tensor(mixture.history, dtype=torch.float64)


def log_joint(x, parameters, structure):
    """log π_k + log N(x | μ_k, Σ_k), by torch.distributions."""
    normal = MultivariateNormal(parameters.means, as_matrices(parameters, structure))
    return normal.log_prob(x[:, None]) + parameters.weights.log()


@EVERY_STRUCTURE
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_density_and_responsibilities(structure, dtype):
    x = draw(dtype=dtype)
    mixture = GaussianMixture(3, covariance=structure, max_steps=500).fit(x)
    expected = log_joint(x.double(), mixture.parameters, structure)
    assert mixture.log_prob(x).dtype == mixture.responsibilities(x).dtype == dtype
    torch.testing.assert_close(mixture.log_prob(x), expected.logsumexp(1).to(dtype))
    torch.testing.assert_close(mixture.responsibilities(x), expected.softmax(1).to(dtype))


@EVERY_KIND
@EVERY_STRUCTURE
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", daily(0, 1, rest=range(2, 8)))
def test_the_bound_never_falls(seed, kind, structure, dtype):
    """Of up to 60 examples in up to 4 dimensions; all of the first seed are equal, some of others."""
    random = Random(f"{seed} {kind} {structure} {dtype}")
    n, dim, num_components = random.randint(4, 60), random.randint(1, 4), random.randint(1, 4)
    distinct = random.randint(1, n) if seed else 1
    x = draw(random.randint(0, 2**32 - 1), n, dim, num_components, dtype)
    x = x[torch.arange(n) % distinct]
    options = {"covariance": structure, "max_steps": 20, "tolerance": 0.0, "seed": seed}
    mixture = made(kind, num_components, **options)
    for _ in mixture.steps(x):
        pass
    bounds = path(mixture).flatten()
    assert torch.isfinite(bounds).all()
    assert (bounds.diff() >= -1e-8 * bounds[1:].abs().clamp(min=1)).all()
    assert torch.isfinite(mixture.log_prob(x)).all()


def log_posterior(x, parameters, structure, prior):
    """log p(X, π, μ, Σ), with the Wishart prior of each block turned to its covariance."""
    weights, means, covariances = parameters
    num_components, dim = means.shape
    value = log_joint(x, parameters, structure).logsumexp(1).sum()
    if not prior:
        return value
    scale = x.var(0, correction=0).diag() * num_components ** (-2 / dim)
    value = value + Dirichlet(torch.full((num_components,), 2.0).double()).log_prob(weights)
    matrices = as_matrices(parameters, structure)
    value = value + MultivariateNormal(x.mean(0), matrices / 0.01).log_prob(means).sum()
    if structure == "full":
        size, sigma = dim, covariances
    else:
        size, sigma = 1, covariances.reshape(-1, 1, 1)
        scale = scale.diagonal().repeat(num_components).reshape(-1, 1, 1)
    precision = sigma.inverse()
    precision = (precision + precision.mT) / 2
    wishart = Wishart(torch.tensor(size + 2.0).double(), precision_matrix=scale)
    jacobian = -(size + 1) * sigma.logdet()
    return value + (wishart.log_prob(precision) + jacobian).sum()


@EVERY_STRUCTURE
@pytest.mark.parametrize("prior", [True, False])
def test_a_fit_ends_at_the_mode_of_the_posterior(structure, prior):
    """The objective is log p(X, θ) up to a constant, and its gradient vanishes at the end."""
    x, dense = draw(n=120), structure == "full"
    options = {"covariance": structure, "prior": prior, "tolerance": 1e-14, "max_steps": 5000}
    mixture = GaussianMixture(2, **options)
    heights = [log_posterior(x, mixture.parameters, structure, prior) for _ in mixture.steps(x)]
    assert mixture.converged
    torch.testing.assert_close(path(mixture)[1:, 0].diff(), torch.stack(heights)[:-1].diff())

    def value(logits, means, covariances):
        covariances = (covariances + covariances.mT) / 2 if dense else covariances
        return log_posterior(x, Gaussians(logits.softmax(0), means, covariances), structure, prior)

    weights, means, covariances = mixture.parameters
    leaves = [t.clone().requires_grad_() for t in (weights.log(), means, covariances)]
    unit = x.std(0)
    units = 1.0, unit, unit[:, None] * unit if dense else unit**2
    for gradient, unit in zip(torch.autograd.grad(value(*leaves), leaves), units):
        torch.testing.assert_close(gradient * unit, torch.zeros_like(gradient), atol=2e-4, rtol=0)


@EVERY_STRUCTURE
def test_a_component_without_examples_keeps_the_weight_zero(structure):
    x = draw()
    start = GaussianMixture(2, covariance=structure, max_steps=500).fit(x).parameters
    start = start._replace(weights=torch.tensor([1.0, 0.0]))
    mixture = GaussianMixture(2, covariance=structure, max_steps=2, tolerance=0.0)
    steps_from(start, mixture, x)
    torch.testing.assert_close(mixture.parameters.means[0], x.mean(0))
    assert mixture.parameters.weights.tolist() == [1.0, 0.0]
    assert all(torch.isfinite(t).all() for t in (path(mixture), *mixture.parameters))


@EVERY_STRUCTURE
def test_batches_and_pieces_do_not_matter(structure, monkeypatch):
    x = draw()
    start = GaussianMixture(3, covariance=structure, max_steps=500, seed=3).fit(x).parameters
    start = start._replace(means=start.means + 0.1)
    options = {"covariance": structure, "max_steps": 5, "tolerance": 0.0}
    whole, pieced = (GaussianMixture(3, **options) for _ in range(2))
    assert len(steps_from(start, whole, x)) == 5
    monkeypatch.setattr(em, "_NUMBERS", {"cpu": 1})  # 256 examples at a time
    assert len(steps_from(start, pieced, ((part, None) for part in x.split(37)))) == 5
    torch.testing.assert_close(whole.parameters, pieced.parameters)
    torch.testing.assert_close(path(whole), path(pieced))


def test_the_seed_determines_the_fit(monkeypatch):
    x = draw()
    monkeypatch.setattr(starts, "_SAMPLE", 40)
    options = {"max_steps": 3, "tolerance": 1e9}

    def means(seed):
        return GaussianMixture(3, seed=seed, **options).fit(x).parameters.means

    torch.testing.assert_close(means(1), means(1), rtol=0, atol=0)
    assert not torch.equal(means(1), means(2))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    means(0)
    assert torch.equal(before, torch.get_rng_state())


def test_a_fit_by_label_is_one_mixture_for_each_class():
    x, generator = draw(n=400), torch.Generator().manual_seed(0)
    labels = torch.randint(2, (400,), generator=generator) * 4 + 1
    options = {"num_components": 2, "max_steps": 3, "tolerance": 0.0}
    own = [x[labels == label] for label in (1, 5)]
    starts = [
        GaussianMixture(2, max_steps=500, tolerance=1e-2).fit(rows).parameters for rows in own
    ]
    share = [torch.tensor(len(rows) / 400).double() for rows in own]
    start = Gaussians(*map(torch.cat, zip(*starts)))
    weights = torch.cat([s * first.weights for s, first in zip(share, starts)])
    start, joint = start._replace(weights=weights), GaussianMixture(**options)
    steps_from(start, joint, [(x, labels)], by_label=True)
    assert joint.classes.tolist() == [1, 1, 5, 5]
    log_prob = []
    for label, rows, first, s in zip((1, 5), own, starts, share):
        mixture, mine = GaussianMixture(**options), joint.classes == label
        steps_from(first, mixture, rows)
        torch.testing.assert_close(joint.parameters.means[mine], mixture.parameters.means)
        torch.testing.assert_close(joint.parameters.weights[mine], s * mixture.parameters.weights)
        log_prob.append(mixture.log_prob(x) + s.log())
    torch.testing.assert_close(joint.class_log_prob(x), torch.stack(log_prob, 1))
    torch.testing.assert_close(joint.log_prob(x), torch.stack(log_prob, 1).logsumexp(1))
    again = pickle.loads(pickle.dumps(joint))
    torch.testing.assert_close(again.class_log_prob(x), joint.class_log_prob(x))


DEGENERATE = {
    "equal": torch.full((20, 3), 5.0),
    "two points": torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, 0.0]]).repeat(10, 1),
    "constant column": torch.cat([draw(n=40, dim=2), torch.full((40, 1), 1e6)], 1),
    "equal columns": torch.cat([draw(n=40, dim=2), draw(n=40, dim=2)[:, :1]], 1),
    "N = K": draw(n=3),
    "tiny": draw(n=30) * 1e-8,
    "huge": draw(n=30) * 1e8,
    "one far": torch.cat([draw(n=50), torch.full((1, 3), 400.0)]),
    "one farther": torch.cat([draw(n=40), torch.full((1, 3), 1e12)]),
    "off centre": draw(n=30, dtype=torch.float32) + 1e4,
}


@EVERY_KIND
@EVERY_STRUCTURE
def test_degenerate_data_give_finite_densities(kind, structure):
    for x in DEGENERATE.values():
        mixture = made(kind, 3, covariance=structure, max_steps=60).fit(x)
        assert all(torch.isfinite(t).all() for t in mixture.parameters)
        assert torch.isfinite(mixture.log_prob(x)).all()
        assert torch.isfinite(mixture.log_prob(x + 1)).all()
        torch.testing.assert_close(mixture.responsibilities(x).sum(1), torch.ones(len(x)).to(x))


def test_units_do_not_matter():
    x = draw()
    small = GaussianMixture(3, max_steps=500).fit(x)
    large = GaussianMixture(3, max_steps=500).fit(x * 1e6)
    torch.testing.assert_close(small.parameters.means * 1e6, large.parameters.means)
    torch.testing.assert_close(small.parameters.covariances * 1e12, large.parameters.covariances)


def one_row(value):
    return draw().index_fill(0, torch.tensor([4]), value)


@pytest.mark.parametrize(
    ("error", "message", "case"),
    [
        (ValueError, "have 2 examples for 3 components. Give at most one", {"data": draw(n=2)}),
        (ValueError, "1 examples with NaN or infinity", {"data": one_row(float("nan"))}),
        (ValueError, "1 examples with NaN or infinity", {"data": one_row(float("inf"))}),
        (ValueError, r"shape \(300,\). Pass tensors with one row", {"data": draw()[:, 0]}),
        (ValueError, r"one row per example, shape \(n, D\)", {"data": draw()[:, :0]}),
        (ValueError, "no examples. Is the loader empty", {"data": []}),
        (ValueError, "holds a str of shape None. Pass tensors", {"data": ["words"]}),
        (ValueError, r"needs batches \(x, labels\)", {"data": draw(), "by_label": True}),
        (ValueError, "labels are torch.float32", {"labels": torch.zeros(300)}),
        (ValueError, "one integer per example", {"labels": torch.zeros(3).long()}),
        (ValueError, "class has 2 examples for 3", {"labels": (torch.arange(300) < 2).long()}),
        (ValueError, "num_components must be 1 or more, not 0", {"num_components": 0}),
        (ValueError, "max_steps must be 1 or more", {"max_steps": 0}),
        (ValueError, "tolerance must be 0 or more", {"tolerance": -1.0}),
        (ValueError, "covariance='round' is not known: choose one", {"covariance": "round"}),
        (ValueError, "min_variance must be between 0 and 1", {"min_variance": 0.0}),
    ],
)
def test_unsuitable_data_and_options_raise(error, message, case):
    fit = {"data": case.pop("data", draw())}
    if "labels" in case:
        fit["data"] = [(draw(), case["labels"])]
    fit["by_label"] = case.pop("by_label", False) or case.pop("labels", None) is not None
    with pytest.raises(error, match=message):
        GaussianMixture(**{"num_components": 3} | case).fit(**fit)


def test_densities_require_a_fit():
    with pytest.raises(RuntimeError, match=r"no parameters yet. Call fit\(data\) first"):
        GaussianMixture(2).log_prob(draw())
    mixture = GaussianMixture(2, max_steps=500).fit(draw())
    with pytest.raises(RuntimeError, match="by_label=True"):
        mixture.class_log_prob(draw())
    with pytest.raises(ValueError, match=r"x has shape \(3,\), and the mixture takes \(n, 3\)"):
        mixture.log_prob(draw()[0])


def test_a_fit_that_has_not_converged_warns():
    mixture = GaussianMixture(3, max_steps=2, tolerance=0.0)
    with pytest.warns(UserWarning, match="not converged after 2 steps. Increase max_steps"):
        mixture.fit(draw())
    assert not mixture.converged
    assert GaussianMixture(3, max_steps=500).fit(draw()).converged


@pytest.mark.cuda
@EVERY_KIND
@EVERY_STRUCTURE
def test_cuda_agrees_with_the_cpu(kind, structure):
    x, options = draw(), {"covariance": structure, "max_steps": 500}
    here, there = made(kind, 3, **options).fit(x), made(kind, 3, **options).fit(x.cuda())
    assert there.log_prob(x.cuda()).is_cuda
    torch.testing.assert_close(here.parameters, there.parameters, check_device=False)
    torch.testing.assert_close(here.log_prob(x), there.log_prob(x.cuda()).cpu())
    labels = torch.arange(len(x)).cuda() % 2
    mixture = made(kind, 1, **options).fit([(x.cuda(), labels)], by_label=True)
    assert mixture.class_log_prob(x.cuda()).shape == (len(x), 2)


def test_arrays_are_data_and_the_most_probable_component_or_label_is_predicted():
    x = draw()
    mixture, same = GaussianMixture(3), GaussianMixture(3).fit(x.numpy())
    assert "not fitted" in repr(mixture)
    mixture.fit(x)
    assert torch.equal(mixture.log_prob(x), same.log_prob(x.numpy()))
    assert torch.equal(mixture.predict(x.numpy()), mixture.responsibilities(x).argmax(1))
    assert f"converged after {len(mixture.history)} steps" in repr(mixture)
    labels = 5 + (x[:, 0] > x[:, 0].median()).long()
    by_label = GaussianMixture(1).fit([(x, labels)], by_label=True)
    predicted = by_label.predict(x)
    assert set(predicted.tolist()) == {5, 6} and (predicted == labels).double().mean() > 0.8
