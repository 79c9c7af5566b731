"""Compiled products: kept where they agree and are faster, left with one line otherwise."""

import logging

import pytest
import torch

from test_compute import images, small_cnn
from tiny import tiny
from torch_lla_em import Compute, LinearisedLaplace
from torch_lla_em.compiled import CompiledShare
from torch_lla_em.expectation import at_sigma
from torch_lla_em.network import Network

pytestmark = pytest.mark.usefixtures("own_tangents_at_any_size")


def fit(model, batches, compile, likelihood="classification", **options):
    options = {"num_samples": 4, "compute": Compute(compile=compile), **options}
    return LinearisedLaplace(model, likelihood, **options).fit(batches, progress_bar=False)


@pytest.fixture
def faster(monkeypatch):
    """Traced by the compiler but run as it is, and timed as if that were faster."""
    torch.compiler.reset()
    monkeypatch.setattr("torch_lla_em.compiled._BACKEND", "eager")
    times = iter([1.0, 2.0] * 1000)
    monkeypatch.setattr("torch_lla_em.compiled._seconds", lambda *_: next(times))


@pytest.mark.parametrize("likelihood", ["classification", "regression", "poisson"])
@pytest.mark.parametrize("curvature", ["network", "linear"])
def test_compiled_fits_equal_eager_ones(likelihood, curvature, faster, caplog):
    caplog.set_level(logging.INFO)
    case = tiny(likelihood)
    batches = list(zip(case.x.split(9), case.y.split(9)))
    eager, compiled = (
        fit(case.model, batches, compile, likelihood, curvature=curvature)
        for compile in (False, True)
    )
    assert "take 0.50 of the time" in caplog.text and "is left" not in caplog.text
    torch.testing.assert_close(compiled.w_samples, eager.w_samples, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(compiled.w_lin, eager.w_lin, rtol=1e-6, atol=1e-6)


def test_slower_ones_are_left(faster, monkeypatch, caplog):
    monkeypatch.setattr("torch_lla_em.compiled._seconds", lambda *_: 1.0)
    eager, compiled = (fit(small_cnn(), images(), compile) for compile in (False, True))
    assert "torch.compile is left: it takes 1.00 times as long" in caplog.text
    assert torch.equal(eager.w_samples, compiled.w_samples)


def test_wrong_ones_are_left(faster, monkeypatch, caplog):
    share = "torch_lla_em.compiled.CompiledShare._share"
    right = CompiledShare._share

    def wrong(self, *args):
        f, grads = right(self, *args)
        return f, {name: 1.01 * grad for name, grad in grads.items()}

    monkeypatch.setattr(share, wrong)
    eager, compiled = (fit(small_cnn(), images(), compile) for compile in (False, True))
    assert "differ from eager ones by 1.0e-02" in caplog.text
    assert torch.equal(eager.w_samples, compiled.w_samples)


def test_what_cannot_be_compiled_is_left(faster, monkeypatch, caplog):
    def broken(graph, inputs):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr("torch_lla_em.compiled._BACKEND", broken)
    eager, compiled = (fit(small_cnn(), images(), compile) for compile in (False, True))
    assert "torch.compile is left: " in caplog.text
    assert torch.equal(eager.w_samples, compiled.w_samples)


def test_modules_with_two_names_are_not_compiled(faster, caplog):
    def twice():
        model = small_cnn()
        model.again = model[4]
        model.forward = lambda x: model.again(model[3](model[2](model[1](model[0](x)))))
        return model

    models = twice(), twice()
    eager, compiled = (fit(model, images(), on) for model, on in zip(models, (False, True)))
    assert "under two names" in caplog.text
    assert torch.equal(eager.w_samples, compiled.w_samples)
    assert isinstance(models[1][4].weight, torch.nn.Parameter)


def test_last_layers_need_no_compiler(faster, caplog):
    fits = [
        fit(small_cnn(), images(), compile, parameters="last_layer") for compile in (False, True)
    ]
    assert "not of one forward pass" in caplog.text
    assert torch.equal(fits[0].w_samples, fits[1].w_samples)


@pytest.mark.slow
def test_the_real_compiler_agrees(caplog):
    caplog.set_level(logging.INFO)
    eager, compiled = (fit(small_cnn(), images(), compile) for compile in (False, True))
    assert "Compiled products take" in caplog.text or "times as long" in caplog.text
    torch.testing.assert_close(compiled.w_samples, eager.w_samples, rtol=1e-3, atol=1e-4)


def test_another_noise_is_neither_compiled_nor_compared_again(faster, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    graphs = []
    monkeypatch.setattr("torch_lla_em.compiled._BACKEND", lambda graph, _: graphs.append(1) or graph)
    case = tiny("regression")
    eager, compiled = (case.problem(15) for _ in range(2))
    compiled.prepare(4, Compute(compile=True))
    w = torch.randn(4, eager.size, generator=torch.Generator().manual_seed(0)).double()
    counts = []
    for sigma in (0.4, 0.5, 0.6, 0.7):
        sigma = torch.tensor(sigma, dtype=torch.float64)
        expected = at_sigma(eager, sigma).ggn_product(w)
        torch.testing.assert_close(at_sigma(compiled, sigma).ggn_product(w), expected)
        counts.append(len(graphs))
    assert counts[0] > 0 and counts[-1] == counts[0]
    assert caplog.text.count("Compiled products take") == 1


def test_times_are_taken_where_the_network_is(monkeypatch):
    devices = []
    timed = "torch_lla_em.compiled._seconds"
    monkeypatch.setattr(timed, lambda _, device: devices.append(device.type) or 1.0)
    share = CompiledShare(tiny("regression").problem().linear_model, None)
    monkeypatch.setattr(Network, "device", torch.device("cuda"))
    monkeypatch.setattr(share, "_in_blocks", lambda batch, at, w: (None, w))
    share._compare(None, None, torch.ones(2, 3), lambda w: w)
    assert devices == ["cuda", "cuda"]


@pytest.mark.parametrize("kept_in", [torch.float64, torch.float32])
def test_shares_are_added_in_the_precision_of_the_vectors(kept_in, faster):
    """As they are where the vectors live, on another device than the network's gradients."""
    problem = tiny("regression").problem()
    problem.prepare(4, Compute(compile=True))
    w = torch.randn(3, problem.size, generator=torch.Generator().manual_seed(0)).to(kept_in)
    expected = problem.ggn_product(w.double())
    found = problem._compiled._in_blocks(problem.data.first(), None, w)[1]
    assert found.dtype == kept_in
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
