"""The paper's recipe, carried over to our coordinates, is the paper's; and the study runs."""

import json
import sys
from pathlib import Path

import pytest
import torch
from tiny import tiny

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

for package in ("sklearn", "matplotlib"):
    pytest.importorskip(package)

import paper_sgd  # noqa: E402
from methods import sgd_page  # noqa: E402
from methods.counted import problem_of  # noqa: E402
from methods.fits import dense_fixed_point  # noqa: E402
from methods.race import Race  # noqa: E402
from methods.recipe import (  # noqa: E402
    NoisyTargets,
    Recipe,
    Task,
    batches_of,
    expectation_maximisation,
    noise_shares,
    solve_samples,
)

from torch_lla_em.inference.stochastic_prior import get_sto_samples  # noqa: E402
from torch_lla_em.problem.operators import WhitenedGGN  # noqa: E402

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
        assert (gradient.abs() > clip).any()
        gradient = gradient.clamp(-clip, clip)
    stepped = scale * (z0 - 0.5 * gradient)
    torch.testing.assert_close(race.product.deviation * x, stepped)


def test_noise_of_targets_in_batches_adds_up(setting):
    tiny_setting, task, race = setting
    batches = batches_of([(tiny_setting.x, tiny_setting.y)], 12)
    assert [len(x) for x, _ in batches] == [12, 12, 6]

    def problem(part):
        return problem_of(tiny_setting.model, part)

    shares = noise_shares(task, batches, problem)
    torch.testing.assert_close(sum(shares), task.noise.eta)
    noisy = NoisyTargets(WhitenedGGN(problem(batches), race.product.deviation), shares)
    x = race.truth.x
    torch.testing.assert_close(task.noise.xi - x - noisy(x), torch.zeros_like(x), atol=1e-7, rtol=0)
    by_batch = sum(product(x) for _, product in noisy.minibatches())
    torch.testing.assert_close(by_batch, noisy(x))


@pytest.mark.parametrize("noisy", [False, True])
def test_both_losses_have_the_same_minimum(setting, noisy):
    tiny_setting, task, race = setting
    product = race.product
    if noisy:
        batches = [(tiny_setting.x, tiny_setting.y)]
        shares = noise_shares(task, batches, lambda part: problem_of(tiny_setting.model, part))
        product = NoisyTargets(product, shares)
    recipe = Recipe(0.5, ROWS, 400, relative=True, noisy_targets=noisy, from_zero=True)
    x = solve_samples(task, product, recipe, race.precision, K)
    assert race.error(x) < 1e-3 and race.dims_error(x, averaged=False) < 1e-3


def test_enough_epochs_find_the_dense_precision(setting):
    _, task, _ = setting
    stages = Recipe(0.5, ROWS, 100, relative=True), Recipe(0.1, ROWS, 100, relative=True)
    problems = task.problem, task.problem
    path = list(expectation_maximisation(task, stages, problems, 40.0))
    assert [point[:2] for point in path] == [(101 * step, 100 * step) for step in range(1, 11)]
    start = torch.tensor(40.0).double()
    dense = dense_fixed_point(task.problem, task.noise, start, averaged=False)
    assert path[-1][2] == pytest.approx(dense, rel=0.02)


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
    record = json.loads((tmp_path / "paper_sgd_digits_5.jsonl").read_text())
    assert set(record["samples"]) == {"block krylov", "block cg", *paper_sgd.OWN, *paper_sgd.TUNED}
    assert len(record["em"]) == 5 and record["commits"] and record["commands"]
    for points in record["samples"].values():
        assert [p[0] for p in points] == sorted(p[0] for p in points)
    for solver in ("block krylov", "block cg"):
        assert record["samples"][solver][-1][1] < 0.01
        last = record["em"][solver][-1]
        assert last[2] == pytest.approx(record["dense"]["averaged"], rel=0.2)
    text = sgd_page.section([record])
    assert "| SGD, L', batches of 20 |" in text and "paper_sgd.py" in text
    sgd_page.draw(record, tmp_path / "paper_sgd.png")
    assert (tmp_path / "paper_sgd.png").stat().st_size > 1000


def test_targets_are_held_from_some_passes_on():
    errors = [(5, 0.2), (10, 0.02), (20, 0.04), (40, 0.004)]
    assert [sgd_page.held(errors, target) for target in (0.1, 0.03, 0.01)] == ["10", "40", "40"]
    assert sgd_page.held(errors, 1e-3) == "– (0.004 at 40)"
    assert sgd_page.held([(5, 0.2), (10, None)], 0.1) == "diverges"
