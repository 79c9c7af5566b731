"""What the pretended card sees, and what it says where it cannot be."""

from importlib import metadata

import pytest
import torch

import pretended_card

pytestmark = pytest.mark.cuda


def test_what_lies_elsewhere_is_refused(pretended):
    a = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="same device"):
        a + torch.ones(3)
    with pytest.raises(RuntimeError, match="'cuda' device type for generator"):
        torch.randn(3, device="cuda", generator=torch.Generator())
    with pytest.raises(NotImplementedError, match="mm_cuda"):
        torch.ones(2, 2, device="cuda").long() @ torch.ones(2, 2, device="cuda").long()
    assert (a + torch.tensor(2.0)).tolist() == [3.0] * 3


def test_copies_arrive_late_and_races_are_counted(pretended):
    there = torch.full((4,), 2.0, device="cuda")
    here = torch.zeros(4, pin_memory=True)
    here.copy_(there, non_blocking=True)
    assert here.isnan().all()
    with pretended.watched() as seen:
        torch.cuda.current_stream().synchronize()
    assert here.tolist() == there.tolist() and pretended.waits(seen) == 1
    raced = pretended.races()
    there.copy_(here, non_blocking=True)
    here.zero_()
    torch.cuda.current_stream().synchronize()
    assert pretended.races() == raced + 1


def test_what_makes_the_host_wait_is_counted(pretended):
    a = torch.arange(3.0, device="cuda")
    for run in (lambda: a.sum().item(), lambda: a[a > 1], lambda: a.nonzero(), lambda: a.cpu()):
        with pretended.watched() as seen:
            run()
        assert pretended.waits(seen) == 1
    with pretended.watched() as seen:
        a.sin().cumsum(0)[1:] @ a[1:]
    assert not seen


def test_numbers_follow_from_the_seed_alone():
    torch.cuda.manual_seed(3)
    first = torch.randn(5, device="cuda"), torch.randn(5, device="cuda")
    state = torch.get_rng_state()
    torch.cuda.manual_seed(3)
    assert torch.equal(torch.randn(5, device="cuda"), first[0])
    assert not torch.equal(*first) and torch.equal(torch.get_rng_state(), state)


def test_other_versions_are_named(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "1.13.1")
    monkeypatch.setattr(pretended_card, "absent", None)
    pretended_card.install()
    assert pretended_card.absent.endswith("knows torch 2.14 and 2.15, not 1.13.1")
