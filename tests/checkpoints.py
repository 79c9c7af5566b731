"""Fits whose loaders break off, kill their process or lose a worker."""

import os
import time

import torch
from tiny import tiny
from torch.utils.data import DataLoader

from torch_lla_em import BlockCG, Compute, FunctionSpace, LinearisedLaplace


class Fuse:
    """A loader that kills its process, or raises, in the middle of some pass."""

    def __init__(self, passes, with_signal=None):
        self.passes_left = passes
        self.with_signal = with_signal

    def __iter__(self):
        case = tiny("classification")
        batches = list(zip(case.x.split(7), case.y.split(7)))
        yield from batches[:2]
        if self.passes_left == 0:
            if self.with_signal is None:
                raise InterruptedError
            os.kill(os.getpid(), self.with_signal)
        self.passes_left -= 1
        yield from batches[2:]


SOLVERS = {"krylov": None, "cg": BlockCG(), "function space": FunctionSpace()}


READ = Compute(keep_data=False)  # at every pass, so that the loaders can break it


def fit(solver, loader, folder, **options):
    name = options.pop("likelihood", "classification")
    known = {"num_samples": 4, "solver": SOLVERS[solver], "curvature": "network"}
    options = {**known, "compute": READ, **options}
    la = LinearisedLaplace(tiny(name).model, name, **options)
    return la.fit(loader, progress_bar=False, checkpoint=folder)


def until_done(run, most=1000):
    """Return what ``run(broken)`` gives once nothing breaks it off, and how often something did."""
    for broken in range(most):
        try:
            return run(broken), broken
        except InterruptedError:
            pass
    raise AssertionError(f"broken off {most} times")


class Slow(Fuse):
    """A loader that takes its time, so that a signal from outside hits any place of a fit."""

    def __iter__(self):
        for batch in super().__iter__():
            time.sleep(0.002)
            yield batch


def fit_slowly(folder):
    torch.set_num_threads(1)
    fit("krylov", Slow(10**6), folder)


class Rationed:
    """A loader of five batches a pass that raises after so many batches in all."""

    def __init__(self, batches, likelihood="classification", shuffled=False):
        self.left, self.case, self.shuffled = batches, tiny(likelihood), shuffled

    def __iter__(self):
        x, y = self.case.x, self.case.y
        order = torch.randperm(len(x)) if self.shuffled else torch.arange(len(x))
        for rows in order.tensor_split(5):
            if self.left == 0:
                raise InterruptedError
            self.left -= 1
            yield x[rows], y[rows]


class Shuffled(DataLoader):
    """A shuffling loader that raises after so many batches in all."""

    def __init__(self, batches, own):
        case, generator = tiny("classification"), torch.Generator().manual_seed(5) if own else None
        rows = list(zip(case.x, case.y))
        super().__init__(rows, batch_size=5, shuffle=True, generator=generator)
        self.__dict__["left"] = [batches]

    def __iter__(self):
        for batch in super().__iter__():
            if self.left[0] == 0:
                raise InterruptedError
            self.left[0] -= 1
            yield batch


class DyingWorker(torch.utils.data.Dataset):
    """A data set whose worker processes end when they are told to."""

    def __init__(self, healthy_reads):
        self.case, self.left = tiny("classification"), healthy_reads

    def __len__(self):
        return len(self.case.x)

    def __getitem__(self, row):
        if row == len(self) - 1 and self.left.value >= 0:
            self.left.value -= 1
            if self.left.value < 0:
                os._exit(1)
        return self.case.x[row], self.case.y[row]


def fit_with_a_worker(passes, folder):
    left = torch.multiprocessing.get_context("fork").Value("i", passes)
    data = DyingWorker(left)
    loader = torch.utils.data.DataLoader(
        data, batch_size=7, num_workers=1, multiprocessing_context="fork"
    )
    options = {"num_samples": 4, "curvature": "network", "compute": READ}
    la = LinearisedLaplace(data.case.model, "classification", **options)
    return la.fit(loader, progress_bar=False, checkpoint=folder)
