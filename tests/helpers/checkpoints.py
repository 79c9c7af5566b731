"""Fits that are interrupted after saving a state or in the middle of a pass."""

import time
from contextlib import contextmanager

import pytest
import torch
from direct import Direct
from tiny import batched, posterior_of, tiny

from torch_lla_em import BlockCG
from torch_lla_em.checkpoint import Folder


class Fuse:
    """A loader that raises in the middle of some pass."""

    def __init__(self, passes=10**6):
        self.passes_left = passes

    def __iter__(self):
        case = tiny("classification")
        batches = batched(7, case.x, case.y)
        yield from batches[:2]
        if self.passes_left == 0:
            raise InterruptedError
        self.passes_left -= 1
        yield from batches[2:]


class Slow(Fuse):
    """A slow loader, so that a signal may arrive anywhere in a fit."""

    def __iter__(self):
        for batch in super().__iter__():
            time.sleep(0.002)
            yield batch


SOLVERS = {"krylov": None, "cg": BlockCG(), "function space": Direct()}


def fit(solver, loader, folder, likelihood="classification", model=None, **options):
    """Fit with batches that are read in every pass, so that loaders can interrupt it."""
    own = {"curvature": "network", "keep_data": False, "solver": SOLVERS[solver]}
    model = tiny("classification").model if model is None else model
    return posterior_of(model, likelihood, loader, checkpoint=folder, **own | options)


def fit_slowly(folder):
    torch.set_num_threads(1)
    fit("krylov", Slow(), folder)


@contextmanager
def dying_after(saves):
    """Make a fit raise InterruptedError after it has saved this many states."""
    save, done = Folder.save, []

    def then_die(self, state, *name):
        save(self, state, *name)
        done.append(1)
        if len(done) == saves:
            raise InterruptedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Folder, "save", then_die)
        patch.setattr(Folder, "is_due", lambda self: True)
        yield


def until_done(run, saves=1, most=100):
    """Return the result of ``run()`` once it completes, and how often it was interrupted."""
    for deaths in range(most):
        try:
            with dying_after(saves):
                return run(), deaths
        except InterruptedError:
            pass
    raise AssertionError(f"died {most} times")
