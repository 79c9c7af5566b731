"""The paper's recipe, carried over to our coordinates, is the paper's; and the study runs."""

import sys

import paper_sgd
import pytest
import torch
from methods import markdown
from methods.counted import problem_of
from methods.fits import dense_fixed_point
from methods.race import Race
from methods.recipe import (
    Recipe,
    Task,
    expectation_maximisation,
    solve_samples,
)
from tiny import tiny

from torch_lla_em.inference.stochastic_prior import get_sto_samples
from torch_lla_em.problem.operators import WhitenedLoss

K, ROWS, PRECISION = 3, 30, 4.0


@pytest.fixture
def setting():
    setting = tiny("classification")
    problem = problem_of(setting.model, [(setting.x, setting.y)])
    noise = get_sto_samples(problem, K)
    race = Race(problem, noise, torch.tensor(PRECISION).double(), 1e-9)
    return setting, Task(problem, noise, race.largest_eigenvalue() * PRECISION), race


@pytest.mark.parametrize("clip", [None, 1e-3])
def test_one_step_is_the_papers(setting, clip):
    """On (1/C) [mean_n ½ vᵀHv + λ/2N ‖z - z0‖²], features scaled to a sum of squares of 1."""
    tiny_setting, task, race = setting
    recipe = Recipe(0.5, ROWS, 1, clip=clip)
    x = solve_samples(task, race.product, recipe, race.precision, K)
    scale = task.noise.prior.scale / ROWS**0.5
    precision = PRECISION / ROWS
    w0 = task.noise.at(race.precision)
    G = scale[:, None] * tiny_setting.exact().ggn * scale
    z0 = w0 / scale
    z = z0.clone().requires_grad_()
    data, prior = ((z @ G) * z).sum() / (2 * ROWS), precision / (2 * ROWS) * (z - z0).square().sum()
    (gradient,) = torch.autograd.grad((data + prior) / 3, z)
    if clip is not None:
        assert gradient.norm() > clip
        gradient = gradient * (clip / gradient.norm())
    stepped = scale * (z0 - 0.5 * gradient)
    torch.testing.assert_close(race.product.deviation * x, stepped)


def test_a_summed_step_is_the_papers(setting):
    """From zero, on Σ_n CE(J_n z, y_n) / C + λ/2C ‖z‖², clipped by its norm."""
    tiny_setting, task, race = setting
    recipe = Recipe(1e-3, ROWS, 1, clip=0.5, summed=True)
    loss = WhitenedLoss(task.problem, race.product.deviation)
    x = task.solver(recipe, PRECISION).minimise(loss, torch.zeros_like(race.b[0])).x
    scale = task.noise.prior.scale / ROWS**0.5
    z = torch.zeros_like(scale).requires_grad_()
    _, slope = task.problem.loss_and_gradient((scale * z).detach())
    # of a batch of all rows: the regulariser of every row's loss is λ/N² of whole
    gradient = (scale * slope + PRECISION / ROWS * z.detach()) / 3
    assert gradient.norm() > 0.5
    stepped = -1e-3 * gradient * (0.5 / gradient.norm())
    torch.testing.assert_close(race.product.deviation * x, scale * stepped)


@pytest.mark.slow
def test_enough_epochs_reach_the_minimum(setting):
    _, task, race = setting
    recipe = Recipe(0.5, ROWS, 400, relative=True)
    x = solve_samples(task, race.product, recipe, race.precision, K)
    assert race.error(x) < 1e-3 and race.dims_error(x, averaged=False) < 1e-3


@pytest.mark.slow
def test_enough_epochs_reach_the_dense_precision(setting):
    _, task, _ = setting
    stages = Recipe(0.5, ROWS, 100, relative=True), Recipe(0.1, ROWS, 100, relative=True)
    problems = task.problem, task.problem
    path = list(expectation_maximisation(task, stages, problems, 40.0))
    assert [point[:2] for point in path] == [(101 * step, 100 * step) for step in range(1, 11)]
    start = torch.tensor(40.0).double()
    dense = dense_fixed_point(task.problem, task.noise, start, averaged=False)
    assert path[-1][2] == pytest.approx(dense, rel=0.02)


@pytest.mark.slow
def test_the_command_writes_every_part(tmp_path, monkeypatch):
    small = tiny("classification")
    batches = [(small.x[:20], small.y[:20]), (small.x[20:], small.y[20:])]
    for name, value in {
        "EPOCHS": (2, 10),
        "RATES": (0.05, 0.1),
        "MODE_RATES": (0.003, 0.01),
        "trained": lambda *_: (small.model, batches),
    }.items():
        monkeypatch.setattr(paper_sgd, name, value)
    monkeypatch.setattr(sys, "argv", ["paper_sgd.py", "--num-samples", "5", "--out", str(tmp_path)])
    paper_sgd.main()
    lines = markdown.read(tmp_path / "paper_sgd.jsonl")
    samples = {line["method"]: line for line in lines if line["part"] == "samples"}
    assert set(samples) == {"block krylov", "block cg", *paper_sgd.OWN, *paper_sgd.TUNED}
    found = {line["method"]: line for line in lines if line["part"] == "em"}
    assert len(found) == 5 and all(line["commit"] for line in lines)
    for solver in ("block krylov", "block cg"):
        assert samples[solver]["samples, 1 %"].isdigit() and found[solver]["error"] < 0.2
