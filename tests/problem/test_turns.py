"""A fit lets other threads predict between two of its batches."""

import os
import signal
import threading
import time
from itertools import pairwise

import torch
from torch import nn

from torch_lla_em import Compute, LinearisedLaplace
from torch_lla_em.jacobian.state import ONE_AT_A_TIME
from torch_lla_em.runtime import Turns


class Slow(nn.Linear):
    """A layer that notes the sizes of its batches, each of which takes a while."""

    sizes = []

    def forward(self, x):
        self.sizes.append(len(x))
        time.sleep(0.002)
        return super().forward(x)


def laplace(layer, **options):
    return LinearisedLaplace(layer, "regression", num_samples=2, **options)


def test_predictions_wait_for_a_batch_and_not_for_a_pass():
    torch.manual_seed(0)
    x, slow = torch.randn(20, 2), Slow(2, 1)
    fixed = {"em_steps": 0, "prior_precision": 1.0, "progress_bar": False}
    fast = nn.Linear(2, 1)
    other = laplace(fast).fit(x, fast(x).detach() + 0.1 * torch.randn(20, 1), **fixed)
    sized = [torch.randn(n, 2) for n in range(20, 40)]
    batches = [(x, slow(x).detach() + 0.1 * torch.randn(len(x), 1)) for x in sized]
    Slow.sizes.clear()
    la = laplace(slow, compute=Compute(keep_data=False))
    fit = threading.Thread(target=la.fit, args=(batches,), kwargs=fixed)
    fit.start()
    waits = []
    while fit.is_alive():
        before = len(Slow.sizes)
        other(x)
        passed = [n for n in Slow.sizes[max(0, before - 1) :] if n >= 20]  # none of a probe
        waits.append(sum(a != b for a, b in pairwise(passed)))
        time.sleep(0.001)
    fit.join()
    assert la.prior_precision > 0 and len(waits) > 20
    # one batch each; on a busy machine some pass before the thread gets in line
    assert sorted(waits)[len(waits) * 4 // 5] <= 2


def test_a_waiting_thread_gets_its_turn_before_the_holder():
    turns, order = Turns(), []

    def wait():
        with turns, turns:
            order.append("other")

    with turns:
        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.05)
        order.append("holder")
    with turns:
        order.append("holder again")
    thread.join()
    assert order == ["holder", "other", "holder again"]


def test_the_child_of_a_fork_waits_for_no_thread_that_it_lacks():
    with ONE_AT_A_TIME:
        waiting = threading.Thread(
            target=lambda: ONE_AT_A_TIME.__enter__() or ONE_AT_A_TIME.release()
        )
        waiting.start()
        time.sleep(0.05)
        child = os.fork()
        if not child:
            ONE_AT_A_TIME.release()
            with ONE_AT_A_TIME:
                os._exit(0)
    waiting.join()
    end = time.monotonic() + 20
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
        time.sleep(0.01)
    if done[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert done == (child, 0)
