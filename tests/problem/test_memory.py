"""Where memory ends, the work goes on in smaller pieces, with the same result."""

import pytest
import torch
from allocator import Allocator
from daily import daily
from models import Centred, network
from tiny import batched, fitted, posterior_of, problem_of
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from torch_lla_em import SGD, BlockCG, Compute
from torch_lla_em.data import Share
from torch_lla_em.likelihoods import Classification, Regression
from torch_lla_em.problem import pull_back
from torch_lla_em.problem.problem import Problem
from torch_lla_em.runtime.memory import DoesNotFit, shortage_of
from torch_lla_em.solvers import space as blocks

K, WIDTHS = 8, (20, 200, 50, 3)


def rows(count):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 20, generator=generator), torch.arange(count) % 3


def problem(model=None):
    """A problem that has been probed, and takes all columns at once."""
    x, y = rows(300)
    made = problem_of(model or network(*WIDTHS), Classification(), batched(200, x, y))
    made.linear_model.probe(x[:8])
    with made.linear_model.network.guarded():  # torch.func, too
        made.linear_model.by_autodiff(x[:8])
    return made


def product(problem):
    generator = torch.Generator().manual_seed(2)
    return problem.ggn_product(torch.randn(K, problem.size, generator=generator))


def gradient(problem):
    loss, gradient = problem.loss_and_gradient(torch.linspace(-0.1, 0.1, problem.size))
    return torch.cat([gradient, torch.tensor([loss])])


def noise(problem):
    return problem.probe_features(K, seed=0)[0]


def outputs(problem):
    w = torch.linspace(-1, 1, K * problem.size).view(K, -1)
    return torch.cat([Jw for _, _, Jw in problem.push_forward(w)], dim=1)


WORK = [(outputs, 0.25), (product, 0.35), (noise, 0.4)]


@pytest.mark.parametrize("work, least", daily((gradient, 0.25), rest=WORK))
def test_smaller_gpus_give_the_same(work, least):
    with Allocator() as unlimited:
        expected = work(problem())
    refused = []
    for share in (0.9, 0.5 * (0.9 + least), least):
        small = problem()
        with Allocator(share * unlimited.peak) as allocator:
            work(small)
            refused.append(allocator.refusals)
            found = work(small)  # what did not fit is remembered
        assert allocator.refusals == refused[-1]
        assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert refused == sorted(refused) and refused[-1] > refused[0]


MODELS = [(network(20, 2000, 50, 3), "1 examples "), (Centred(*network(*WIDTHS)), "200 examples ")]


@pytest.mark.parametrize("model, rows", daily(MODELS[1], rest=MODELS[:1]))
def test_what_cannot_be_made_smaller_is_said_and_tried_in_vain(model, rows):
    small = problem(model)
    with Allocator(2.9 * 4 * small.size), pytest.raises(DoesNotFit) as caught:
        gradient(small)
    message = str(caught.value)
    assert f"One column of {rows}of batch 0 does not fit" in message
    for knob in ("smaller batches", 'parameters="last_layer"', 'vectors="cpu"', "2 P numbers"):
        assert knob in message
    assert small.sweep.plan.columns is None and small.sweep.plan.rows == float("inf")


class EndsOnce(TorchDispatchMode):
    """Refuses one of the operations that allocate, whichever it is."""

    def __init__(self, refused):
        super().__init__()
        self.left = refused

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.left -= not any(part.alias_info for part in function._schema.returns)
        if self.left == 0:
            self.left = -1
            raise torch.OutOfMemoryError("none left")
        return function(*args, **(kwargs or {}))


def prepared():
    x, y = rows(8)
    layers = nn.Sequential(nn.Linear(20, 3), nn.Tanh(), nn.Linear(3, 3))
    return problem_of(layers, Classification(), [(x, y)])


def test_nothing_is_added_twice_and_no_shortage_is_a_property_of_the_network():
    """Wherever memory ends once: in a product of columns in chunks, and in the probe before it."""
    torch.manual_seed(0)
    first = prepared()
    first.sweep.take(first.sweep.plan._replace(columns=3))
    with EndsOnce(0) as operations:
        expected = product(first)
    count = -operations.left
    assert first.linear_model.ways.names and count > 100
    errors = []
    for refused in range(1, count, count // 8):
        torch.manual_seed(0)
        small = prepared()
        small.sweep.take(small.sweep.plan._replace(columns=3))
        with EndsOnce(refused):
            try:
                found = product(small)
            except (torch.OutOfMemoryError, DoesNotFit) as error:  # in checks, in the probe
                errors.append(error)
                found = product(small)
                assert small.linear_model.ways.names == first.linear_model.ways.names
        assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert any('vectors="cpu"' in str(error) for error in errors if isinstance(error, DoesNotFit))


def targets(problem):
    """Continuous targets, whose sums the first pass takes beside the random probes."""
    eta, _, facts = problem.probe_features(K, seed=0, with_squares=False)
    return torch.cat([eta.flatten(), *(part.flatten() for part in facts)])


def pulled(problem):
    """A product with the transposed Jacobian alone."""
    problem.data.read()
    u = torch.linspace(-1, 1, K * 36).view(K, 12, 3)
    return pull_back(problem, u, Share(torch.arange(12), 12))


def normed(problem):
    return torch.cat([part.flatten() for part in problem.probe_features(K, seed=0)[:2]])


@pytest.mark.parametrize("work", daily(targets, rest=[product, gradient, outputs, pulled, normed]))
def test_no_sum_counts_a_batch_twice_wherever_memory_ends(work):
    """Operations of a pass after the probe that allocate are refused once, of many every few."""
    x, y = rows(12)
    kind, y = (Regression(), x[:, :3].sin()) if work is targets else (Classification(), y)

    def probed():
        torch.manual_seed(0)
        made = problem_of(prepared().linear_model.network.module, kind, [(x, y)])
        made.linear_model.probe(x)
        limits = {"columns": 3}
        if work is normed:  # without factors, squares depend on the sums that are squared
            made.linear_model.leave_factors()
            limits["rows"] = 1
        made.sweep.take(made.sweep.plan._replace(**limits))
        return made

    whole = probed()
    with EndsOnce(0) as operations:
        expected = work(whole)
    count, repeated = -operations.left, 0
    tries = range(1, count + 1, 1 + count // 20)
    for refused in tries:
        small = probed()
        with EndsOnce(refused):
            try:
                found = work(small)
            except (torch.OutOfMemoryError, DoesNotFit):  # before or after the batches
                continue
        assert_close(found, expected, rtol=1e-4, atol=1e-4)
        repeated += 1
    assert repeated > len(tries) / 2


SHORTAGES = """std::bad_alloc
could not create a primitive
cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED
cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`
CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`
cuDNN error: CUDNN_STATUS_NOT_INITIALIZED
cusolver error: CUSOLVER_STATUS_NOT_INITIALIZED, when calling `cusolverDnCreate(handle)`
GET was unable to find an engine to execute this computation"""


def test_libraries_have_words_of_their_own_and_other_errors_are_no_shortage():
    for words in SHORTAGES.splitlines():
        assert shortage_of(RuntimeError(words)) == words
    for words in ("shapes do not match", "could not create a primitive descriptor for a conv"):
        with pytest.raises(RuntimeError, match=words):
            shortage_of(RuntimeError(words))


SOLVERS = [(SGD(epochs=10), False), (BlockCG(), True)]


@pytest.mark.parametrize("solver, layerwise", daily((BlockCG(), False), rest=SOLVERS))
@pytest.mark.filterwarnings("ignore:The samples", "ignore:The mode")
def test_fits_on_smaller_gpus_are_the_same(solver, layerwise, monkeypatch, caplog):
    monkeypatch.setattr(blocks, "NUMBERS", 1 << 12)  # as small as those of a large problem
    (x, y), model = rows(96), network(20, 20, 50, 3)

    def fit():
        options = {"compute": Compute(solver=solver), "layerwise": layerwise, "num_samples": 3}
        return posterior_of(model, "classification", batched(64, x, y), **options, em_steps=1)

    fit()  # what is made once a process counts for none
    with Allocator() as unlimited:
        whole = fit()
    with Allocator(0.85 * unlimited.peak) as allocator:
        small = fit()
    assert allocator.refusals and "Out of memory" in caplog.text
    assert_close(small.prior_precision, whole.prior_precision, rtol=0.05, atol=0)
    due = whole.functional_samples(x)
    assert (small.functional_samples(x) - due).norm() < 0.05 * due.norm()


def test_factors_that_were_given_up_are_not_used_again(monkeypatch):
    """The probe of torch.func that follows the shortage finds factors again."""
    inspect, calls = Problem.inspect, []

    def short_of_memory(self, rows, batch):
        calls.append(batch)
        if len(calls) == 1:
            raise MemoryError("simulated")
        return inspect(self, rows, batch)

    monkeypatch.setattr(Problem, "inspect", short_of_memory)
    _, la = fitted("classification", em_steps=1)
    assert not la._linear_model.factored
    assert any("without stored Jacobian factors" in words for words in la.messages)
