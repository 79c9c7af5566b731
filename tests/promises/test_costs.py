"""What a fit costs, what it says of that before and during it, and what a budget of seconds ends."""

import copy
import itertools

import pytest
import torch
from allocator import Allocator
from daily import daily
from direct import rows_of
from fresh import run_fresh
from loaders import Loader, batches
from models import images, network, small_cnn, trained
from tiny import batched, fitted, known, posterior_of, tiny
from torch import nn
from torch.testing import assert_close
from tqdm.auto import tqdm

from torch_lla_em import BlockCG, Compute, LinearisedLaplace
from torch_lla_em.data import Data
from torch_lla_em.jacobian.network import Network
from torch_lla_em.problem import duration, prepare
from torch_lla_em.problem.problem import Problem
from torch_lla_em.runtime import Group, files
from torch_lla_em.runtime.modes import tf32
from torch_lla_em.session import Budget

FREE = "torch_lla_em.runtime.memory.free_memory"


# what a plan says


def test_plans_tell_memory_and_time_and_run_nothing(caplog, monkeypatch):
    model, x, y = network(4, 30, 30, 3), torch.randn(30, 4), torch.arange(30) % 3

    def plan(num_samples, times=1):
        la = LinearisedLaplace(model, "classification", num_samples=num_samples)
        found = la.plan(x.repeat(times, 1), y.repeat(times))
        assert la.w_lin is None and f"{num_samples} samples of" in str(found)
        return found

    few, more, long = plan(4), plan(64), plan(4, 100)
    assert few.memory[0] < more.memory[0] <= more.memory[1]
    assert few.pass_seconds > 0 and long.memory[0] > few.memory[0]
    assert "A pass over the data takes about" in str(few) and "fits take 10 to 40." in str(few)
    case = tiny("classification")
    la = LinearisedLaplace(case.model, "classification")
    assert la.plan(Loader(batches(case))).pass_seconds is None  # of a loader of unknown length
    # a long fit names the remedies, which is no warning of its result
    ways = 'use parameters="last_layer" or Compute(budget=seconds)'
    monkeypatch.setattr("torch_lla_em.problem.plan._LONG", 0.0)
    la.fit(case.x, case.y, em_steps=0, prior_precision=1.0, progress_bar=False)
    assert ways in caplog.text and not any(ways in words for words in la.messages)
    assert ways in str(la.plan(case.x, case.y)) and la.w_lin is not None
    caplog.clear()  # the time of a last layer is that of its algebra, and it cannot be made smaller
    head = LinearisedLaplace(case.model, "classification", parameters="last_layer")
    head.fit(case.x, case.y, em_steps=0, prior_precision=1.0, progress_bar=False)
    assert "last_layer" not in caplog.text and "fits take" not in str(head.plan(case.x, case.y))
    assert "Compute(budget=seconds) limits it" in str(head.plan(case.x, case.y))
    # one layer alone is no last layer
    first = LinearisedLaplace(case.model, "classification", parameters="0.*")
    assert "most fits take 10 to 40" in str(first.plan(case.x, case.y))
    assert [duration(seconds) for seconds in (0.0321, 2e4)] == ["0.0321 s", "333 min"]


def test_the_plan_estimates_the_peak_memory_before_anything_is_allocated(monkeypatch, caplog):
    x, y, model = torch.randn(64, 20), torch.arange(64) % 3, network(20, 1500, 30, 3)
    by_solver = Compute(solver=BlockCG())
    la = LinearisedLaplace(model, "classification", num_samples=8, compute=by_solver)
    plan, logged, draws = la.plan(x, y), [], Problem.probe_features

    def noted(self, *args, **options):
        logged.extend(caplog.messages)
        return draws(self, *args, **options)

    monkeypatch.setattr(Problem, "probe_features", noted)
    with caplog.at_level("INFO", "torch_lla_em"), Allocator() as allocator:
        la.fit([(x, y)], progress_bar=False, em_steps=3)
    assert any("8 samples of 76," in message for message in logged)
    assert "8 samples of 76," in repr(la.details())
    assert 0.5 < allocator.peak / plan.memory[0] < 2


@pytest.mark.parametrize(("rows", "classes"), [(4000, 5), (2000, 60)])
def test_the_plan_knows_the_memory_of_a_last_layer(rows, classes):
    x, y, model = torch.randn(rows, 20), torch.arange(rows) % classes, network(20, 60, classes)
    options = {"parameters": "last_layer", "num_samples": 16}
    la = LinearisedLaplace(model, "classification", **options)
    plan = la.plan(x, y)
    with Allocator() as allocator:
        la.fit(x, y, progress_bar=False, em_steps=2, validation=False)
    assert 0.4 < allocator.peak / plan.memory[0] < 1.6


def test_a_last_layer_that_is_too_large_is_told_beforehand(monkeypatch, caplog):
    x, y = torch.zeros(1, 512).expand(50_000, 512), torch.arange(50_000) % 1000
    la = LinearisedLaplace(nn.Linear(512, 1000), "classification", parameters="last_layer")
    compute = Compute(span_memory=22e9)
    large = LinearisedLaplace(nn.Linear(512, 1000), "classification", compute=compute)
    monkeypatch.setattr(FREE, lambda _: 20e9)
    assert 15e9 < large.plan(x, y).memory[0] < 22e9 and not caplog.messages
    la.plan(x, y)
    (words,) = caplog.messages
    assert "needs 20 GB" in words and "Use fewer samples or fewer examples" in words
    x, y, model = torch.randn(80, 20), torch.arange(80) % 3, network(20, 60, 3)
    la = LinearisedLaplace(model, "classification", num_samples=4, parameters="last_layer")
    la = la.fit(x, y, validation=False, em_steps=1, progress_bar=False)
    assert not any("fit of this last layer" in message for message in la.messages)
    monkeypatch.setattr(FREE, lambda _: 1e6)
    la = la.fit(x, y, validation=False, em_steps=1, progress_bar=False)
    assert any("fit of this last layer" in message for message in la.messages)


def test_directions_use_the_memory_that_is_given_to_them(monkeypatch, caplog):
    case = tiny("classification")
    monkeypatch.setattr(FREE, lambda _: 3e3)
    for memory, stored in ((None, False), (1e8, True)):
        caplog.clear()
        compute = Compute(span_memory=memory, keep_data=False)
        la = LinearisedLaplace(case.model, "classification", num_samples=4, compute=compute)
        la.fit(case.x, case.y, em_steps=2, validation=False, progress_bar=False)
        assert ("Directions cannot be stored" in caplog.text) != stored


def test_one_large_tensor_is_taken_in_batches():
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    model, x = nn.Sequential(*layers, nn.Linear(8, 3)), torch.randn(1000, 3, 64, 64)
    la = LinearisedLaplace(model, "classification", parameters="last_layer", num_samples=2)
    with Allocator() as allocator:
        la.fit(x, torch.arange(1000) % 3, progress_bar=False, em_steps=1, validation=False)
    assert allocator.peak < 1e8  # and not 2.6e8, what two layers return for all


@pytest.mark.parametrize("keeps", [True, False])
def test_the_plan_decides_what_is_kept(keeps, monkeypatch):
    """Batches and factors of J together; what is free after the plan changes nothing."""
    problem, free = tiny("classification").problem(10, 20), 1e7
    data, sweep = problem.data, problem.sweep
    monkeypatch.setattr(FREE, lambda _: free)
    plan = prepare(problem, 4, Compute(keep_data=keeps))
    assert (plan.batches > 0, plan.factors > 0) == (keeps, keeps)
    assert plan.vectors + plan.batches + plan.factors < free
    for _ in range(3):
        problem.ggn_product(torch.ones(5, problem.size).double())
    assert (data.kept is not None) == keeps and data.room == plan.batches
    assert 0 < sweep.plan.factors < plan.factors if keeps else sweep.plan.factors == 0
    other = tiny("classification").problem(10, 20)  # with room for less than the factors of a batch
    other.sweep.take(prepare(other, 4, Compute(keep_data=keeps))._replace(factors=1.0))
    other.ggn_product(torch.ones(5, other.size).double())
    other.ggn_product(torch.ones(5, other.size).double())
    assert other.sweep.plan.factors == 1.0


def test_data_that_fit_in_memory_are_read_a_few_times(monkeypatch):
    kept, read, small = (Loader(batches(tiny("classification"))) for _ in range(3))
    _, first = fitted(loader=kept)
    _, second = fitted(loader=read, compute=Compute(keep_data=False))
    # the first of two passes begins with the batches that were looked at
    assert kept.passes == 2 and read.passes >= second.history[-1]["data_passes"] > 5
    assert_close(first.w_samples, second.w_samples, rtol=1e-9, atol=1e-9)
    monkeypatch.setattr(FREE, lambda _: 100.0)
    _, la = fitted(loader=small)
    assert small.passes >= la.history[-1]["data_passes"] > 5


class Two(Group):
    """Two processes on one device."""

    size = 2

    def meet(self, value, merge):
        return merge([value, value])


def test_ranks_share_a_device_and_keep_neither_batches_nor_factors(monkeypatch):
    monkeypatch.setattr(FREE, lambda _: 8e6)
    problem, case = tiny("classification").problem(), tiny("classification")
    data = Data(batches(case), torch.device("cpu"), group=Two())
    alone = prepare(case.problem(), 4, Compute())
    shared = prepare(Problem(problem.linear_model, problem.likelihood, data), 4, Compute())
    assert (alone.free, shared.free) == (8e6, 4e6)
    assert shared.batches == shared.factors == 0 < alone.batches


def test_a_fit_hashes_its_network_once_and_compares_ranks_only_if_there_are_several(monkeypatch):
    counts, hashed = [], files.fingerprint
    monkeypatch.setattr(files, "fingerprint", lambda model: counts.append(1) or hashed(model))
    monkeypatch.setattr("torch_lla_em.session.compare_ranks", lambda *_: counts.append(2))
    monkeypatch.setattr("torch_lla_em.laplace.header_of", lambda *_: counts.append(3))
    case, la = fitted()
    la(case.x)
    assert counts == [1]


# what is shown meanwhile


@pytest.mark.parametrize("curvature", ["network", "variational"])
def test_the_bar_shows_the_stage_and_the_time_of_a_pass(curvature, capsys, monkeypatch):
    always = {"mininterval": 0.0}  # is the bar drawn
    monkeypatch.setattr("torch_lla_em.session.tqdm", lambda **looks: tqdm(**{**looks, **always}))
    case, loader = tiny("classification"), Loader(batches(tiny("classification")))
    la = LinearisedLaplace(case.model, "classification", curvature=curvature, num_samples=4)
    whole = la.fit(loader, progress_bar=False).w_samples
    la.fit(loader)
    drawn = [part.strip() for part in capsys.readouterr().err.split("\r") if part.strip()]
    assert drawn[-1].startswith("fitted:")
    assert any("drawing random numbers, pass 1" in part for part in drawn)
    learning = [part for part in drawn if "learning the prior and the posterior, pass" in part]
    assert learning and all(" per pass" in part for part in learning)
    assert torch.equal(la.w_samples, whole)


# options of Compute change memory and speed, but not the posterior


@pytest.mark.parametrize(
    "means", [{"columns": 1}, {"columns": 3, "rows": 4}, {"group": 3}], ids=str
)
@pytest.mark.parametrize("name", ["classification", "regression per output"])
def test_pieces_change_nothing(name, means):
    """Of columns and examples at once, and groups of columns that visit the device."""
    results = []
    for own in ({}, means):
        problem = tiny(name).problem(5, 11)
        problem.sweep.take(problem.sweep.plan._replace(**own))
        w = torch.randn(8, problem.size, generator=torch.Generator().manual_seed(0)).double()
        loss, gradient = problem.loss_and_gradient(w[0])
        curved = problem.with_curvature_at(w[1])
        found = [*problem.probe_features(8, seed=0)[:2], problem.ggn_product(w), gradient]
        found += [curved.ggn_product(w), curved.probe_features(8, seed=0)[0], rows_of(problem)]
        results.append([*found, torch.tensor(loss)])
    assert_close(*results, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:The prior precision reached")  # of a tensor that is pruned
@pytest.mark.parametrize("layerwise", daily(False, rest=[True]))
def test_bfloat16_products(layerwise):
    fits, x = [], images()[0][0]
    for precision in ("float32", "bfloat16"):
        # squared features without factors, as in bfloat16, have a Monte Carlo error of their own
        means = {"compute": Compute(precision=precision), "layerwise": layerwise}
        means |= {"prior": "isotropic", "num_samples": 16}
        fits.append(posterior_of(small_cnn(), "classification", images(), **means))
    assert fits[0]._linear_model.rounding < 1e-6 < 1e-3 < fits[1]._linear_model.rounding
    exact, found = (la.functional_samples(x).var(0).mean().item() for la in fits)
    assert found == pytest.approx(exact, rel=0.1) and fits[1].w_samples.dtype == torch.float32


@pytest.mark.parametrize("dtype", daily(torch.bfloat16, rest=[torch.float16]))
@pytest.mark.parametrize("layerwise", daily(False, rest=[True]))
def test_models_in_half_precision(dtype, layerwise):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(60, 5, generator=generator)
    y, variances = (x[:, :3] + torch.randn(60, 3, generator=generator)).argmax(1), []
    model = trained(network(5, 16, 3), x, y, 50)
    for kind in (torch.float32, dtype):
        given = copy.deepcopy(model).to(kind), "classification", batched(30, x.to(kind), y)
        la = posterior_of(*given, layerwise=layerwise, num_samples=16)
        assert la.w_samples.dtype == torch.float32
        variances.append(la.functional_samples(x.to(kind)).float().var(0))
    exact, found = variances
    assert found.mean().item() == pytest.approx(exact.mean().item(), rel=0.1)
    assert (found - exact).norm() < 0.1 * exact.norm()


def flags_come_back():
    matmul, is_new = torch.backends.cuda.matmul, hasattr(torch.backends, "fp32_precision")

    def known():
        return matmul.fp32_precision if is_new else matmul.allow_tf32

    before = known()
    for allowed in (True, False):
        with tf32(allowed):
            assert known() == (("tf32" if allowed else "ieee") if is_new else allowed)
        assert known() == before


def test_tf32_flags_are_restored():
    """In a fresh process, since some of them cannot be unset."""
    run_fresh(flags_come_back)


@pytest.mark.parametrize(
    "vectors, free, place",
    [("device", 0.0, "meta"), ("cpu", 1e9, "cpu"), ("auto", 1e9, "meta"), ("auto", 1e3, "cpu")],
)
def test_a_loaded_posterior_is_where_compute_puts_vectors(vectors, free, place, monkeypatch):
    """A device without storage takes the place of a GPU."""
    case, fit = known()
    state = fit.state_dict()
    la = LinearisedLaplace(case.model, case.name, compute=Compute(vectors=vectors))
    monkeypatch.setattr("torch_lla_em.prediction.stored.free_memory", lambda _: free)
    monkeypatch.setattr(Network, "device", torch.device("meta"))
    la.load_state_dict(state)
    assert {la.w_lin.device.type, la.w_samples.device.type, la.scale.device.type} == {place}


# budgets

KINDS = {
    "variational": ("classification", {}),
    "fixed": ("classification", {"curvature": "network"}),
    "noise": ("regression", {}),
    "solves": ("classification", {"compute": Compute(solver=BlockCG())}),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_fit_that_is_cut_short_continues_to_the_same_posterior(name, monkeypatch, tmp_path):
    likelihood, options = KINDS[name]
    case, whole = fitted(likelihood, **options)
    ends = iter([True, True])  # of the probes, after which a step is taken, and of that step
    with monkeypatch.context() as patched:
        patched.setattr(Budget, "ends", lambda _: next(ends))
        _, la = fitted(likelihood, budget=9.0, checkpoint=tmp_path, **options)
    assert len(la.history) == 1 < len(whole.history)
    shown, spent = " ".join(str(la).split()), "The budget is spent. The numerical error is"
    assert spent in la.messages[-1] and spent in shown
    variance = la.predict(case.x).f_variance
    assert variance.isfinite().all() and (variance > 0).all()
    _, la = fitted(likelihood, budget=1e6, checkpoint=tmp_path, **options)
    assert torch.equal(la.w_samples, whole.w_samples) and torch.equal(la.w_lin, whole.w_lin)
    assert len(la.history) == len(whole.history)


@pytest.mark.parametrize("name", ["variational", "fixed", "noise"])
def test_a_fit_in_the_shortest_pieces_ends_with_the_posterior_of_a_whole_one(name, tmp_path):
    """Every piece ends in the midst of a solution for λ, σ and H, which the next one continues."""
    likelihood, options = KINDS[name]
    case, whole = fitted(likelihood, **options)
    ends = []
    while ends[-1:] in ([], ["budget"]):
        _, la = fitted(likelihood, budget=1e-9, checkpoint=tmp_path, **options)
        ends.append(la.history[-1]["why"])
    assert len(ends) > 1 and ends[-1] == whole.history[-1]["why"]
    assert_close(la.prior_precision, whole.prior_precision, rtol=1e-6, atol=0.0)
    found, due = (each.predict(case.x).f_variance for each in (la, whole))
    assert_close(found, due, rtol=1e-6, atol=0.0)


def test_a_budget_that_is_spent_with_the_last_step_ends_nothing(monkeypatch):
    calls = []
    monkeypatch.setattr(Budget, "ends", lambda _: calls.append(1))
    _, whole = fitted(budget=1e6)
    last = len(calls)
    monkeypatch.setattr(Budget, "ends", lambda _: calls.append(1) or len(calls) == 2 * last)
    _, la = fitted(budget=1e6)
    assert len(calls) == 2 * last
    assert la.history[-1]["why"] == whole.history[-1]["why"] == "accurate"


def test_a_fit_ends_in_time(monkeypatch):
    _, whole = fitted(compute=Compute(tolerance=1e-6))
    seconds = itertools.count()  # each look at the clock takes one
    monkeypatch.setattr("torch_lla_em.session.time.monotonic", lambda: next(seconds))
    _, la = fitted(compute=Compute(budget=10, tolerance=1e-6))
    assert next(seconds) < 60  # of which the steps after the last look take some
    assert any("budget" in words for words in la.messages) and "(ended by: budget)" in str(la)
    assert la.history[-1]["why"] == "budget" != whole.history[-1]["why"]


def test_all_ranks_end_where_the_slowest_one_does(monkeypatch):
    class Slower(Group):
        def meet(self, value, merge):
            return merge([value, value - 5])

    now = iter([0.0, 0.0, 2.0, 2.0, 3.0, 3.0])
    monkeypatch.setattr("torch_lla_em.session.time.monotonic", lambda: next(now))
    alone, slower = Budget(8.0), Budget(8.0, Slower())
    assert not alone.ends() and slower.ends()
