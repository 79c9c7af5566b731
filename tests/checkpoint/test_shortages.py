"""A run that memory ended in goes on, after a kill, as it did: without what had no room."""

import pytest
import torch
from checkpoints import Fuse, fit
from daily import daily

from torch_lla_em.solvers.space import Space


class EndsOnce:
    """Lets memory end in some call of a method, and a loader die soon after."""

    def __init__(self, method, call):
        self.method, self.left = method, call
        self.loader = None
        """What then dies at the next pass."""

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0:
            if self.loader is not None:
                self.loader.passes_left = 1
            raise torch.OutOfMemoryError("none left")
        return self.method(*args, **kwargs)


@pytest.mark.parametrize(
    "solver, prior, call",
    daily(("krylov", "scalar", 14), rest=[("krylov", "scalar", 18), ("cg", "layerwise", 5)]),
)
@pytest.mark.filterwarnings("ignore:The samples are known", "ignore:The linear mode is known")
def test_memory_ends_at_a_restart_where_it_ended(solver, prior, call, tmp_path, monkeypatch):
    def run(loader, folder):
        return fit(solver, loader, tmp_path / folder, prior=prior, num_samples=2)

    memory = EndsOnce(Space.gram, call)
    monkeypatch.setattr(Space, "gram", lambda *args, **options: memory(*args, **options))
    whole = run(Fuse(-1), "whole")
    assert memory.left <= 0
    memory.left, memory.loader = call, Fuse(-1)
    with pytest.raises(InterruptedError):
        run(memory.loader, "broken")
    la = run(Fuse(-1), "broken")
    torch.testing.assert_close(la.w_samples, whole.w_samples, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(la.w_lin, whole.w_lin, rtol=1e-6, atol=1e-8)
