"""Fits and predictions of one network in several threads and processes."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny import fitted, tiny
from torch.testing import assert_close

from torch_lla_em import LinearisedLaplace
from torch_lla_em.jacobian.network import ONE_AT_A_TIME


def test_fits_and_predictions_in_threads():
    case = tiny("classification")
    case.model.train()

    def fit():
        la = LinearisedLaplace(case.model, "classification", num_samples=4)
        return la.fit([(case.x, case.y)], em_steps=3, progress_bar=False)

    alone = fit()
    expected = alone(case.x)
    flags = torch.backends.cuda.math_sdp_enabled(), torch.backends.mkldnn.enabled
    with ThreadPoolExecutor(4) as pool:
        fits = [pool.submit(fit) for _ in range(2)]
        answers = [pool.submit(alone, case.x) for _ in range(50)]
    for answer in answers:
        assert_close(answer.result(), expected)
    for other in fits:
        assert_close(other.result().w_samples, alone.w_samples)
    assert all(module.training for module in case.model.modules())
    assert flags == (torch.backends.cuda.math_sdp_enabled(), torch.backends.mkldnn.enabled)
    assert torch.backends.mha.get_fastpath_enabled()


def _end_of_child(check):
    """Return 0 where the check holds in a forked process; an alarm ends one that hangs."""
    process = os.fork()
    if process == 0:
        signal.alarm(10)
        os._exit(0 if check() else 1)
    return os.waitpid(process, 0)[1]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_waits_until_other_threads_have_left_the_network():
    (case, la), inside, left = fitted(em_steps=1), threading.Event(), []
    expected = la(case.x)

    def hold():
        with ONE_AT_A_TIME:
            inside.set()
            time.sleep(0.2)
            left.append(True)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(hold)
        inside.wait()
        assert _end_of_child(lambda: left and torch.equal(la(case.x), expected)) == 0
