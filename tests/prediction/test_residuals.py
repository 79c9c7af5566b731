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
    found = residual_size(noise.abs(), columns_of(x))
    assert found.p_value == pytest.approx(0.001) and found.most == words
    assert sign * found.correlation > 0.3


def test_the_correlation_is_that_of_ranks():
    sizes, x = torch.tensor([[1.0], [5.0], [2.0], [9.0]]), torch.tensor([0.0, 0.0, 0.0, 1.0])
    found = residual_size(sizes, {"x": x})
    # ranks 1, 3, 2, 4 and 2, 2, 2, 4
    ranks = torch.tensor([[1.0, 3.0, 2.0, 4.0], [2.0, 2.0, 2.0, 4.0]], dtype=torch.float64)
    assert found.correlation == pytest.approx(torch.corrcoef(ranks)[0, 1].item())
    # half of all orders have the largest or the smallest size where x is 1
    assert found.p_value == pytest.approx(0.5, abs=0.08)  # five standard errors
    again = residual_size(sizes.exp(), {"x": 7 - 3 * x})
    assert again.p_value == found.p_value and again.correlation == pytest.approx(-found.correlation)


def test_nothing_is_said_of_columns_that_are_equal_everywhere():
    for count in (1, 40):
        found = residual_size(draw(count, 1).abs(), {"x": torch.ones(count)})
        assert found.p_value == 1 and found.correlation == 0


def test_the_rate_of_false_alarms_holds_for_any_number_of_columns():
    """Five standard errors of 150 tests at 10 %, of columns with outliers and with two values."""
    x = draw(40, 6) ** 3
    x[:, 4:] = (x[:, 4:] > 0).double()
    sizes = draw(150, 40, 2, seed=1).abs()
    alarms = sum(residual_size(each, columns_of(x)).p_value <= 0.1 for each in sizes) / 150
    assert abs(alarms - 0.1) < 5 * (0.1 * 0.9 / 150) ** 0.5
