"""Where memory ends, the work goes on in smaller pieces, with the same result."""

import sys

import pytest
import torch
from allocator import Allocator
from daily import daily
from fresh import run_fresh
from models import Centred
from tiny import fitted as tiny_fit
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_lla_em import SGD, BlockCG, FunctionSpace, LinearisedLaplace
from torch_lla_em.data.loader import Data
from torch_lla_em.likelihoods import Classification
from torch_lla_em.problem.plan import measured
from torch_lla_em.problem.problem import Problem
from torch_lla_em.runtime.memory import DoesNotFit, shortage_of
from torch_lla_em.solvers import space as blocks

K = 8


def network(width=200):
    torch.manual_seed(0)
    first, last = nn.Linear(20, width), nn.Linear(50, 3)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(width, 50), nn.Tanh(), last)


def problem(model=None):
    """A problem that has been probed, and takes all columns at once."""
    torch.manual_seed(1)
    x, y = torch.randn(300, 20), torch.randint(0, 3, (300,))
    la = LinearisedLaplace(model or network(), "classification")
    batches = list(zip(x.split(200), y.split(200)))
    problem = Problem(la._linear_model, Classification(), Data(batches, torch.device("cpu")))
    linear = problem.linear_model
    linear.probe(x[:200])
    linear.path = linear.path._replace(columns=None)
    return problem


def product(problem):
    generator = torch.Generator().manual_seed(2)
    return problem.ggn_product(torch.randn(K, problem.size, generator=generator))


def gradient(problem):
    loss, gradient = problem.loss_and_gradient(torch.linspace(-0.1, 0.1, problem.size))
    return torch.cat([gradient, torch.tensor([loss])])


def noise(problem):
    return problem.noise_features(K, seed=0).eta


def outputs(problem):
    w = torch.linspace(-1, 1, K * problem.size).view(K, -1)
    return torch.cat([Jw for _, _, Jw in problem.push_forward(w)], dim=1)


@pytest.mark.parametrize(
    "work, least",
    daily((gradient, 0.25), rest=[(outputs, 0.25), (product, 0.35), (noise, 0.4)]),
)
def test_smaller_gpus_give_the_same(work, least):
    with Allocator() as unlimited:
        expected = work(problem())
    refused = []
    for share in (0.9, 0.5 * (0.9 + least), least):
        small = problem()
        with Allocator(share * unlimited.peak) as allocator:
            found = work(small)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        refused.append(allocator.refusals)
    assert refused == sorted(refused) and refused[-1] > refused[0]


@pytest.mark.slow
def test_what_did_not_fit_is_remembered():
    with Allocator() as unlimited:
        product(problem())
    small = problem()
    with Allocator(0.4 * unlimited.peak) as allocator:
        product(small)
        assert small.sweep.limits.columns < K
        refusals = allocator.refusals
        product(small)
    assert allocator.refusals == refusals


@pytest.mark.parametrize(
    "model, rows", [(network(2000), "1 row "), (Centred(*network()), "200 rows ")]
)
def test_what_cannot_be_made_smaller_is_said(model, rows):
    small = problem(model)
    with Allocator(2.9 * 4 * small.size), pytest.raises(DoesNotFit) as caught:
        gradient(small)
    message = str(caught.value)
    assert f"One column of {rows}of batch 0 does not fit" in message
    for knob in ("smaller batches", 'parameters="last_layer"', 'vectors="cpu"', "2 P numbers"):
        assert knob in message


def test_nothing_is_added_twice_where_memory_ends_between_chunks(monkeypatch):
    whole, small = problem(), problem()
    expected = product(whole)
    small.linear_model.path = small.linear_model.path._replace(columns=3)
    pulls = []
    adding = small.linear_model.layout.add_

    def out_of_memory_once(total, tensors):
        pulls.append(len(total))
        return adding(total, tensors)

    reshape, failures = torch.Tensor.reshape, [4]

    def failing(self, *args):
        failures[0] -= 1
        if failures[0] == 0:
            raise torch.OutOfMemoryError("while a gradient was made flat")
        return reshape(self, *args)

    monkeypatch.setattr(
        type(small.linear_model.layout), "add_", lambda _, *a: out_of_memory_once(*a)
    )
    monkeypatch.setattr(torch.Tensor, "reshape", failing)
    found = product(small)
    monkeypatch.undo()
    assert len(pulls) > 3
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


class EndsOnce(TorchDispatchMode):
    """Refuses one operation, whatever it is."""

    def __init__(self, refused):
        super().__init__()
        self.left = refused

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError("none left")
        return function(*args, **(kwargs or {}))


def test_a_shortage_is_no_property_of_the_network():
    def prepared(refused=0):
        fresh = problem_of_rows(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
        first = fresh.data.first()
        with EndsOnce(refused) as operations:
            measured(fresh, first, 4)
        return fresh.linear_model, -operations.left

    expected, count = prepared()
    assert expected.path.forward and count > 100
    for refused in range(1, count, count // 10):
        linear, _ = prepared(refused)
        assert linear.path.forward and not linear.report.unbatched and not linear.report.forward


def problem_of_rows(model):
    torch.manual_seed(0)
    x, y = torch.randn(8, 3), torch.randint(0, 3, (8,))
    la = LinearisedLaplace(model, "classification")
    return Problem(la._linear_model, Classification(), Data([(x, y)], torch.device("cpu")))


@pytest.mark.parametrize(
    "words", ["shapes do not match", "could not create a primitive descriptor for a convolution"]
)
def test_other_errors_are_not_mistaken_for_shortage(words):
    with pytest.raises(RuntimeError, match=words):
        shortage_of(RuntimeError(words))


@pytest.mark.parametrize(
    "words",
    [
        "std::bad_alloc",
        "could not create a primitive",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
        "cuFFT error: CUFFT_ALLOC_FAILED",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
        "cusolver error: CUSOLVER_STATUS_NOT_INITIALIZED, when calling `cusolverDnCreate(handle)`",
        "GET was unable to find an engine to execute this computation",
    ],
)
def test_libraries_have_words_of_their_own(words):
    assert shortage_of(RuntimeError(words)) == words


def field(name):
    with open("/proc/self/status") as lines:
        return int(dict(line.split(":", 1) for line in lines)[name].split()[0]) * 1024


def convolve_without_room():
    import resource

    torch.set_num_threads(1)
    layer = nn.Conv2d(3, 32, 3, padding=1)
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    x = torch.randn(128, 3, 32, 32)
    resource.setrlimit(resource.RLIMIT_DATA, (field("VmData") + (8 << 20), limits[1]))
    try:
        layer(x)  # whose result takes 16 MiB
    except RuntimeError as error:
        shortage = shortage_of(error)
    resource.setrlimit(resource.RLIMIT_DATA, limits)
    assert shortage
    assert layer(x).shape == (128, 32, 32, 32)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux alone")
def test_layers_that_run_out_of_memory_are_understood():
    run_fresh(convolve_without_room)


ROWS = torch.randn(4, 1 << 14, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    "work, outputs",
    [
        (lambda rows: blocks.gram(rows, rows), 0.0),
        (lambda rows: blocks.gram(rows, rows.bfloat16()), 0.5),
        (lambda rows: blocks.dots(rows, rows), 0.0),
        (lambda rows: blocks.add_combined(rows, torch.eye(4).double(), ROWS, -0.5), 0.0),
        (lambda rows: blocks.add_combined(rows, torch.eye(4), rows.bfloat16()), 0.5),
        (lambda rows: blocks.orthonormalise(rows), 1.0),
    ],
)
def test_work_on_blocks_takes_no_copies_of_them(work, outputs, monkeypatch):
    """Beside what it returns, and the bfloat16 rows it is given."""
    monkeypatch.setattr(blocks, "_ENTRIES", 1 << 10)
    rows = ROWS.clone()
    with Allocator() as allocator:
        work(rows)
    assert allocator.peak < (outputs + 0.3) * rows.nbytes


@pytest.mark.parametrize("dependent", [False, True])
def test_pieces_are_orthonormalised_as_the_whole_is(dependent, monkeypatch):
    rows = ROWS[:, :1000].double()
    rows = torch.cat([rows, rows[:2] - rows[2:]]) if dependent else rows
    whole = blocks.orthonormalise(rows)
    monkeypatch.setattr(blocks, "_ENTRIES", 1)
    basis, coefficients = blocks.orthonormalise(rows)
    torch.testing.assert_close(basis @ basis.T, torch.eye(4).double())
    torch.testing.assert_close(coefficients @ basis, rows)
    torch.testing.assert_close((basis, coefficients), whole)


SOLVERS = [
    (BlockCG(), "scalar"),
    (SGD(epochs=10), "scalar"),
    (FunctionSpace(), "scalar"),
    (BlockCG(), "layerwise"),
]


@pytest.mark.parametrize("solver, prior", daily(SOLVERS[0], rest=SOLVERS[1:]))
@pytest.mark.filterwarnings("ignore:The samples", "ignore:The mode")
def test_fits_on_smaller_gpus_are_the_same(solver, prior, monkeypatch, caplog):
    fit, x = small_fit(solver, prior, monkeypatch)
    fit()  # what is made once a process counts for none
    with Allocator() as unlimited:
        whole = fit()
    with Allocator(0.85 * unlimited.peak) as allocator:
        small = fit()
    assert allocator.refusals and "Out of memory" in caplog.text
    torch.testing.assert_close(small.prior_precision, whole.prior_precision, rtol=0.05, atol=0)
    error = (small.functional_samples(x) - whole.functional_samples(x)).norm()
    assert error < 0.05 * whole.functional_samples(x).norm()


def small_fit(solver, prior, monkeypatch):
    """Return a small fit whose pieces of vectors are as small as those of a large one, and inputs."""
    monkeypatch.setattr(blocks, "_ENTRIES", 1 << 12)
    torch.manual_seed(1)
    x, y = torch.randn(96, 20), torch.randint(0, 3, (96,))
    batches, model = list(zip(x.split(64), y.split(64))), network(20)

    def fit():
        la = LinearisedLaplace(model, "classification", solver=solver, prior=prior, num_samples=3)
        return la.fit(batches, em_steps=1, progress_bar=False)

    return fit, x


def test_what_a_fit_cannot_do_without_is_said(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(sys.modules["torch_lla_em.inference.fit"], "get_sto_samples", full)
    la = LinearisedLaplace(network(), "classification", num_samples=K)
    x, y = torch.randn(24, 20), torch.randint(0, 3, (24,))
    with pytest.raises(DoesNotFit) as caught:
        la.fit([(x, y)], progress_bar=False)
    message = str(caught.value)
    size = la._linear_model.layout.size
    assert f"{K} samples of {size:,} parameters need" in message and "(none left)" in message
    for knob in ("num_samples", 'parameters="last_layer"', 'vectors="cpu"', "memory="):
        assert knob in message


@pytest.mark.slow
def test_smaller_pieces_that_were_tried_in_vain_are_forgotten():
    small = problem()
    w = torch.ones(K, small.size)
    with Allocator((K + 0.9) * 4 * small.size) as allocator, pytest.raises(DoesNotFit):
        small.ggn_product(w)
    assert allocator.refusals > 5
    assert small.sweep.limits.columns is None
    assert small.sweep.limits.rows == float("inf")


def test_factors_that_were_given_up_are_not_used_again(monkeypatch):
    """The probe of torch.func that follows the shortage finds factors again."""
    inspect, calls = Problem.inspect, []

    def short_of_memory(self, rows, batch):
        calls.append(batch)
        if len(calls) == 1:
            raise MemoryError("simulated")
        return inspect(self, rows, batch)

    monkeypatch.setattr(Problem, "inspect", short_of_memory)
    case, la = tiny_fit("classification", em_steps=1)
    assert la._linear_model.factored is None
    assert any("without stored Jacobian factors" in words for words in la.messages)
