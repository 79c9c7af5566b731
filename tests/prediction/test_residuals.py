"""Whether the size of residuals depends on the inputs: what the permutation test finds, and how often it is wrong."""

import pytest
import torch
from tiny import draw

from torch_lla_em.prediction.residuals import residual_size


def columns_of(x):
    return {f"x[:, {k}]": column for k, column in enumerate(x.T)}


@pytest.mark.parametrize(
    "scale, words, sign",
    [
        (lambda x: x[:, 1].exp(), "x[:, 1]", 1),
        (lambda x: (-x[:, 2]).exp(), "x[:, 2]", -1),
        (lambda x: x[:, 1].abs(), "the distance of x[:, 1] from its median", 1),
    ],
)
def test_what_sizes_depend_on_is_named(scale, words, sign):
    x, noise = draw(300, 3), draw(300, 2, seed=1)
    noise[:, 1] *= scale(x)
    found = residual_size(noise.abs(), [columns_of(x)])
    assert found.p_value == pytest.approx(0.001) and found.most == words
    assert sign * found.correlation > 0.3


def test_the_correlation_is_that_of_ranks_with_scores():
    sizes, x = torch.tensor([[1.0], [5.0], [2.0], [9.0]]), torch.tensor([0.0, 0.0, 0.0, 1.0])
    found = residual_size(sizes, [{"x": x}])
    # ranks 1, 3, 2, 4 of sizes, by their half-normal scores, and 2, 2, 2, 4
    scores = torch.distributions.HalfNormal(1.0).icdf(torch.tensor([0.125, 0.625, 0.375, 0.875]))
    both = torch.stack([scores, torch.tensor([2.0, 2.0, 2.0, 4.0])])
    assert found.correlation == pytest.approx(torch.corrcoef(both)[0, 1].item(), abs=1e-5)
    # one of four orders has the largest size where x is 1
    assert found.p_value == pytest.approx(0.25, abs=0.07)  # five standard errors
    again = residual_size(sizes.exp(), [{"x": 7 - 3 * x}])
    assert again.p_value == found.p_value and again.correlation == pytest.approx(-found.correlation)


def test_the_smallest_p_value_counts_by_the_number_of_families():
    x, sizes = draw(30, 5), draw(30, 1, seed=1).abs()
    parts = [columns_of(x[:, :1]), columns_of(x[:, 1:])]
    alone, both = [residual_size(sizes, [part]) for part in parts], residual_size(sizes, parts)
    least = min(alone, key=lambda found: found.p_value)
    assert both == least._replace(p_value=min(1, 2 * least.p_value))


def test_nothing_is_said_of_columns_that_are_equal_everywhere():
    for count in (1, 40):
        found = residual_size(draw(count, 1).abs(), [{"x": torch.ones(count)}, {}])
        assert found.p_value == 1 and found.correlation == 0


def test_the_rate_of_false_alarms_holds_for_any_number_of_columns():
    """Five standard errors of 150 tests at 10 %, of columns with outliers and with two values."""
    x = draw(40, 6) ** 3
    x[:, 4:] = (x[:, 4:] > 0).double()
    sizes, parts = draw(150, 40, 2, seed=1).abs(), [columns_of(x)]
    alarms = sum(residual_size(each, parts).p_value <= 0.1 for each in sizes) / 150
    assert abs(alarms - 0.1) < 5 * (0.1 * 0.9 / 150) ** 0.5
