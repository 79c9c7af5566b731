"""Operations a batch, each of them a launch on a card: by them small batches are bound there."""

from collections import Counter

import pytest
import torch
from tiny import LOG_PROBS, likelihood_of, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models.resnet import BasicBlock, ResNet

from torch_lla_em import Classification, Compute
from torch_lla_em.data.loader import Data
from torch_lla_em.jacobian.linear_model import LinearModel
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.parameters import ParameterLayout, select_parameters
from torch_lla_em.problem.graphs import Recording
from torch_lla_em.problem.problem import Problem
from torch_lla_em.problem.setting import prepare

# they launch nothing
VIEWS = """_efficientzerotensor _has_same_storage_numel _unsafe_view alias as_strided detach empty
    empty_like expand is_pinned is_same_size new_empty_strided permute promote_types select slice
    split split_with_sizes squeeze t to transpose unbind unfold unsqueeze view""".split()


class Launches(TorchDispatchMode):
    """Counts operations by name, but for those that only look at sizes."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("aten::").partition(".")[0]
        self.counts[name] += name not in VIEWS
        return function(*args, **(kwargs or {}))


def launches(run):
    with Launches() as seen:
        run()
    return seen.counts.total()


def problem_of(batches, keep, device="cpu", **compute):
    torch.manual_seed(0)
    model = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10).eval().to(device)
    linear = LinearModel(Network(model), ParameterLayout.of(model, select_parameters(model)))
    data = [(torch.randn(4, 3, 32, 32), torch.arange(4)) for _ in range(batches)]
    problem = Problem(linear, Classification(), Data(data, torch.device(device)))
    prepare(problem, 2, Compute(**compute))
    problem.data.merge_rows = 0
    problem.fitting.room *= keep
    return problem


def launches_forward(problem):
    x = next(iter(problem.data)).inputs
    with torch.no_grad():
        return launches(lambda: problem.linear_model.network.module(x))


# times the operations of a forward pass, whatever the batch: kept factors, and torch.func
@pytest.mark.slow
@pytest.mark.parametrize("keep, limits", [(True, (6, 6, 6, 6)), (False, (12, 12, 9, 9))])
def test_a_batch_launches_a_few_times_what_its_forward_pass_does(keep, limits):
    totals = []
    for batches in (1, 3):
        problem = problem_of(batches, keep, graphs=True)
        assert problem.fitting.graphs is None  # they are a card's
        w = torch.randn(1, problem.size)
        for _ in range(4):
            problem.ggn_product(w)
        assert bool(problem.fitting._factors) == keep
        runs = (
            lambda w=w, problem=problem: problem.ggn_product(w),
            lambda w=w, problem=problem: problem.loss_and_gradient(w[0]),
            lambda problem=problem: problem.noise_features(1, 0),
            lambda w=w, problem=problem: problem.push_forward(w),
        )
        totals.append([launches(run) for run in runs])
    forward = launches_forward(problem)
    for less, more, limit in zip(*totals, limits):
        assert forward < (more - less) / 2 <= limit * forward


@pytest.mark.cuda
@pytest.mark.parametrize("keep", [True, False])
def test_a_graph_takes_the_place_of_a_batchs_launches(keep, pretended):
    """Columns in, graph, sum out: three where a batch had over a hundred."""
    problem = problem_of(2, keep, "cuda", graphs=True)
    graphs, w = problem.fitting.graphs, torch.randn(1, problem.size, device="cuda")
    counts, replayed = [], []
    for _ in range(8):
        with pretended.watched() as seen:
            counts.append(launches(lambda: problem.ggn_product(w)))
        replayed.append(sum(n for (what, _), n in seen.items() if what == "graph"))
    assert pretended.waits(seen) <= 2
    first = replayed.index(2)
    assert replayed == first * [0] + (8 - first) * [2]
    assert (counts[first - 1] - counts[-1]) / 2 > 3 * launches_forward(problem)
    recorded = dict(graphs._known[problem.work])
    for columns in (1, 2):  # others of this width, and of a new one
        w = torch.randn(columns, problem.size, device="cuda")
        found, problem.fitting.graphs = problem.ggn_product(w), None
        torch.testing.assert_close(found, problem.ggn_product(w))
        problem.fitting.graphs = graphs
    assert len(recorded) == 2 and graphs._known[problem.work].items() >= recorded.items()


def tiny_on_card(name, **compute):
    case = tiny(name)
    linear = LinearModel(Network(case.model.cuda()), case.layout)
    batches = list(zip(case.x.tensor_split([17]), case.y.tensor_split([17])))
    problem = Problem(linear, likelihood_of(name), Data(batches, torch.device("cuda")))
    prepare(problem, 3, Compute(**compute))
    problem.data.merge_rows = 0
    return problem


@pytest.mark.cuda
@pytest.mark.parametrize("name", LOG_PROBS)
def test_likelihoods_are_part_of_a_graph(name):
    problem = tiny_on_card(name, graphs=True)
    w = torch.randn(3, problem.size, dtype=torch.float64, device="cuda")
    for _ in range(7):
        found = problem.ggn_product(w)
    known = problem.fitting.graphs._known[problem.work].values()
    # but for a σ per output, which is copied to the card
    assert all(isinstance(one, Recording) for one in known) == (not name.endswith("per output"))
    problem.fitting.graphs = None
    torch.testing.assert_close(found, problem.ggn_product(w))


@pytest.mark.cuda
def test_a_fault_inside_a_graph_is_told():
    problem = tiny_on_card("classification", graphs=True)
    w = torch.randn(3, problem.size, dtype=torch.float64, device="cuda")
    for _ in range(7):
        problem.ggn_product(w)
    problem.fitting._factors[17, 13].f.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="outputs on batch 1 are not finite"):
        problem.ggn_product(w)


@pytest.mark.cuda
def test_what_waits_is_left_without_a_graph(caplog):
    caplog.set_level("INFO")
    problem = tiny_on_card("classification", graphs=True)
    w = torch.randn(3, problem.size, dtype=torch.float64, device="cuda")
    expected = problem.ggn_product(w)
    problem.work.inspect = lambda batch, f: bool(f.isfinite().all())
    for _ in range(8):
        torch.testing.assert_close(problem.ggn_product(w), expected)
    assert caplog.text.count("cannot be captured in a CUDA graph") == 1


@pytest.mark.cuda
def test_graphs_are_given_up_where_memory_ends(caplog, pretended):
    problem = tiny_on_card("classification", graphs=True)
    w = torch.randn(3, problem.size, dtype=torch.float64, device="cuda")
    expected = problem.ggn_product(w)
    for _ in range(8):  # elsewhere torch frees what it holds, and asks again
        pretended.fail_at_malloc(1)
        torch.testing.assert_close(problem.ggn_product(w), expected)
        pretended.fail_at_malloc(0)
    assert problem.fitting.graphs is None
    assert "from now on without CUDA graphs" in caplog.text
