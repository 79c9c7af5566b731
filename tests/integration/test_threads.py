"""Fits and predictions of one network in several threads and processes."""

import copy
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny import tiny
from torch.testing import assert_close

from torch_lla_em import LinearisedLaplace
from torch_lla_em.jacobian import one_at_a_time


def test_fits_and_predictions_in_threads():
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


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_processes_predict():
    case = tiny("classification")
    la = LinearisedLaplace(case.model, "classification", num_samples=4)
    la.fit([(case.x, case.y)], em_steps=1, progress_bar=False)
    expected, done, ends = la(case.x), threading.Event(), []
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(lambda: [la(case.x) for _ in iter(done.is_set, True)])
        try:
            for _ in range(6):
                ends.append(_end_of_child(lambda: torch.equal(la(case.x), expected)))
        finally:
            done.set()
        assert beside.result()
    assert ends == [0] * 6


def _end_of_child(check):
    """Return 0 where the check holds in a forked process; an alarm ends one that hangs."""
    process = os.fork()
    if process == 0:
        signal.alarm(10)
        os._exit(0 if check() else 1)
    return os.waitpid(process, 0)[1]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_forked_during_a_call_raises(monkeypatch):
    monkeypatch.setattr(one_at_a_time, "_WAIT", 0.01)
    case, inside, done = tiny("classification"), threading.Event(), threading.Event()
    network = LinearisedLaplace(case.model, "classification")._linear_model.network

    def hold():
        with network.alone():
            inside.set()
            done.wait()

    def is_refused():
        with pytest.raises(RuntimeError, match="forked while another thread"):
            network.weights(("0.weight",))
        return True

    with ThreadPoolExecutor(1) as pool:
        pool.submit(hold)
        inside.wait()
        try:
            assert _end_of_child(is_refused) == 0
        finally:
            done.set()
    assert network.weights(("0.weight",))


def test_two_threads_fit_with_one_folder(tmp_path, caplog):
    case = tiny("classification")
    together, found = threading.Barrier(2), []

    class Meeting:
        """A loader that two fits enter at the same time."""

        entered = 0

        def __iter__(self):
            if not self.entered:
                together.wait(timeout=60)
            self.entered += 1
            yield case.x, case.y

    def fit():
        model = copy.deepcopy(case.model)
        la = LinearisedLaplace(model, "classification", num_samples=4)
        try:
            found.append(la.fit(Meeting(), progress_bar=False, checkpoint=tmp_path)(case.x))
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=fit) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(result, torch.Tensor) for result in found), found
    assert torch.equal(*found)
    assert "thread is writing to the checkpoint folder" in caplog.text
