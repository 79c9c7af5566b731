"""Fits and predictions of one network in several threads and processes."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from jacobians import Calls
from tiny import fitted, tiny
from torch import nn
from torch.testing import assert_close


class Slow:
    """Counts the threads that are inside of the network at once, and sees whether it is in eval mode."""

    def __init__(self, net, seconds=0.0):
        self.inside, self.most, self.seconds, self.entered = 0, 0, seconds, threading.Event()
        self.model = Calls(self.forward, net=net, rnn=nn.GRU(2, 2, batch_first=True).double())

    def forward(self, m, x):
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.entered.set()
        time.sleep(self.seconds)
        self.inside -= 1
        assert not m.training
        return m.net(x) + m.rnn(x[:, None])[0].sum()


def test_fits_and_predictions_in_threads_enter_a_network_one_at_a_time():
    case = tiny("classification")
    slow = Slow(case.model)
    options = {"model": slow.model.train(), "em_steps": 2, "parameters": ["net.*"]}
    _, alone = fitted(**options)
    expected, slow.seconds = alone(case.x), 1e-3
    with ThreadPoolExecutor(4) as pool:
        fits = [pool.submit(fitted, **options) for _ in range(2)]
        answers = [pool.submit(alone, case.x) for _ in range(20)]
    for answer in answers:
        assert_close(answer.result(), expected)
    for other in fits:
        assert_close(other.result()[1].w_samples, alone.w_samples)
    assert slow.most == 1 and all(module.training for module in slow.model.modules())
    assert torch.backends.mkldnn.enabled and torch.backends.cudnn.enabled
    assert torch.backends.cuda.math_sdp_enabled() and torch.backends.mha.get_fastpath_enabled()


def _end_of_child(check):
    """Return 0 where the check holds in a forked process; an alarm ends one that hangs."""
    process = os.fork()
    if process == 0:
        signal.alarm(10)
        os._exit(0 if check() else 1)
    return os.waitpid(process, 0)[1]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_waits_until_other_threads_have_left_the_network():
    case = tiny("classification")
    slow = Slow(case.model)
    _, la = fitted(model=slow.model, em_steps=1, parameters=["net.*"])
    expected, slow.seconds = la(case.x), 0.1
    slow.entered.clear()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(la, case.x)
        slow.entered.wait()
        assert _end_of_child(lambda: not slow.inside and torch.equal(la(case.x), expected)) == 0
