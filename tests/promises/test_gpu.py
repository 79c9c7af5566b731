"""The public interface on a GPU equals that on the CPU to rounding; TF32, out of memory, memory of the CPU."""

import gc
import logging
from contextlib import contextmanager

import pytest
import ranks
import simulated_gpu
import torch
from checkpoints import dying_after
from loaders import batches
from models import images, network, small_cnn
from tiny import batched, draw, fitted, likelihood_of, posterior_of, tiny
from torch.testing import assert_close

from torch_lla_em import (
    SGD,
    BlockCG,
    HeteroscedasticRegression,
    LaplaceEnsemble,
    LinearisedLaplace,
    compare,
)

pytestmark = pytest.mark.cuda
GPU, K = torch.device("cuda"), 16


def fit(model, likelihood, data, em_steps=3, folder=None, **options):
    at = {"em_steps": em_steps} if em_steps else {"at": 3.0}
    options = {"num_samples": 3, "tolerance": 1e-4, **options, **at}
    return posterior_of(model, likelihood, data, checkpoint=folder, **options)


def of_tiny(device, loader=None, **options):
    """Return the posterior of a network on a device, whose data are on the CPU."""
    case = tiny("classification")
    return fit(case.model.to(device), "classification", loader or batches(case), **options)


def predicted_noise():
    x, noise = draw(20, 3).split([2, 1], dim=1)
    data = x, x.sum(1, keepdim=True) + 0.3 * noise
    return network(2, 3, 2).double(), HeteroscedasticRegression(), data, x


def convolutions():
    x, y = images()[0]
    return small_cnn().double(), "classification", (x.double(), y), x.double()


def both(name="classification", **options):
    """Return the posterior on the CPU and that on the GPU, and inputs."""
    found = []
    for device in ("cpu", GPU):
        if callable(name):
            model, likelihood, batch, x = name()
            data = [tuple(part.to(device) for part in batch)]
        else:
            case = tiny(name)
            model, likelihood, x = case.model, likelihood_of(name), case.x
            data = [(x.to(device), y.to(device)) for x, y in batches(case)]
        found.append(fit(model.to(device), likelihood, data, **options))
    return *found, x


def the_same(there, here, **tolerances):
    near = {"rtol": 1e-5, "atol": 1e-7, "equal_nan": True, **tolerances}
    assert_close(there.cpu(), here.cpu(), **near)


LIKELIHOODS = "classification", "regression", "bernoulli", "poisson", "binomial"
OWN = predicted_noise, convolutions
CASES = {
    **{name: {"name": name} for name in (*LIKELIHOODS, "regression per output")},
    "layerwise, a noise per output": {"name": "regression per output", "layerwise": True},
    "plain prior": {"prior": "isotropic"},
    "block CG": {"solver": BlockCG()},
    "SGD": {"solver": SGD(epochs=8, tolerance=0.5), "tolerance": 0.5},
    "network curvature": {"curvature": "network"},
    "last layer": {"parameters": "last_layer"},
    "vectors on the CPU": {"vectors": "cpu"},
    "data from the loader": {"keep_data": False},
    **{make.__name__: {"name": make, "curvature": "network"} for make in OWN},
}  # fmt: skip
CASES["predicted_noise"] |= {"em_steps": 1, "tolerance": 0.1}
LOOSE = {name: {"rtol": 1e-3, "atol": 1e-4} for name in ("SGD", "predicted_noise")}
# over a complete span the iteration ends within 2e-3 of its fixed point
LOOSE["poisson"] = {"rtol": 1e-3, "atol": 2e-3}


@pytest.mark.filterwarnings("ignore:SGD", "ignore:The samples")
@pytest.mark.filterwarnings("ignore:The mode has a relative error")
@pytest.mark.parametrize("case", CASES)
def test_a_fit_equals_that_of_the_cpu(case):
    here, there, x = both(**CASES[case])
    loose = LOOSE.get(case, {})
    assert there.w_samples.device.type == ("cpu" if "vectors" in case else "cuda")
    for name in ("prior_precision", "effective_dim", "w_lin", "w_samples"):
        the_same(getattr(there, name), getattr(here, name), **loose)
    predicted, expected = there.predict(x.cuda()), here.predict(x)
    for name in ("f_mean", "f_variance", "f_covariance", "samples"):
        assert getattr(predicted, name).is_cuda
        the_same(getattr(predicted, name), getattr(expected, name), **loose)


PLACES = [{"vectors": "device"}, {"vectors": "cpu"}, {"vectors": "cpu", "keep_data": False}]


def features(la, x, y, path):
    """Yield numbers from every feature of a posterior, at examples on its device that are not those of the fit."""
    ones, halves = torch.ones(len(x)), torch.arange(len(x)) % 2
    yield la.log_marginal_likelihood().value
    yield la.functional_samples(x)
    yield from (la.predict(x, mean="linear").f_variance, la.predict(x).entropy, la(x)[0])
    yield la.calibrate().predict(x).f_variance
    yield la.calibrate([(x, y)], groups=halves).predict(x, groups=halves).p_values()
    yield la.calibrate([(x, y)], weights=ones).predict(x, weights=ones).p_values()
    found = la.calibrate([(x, y)]).predict(x)
    yield from (found.p_values(), found.is_ood(0.2).double(), found.epistemic, found.f_variance)
    yield from (found.log_prob(y), found.joint_log_prob(y))
    if la.likelihood.real_valued:
        yield from (*found.interval(0.5), found.quantile(0.3), found.crps(y))
    else:
        yield found.prediction_set(0.5).double()
    yield la.export(x, p_value=True).module()(x)["p_value"]
    str(la), str(la.check([(x, y)])), la.report([(x, y)], path.with_suffix(".html"))
    la.save(path)
    yield type(la).load(path, la.model, compute=la.compute).predict(x).p_values()
    la.load_state_dict(la.state_dict())
    yield la.predict(x).epistemic
    ensemble = LaplaceEnsemble([la, la]).calibrate([(x, y)])
    yield from (ensemble.predict(x).p_values(), ensemble.predict(x).f_variance)
    str(compare([la, ensemble], [(x, y)]))
    student = la.distil(x, steps=2, num_inputs=10, progress_bar=False).calibrate([(x, y)])
    yield from (student.predict(x).epistemic, student.predict(x).p_value)


@pytest.mark.parametrize("name", ["classification", "regression"])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_every_feature_wherever_vectors_and_data_are(name, place, tmp_path):
    here, there, x = both(name, **place)
    case, x = tiny(name), x + 0.1
    of_gpu = features(there, x.cuda(), case.y.cuda(), tmp_path / "there.pt")
    of_cpu = features(here, x, case.y, tmp_path / "here.pt")
    for found, expected in zip(of_gpu, of_cpu, strict=True):
        the_same(found, expected, rtol=1e-3, atol=1e-4)


def test_files_move_between_devices(tmp_path):
    (_, there, x), case = both(curvature="network"), tiny("classification")
    there.save(tmp_path / "la.pt")
    for model, device in ((case.model, "cpu"), (case.model, GPU)):
        moved = LinearisedLaplace.load(tmp_path / "la.pt", model.to(device))
        the_same(moved(x.to(device)), there(x.cuda()).cpu())


@pytest.mark.parametrize("curvature", ["variational", "network"])
def test_a_fit_continues_on_another_device(curvature, tmp_path):
    case = tiny("classification")
    options = {"curvature": curvature, "loader": [(case.x, case.y)], "tolerance": None}
    for start, end in (("cpu", GPU), (GPU, "cpu")):
        folder = tmp_path / str(start)
        with pytest.raises(InterruptedError), dying_after(2):
            of_tiny(start, folder=folder, **options)
        la = of_tiny(end, folder=folder, **options)
        assert la.w_samples.device.type == torch.device(end).type
        the_same(la.w_samples, of_tiny(end, **options).w_samples, rtol=1e-4, atol=1e-6)
        finished = of_tiny(start, folder=folder, **options)
        the_same(finished.w_samples, la.w_samples)


@contextmanager
def default_device():
    torch.set_default_device(GPU)
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("context", [default_device, lambda: GPU])
def test_a_default_device_changes_nothing(context):
    here, case, other = of_tiny("cpu"), tiny("classification"), tiny("classification")
    data = batches(case)
    with context():
        for model, device in ((case.model, "cpu"), (other.model.cuda(), "cuda")):
            la = fit(model, "classification", data)
            the_same(la.w_samples, here.w_samples)
            where = la.w_samples, la.calibrate(data)(case.x.to(device))
            assert {tensor.device.type for tensor in where} == {device}


def on_a_gpu(rank):
    la = of_tiny(GPU, curvature="network")
    return la.w_samples.is_cuda, la.w_samples.cpu()


def test_ranks_have_a_gpu_each(tmp_path, simulated):
    here = of_tiny("cpu", curvature="network")
    for is_cuda, w_samples in ranks.run(2, on_a_gpu, tmp_path):
        assert is_cuda
        the_same(w_samples, here.w_samples, rtol=1e-3, atol=1e-4)


# precision and memory


def wide(width=400):
    return network(20, width, 50, 3)


def fixed(model, count=200, **compute):
    x, y = draw(count, 20, seed=1).float(), torch.arange(count) % 3
    loader = batched(count // 4, x, y)
    return fitted("classification", loader, model, num_samples=K, at=100.0, **compute)[1]


def test_products_in_bfloat16():
    case, found = tiny("classification"), []
    options = {"em_steps": 0, "curvature": "network", "prior": "g"}
    options |= {"precision": "bfloat16", "tolerance": 0.3}
    for device in ("cpu", GPU):
        model = tiny("classification").model.float().to(device)
        found.append(fit(model, "classification", [(case.x.float(), case.y)], **options))
    here, there = (la.w_samples.cpu() for la in found)
    assert (there - here).norm() < 0.05 * here.norm()


@pytest.mark.filterwarnings("ignore:Please use the new API settings")
def test_tf32_is_off_unless_requested():
    torch.set_float32_matmul_precision("high")
    try:
        model = wide().cuda()
        exact, low = (fixed(model, precision=p)._linear_model for p in ("float32", "tf32"))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert exact.ways.adjoint_error < 1e-5 and exact.rounding < 1e-6 < 1e-4 < low.rounding
    w, x, each = torch.ones(1, exact.layout.size, device=GPU), draw(50, 20).float().cuda(), []
    for own in (exact, low):
        with own.network.guarded():
            each.append(own.by_autodiff(x).push(w))
    error = (each[1] - each[0]).norm() / each[0].norm()
    # older GPUs have no TF32, and the simulated one rounds like a CPU
    rounds = torch.cuda.get_device_capability() >= (8, 0) and simulated_gpu.absent
    assert (1e-5 if rounds else -1) < error < 0.01


@pytest.mark.filterwarnings("ignore:The mode has a relative error")
def test_a_small_share_of_the_memory_suffices(caplog):
    caplog.set_level(logging.WARNING)
    # without a Krylov basis, whose size follows from the free memory that the driver reports
    options = {"solver": BlockCG(), "tolerance": 5e-3}
    width = 3000 if simulated_gpu.absent else 300
    whole = fixed(wide(width).cuda(), 1000, **options).w_samples.cpu()
    gc.collect()
    torch.cuda.empty_cache()
    model = wide(width).cuda()
    total = torch.cuda.get_device_properties(0).total_memory
    # plus the granularity of the allocator
    share = (torch.cuda.memory_allocated() + 30 * K * 4 * 73 * width + 5e6) / total
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        small = fixed(model, 1000, **options)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "columns at a time" in caplog.text
    # computed in another way, to the same tolerance
    assert (small.w_samples.cpu() - whole).norm() < 1e-2 * whole.norm()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_out_of_memory_once_changes_nothing(count, simulated):
    whole, model = fixed(wide(), tolerance=1e-2), wide().cuda()
    torch.cuda.empty_cache()
    simulated.fail_at_malloc(count)
    short = fixed(model, tolerance=1e-2)
    assert not simulated.fail_at_malloc(0)
    assert_close(short.w_samples.cpu(), whole.w_samples, rtol=2e-2, atol=2e-3)
