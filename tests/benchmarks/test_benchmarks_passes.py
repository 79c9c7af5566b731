"""The study of passes: what it counts and what it calls an error are right."""

import sys

import passes
import pytest
import torch
from methods import markdown
from methods.counted import problem_of
from methods.fits import FITS, Fit, dense_fixed_point, whole_fit
from methods.plain_cg import PlainCG
from methods.race import Race
from tiny import tiny

from torch_lla_em.inference.linear_mode import optimise_MAP
from torch_lla_em.inference.stochastic_prior import get_sto_samples
from torch_lla_em.solvers import SGD, BlockCG, BlockKrylov, Newton

K = 3


@pytest.fixture
def setting():
    """Three classes, 30 rows, two uneven batches."""
    setting = tiny("classification")
    problem = problem_of(setting.model, batches_of(setting))
    return setting, problem, get_sto_samples(problem, K)


def batches_of(setting):
    return [(setting.x[:12], setting.y[:12]), (setting.x[12:], setting.y[12:])]


@pytest.fixture
def race(setting):
    _, problem, noise = setting
    return Race(problem, noise, torch.tensor(4.0).double(), 1e-9)


def test_the_error_is_that_of_functions_on_the_data(setting, race):
    tiny_setting, _, noise = setting
    exact = tiny_setting.exact(noise.prior.scale)
    precision = race.precision
    root = precision.sqrt() / noise.prior.scale
    w = (noise.xi * root + noise.eta) @ exact.covariance(precision)
    x = noise.prior.whitened(w, precision)
    assert race.error(x) < 1e-7
    assert race.error(0 * x) == pytest.approx(1.0)
    other = x + torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
    e = noise.prior.deviation(precision) * (other - x)
    true = (((e @ exact.ggn) * e).sum() / ((w @ exact.ggn) * w).sum()).sqrt()
    assert race.error(other) == pytest.approx(true.item(), rel=1e-6)
    assert race.dims_error(x) < 1e-7 and race.dims_error(x, averaged=False) < 1e-7
    seed = ((w @ exact.ggn) * w).sum() / K
    moved = ((2 * w @ exact.ggn) * 2 * w).sum() / K
    assert race.dims_error(2 * x, averaged=False) == pytest.approx(
        (moved / seed - 1).item(), rel=1e-6
    )


def test_passes_are_those_taken(setting, race):
    problem = setting[1]
    problem.spent.update(columns=0.0, single=0.0)
    solution = BlockCG(1e-3).solve(race.product, race.b)
    assert problem.spent == {"columns": K * solution.passes, "single": 0}
    mode = optimise_MAP(problem, race.noise.prior, race.precision, Newton(1e-3))
    assert problem.spent["single"] == mode.passes
    problem.spent.update(columns=0.0, single=0.0)
    SGD(epochs=5, learning_rate=1e-4).solve(race.product, race.b)
    assert problem.spent["columns"] == pytest.approx(K * 6)  # one for the true residual
    problem.spent.update(columns=0.0)
    get_sto_samples(problem, K)
    assert problem.spent["columns"] == K


@pytest.mark.parametrize("solver", ["block_krylov", "block_cg", "plain_cg"])
def test_every_error_trace_decreases(race, solver):
    points = race.trace(solver)
    assert points[-1][2] < 0.01
    passes = [point[0] for point in points]
    assert passes == sorted(passes) and passes[0] > 0


def test_sgd_takes_the_best_step_size(race):
    errors = [error for _, _, error in race.trace("sgd")]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.2


def test_plain_cg_solves_every_system_alone(race):
    b = race.b.clone()
    b[1] = 0  # solved before it begins
    cold = PlainCG(1e-6).solve(race.product, b)
    each = [PlainCG(1e-6).solve(race.product, row[None]).x for row in b]
    torch.testing.assert_close(cold.x + race.product(cold.x), b, rtol=0, atol=1e-4)
    torch.testing.assert_close(cold.x, torch.cat(each), rtol=0, atol=1e-4)
    warm = PlainCG(1e-6).solve(race.product, b, cold.x)
    assert warm.converged and warm.passes == 2 < cold.passes


def test_whole_fits_agree_with_the_dense_fixed_point(setting):
    tiny_setting, problem, noise = setting
    batches, found = batches_of(tiny_setting), {}
    for name, fit in (
        ("krylov", Fit(BlockKrylov())),
        ("cg", Fit(BlockCG())),
        ("plain", Fit(PlainCG())),
    ):
        counted = problem_of(tiny_setting.model, batches)
        found[name] = whole_fit(counted, K, fit)
        assert found[name]["passes"] == counted.spent["columns"] / K
        assert found[name]["error"] <= 0.05
    start = torch.tensor(found["krylov"]["path"][0]).double()
    dense = dense_fixed_point(problem, noise, start)
    for fit in found.values():
        monte_carlo = (K * fit["gamma"]) ** -0.5  # where EM stops
        assert fit["path"][-1] == pytest.approx(dense, rel=monte_carlo)


def test_layerwise_fits_have_a_precision_for_each_tensor(setting):
    problem = problem_of(setting[0].model, batches_of(setting[0]))
    assert len(whole_fit(problem, K, FITS["layerwise_block_cg"])["path"][-1]) == 4


def test_a_failed_fit_is_reported(setting):
    counted = problem_of(setting[0].model, batches_of(setting[0]))
    fit = whole_fit(counted, K, Fit(SGD(epochs=30, learning_rate=10.0)))
    assert fit["failed"].startswith("SGD diverged")


def test_the_command_writes_lines(tmp_path, monkeypatch):
    command = "passes.py --rows 40 --epochs 2 --num-samples 2 --parts block_krylov traces --solvers"
    arguments = [*command.split(), "block_krylov", "block_cg", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    passes.main()
    fit, *solvers = markdown.read(tmp_path / "passes.jsonl")
    assert fit["part"] == "fit" and fit["precision"] > 0 and fit["commit"]
    assert [line["solver"] for line in solvers] == ["block krylov", "block cg"]
