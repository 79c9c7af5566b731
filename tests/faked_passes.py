"""A fit without a network: passes that sum over rows of numbers, and methods made of them."""

from types import SimpleNamespace

import torch

from torch_lla_em.checkpoint import Log, Partial, Recorded
from torch_lla_em.data import Data
from torch_lla_em.problem import OUTPUTS, Cost, Pass, Record, Step, is_finite
from torch_lla_em.problem.finite import Finite
from torch_lla_em.problem.passes import BLOCK, SCALAR
from torch_lla_em.runtime import Group, Leaving, records
from torch_lla_em.solvers.space import Space

CPU = torch.device("cpu")
SIZE = 2
KINDS = {"Gw": BLOCK, "loss": SCALAR}


class FakePasses:
    """The plain loop over the data: ``Passes`` at the bottom of a checkpoint's layers."""

    def __init__(self, data, meanwhile):
        self.data, self.finite, self.worked = data, Finite(CPU), 0
        self.refuse_changed_weights = lambda: None
        self._meanwhile = meanwhile

    def zeros(self, columns, kinds):
        shapes = {BLOCK: (columns, SIZE), SCALAR: ()}
        return {name: torch.zeros(shapes[kind]).double() for name, kind in kinds.items()}

    def add(self, batch, w, sums):
        """Add G w of G = XᵀX, and count the batches that this was done for."""
        self.worked += 1
        x = batch.inputs.double()
        sums["Gw"] += w @ x.T @ x
        sums["loss"] += batch.targets.double().sum()
        self._meanwhile(self.worked, sums)
        self.finite.expect(batch.index, OUTPUTS, sums["Gw"])

    def fold(self, w, task):
        self.finite.fine.fill_(True)
        sums = self.zeros(len(w), task.kinds)
        for batch in self.data:
            task.add(batch, w, sums)
        return sums

    def steps(self, state=None):
        self.finite.fine.fill_(True)
        for batch in self.data.batches(in_step=True):

            def fold(w, task, batch=batch):
                sums = self.zeros(len(w), task.kinds)
                task.add(batch, w, sums)
                return sums

            yield Step(len(batch.rows), fold)


class FakeFit:
    """What a session does around a method, with ``meanwhile(batches worked on, sums)`` inside."""

    def __init__(self, loader, meanwhile=lambda worked, sums: None, keep=False):
        self.data, self.cost = Data(loader, CPU), Cost()
        self.data.keep = keep
        self.local = self.passes = FakePasses(self.data, meanwhile)
        self.record = Record(Group())
        self.leaving, self.log = Leaving(), None

    def open(self, folder):
        """Lay a checkpoint around the passes."""
        self.log = Log(folder, {"seed": 0})
        partial = Partial(self.local, self.log, self.leaving, self.cost)
        inside = {"passes": partial, "data": self.data, "cost": self.cost}
        problem = SimpleNamespace(**inside, space=Space(), device=CPU)
        self.passes = self.record = Recorded(problem, self.log, partial)
        return self

    def run(self, folder, method=None):
        """Return what the method finds: from the folder, as far as it is there."""
        self.open(folder)
        state = self.log.posterior(CPU)
        if state is not None:
            self.data.restore(records.from_bytes(state["facts"]))
            self.data.confirm()
            return state["w"]
        w = (method or power)(self)
        self.data.confirm()
        found = {"w": w, "torch_lla_em_version": torch.tensor(2)}
        self.log.finish(found, self.data.facts())
        return w

    def product(self, fold, w):
        """Return G w / |G w|; what is not finite is refused, as of a likelihood."""
        self.cost.columns += len(w)
        sums = fold(w, Pass(KINDS, self.local.add))
        if not is_finite(sums["Gw"]):
            raise FloatingPointError("G w is not finite.")
        return (sums["Gw"] + sums["loss"]) / sums["Gw"].norm()


def power(fit, passes=5):
    """Return columns after some products, each of which follows from the one before."""
    w = torch.ones(3, SIZE).double().cumsum(0)
    for _ in range(passes):
        w = fit.product(fit.passes.fold, w)
    return w


def descend(fit, epochs=4):
    """Return x after some epochs, each of which changes a state in place, batch by batch."""
    state = {"x": torch.ones(1, SIZE).double(), "count": torch.zeros(())}

    def epoch(state):
        state = {name: tensor.clone() for name, tensor in state.items()}
        for step in fit.passes.steps(state):
            state["x"].lerp_(fit.product(step.fold, state["x"]), 0.3)
            state["count"].add_(1)
        return state

    for _ in range(epochs):
        before = state
        state = fit.record.kept(before["x"], lambda: epoch(before))
    return state["x"]
