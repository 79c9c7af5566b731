"""What the simulated GPU detects, and how it says why it is absent."""

import pytest
import torch

pytestmark = pytest.mark.cuda


def test_tensors_on_other_devices_raise(simulated):
    a = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="same device"):
        a + torch.ones(3)
    with pytest.raises(RuntimeError, match="'cuda' device type for generator"):
        torch.randn(3, device="cuda", generator=torch.Generator())
    with pytest.raises(NotImplementedError, match="mm_cuda"):
        torch.ones(2, 2, device="cuda").long() @ torch.ones(2, 2, device="cuda").long()
    assert (a + torch.tensor(2.0)).tolist() == [3.0] * 3


def test_copies_arrive_late(simulated):
    there, here = torch.full((4,), 2.0, device="cuda"), torch.zeros(4, pin_memory=True)
    here.copy_(there, non_blocking=True)
    assert here.isnan().all()
    with simulated.watched() as seen:
        torch.cuda.current_stream().synchronize()
    assert here.tolist() == there.tolist() and simulated.waits(seen) == 1


def test_synchronisations_are_counted(simulated):
    a = torch.arange(3.0, device="cuda")
    for run in (lambda: a.sum().item(), lambda: a[a > 1], lambda: a.nonzero(), lambda: a.cpu()):
        with simulated.watched() as seen:
            run()
        assert simulated.waits(seen) == 1
    with simulated.watched() as seen:
        a.sin().cumsum(0)[1:] @ a[1:]
    assert not seen
