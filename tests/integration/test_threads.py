"""Fits and predictions beside each other, over one network."""

from concurrent.futures import ThreadPoolExecutor

import torch
from tiny import tiny
from torch.testing import assert_close

from torch_lla_em import LinearisedLaplace


def test_two_fits_beside_predictions():
    case = tiny("classification")
    case.model.train()

    def fit():
        la = LinearisedLaplace(case.model, "classification", num_samples=4)
        return la.fit([(case.x, case.y)], em_steps=3, progress_bar=False)

    alone = fit()
    expected = alone(case.x)
    with ThreadPoolExecutor(4) as pool:
        fits = [pool.submit(fit) for _ in range(2)]
        answers = [pool.submit(alone, case.x) for _ in range(50)]
    for answer in answers:
        assert_close(answer.result(), expected)
    for other in fits:
        assert_close(other.result().w_samples, alone.w_samples)
    assert case.model.training and torch.backends.mha.get_fastpath_enabled()
