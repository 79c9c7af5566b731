"""Freed memory serves the next tensor while a network is at work, and goes back afterwards.

What others have done to the heap of this process would be seen too: checks run in one of their own.
"""

import os
import resource
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn

from torch_lla_em import LinearisedLaplace, heap
from torch_lla_em.heap import can_be_kept, is_kept_here, kept_heap
from torch_lla_em.memory import free_memory

NUMBERS = 20_000_000
PAGES = NUMBERS * 4 // resource.getpagesize()


def pages_fetched(run):
    """How many pages the system has filled in meanwhile."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def temporary(times=1):
    torch.empty(times * NUMBERS).fill_(1.0)


def resident():
    with open("/proc/self/statm") as line:
        return int(line.read().split()[1])


def temporaries_reuse_memory():
    assert pages_fetched(temporary) >= 0.9 * PAGES
    with kept_heap():
        for _ in range(2):
            temporary()
        assert pages_fetched(temporary) < 0.1 * PAGES


def all_is_given_back():
    heap._WORTH_TRIMMING = 0.0
    with kept_heap():
        pass  # what came before is gone
    before = resident()
    with kept_heap():
        temporary()
        with kept_heap():
            temporary()
        assert resident() > before + 0.9 * PAGES  # the inner one keeps it for the outer
    assert resident() < before + 0.2 * PAGES
    with kept_heap():
        temporary()
        free_memory(torch.device("cpu"))
        assert resident() < before + 0.2 * PAGES  # asked what is free, it gives back first
    assert pages_fetched(lambda: temporary(3)) >= 2.7 * PAGES


def it_ends_with_an_error_too():
    with pytest.raises(KeyError), kept_heap():
        raise KeyError
    for _ in range(2):  # larger than what may lie about
        assert pages_fetched(lambda: temporary(5)) >= 4.5 * PAGES


class Wide(nn.Module):
    """A network with a large temporary, which counts the pages of each."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.fetched = []

    def forward(self, x):
        self.fetched.append(pages_fetched(temporary))
        return self.layer(x)


def a_fit_keeps_it():
    x, y = torch.randn(8, 2), torch.randint(0, 2, (8,))
    model = Wide()
    LinearisedLaplace(model, "classification", num_samples=2).fit([(x, y)], progress_bar=False)
    assert sum(fetched > 0.5 * PAGES for fetched in model.fetched) < 0.5 * len(model.fetched)


def it_is_known_where_it_cannot_be():
    """glibc gives other threads heaps of 64 MB each, which large tensors are not taken from."""
    found = []
    thread = threading.Thread(target=lambda: found.append(is_kept_here()))
    thread.start()
    thread.join()
    assert found == [False] and is_kept_here()


def forked_processes_begin_anew():
    """As a loader's workers: what they free goes back, and what they do is theirs."""
    with kept_heap():
        child = os.fork()
        if child == 0:
            pages = min(pages_fetched(lambda: temporary(5)) for _ in range(2))
            os._exit(0 if pages >= 4.5 * PAGES and not heap._keepers else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert heap._keepers == 1


CHECKS = [
    forked_processes_begin_anew,
    temporaries_reuse_memory,
    all_is_given_back,
    it_ends_with_an_error_too,
    a_fit_keeps_it,
    it_is_known_where_it_cannot_be,
]


@pytest.fixture(scope="module")
def faults():
    """What each check had to say, by its name."""
    source = "import torch; torch.set_num_threads(1); import test_heap; test_heap.main()"
    ended = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    assert ended.returncode == 0, ended.stderr
    return eval(ended.stdout)


def main():
    said = {}
    for check in CHECKS:
        try:
            check()
        except Exception:
            said[check.__name__] = traceback.format_exc()
    print(said)


@pytest.mark.skipif(not can_be_kept(), reason="the heap is not glibc's own")
@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_in_a_process_of_its_own(name, faults):
    assert name not in faults, faults[name]


@pytest.mark.parametrize("name, value", [("MALLOC_ARENA_MAX", "2"), ("GLIBC_TUNABLES", "glibc.malloc.check=0")])
def test_a_user_who_has_set_it_is_left_alone(name, value):
    source = "from torch_lla_em.heap import can_be_kept; print(can_be_kept())"
    command = [sys.executable, "-c", source]
    ended = subprocess.run(command, capture_output=True, text=True, env={name: value}, check=True)
    assert ended.stdout.strip() == "False"
