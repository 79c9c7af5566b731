"""What a fit costs: memory, columns and shares of passes, and frames around the network."""

import logging
import sys
import traceback
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny import tiny
from torch import nn

import torch_lla_em
from torch_lla_em import Compute, LinearisedLaplace
from torch_lla_em.jacobian import LinearModel, NetworkState
from torch_lla_em.jacobian.factors import Factored
from torch_lla_em.runtime import files
from torch_lla_em.solvers import BlockCG

HERE = Path(torch_lla_em.__file__).parent


def made(**options):
    case = tiny("classification")
    options = {"num_samples": 4, "curvature": "network", **options}
    return case, LinearisedLaplace(case.model, "classification", **options)


def test_a_plan_tells_memory_and_runs_nothing(caplog):
    caplog.set_level(logging.INFO, "torch_lla_em")
    case, la = made()
    loader = [(case.x[:15], case.y[:15]), (case.x[15:], case.y[15:])]
    assert "4 samples of" in str(la.plan(loader)) and la.w_lin is None
    assert "4 samples of" not in caplog.text  # since it is printed
    la.fit(loader, progress_bar=False)
    assert "4 samples of" in caplog.text
    la.plan(loader)  # and leaves what is fitted as it is
    assert la.w_lin is not None


def test_data_that_change_are_refused_at_the_second_batch():
    case, la = made()
    read = []

    class Augmented(torch.utils.data.TensorDataset):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            read.append(index)
            return x + torch.rand_like(x), y

    for kind in (torch.utils.data.TensorDataset, Augmented):
        loader = torch.utils.data.DataLoader(kind(case.x, case.y), 10, shuffle=True)
        if kind is Augmented:
            for call in (la.plan, la.fit):
                read.clear()
                with pytest.raises(ValueError, match="random augmentation"):
                    call(loader)
                assert len(read) == 20
        else:
            assert la.plan(loader).of_memory


@pytest.mark.parametrize("curvature", ["network", "variational"])
@pytest.mark.parametrize("length", [True, False])
def test_the_bar_shows_the_stage_and_the_time_that_is_left(curvature, length, capsys, monkeypatch):
    monkeypatch.setattr("torch_lla_em.session._SECONDS_BETWEEN_UPDATES", 0.0)
    compute = Compute(keep_data=False, rows=5)
    case, la = made(curvature=curvature, compute=compute, tolerance=1e-4)
    loader = list(zip(case.x.split(5), case.y.split(5)))
    whole = la.fit(loader, progress_bar=False).w_samples

    class Stream:
        def __iter__(self):
            return iter(loader)

    la.fit(loader if length else Stream())
    drawn = [part.strip() for part in capsys.readouterr().err.split("\r") if part.strip()]
    assert drawn[-1].startswith("fitted:")
    # the random numbers are drawn in the first pass, batch by batch
    shares = [part for part in drawn if "random numbers, pass 1 (" in part]
    assert [part.split("(")[1].split(")")[0] for part in shares] == [
        f"{n / 6:.0%}" for n in range(1, 7) if length
    ]
    learning = [part for part in drawn if "learning the prior and the posterior, pass" in part]
    assert learning and all(" per pass" in part for part in learning)
    assert any(", about 1 s left" in part for part in learning)
    assert torch.equal(la.w_samples, whole)


def test_a_batch_that_is_cut_is_not_done_after_its_first_piece():
    case = tiny("classification")
    problem, shares = case.problem(), []
    problem.sweep.take(problem.sweep.limits._replace(batch_rows=10))
    problem.sweep.watch(shares.append)
    problem.ggn_product(torch.zeros(1, problem.size).double())
    assert shares == [1 / 3, 2 / 3, 1.0]


class Backward(torch.autograd.Function):
    """The identity, which calls a function when it is differentiated backwards."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, see):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.see = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        ctx.see()
        return grad, None


class Watching(nn.Module):
    """A network without factors, which notes the library's frames while it is differentiated."""

    def __init__(self, outputs):
        super().__init__()
        self.inner, self.head = (
            nn.Parameter(torch.randn(16, 4)),
            nn.Parameter(torch.randn(outputs, 16)),
        )
        self.stacks = {"push": [], "pull": []}

    def note(self, product):
        codes = [frame.f_code for frame, _ in traceback.walk_stack(None)]
        own = [code.co_name for code in codes if HERE in Path(code.co_filename).parents]
        self.stacks[product].append([name for name in own if "<" not in name])

    def forward(self, x):
        f = (x @ self.inner.sin().T).tanh() @ self.head.sin().T
        transform = torch._C._functorch.peek_interpreter_stack()
        if transform is not None and transform.key() == torch._C._functorch.TransformType.Jvp:
            self.note("push")
            return f
        return Backward.apply(f, partial(self.note, "pull"))


# frames of a product below the method of Problem, and below fit
FRAMES = {"push": (5, 12), "pull": (4, 12)}
OF_BLOCK_CG = {"push": (5, 16), "pull": (4, 15)}
PRODUCTS = "ggn_product", "loss_and_gradient", "noise_features", "push_forward", "pull_back"


@pytest.mark.parametrize("solver, most", [(None, FRAMES), (BlockCG(), OF_BLOCK_CG)])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_few_frames_lie_between_a_product_and_the_network(likelihood, solver, most):
    torch.manual_seed(0)
    x, y = torch.randn(200, 4), torch.arange(200) % 3
    network = Watching(3 if likelihood == "classification" else 1)
    y = y if likelihood == "classification" else x[:, :1].sin()
    la = LinearisedLaplace(network, likelihood, num_samples=4, solver=solver)
    la.fit(list(zip(x.split(100), y.split(100))), progress_bar=False, em_steps=2)
    for product, (inside, from_fit) in most.items():
        names = [stack for stack in network.stacks[product] if set(PRODUCTS) & set(stack)]
        assert max(stack.index(p) for stack in names for p in PRODUCTS if p in stack) <= inside
        assert max(stack.index("fit") for stack in names) <= from_fit


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_a_prediction_rebuilds_nothing_that_depends_on_the_network_alone(likelihood):
    case = tiny(likelihood)
    la = LinearisedLaplace(case.model, likelihood, num_samples=4)
    la.fit(case.x, case.y, progress_bar=False, em_steps=1)
    la(case.x[:1])
    called = Counter()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(HERE)):
            called[frame.f_code] += 1

    sys.setprofile(note)
    try:
        la(case.x[:1])
    finally:
        sys.setprofile(None)
    made = [kind.__init__ for kind in (NetworkState, LinearModel, Factored)]
    rebuilt = {function.__qualname__ for function in made if function.__code__ in called}
    assert not rebuilt and files.fingerprint.__code__ not in called
    # without comprehensions, which are functions before Python 3.12 only
    functions = {code: count for code, count in called.items() if "<" not in code.co_name}
    assert len(functions) <= 88 and sum(functions.values()) <= 200
