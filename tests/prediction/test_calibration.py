"""The search for τ and the factor of the mean, on functions whose maximum is known."""

import logging
from math import exp, log

import pytest

from torch_lla_em.prediction.calibration import best_scale, calibration


class Counted:
    """A quadratic in log τ and log c, and how often it was asked for."""

    def __init__(self, scale, factor, weight, ridge):
        self.scale, self.factor, self.weight, self.ridge, self.calls = (
            scale,
            factor,
            weight,
            ridge,
            0,
        )

    def __call__(self, scale, factor):
        self.calls += 1
        a, b = log(scale / self.scale), log(factor / self.factor)
        value = -self.weight * (a * a + b * b + 2 * self.ridge * a * b) / 2
        prior = -0.5 * (log(scale) ** 2 + log(factor) ** 2) / 0.5**2
        return value - prior  # so that the penalised function is the quadratic


@pytest.mark.parametrize("ridge", [0.0, 0.9, -0.99])
@pytest.mark.parametrize("weight", [10.0, 1e5])
def test_narrow_ridges_are_climbed(weight, ridge):
    log_prob = Counted(0.02, 3.0, weight, ridge)
    scale, factor = calibration(log_prob, with_factor=True)
    assert scale == pytest.approx(0.02, rel=0.01) and factor == pytest.approx(3.0, rel=0.01)
    assert log_prob.calls <= 120


def test_without_data_the_prior_speaks():
    assert calibration(lambda scale, factor: 0.0, with_factor=True) == pytest.approx((1.0, 1.0))


def test_the_higher_of_two_peaks_wins():
    def log_prob(scale):
        low, high = (log(scale) + 6) ** 2, (log(scale) - 3) ** 2
        return 1000 * max(exp(-low), 1.2 * exp(-high))

    assert log(best_scale(log_prob)) == pytest.approx(3, abs=0.05)


@pytest.mark.parametrize(
    ("slope", "end", "words"), [(-1e3, 1e-4, "no uncertainty"), (1e3, 1e2, "more")]
)
def test_the_edge_is_said(slope, end, words, caplog):
    with caplog.at_level(logging.WARNING, logger="torch_lla_em"):
        assert best_scale(lambda scale: slope * log(scale)) == pytest.approx(end)
    assert words in caplog.text


def test_hopeless_points_are_not_asked_for():
    asked = []

    def log_prob(scale, factor):
        asked.append((scale, factor))
        return -0.1

    calibration(log_prob, with_factor=True)
    assert len(asked) < 20
