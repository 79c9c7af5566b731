"""On a GPU: TF32, out of memory."""

import gc
import logging

import pytest
import simulated_gpu
import torch
from tiny import fitted
from torch import nn

from torch_lla_em import BlockCG, Compute

pytestmark = pytest.mark.cuda
K = 16


def wide(width=400):
    torch.manual_seed(0)
    layers = nn.Linear(20, width), nn.Tanh(), nn.Linear(width, 50), nn.Tanh(), nn.Linear(50, 3)
    return nn.Sequential(*layers)


def rows(count=200):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 20, generator=generator)
    y = torch.randint(0, 3, (count,), generator=generator)
    return list(zip(x.split(count // 4), y.split(count // 4)))


def fit(model, batches, **options):
    options = {"num_samples": K, "em_steps": 0, "prior_precision": 100.0, **options}
    return fitted("classification", batches, model, **options)[1]


@pytest.mark.filterwarnings("ignore:Please use the new API settings")
def test_tf32_is_off_unless_requested():
    torch.set_float32_matmul_precision("high")
    try:
        exact = fit(wide().cuda(), rows())._linear_model
        low = fit(wide().cuda(), rows(), compute=Compute(precision="tf32"))._linear_model
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert exact.report.adjoint_error < 1e-5 and exact.precision_error == 0
    assert low.precision_error < 0.01
    # older GPUs have no TF32, and the simulated one rounds like a CPU
    if torch.cuda.get_device_capability() >= (8, 0) and simulated_gpu.absent:
        assert low.precision_error > 1e-5


@pytest.mark.filterwarnings("ignore:The mode has a relative error")
def test_a_small_share_of_the_memory_suffices(caplog):
    caplog.set_level(logging.WARNING)
    # without a Krylov basis, whose size follows from the free memory that the driver reports
    options = {"tolerance": 5e-3, "solver": BlockCG()}
    width = 3000 if simulated_gpu.absent else 300
    whole = fit(wide(width).cuda(), rows(1000), **options).w_samples.cpu()
    gc.collect()
    torch.cuda.empty_cache()
    model = wide(width).cuda()
    total = torch.cuda.get_device_properties(0).total_memory
    # plus the granularity of the allocator
    share = (torch.cuda.memory_reserved() + 30 * K * 4 * 73 * width + 5e6) / total
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        small = fit(model, rows(1000), **options)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "columns at a time" in caplog.text
    # computed in another way, to the same tolerance
    off = small.w_samples.cpu() - whole
    assert off.norm() < 1e-2 * whole.norm()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_out_of_memory_once_changes_nothing(count, simulated):
    whole = fit(wide(), rows(), tolerance=1e-2)
    model = wide().cuda()
    torch.cuda.empty_cache()
    simulated.fail_at_malloc(count)
    short = fit(model, rows(), tolerance=1e-2)
    assert not simulated.fail_at_malloc(0)
    torch.testing.assert_close(short.w_samples.cpu(), whole.w_samples, rtol=2e-2, atol=2e-3)
