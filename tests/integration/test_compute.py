"""Options of ``Compute`` change memory and speed, but not the posterior."""

import logging
import warnings

import pytest
import torch
from daily import daily
from fresh import run_fresh
from loaders import batches
from models import images, small_cnn
from tiny import fitted, tiny
from torch import nn
from torch.testing import assert_close

from torch_lla_em import Compute, LinearisedLaplace
from torch_lla_em.jacobian.network import Network
from torch_lla_em.runtime.modes import tf32


@pytest.mark.parametrize(
    "name", daily("classification", "regression per output", rest=["regression"])
)
@pytest.mark.parametrize("means", [{"columns": 1}, {"columns": 3, "rows": 4}, {"keep_data": False}])
def test_pieces_change_nothing(name, means):
    data = batches(tiny(name))
    # s² of the g-prior is an average over groups of rows, whose size is one of the means
    options = {"g_prior": "rows" not in means}
    _, whole = fitted(name, data, **options)
    _, parts = fitted(name, data, compute=Compute(**means), **options)
    assert_close(parts.w_samples, whole.w_samples, rtol=1e-6, atol=1e-6)
    assert_close(parts.w_lin, whole.w_lin, rtol=1e-6, atol=1e-6)


def test_groups_of_columns_that_visit_the_device_change_nothing():
    problems = tiny("classification").problem(5, 11), tiny("classification").problem(5, 11)
    problems[1]._group = 3
    w = torch.randn(8, problems[0].size, generator=torch.Generator().manual_seed(0)).double()
    results = []
    for problem in problems:
        eta, squares = problem.noise_features(8, seed=0)
        loss, gradient = problem.loss_and_gradient(w[0])
        curved = problem.with_curvature_at(w[1])
        results.append(
            [
                *(eta, squares, problem.ggn_product(w), torch.tensor(loss), gradient),
                *(curved.ggn_product(w), curved.noise_features(8, seed=0).eta, problem.rows()),
            ]
        )
    assert_close(*results, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("prior", daily("scalar", rest=["layerwise"]))
def test_bfloat16_products_log_their_error(prior, caplog):
    caplog.set_level(logging.INFO)
    fits = []
    for precision in ("float32", "bfloat16"):
        # squared features without factors, as in bfloat16, have a Monte Carlo error of their own
        means = {"compute": Compute(precision=precision), "prior": prior, "num_samples": 16}
        means["g_prior"] = False
        la = LinearisedLaplace(small_cnn(), "classification", **means)
        fits.append(la.fit(images(), progress_bar=False))
    error = fits[1]._linear_model.precision_error
    assert 1e-4 < error < 0.05 and "In bfloat16, the relative error of J w" in caplog.text
    assert fits[0]._linear_model.precision_error == 0
    x = images()[0][0]
    variances = [la.functional_samples(x).var(0).mean().item() for la in fits]
    assert variances[1] == pytest.approx(variances[0], rel=0.1)
    assert fits[1].w_samples.dtype == torch.float32


@pytest.mark.parametrize("dtype", daily(torch.bfloat16, rest=[torch.float16]))
@pytest.mark.parametrize("prior", daily("scalar", rest=["layerwise"]))
def test_models_in_half_precision(dtype, prior):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(60, 5, generator=generator), torch.randint(0, 3, (60,), generator=generator)
    variances = []
    for kind in (torch.float32, dtype):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)).to(kind)
        la = LinearisedLaplace(model, "classification", prior=prior, num_samples=16)
        la.fit(list(zip(x.to(kind).split(30), y.split(30))), progress_bar=False)
        assert la.w_samples.dtype == torch.float32
        variances.append(la.functional_samples(x.to(kind)).float().var(0))
    exact, found = variances
    assert found.mean().item() == pytest.approx(exact.mean().item(), rel=0.1)
    assert (found - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize(
    "means", [{"precision": "half"}, {"vectors": "disk"}, {"columns": 0}, {"rows": 1.5}]
)
def test_unknown_options_of_compute_raise(means):
    with pytest.raises((TypeError, ValueError), match=next(iter(means))):
        Compute(**means)


OLD = "backends.cuda.matmul.allow_tf32", "backends.cudnn.allow_tf32"
NEW = [f"backends.{name}.fp32_precision" for name in ("cuda.matmul", "cudnn.conv", "cudnn.rnn")]
FLAGS = [*OLD, *NEW, "get_float32_matmul_precision()", "backends.fp32_precision"]
FLAGS += ["backends.mkldnn.matmul.fp32_precision"]


def flags():
    """Return whether TF32 is allowed, by all names that torch has for it."""
    found = {}
    for name in FLAGS:
        try:
            found[name] = eval(name, vars(torch))
        except (RuntimeError, AttributeError) as error:
            found[name] = type(error)
    return found


EVERY_DAY = {"nothing": "", "all": "backends.fp32_precision = 'tf32'"}
SETTINGS = {
    **EVERY_DAY,
    "older": "torch.set_float32_matmul_precision('medium')",
    "older, cudnn": "backends.cudnn.allow_tf32 = False",
    "all, ieee": "backends.fp32_precision = 'ieee'",
    "matmul": "backends.cuda.matmul.fp32_precision = 'tf32'",
    "convolutions": "backends.cudnn.conv.fp32_precision = 'ieee'",
}


def flags_come_back(setting, inherits):
    backends = torch.backends
    warnings.simplefilter("error")
    exec(setting)
    before = flags()
    for allowed in (True, False):
        with tf32(torch.device("cuda"), allowed):
            inside = flags()
            if not hasattr(backends, "fp32_precision"):
                assert all(inside[name] == allowed for name in OLD), inside
            for name in NEW:
                assert inside[name] in ("tf32" if allowed else "ieee", AttributeError), inside
        assert flags() == before, (flags(), before)
    if hasattr(backends, "fp32_precision") and inherits:
        for precision in ("tf32", "ieee"):
            backends.fp32_precision = precision
            assert backends.cuda.matmul.fp32_precision == precision


@pytest.mark.parametrize("name", daily(*EVERY_DAY, rest=list(SETTINGS)[len(EVERY_DAY) :]))
def test_all_tf32_flags_are_restored(name):
    """In a fresh process, since some of them cannot be unset."""
    if "fp32" in SETTINGS[name] and not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("of a newer torch")
    inherits = name in ("nothing", "older, cudnn", "all", "all, ieee")
    run_fresh(flags_come_back, SETTINGS[name], inherits)


@pytest.mark.parametrize(
    "vectors, free, place",
    [("device", 0.0, "meta"), ("cpu", 1e9, "cpu"), ("auto", 1e9, "meta"), ("auto", 1e3, "cpu")],
)
def test_a_loaded_posterior_is_where_compute_puts_vectors(vectors, free, place, monkeypatch):
    """A device without storage takes the place of a GPU."""
    case, fit = fitted(em_steps=0, prior_precision=3.0)
    state = fit.state_dict()
    la = LinearisedLaplace(case.model, case.name, compute=Compute(vectors=vectors))
    monkeypatch.setattr("torch_lla_em.prediction.stored.free_memory", lambda _: free)
    monkeypatch.setattr(Network, "device", torch.device("meta"))
    la.load_state_dict(state)
    assert {la.w_lin.device.type, la.w_samples.device.type, la.scale.device.type} == {place}
