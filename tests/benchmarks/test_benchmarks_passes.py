"""The studies of passes and of the paper's SGD: what they count and what they solve is right."""

import sys

import paper_sgd
import passes
import pytest
import torch
from methods import markdown
from methods.counted import problem_of
from methods.fits import Fit, dense_fixed_point, whole_fit
from methods.plain_cg import PlainCG
from methods.race import Race
from methods.recipe import (
    Recipe,
    Task,
    descend_to_mode,
    expectation_maximisation,
    solve_samples,
)
from tiny import tiny

from torch_lla_em.inference.stochastic_prior import get_sto_samples
from torch_lla_em.solvers import BlockCG, BlockKrylov

K, ROWS, PRECISION = 3, 30, 4.0
CASE = tiny("classification")
BATCHES = [(CASE.x[:12], CASE.y[:12]), (CASE.x[12:], CASE.y[12:])]


def counted():
    return problem_of(CASE.model, BATCHES)


@pytest.fixture
def problem():
    return counted()


@pytest.fixture
def race(problem):
    return Race(problem, get_sto_samples(problem, K), torch.tensor(PRECISION).double(), 1e-9)


def test_the_error_is_that_of_functions_on_the_data(race):
    noise, precision = race.noise, race.precision
    exact = CASE.exact(noise.prior.scale)

    def size(w):
        return ((w @ exact.ggn) * w).sum()

    w = noise.at(precision) * precision / exact.scale**2 @ exact.covariance(precision)
    x = noise.prior.whitened(w, precision)
    assert race.error(x) < 1e-7
    assert race.error(0 * x) == pytest.approx(1.0)
    other = x + torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
    e = noise.prior.deviation(precision) * (other - x)
    true = (size(e) / size(w)).sqrt()
    assert race.error(other) == pytest.approx(true.item(), rel=1e-6)
    assert race.dims_error(x) < 1e-7 and race.dims_error(x, averaged=False) < 1e-7
    expected = (size(2 * w) / size(w) - 1).item()
    assert race.dims_error(2 * x, averaged=False) == pytest.approx(expected, rel=1e-6)


def test_whole_fits_agree_with_the_dense_fixed_point(problem, race):
    found = {}
    for solver in (BlockKrylov(), BlockCG(), PlainCG()):
        own = counted()
        fit = found[type(solver)] = whole_fit(own, K, Fit(solver))
        assert fit["passes"] == own.spent["columns"] / K
        assert fit["error"] <= 0.05
    start = torch.tensor(found[BlockKrylov]["path"][0]).double()
    dense = dense_fixed_point(problem, race.noise, start)
    for fit in found.values():
        monte_carlo = (K * fit["gamma"]) ** -0.5  # where EM stops
        assert fit["path"][-1] == pytest.approx(dense, rel=monte_carlo)


def test_the_study_of_passes_writes_lines(tmp_path, monkeypatch):
    command = "passes.py --rows 40 --epochs 2 --num-samples 2 --parts block_krylov traces --solvers"
    arguments = [*command.split(), "block_krylov", "block_cg", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    passes.main()
    fit, *solvers = markdown.read(tmp_path / "passes.jsonl")
    assert fit["part"] == "fit" and fit["precision"] > 0 and fit["commit"]
    assert [line["solver"] for line in solvers] == ["block krylov", "block cg"]


@pytest.fixture
def task():
    """The paper's task, in one batch."""
    problem = problem_of(CASE.model, [(CASE.x, CASE.y)])
    noise = get_sto_samples(problem, K)
    race = Race(problem, noise, torch.tensor(PRECISION).double(), 1e-9)
    return Task(problem, noise, race.largest_eigenvalue() * PRECISION), race


@pytest.mark.parametrize("clip", [None, 1e-3])
def test_one_step_is_the_papers(task, clip):
    """On (1/C) [mean_n ½ vᵀHv + λ/2N ‖z - z0‖²], features scaled to a sum of squares of 1."""
    task, race = task
    recipe = Recipe(0.5, ROWS, 1, clip=clip)
    x = solve_samples(task, race.product, recipe, race.precision, K)
    scale = task.noise.prior.scale / ROWS**0.5
    precision = PRECISION / ROWS
    w0 = task.noise.at(race.precision)
    G = scale[:, None] * CASE.exact().ggn * scale
    z0 = w0 / scale
    z = z0.clone().requires_grad_()
    data, prior = ((z @ G) * z).sum() / (2 * ROWS), precision / (2 * ROWS) * (z - z0).square().sum()
    (gradient,) = torch.autograd.grad((data + prior) / 3, z)
    if clip is not None:
        assert gradient.norm() > clip
        gradient = gradient * (clip / gradient.norm())
    stepped = scale * (z0 - 0.5 * gradient)
    torch.testing.assert_close(race.product.deviation * x, stepped)


def test_a_summed_step_is_the_papers(task):
    """From zero, on Σ_n CE(J_n z, y_n) / C + λ/2C ‖z‖², clipped by its norm."""
    task, race = task
    recipe = Recipe(1e-3, ROWS, 1, clip=0.5, summed=True)
    solver, deviation = task.solver(recipe, PRECISION), race.product.deviation
    x = descend_to_mode(solver, [task.problem], deviation, torch.zeros_like(race.b[0]))
    scale = task.noise.prior.scale / ROWS**0.5
    z = torch.zeros_like(scale)
    _, slope = task.problem.loss_and_gradient(scale * z)
    # of a batch of all rows: the regulariser of every row's loss is λ/N² of whole
    gradient = (scale * slope + PRECISION / ROWS * z) / 3
    assert gradient.norm() > 0.5
    stepped = -1e-3 * gradient * (0.5 / gradient.norm())
    torch.testing.assert_close(race.product.deviation * x, scale * stepped)


@pytest.mark.slow
def test_enough_epochs_reach_the_dense_precision(task):
    task, race = task
    recipe = Recipe(0.5, ROWS, 400, relative=True)
    assert race.error(solve_samples(task, race.product, recipe, race.precision, K)) < 1e-3
    stages = Recipe(0.5, ROWS, 100, relative=True), Recipe(0.1, ROWS, 100, relative=True)
    problems = task.problem, [task.problem]
    path = list(expectation_maximisation(task, stages, problems, 40.0))
    assert [point[:2] for point in path] == [(101 * step, 100 * step) for step in range(1, 11)]
    start = torch.tensor(40.0).double()
    dense = dense_fixed_point(task.problem, task.noise, start, averaged=False)
    assert path[-1][2] == pytest.approx(dense, rel=0.02)


@pytest.mark.slow
def test_the_study_of_sgd_writes_every_part(tmp_path, monkeypatch):
    for name, value in {
        "EPOCHS": (2, 10),
        "RATES": (0.05, 0.1),
        "MODE_RATES": (0.003, 0.01),
        "trained": lambda *_: (CASE.model, BATCHES),
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
