"""Where EM starts: fits from many seeds, superfluous components, and k-means++."""

import pytest
import torch
from clusters import steps_from
from daily import daily

from torch_lla_em.mixtures import GaussianMixture, Gaussians, VariationalGaussianMixture, starts
from torch_lla_em.mixtures.starts import plus_plus


def clusters(seed, n=400, stretch=0.0):
    """Four clusters in the plane, their members, and the mixture of these."""
    generator = torch.Generator().manual_seed(seed)
    normal = {"generator": generator, "dtype": torch.float64}
    centres = 4 * torch.randn(4, 2, **normal)
    member = torch.arange(n) % 4
    widths = (stretch * torch.randn(4, 2, **normal)).exp()
    x = centres[member] + widths[member] * torch.randn(n, 2, **normal)
    means = torch.stack([x[member == k].mean(0) for k in range(4)])
    covariances = torch.stack([x[member == k].T.cov() for k in range(4)])
    return x, Gaussians(torch.full((4,), 0.25).double(), means, covariances)


@pytest.mark.parametrize("seed", daily(0, rest=[1, 2]))
def test_every_seed_finds_the_clusters(seed):
    x, truth = clusters(seed, stretch=0.7)
    best = GaussianMixture(4, max_steps=500)
    steps_from(truth, best, x)
    for start in range(12):
        found = GaussianMixture(4, max_steps=500, seed=start).fit(x)
        assert found.history[-1].objective > best.history[-1].objective - 0.01 * len(x), start


@pytest.mark.parametrize("covariance", daily("diagonal", rest=["full"]))
@pytest.mark.parametrize("seed", daily(0, rest=[1, 2]))
def test_superfluous_components_have_no_weight(covariance, seed):
    x, truth = clusters(0)
    best = VariationalGaussianMixture(4, covariance=covariance).fit(x)
    mixture = VariationalGaussianMixture(8, covariance=covariance, seed=seed).fit(x)
    weights = mixture.parameters.expected().weights
    assert (weights > 0.01).sum() == 4 and (weights < 0.001).sum() == 4
    difference = mixture.log_prob(x).mean() - best.log_prob(x).mean()
    assert abs(difference) < 0.02


def test_the_sample_counts_as_all_examples(monkeypatch):
    """Two overlapping clusters that 4,000 examples tell apart, and 150 do not."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 1, generator=generator, dtype=torch.float64)
    x[::2] = 1 + 0.5 * x[::2]

    def used(data):
        mixture = VariationalGaussianMixture(2, max_steps=1000).fit(data)
        return int((mixture.parameters.expected().weights > 0.01).sum())

    assert used(x) == 2 and used(x[:150]) == 1
    monkeypatch.setattr(starts, "_SAMPLE", 150)
    assert used(x) == 2


def test_components_of_a_class_are_emptied_within_it():
    x, _ = clusters(0)
    labels = (torch.arange(len(x)) % 4 > 1).long()
    mixture = VariationalGaussianMixture(4).fit([(x, labels)], by_label=True)
    weights = mixture.parameters.expected().weights
    assert [(weights[mixture.classes == k] > 0.01).sum().item() for k in (0, 1)] == [2, 2]
    single = VariationalGaussianMixture(1).fit([(x, labels)], by_label=True)
    assert (single.parameters.expected().weights > 0.4).all()


def test_a_class_that_the_sample_lacks_is_fitted(monkeypatch):
    x, _ = clusters(0)
    labels = (torch.arange(len(x)) < 4).long()
    monkeypatch.setattr(starts, "_SAMPLE", 5)
    mixture = GaussianMixture(2, prior=True, max_steps=500)
    mixture.fit([(x, labels)], by_label=True)
    assert torch.isfinite(mixture.class_log_prob(x)).all()


def test_centres_are_rows_far_from_each_other():
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([k * 100 + torch.randn(50, 2, generator=generator).double() for k in range(6)])
    for seed in range(20):
        centres = plus_plus(x, 6, torch.Generator().manual_seed(seed))
        assert (centres[:, None] == x).all(2).any(1).all()
        assert len((centres[:, 0] / 100).round().unique()) == 6
    same = torch.ones(5, 2).double()
    assert torch.equal(plus_plus(same, 3, torch.Generator()), same[:3])


@pytest.mark.slow
def test_fits_end_as_high_as_the_best_of_five_of_scikit_learn():
    """On six sets of clusters, long and round, near and apart."""
    theirs = pytest.importorskip("sklearn.mixture").GaussianMixture
    gaps = []
    for number, apart in enumerate((2.0, 4.0, 8.0, 2.0, 4.0, 8.0)):
        generator = torch.Generator().manual_seed(200 + number)
        normal = {"generator": generator, "dtype": torch.float64}
        centres = apart * torch.randn(6, 3, **normal)
        owner = torch.randint(6, (600,), generator=generator)
        widths = ((number % 2) * torch.randn(6, 3, **normal)).exp()
        x = centres[owner] + widths[owner] * torch.randn(600, 3, **normal)
        ours = GaussianMixture(6, max_steps=1000).fit(x).log_prob(x).mean().item()
        other = theirs(6, max_iter=1000, tol=1e-4, n_init=5, random_state=0).fit(x.numpy())
        gaps.append(other.score(x.numpy()) - ours)
    assert sum(gaps) / len(gaps) < 0.005
