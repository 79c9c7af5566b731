"""A run that memory ended in goes on, after a kill, as it did: without what had no room."""

import importlib

import pytest
import torch
from checkpoints import SOLVERS, Fuse, fit

from torch_lla_em import BlockKrylov


class EndsOnce:
    """Lets memory end in some call of a function, before or after it does its work."""

    def __init__(self, function, call, after):
        self.function, self.left, self.after = function, call, after
        self.loader = None
        """What then dies at the next pass."""

    def __call__(self, *args, **kwargs):
        self.left -= 1
        result = self.function(*args, **kwargs) if self.after or self.left else None
        if self.left == 0:
            if self.loader is not None:
                self.loader.passes_left = 1
            raise torch.OutOfMemoryError("none left")
        return result


LANCZOS = "torch_lla_em.solvers.block_lanczos.gram"
DEFLATION = "torch_lla_em.solvers.deflation.gram"
SAMPLES = "torch_lla_em.inference.expectation.optimise_samples"

SOLVERS["block krylov"] = BlockKrylov()

# solver, prior, and the call of a function that memory ends in, before or after its work
ENDS = [
    ("krylov", "scalar", LANCZOS, 13, False),
    ("krylov", "scalar", LANCZOS, 16, True),
    ("krylov", "scalar", "torch_lla_em.inference.krylov_e_step.optimise_MAP", 2, True),
    ("krylov", "scalar", "torch_lla_em.inference.krylov_e_step.optimise_samples", 1, True),
    ("block krylov", "layerwise", LANCZOS, 30, False),
    ("cg", "layerwise", LANCZOS, 5, False),
    ("cg", "layerwise", DEFLATION, 7, False),
    ("cg", "layerwise", SAMPLES, 2, True),
]


@pytest.mark.parametrize("solver, prior, name, call, after", ENDS)
@pytest.mark.filterwarnings("ignore:The samples are known", "ignore:The linear mode is known")
def test_memory_ends_at_a_restart_where_it_ended(
    solver, prior, name, call, after, tmp_path, monkeypatch
):
    module, function = name.rsplit(".", 1)
    original = getattr(importlib.import_module(module), function)

    def run(loader, folder):
        return fit(solver, loader, tmp_path / folder, prior=prior, num_samples=2)

    memory = EndsOnce(original, call, after)
    monkeypatch.setattr(name, memory)
    whole = run(Fuse(-1), "whole")
    assert memory.left <= 0
    memory.left, memory.loader = call, Fuse(-1)
    with pytest.raises(InterruptedError):
        run(memory.loader, "broken")
    la = run(Fuse(-1), "broken")
    assert torch.equal(la.w_samples, whole.w_samples) and torch.equal(la.w_lin, whole.w_lin)
    assert not (tmp_path / "broken" / "shortages.pt").exists()
