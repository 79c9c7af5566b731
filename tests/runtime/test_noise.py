import pytest
import torch
from torch.testing import assert_close

from torch_lla_em.runtime.noise import normal


def test_any_part_can_be_drawn_again():
    whole = normal(3, 1, 2, torch.arange(10), 9)
    assert torch.equal(normal(3, 1, 2, torch.arange(4, 7), 9), whole[4:7])
    assert torch.equal(normal(3, 1, 2, torch.arange(10), 5), whole[:, :5])


@pytest.mark.parametrize("change", [(4, 1, 2), (3, 0, 2), (3, 1, 3)])
def test_seed_stream_and_sample_all_matter(change):
    rows = torch.arange(50)
    first, second = normal(3, 1, 2, rows, 40), normal(*change, rows, 40)
    correlation = (first * second).mean() * first.numel() ** 0.5
    assert correlation.abs() < 5


def test_large_draws_are_the_same_in_chunks(monkeypatch):
    whole = normal(0, 0, 0, torch.arange(3), 100)
    monkeypatch.setattr("torch_lla_em.runtime.noise._CHUNK", 7)
    assert_close(normal(0, 0, 0, torch.arange(3), 100), whole, rtol=0, atol=0)


@pytest.mark.slow
def test_moments_are_those_of_a_standard_normal():
    z = normal(0, 0, 0, torch.arange(1000), 1000).flatten()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert (z.pow(power).mean() - moment).abs() < 5 * (variance / len(z)) ** 0.5
    correlations = z.view(1000, 1000).corrcoef().fill_diagonal_(0)
    assert correlations.abs().max() * 1000**0.5 < 6  # the largest of half a million
