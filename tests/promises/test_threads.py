"""Fits and predictions of one network in several threads and processes."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from jacobians import Calls
from tiny import fitted, posterior_of, tiny
from torch import nn
from torch.testing import assert_close

from torch_lla_em import Compute
from torch_lla_em.jacobian.state import ONE_AT_A_TIME


class Slow:
    """Counts the threads that are inside of the network at once, and sees whether it is in eval mode."""

    def __init__(self, net, seconds=0.0):
        self.inside, self.most, self.seconds = 0, 0, seconds
        self.entered = threading.Event()
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
    # data of their own: ``tiny`` draws them by the global generator, which threads share
    options = {"model": slow.model.train(), "em_steps": 2, "parameters": ["net.*"]}
    options["loader"] = [(case.x, case.y)]
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


def until_in_line(turns, is_over):
    """Wait until a thread waits for its turn, or is over; fail if none does for a minute or more."""
    for _ in range(600_000):
        if is_over() or turns._next.locked():
            return
        time.sleep(1e-4)
    raise AssertionError("no thread is in line")


def test_predictions_wait_for_a_batch_of_a_fit_and_not_for_a_pass():
    case, (_, other) = tiny("classification"), fitted(em_steps=0, prior_precision=1.0)
    waits, threads = [], []

    def forward(m, x):
        if len(x) >= 10:  # a batch, not a probe
            if not threads or not threads[-1].is_alive():
                threads.append(threading.Thread(target=other, args=(case.x,)))
                threads[-1].start()
                waits.append(0)
            until_in_line(ONE_AT_A_TIME, lambda: not threads[-1].is_alive())
            waits[-1] += 1
        return m.net(x)

    sized = [(case.x[:n], case.y[:n]) for n in range(10, 30)]
    options = {"parameters": ["net.*"], "compute": Compute(keep_data=False), "num_samples": 2}
    la = posterior_of(Calls(forward, net=case.model), "classification", sized, **options, at=1.0)
    assert la.prior_precision > 0 and len(waits) > 20
    # it enters the network a few times for an answer; a pass has 20 batches
    assert max(waits) <= 5, waits


def end_of_child(check):
    """Return 0 where the check holds in a forked process; an alarm ends one that hangs."""
    process = os.fork()
    if process == 0:
        signal.alarm(100)
        os._exit(0 if check() else 1)
    return os.waitpid(process, 0)[1]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forks_wait_for_threads_in_the_network_and_children_for_none_that_they_lack():
    case = tiny("classification")
    slow = Slow(case.model)
    _, la = fitted(model=slow.model, em_steps=1, parameters=["net.*"])
    expected, slow.seconds = la(case.x), 0.1
    slow.entered.clear()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(la, case.x)
        slow.entered.wait()
        assert end_of_child(lambda: not slow.inside and torch.equal(la(case.x), expected)) == 0
    with ThreadPoolExecutor(1) as pool:
        with ONE_AT_A_TIME:
            waiting = pool.submit(la, case.x)
            until_in_line(ONE_AT_A_TIME, waiting.done)

            def enter():
                ONE_AT_A_TIME.release()
                with ONE_AT_A_TIME:
                    return True

            assert end_of_child(enter) == 0
        assert torch.equal(waiting.result(), expected)
