"""Gaussian mixtures: closed forms, the bound, batches, labels, where EM starts, and what is refused."""

import math
import pickle
from functools import partial
from random import Random

import pytest
import torch
from daily import daily
from tiny import batched
from torch.distributions import MultivariateNormal
from torch.special import gammaln
from torch.testing import assert_close

from torch_lla_em.mixtures import GaussianMixture, Gaussians, VariationalGaussianMixture, em

KINDS = {
    "ml": GaussianMixture,
    "map": partial(GaussianMixture, prior=2.0),
    "vb": VariationalGaussianMixture,
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
EVERY_STRUCTURE = pytest.mark.parametrize("structure", ["full", "diagonal"])


def draw(seed=0, n=300, dim=3, num_components=3, dtype=torch.float64):
    """Overlapping clusters away from the origin, with columns of different scale."""
    generator = torch.Generator().manual_seed(seed)
    normal = {"generator": generator, "dtype": torch.float64}
    centres = 2 * torch.randn(num_components, dim, **normal)
    roots = torch.randn(num_components, dim, dim, **normal)
    owner = torch.randint(num_components, (n,), generator=generator)
    noise = torch.randn(n, dim, 1, **normal)
    x = centres[owner] + (roots[owner] @ noise)[..., 0]
    return (x * torch.logspace(-1, 1, dim) + 7).to(dtype)


def as_matrices(parameters, structure):
    covariances = parameters.covariances
    return covariances if structure == "full" else torch.diag_embed(covariances)


def log_joint(x, parameters, structure):
    """log π_k + log N(x | μ_k, Σ_k), by torch.distributions."""
    normal = MultivariateNormal(parameters.means, as_matrices(parameters, structure))
    return normal.log_prob(x[:, None]) + parameters.weights.log()


@EVERY_STRUCTURE
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_densities_responsibilities_and_predictions(structure, dtype):
    """In any unit."""
    x, options = draw(dtype=dtype), {"covariance": structure, "max_steps": 500}
    mixture = GaussianMixture(3, **options)
    assert "not fitted" in repr(mixture)
    mixture.fit(x)
    expected = log_joint(x.double(), mixture.parameters, structure)
    assert mixture.log_prob(x).dtype == mixture.responsibilities(x).dtype == dtype
    assert_close(mixture.log_prob(x), expected.logsumexp(1).to(dtype))
    assert_close(mixture.responsibilities(x), expected.softmax(1).to(dtype))
    assert torch.equal(mixture.predict(x), mixture.responsibilities(x).argmax(1))
    assert f"converged after {len(mixture.lower_bounds) - 1} steps" in repr(mixture)
    assert mixture.converged
    if dtype is torch.float64:
        large = GaussianMixture(3, **options).fit(x * 1e6).parameters
        assert_close(mixture.parameters.means * 1e6, large.means)
        assert_close(mixture.parameters.covariances * 1e12, large.covariances)


@EVERY_KIND
@EVERY_STRUCTURE
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", daily(0, 1, rest=range(2, 8)))
@pytest.mark.filterwarnings("ignore:EM has not converged")
def test_the_bound_never_falls(seed, kind, structure, dtype):
    """Of up to 60 examples in up to 4 dimensions; all of the first seed are equal, some of others."""
    random = Random(f"{seed} {kind} {structure} {dtype}")
    n, dim, num_components = random.randint(4, 60), random.randint(1, 4), random.randint(1, 4)
    distinct = random.randint(1, n) if seed else 1
    x = draw(random.randint(0, 2**32 - 1), n, dim, num_components, dtype)
    x = x[torch.arange(n) % distinct]
    options = {"covariance": structure, "max_steps": 20, "tolerance": 0.0, "seed": seed}
    mixture = KINDS[kind](num_components, **options).fit(x)
    bounds = torch.tensor(mixture.lower_bounds, dtype=torch.float64)
    assert torch.isfinite(bounds).all()
    assert (bounds.diff() >= -1e-8 * bounds[1:].abs().clamp(min=1)).all()
    assert torch.isfinite(mixture.log_prob(x)).all()


def log_prior(x, parameters, structure, worth):
    """The log-likelihood of ``worth`` examples with the prior's covariance, without constants."""
    num_components, dim = parameters.means.shape
    scale = x.var(0, correction=0).diag() * num_components ** (-2 / dim)
    precision = as_matrices(parameters, structure).inverse()
    each = precision.logdet() - (scale * precision).sum((1, 2))
    return 0.5 * worth * each.sum()


@EVERY_STRUCTURE
@pytest.mark.parametrize("prior", [None, 3.0])
@pytest.mark.parametrize("by_label", [False, True])
def test_a_fit_ends_at_the_mode_of_the_posterior(structure, by_label, prior):
    """There the gradient vanishes, and the bound is the height up to a constant.

    Without a prior it is the likelihood's. Labels are any numbers."""
    x, heights = draw(n=1100), []  # more than are computed with at once
    labels = torch.arange(len(x)) % 2 * 4 + 1
    shuffled = x.clone()  # with the same moments of columns, so that the prior is the same
    shuffled[:, 0] = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0)), 0]
    for some in (x, shuffled):
        options = {"covariance": structure, "tolerance": 1e-14, "max_steps": 5000}
        mixture = GaussianMixture(2, prior=prior, **options)
        mixture.fit(batched(500, some, labels), by_label=by_label)
        weights, means, covariances = mixture.parameters
        leaves = [t.clone().requires_grad_() for t in (weights.log(), means, covariances)]
        both = (leaves[2] + leaves[2].mT) / 2 if structure == "full" else leaves[2]
        parameters = Gaussians(leaves[0].softmax(0), leaves[1], both)
        every = log_joint(some, parameters, structure)
        if by_label:
            assert mixture.classes.tolist() == [1, 1, 5, 5]
            every = every.masked_fill(mixture.classes != labels[:, None], -torch.inf)
        log_prob = every.logsumexp(1).sum()
        height = log_prob + log_prior(some, parameters, structure, prior or 0.0)
        components, of_covariance = len(weights), covariances[0].numel()
        if structure == "full":
            of_covariance = (of_covariance + 3) // 2
        # weights sum to 1, in each class if there are some
        free = components * (1 + 3 + of_covariance) - 1
        assert mixture.aic() == pytest.approx(2 * free - 2 * log_prob.item())
        assert mixture.bic() == pytest.approx(free * math.log(len(x)) - 2 * log_prob.item())
        if not by_label:
            due = 2 * free - 2 * mixture.log_prob(some[::2]).sum().item()
            assert mixture.aic(some[::2].numpy()) == pytest.approx(due)
        unit = some.std(0)
        units = 1.0, unit, unit[:, None] * unit if structure == "full" else unit**2
        for gradient, size in zip(torch.autograd.grad(height, leaves), units, strict=True):
            assert_close(gradient * size, torch.zeros_like(gradient), atol=2e-3, rtol=0)
        heights.append((height.item(), mixture.lower_bounds[-1]))
    (one, first), (other, second) = heights
    assert first - second == pytest.approx(one - other, abs=1e-5) and abs(one - other) > 1


def test_any_batches_and_classes_give_the_same_densities():
    x, options = draw(), {"max_steps": 500}
    labels = 5 + (x[:, 0] > x[:, 0].median()).long()
    whole = GaussianMixture(3, **options).fit(x)
    parts = GaussianMixture(3, **options).fit((part, None) for part in x.split(37))
    assert_close(whole.parameters, parts.parameters)
    mixture = GaussianMixture(1).fit([(x, labels)], by_label=True)
    due = log_joint(x, mixture.parameters, "full")
    for each in (mixture, pickle.loads(pickle.dumps(mixture))):
        assert_close(each.class_log_prob(x), due)
        assert_close(each.log_prob(x), due.logsumexp(1))
    predicted = mixture.predict(x)
    assert set(predicted.tolist()) == {5, 6} and (predicted == labels).double().mean() > 0.8


def test_the_seed_determines_the_fit():
    x, options = draw(n=5000), {"max_steps": 3, "tolerance": 1e9}  # starts have some of them

    def means(seed):
        return GaussianMixture(3, seed=seed, **options).fit(x).parameters.means

    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert torch.equal(means(1), means(1)) and not torch.equal(means(1), means(2))
    assert torch.equal(before, torch.get_rng_state())


DEGENERATE = {
    "equal": torch.full((20, 3), 5.0),
    "constant": torch.cat([draw(n=40, dim=2), torch.full((40, 1), 1e6)], 1),
    "equal columns": draw(n=40, dim=2)[:, [0, 1, 0]],
    "N = K": draw(n=3),
    "tiny": draw(n=30) * 1e-8,
    "huge": draw(n=30) * 1e8,
    "one farther": torch.cat([draw(n=40), torch.full((1, 3), 1e12)]),
    "off centre": draw(n=30, dtype=torch.float32) + 1e4,
}


@EVERY_KIND
@EVERY_STRUCTURE
def test_degenerate_data_give_finite_densities(kind, structure):
    for x in DEGENERATE.values():
        mixture = KINDS[kind](3, covariance=structure, max_steps=60).fit(x)
        assert all(torch.isfinite(t).all() for t in mixture.parameters)
        assert torch.isfinite(mixture.log_prob(torch.cat([x, x + 1]))).all()
        assert_close(mixture.responsibilities(x).sum(1), torch.ones(len(x)).to(x))


NONE = {"by_label": True}


@pytest.mark.parametrize(
    ("message", "data", "how"),
    [
        ("have 2 examples for 3 components. Choose at most one", draw(n=2), {}),
        ("1 examples with NaN or infinity", draw().index_fill(0, torch.tensor([4]), torch.inf), {}),
        (r"shape \(300,\). Pass tensors with one row", draw()[:, 0], {}),
        ("no examples. Is the loader empty", [], {}),
        ("holds a str of shape", ["words"], {}),
        (r"needs batches \(x, labels\)", draw(), NONE),
        ("labels are torch.float32", [(draw(), torch.zeros(300))], NONE),
        ("class has 2 examples for 3", [(draw(), (torch.arange(300) < 2).long())], NONE),
        ("num_components must be a whole number", None, {"num_components": 0}),
        ("prior must be None, or positive real numbers", None, {"prior": 0.0}),
        ("covariance='round' is not known: choose one", None, {"covariance": "round"}),
    ],
)
def test_unsuitable_data_and_options_raise(message, data, how):
    by_label = how.get("by_label", False)
    options = {"num_components": 3} | {key: how[key] for key in how if key != "by_label"}
    with pytest.raises(ValueError, match=message):
        GaussianMixture(**options).fit(data, by_label=by_label)


def test_densities_require_a_fit_that_has_converged():
    mixture = GaussianMixture(3, max_steps=2, tolerance=0.0)
    with pytest.raises(RuntimeError, match=r"no parameters yet. Call fit\(data\) first"):
        mixture.log_prob(draw())
    with pytest.warns(UserWarning, match="not converged after 2 steps. Increase max_steps"):
        mixture.fit(draw())
    assert not mixture.converged and "not converged after 2" in repr(mixture)
    with pytest.raises(RuntimeError, match="by_label=True"):
        mixture.class_log_prob(draw())
    with pytest.raises(ValueError, match=r"x has shape \(3,\), and the mixture takes \(n, 3\)"):
        mixture.log_prob(draw()[0])


@pytest.mark.cuda
@EVERY_KIND
@EVERY_STRUCTURE
def test_cuda_agrees_with_the_cpu(kind, structure):
    x, options = draw(), {"covariance": structure, "max_steps": 500}
    here, there = (KINDS[kind](3, **options).fit(x.to(where)) for where in ("cpu", "cuda"))
    assert there.log_prob(x.cuda()).is_cuda
    assert_close(here.parameters, there.parameters, check_device=False)
    assert_close(here.log_prob(x), there.log_prob(x.cuda()).cpu())
    labels = torch.arange(len(x)).cuda() % 2
    mixture = KINDS[kind](1, **options).fit([(x.cuda(), labels)], by_label=True)
    assert mixture.class_log_prob(x.cuda()).shape == (len(x), 2)


# scikit-learn fits the same


def correlated(seed, n=900):
    """Six columns of which three are nearly linear functions of the others."""
    generator = torch.Generator().manual_seed(seed)
    normal = {"generator": generator, "dtype": torch.float64}
    z = torch.randn(n, 3, **normal)
    x = torch.cat([z, z @ torch.randn(3, 3, **normal) + 0.02 * torch.randn(n, 3, **normal)], 1)
    return x + 3.0 * (torch.arange(n) % 3 == 0)[:, None]


STARTS = {
    "2 columns": (partial(draw, 2, 600, 2, 4), 4),
    "6 columns": (partial(draw, 6, 900, 6, 5), 5),
    "correlated": (partial(correlated, 0), 3),
    "3 columns": (partial(draw, 3, 800, 3, 8), 8),
    "13 columns": (partial(draw, 13, 1200, 13, 4), 4),
    "correlated again": (partial(correlated, 1), 3),
    "thousands": (partial(draw, 4, 50_000, 4, 6), 6),
}


@pytest.mark.parametrize("name", daily(*list(STARTS)[:3], rest=list(STARTS)[3:]))
def test_the_best_of_the_starts_is_not_worse_than_that_of_scikit_learn(name):
    mixture, (data, k) = pytest.importorskip("sklearn.mixture"), STARTS[name]
    options = {"random_state": 0, "n_init": 5, "max_iter": 500}
    for x in (data(), data()[::2]):
        ours = GaussianMixture(k, max_steps=500).fit(x)
        theirs = mixture.GaussianMixture(k, **options).fit(x.numpy())
        assert ours.log_prob(x).mean() > theirs.score(x.numpy()) - 1e-3


def test_arrays_are_taken_and_examples_drawn():
    x = draw()
    mixture, other = GaussianMixture(3).fit(x), GaussianMixture(3).fit(x.numpy()[::-1][::-1])
    assert_close(mixture.parameters, other.parameters)
    assert torch.equal(mixture.log_prob(x), other.log_prob(x.numpy()))
    assert torch.equal(mixture.predict(x), other.predict(x.numpy()))
    assert torch.equal(mixture.sample(7), other.sample(7))
    assert not torch.equal(mixture.sample(7), mixture.sample(7, seed=1))
    with pytest.raises(RuntimeError, match="no information criteria: compare lower_bounds"):
        VariationalGaussianMixture(2).fit(x).bic()
    with pytest.raises(TypeError, match="leave out prior="):
        VariationalGaussianMixture(2, prior=1.0)


@EVERY_STRUCTURE
@pytest.mark.parametrize("kind", daily("ml", rest=["vb"]))
@pytest.mark.slow
def test_drawn_examples_have_the_moments_of_the_mixture(kind, structure):
    mixture = KINDS[kind](3, covariance=structure).fit(draw())
    parameters = mixture.parameters if kind == "ml" else mixture.parameters.expected()
    drawn = mixture.sample(40_000)
    r = log_joint(drawn, parameters, structure).softmax(1)
    matrices = as_matrices(parameters, structure)
    for k, own in enumerate(r.T):
        apart = drawn - parameters.means[k]
        squares = apart[:, :, None] * apart[:, None] - matrices[k]
        moments = (own, parameters.weights[k]), (own[:, None] * apart, 0.0)
        for values, due in (*moments, (own[:, None, None] * squares, 0.0)):
            error = values.std(0) / len(drawn) ** 0.5
            assert ((values.mean(0) - due).abs() < 5 * error).all()


def test_a_component_of_one_point_is_finite():
    """Without a floor the likelihood of a component on twenty equal examples has no bound."""
    x = torch.cat([draw(n=200), draw(n=200).mean(0).expand(20, 3) + 100])
    mixture = GaussianMixture(2).fit(x)
    smallest = mixture.parameters.covariances[mixture.parameters.weights.argmin()]
    assert_close(smallest.diagonal(), 1e-8 * x.var(0, correction=0), rtol=1e-3, atol=0)


# where EM starts


def clusters(seed, n=400, stretch=0.0):
    """Four clusters in the plane, and the mixture of their members."""
    generator = torch.Generator().manual_seed(seed)
    normal = {"generator": generator, "dtype": torch.float64}
    centres, member = 4 * torch.randn(4, 2, **normal), torch.arange(n) % 4
    widths = (stretch * torch.randn(4, 2, **normal)).exp()
    x = centres[member] + widths[member] * torch.randn(n, 2, **normal)
    means = torch.stack([x[member == k].mean(0) for k in range(4)])
    covariances = torch.stack([x[member == k].T.cov() for k in range(4)])
    return x, Gaussians(torch.full((4,), 0.25).double(), means, covariances)


@pytest.mark.parametrize("seed", daily(0, rest=[1, 2]))
def test_every_seed_finds_the_clusters(seed):
    x, truth = clusters(seed, stretch=0.7)
    due = log_joint(x, truth, "full").logsumexp(1).mean()
    for start in range(12):
        found = GaussianMixture(4, max_steps=500, seed=start).fit(x)
        assert found.log_prob(x).mean() > due - 0.01, start


@pytest.mark.parametrize(
    "covariance, n",
    daily(("diagonal", 400), ("full", 50_000), rest=[("full", 400), ("full", 2000)]),
)
@pytest.mark.parametrize("seed", daily(0, rest=[1, 2]))
def test_superfluous_components_have_no_weight(covariance, n, seed):
    """However many examples there are, since the bound of all of them decides."""
    x, _ = clusters(0, n)
    best = VariationalGaussianMixture(4, covariance=covariance).fit(x)
    mixture = VariationalGaussianMixture(8, covariance=covariance, seed=seed).fit(x)
    weights = mixture.parameters.expected().weights
    assert (weights > 0.01).sum() == 4 and (weights < 0.001).sum() == 4
    assert abs(mixture.log_prob(x).mean() - best.log_prob(x).mean()) < 0.02


def test_the_sample_counts_as_all_examples():
    """Two overlapping clusters that 8,000 examples tell apart, of which starts see half, and 150 do not."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8000, 1, generator=generator, dtype=torch.float64)
    x[::2] = 1 + 0.5 * x[::2]

    def used(data):
        mixture = VariationalGaussianMixture(2, max_steps=1000).fit(data)
        return int((mixture.parameters.expected().weights > 0.01).sum())

    assert (used(x), used(x[:150])) == (2, 1)


def test_classes_keep_components_of_their_own(monkeypatch):
    """They are emptied within their class, and one that the sample lacks is fitted."""
    x, _ = clusters(0)
    labels = (torch.arange(len(x)) % 4 > 1).long()
    mixture = VariationalGaussianMixture(3).fit([(x, labels)], by_label=True)
    weights = mixture.parameters.expected().weights
    assert [(weights[mixture.classes == k] > 0.01).sum().item() for k in (0, 1)] == [2, 2]
    single = VariationalGaussianMixture(1).fit([(x, labels)], by_label=True)
    assert (single.parameters.expected().weights > 0.4).all()
    monkeypatch.setattr(em, "_SAMPLE", 5)
    mixture = GaussianMixture(2, max_steps=500)
    mixture.fit([(x, (torch.arange(len(x)) < 4).long())], by_label=True)
    assert torch.isfinite(mixture.class_log_prob(x)).all()


# the variational mixture, whose bound is the evidence if the components are known


@EVERY_STRUCTURE
def test_the_bound_of_known_components_is_the_evidence(structure):
    """log p(X, labels): each example given those before it, under the posterior that these leave."""
    stats, (x, dim) = pytest.importorskip("scipy.stats"), (draw(n=41), 3)
    labels, is_full = torch.arange(41) % 3 % 2, structure == "full"
    mixture = VariationalGaussianMixture(1, covariance=structure).fit([(x, labels)], by_label=True)
    counts = labels.bincount().double()
    evidence = gammaln(0.5 + counts).sum() - 2 * math.lgamma(0.5) - math.lgamma(1 + 41)
    blocks = [slice(0, dim)] if is_full else [slice(i, i + 1) for i in range(dim)]
    for label, block in ((label, block) for label in (0, 1) for block in blocks):
        size, strength, mean = block.stop - block.start, 0.01, x[:, block].mean(0)
        dof, scale = size + 2.0, x[:, block].var(0, correction=0).diag() * 2 ** (-2 / dim)
        for row in x[labels == label][:, block]:
            freedom = dof - size + 1
            shape = scale * (strength + 1) / (strength * freedom)
            evidence += stats.multivariate_t(mean, shape, freedom).logpdf(row.numpy())
            gap = row - mean
            scale = scale + strength / (strength + 1) * gap[:, None] * gap
            mean, strength, dof = mean + gap / (strength + 1), strength + 1, dof + 1
        known = mixture.parameters
        found = known.scale[label] if is_full else known.scale[label, block, None]
        assert_close((known.means[label, block], found), (mean, scale))
        assert_close((known.strength[label].item(), known.dof[label].item()), (strength, dof))
    assert mixture.lower_bounds[-1] == pytest.approx(evidence.item(), rel=1e-9)
    # log E p is above exp E log p, and equal to it in the limit of many examples
    near = log_joint(x, known.expected(), structure) - mixture.log_joint(x)
    assert (near > 0).all() and near.median() < 0.5
