"""Freed memory serves the next tensor while a network is at work, and goes back afterwards."""

import resource
import subprocess
import sys

import pytest
import torch
from torch import nn

from torch_lla_em import LinearisedLaplace, heap
from torch_lla_em.heap import can_be_kept, kept_heap
from torch_lla_em.memory import free_memory

pytestmark = pytest.mark.skipif(not can_be_kept(), reason="the heap is not glibc's own")

NUMBERS = 20_000_000
PAGES = NUMBERS * 4 // resource.getpagesize()


def pages_fetched(run):
    """How many pages the system has filled in meanwhile."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def temporary():
    torch.empty(NUMBERS).fill_(1.0)


def resident():
    with open("/proc/self/statm") as line:
        return int(line.read().split()[1])


def test_temporaries_reuse_memory():
    assert pages_fetched(temporary) >= 0.9 * PAGES
    with kept_heap():
        temporary()
        assert pages_fetched(temporary) < 0.1 * PAGES


def test_all_is_given_back(monkeypatch):
    monkeypatch.setattr(heap, "_WORTH_TRIMMING", 0.0)
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
    assert pages_fetched(temporary) >= 0.9 * PAGES


def test_ends_with_an_error_too():
    with pytest.raises(KeyError), kept_heap():
        raise KeyError
    assert pages_fetched(temporary) + pages_fetched(temporary) >= 1.8 * PAGES


def test_a_pass_keeps_it():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.fetched = []

        def forward(self, x):
            self.fetched.append(pages_fetched(temporary))
            return self.layer(x)

    x, y = torch.randn(8, 2), torch.randint(0, 2, (8,))
    model = Wide()
    LinearisedLaplace(model, "classification", num_samples=2).fit([(x, y)], progress_bar=False)
    assert sum(fetched > 0.5 * PAGES for fetched in model.fetched) < 0.5 * len(model.fetched)


@pytest.mark.parametrize("name, value", [("MALLOC_ARENA_MAX", "2"), ("GLIBC_TUNABLES", "glibc.malloc.check=0")])
def test_a_user_who_has_set_it_is_left_alone(name, value):
    source = "from torch_lla_em.heap import can_be_kept; print(can_be_kept())"
    command = [sys.executable, "-c", source]
    ended = subprocess.run(command, capture_output=True, text=True, env={name: value}, check=True)
    assert ended.stdout.strip() == "False"
