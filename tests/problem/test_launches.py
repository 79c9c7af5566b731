"""Operations a batch, each of them a launch on a card: by them small batches are bound there."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models.resnet import BasicBlock, ResNet

from torch_lla_em import Classification, Compute
from torch_lla_em.data.loader import Data
from torch_lla_em.jacobian.linear_model import LinearModel
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.parameters import ParameterLayout, select_parameters
from torch_lla_em.problem.plan import prepare
from torch_lla_em.problem.problem import Problem

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
    problem.sweep.kept.room *= keep
    return problem


def launches_forward(problem):
    x = next(iter(problem.data)).inputs
    with torch.no_grad():
        return launches(lambda: problem.linear_model.network.module(x))


# times the operations of a forward pass, whatever the batch: kept factors, and torch.func; noise takes
# the squares of single rows, by factors of ten outputs
@pytest.mark.slow
@pytest.mark.parametrize("keep, limits", [(True, (6, 6, 9, 6)), (False, (12, 12, 22, 9))])
def test_a_batch_launches_a_few_times_what_its_forward_pass_does(keep, limits):
    totals = []
    for batches in (1, 3):
        problem = problem_of(batches, keep)
        w = torch.randn(1, problem.size)
        for _ in range(4):
            problem.ggn_product(w)
        assert bool(problem.sweep.kept.known) == keep
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
