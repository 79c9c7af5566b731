"""Functions made out of samples: their covariance, their mean, and what averages gain."""

import pytest
import torch
from torch.testing import assert_close

from torch_lla_em.likelihoods import Classification
from torch_lla_em.prediction import functions
from torch_lla_em.prediction.functions import FUNCTIONS, functions_of
from torch_lla_em.prediction.prediction import Prediction


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("count", [1, 2, 5, 32, 300])
def test_functions_keep_covariance_and_mean(count):
    deviations = draw(count, 3, 4)
    functions = functions_of(deviations)
    flat, samples = functions.flatten(1), deviations.flatten(1)
    assert len(functions) == 2 if count == 1 else len(functions) >= max(2 * count, FUNCTIONS)
    assert_close(flat.T @ flat / len(flat), samples.T @ samples / count)
    assert_close(flat.mean(0), torch.zeros(12).double(), rtol=0, atol=1e-12)
    assert_close(functions[:count], deviations)


def test_functions_of_single_examples_are_those_of_the_batch():
    deviations = draw(5, 6, 2)
    together = functions_of(deviations)
    apart = [functions_of(part) for part in deviations.split(2, dim=1)]
    assert_close(together, torch.cat(apart, dim=1))


def test_many_outputs_use_mirror_images_only():
    assert len(functions_of(torch.zeros(4, 2, 3000))) == 8


def test_averages_do_not_depend_on_the_chunk_size(monkeypatch):
    p, y = Prediction(Classification(), draw(7, 3), draw(4, 7, 3, seed=1)), torch.arange(7) % 3

    def everything():
        values = [p.probs, p.log_probs, p.entropy, p.epistemic, p.aleatoric, p.log_prob(y)]
        return [*values, p.joint_log_prob(y), *p.credible_interval()]

    whole = everything()
    monkeypatch.setattr(functions, "_NUMBERS", 1)
    for few, all_at_once in zip(everything(), whole):
        assert_close(few, all_at_once)


def test_an_empty_batch_has_empty_predictions():
    p = Prediction(Classification(), draw(0, 3), draw(4, 0, 3))
    assert p.probs.shape == (0, 3) and p.epistemic.shape == (0,)


def test_averages_are_nearer_to_those_of_the_gaussian():
    """Against many samples: the error of probabilities falls by more than a half."""
    centre, root = draw(40, 3), draw(6, 40, 3, seed=1)
    truth = Prediction(Classification(), centre, torch.tensordot(draw(20_000, 6, seed=2), root, 1))
    exact, plain, better = truth.probs, 0.0, 0.0
    for seed in range(3, 23):
        p = Prediction(Classification(), centre, torch.tensordot(draw(32, 6, seed=seed), root, 1))
        plain += (p.predictive_samples.mean(0) - exact).square().mean()
        better += (p.probs - exact).square().mean()
    assert (better / plain).sqrt() < 0.5
