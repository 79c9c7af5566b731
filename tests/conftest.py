import gc
import logging
import os
import warnings

import pytest
import simulated_gpu
import torch

torch.set_num_threads(1)
# scripts and kernels beside another worker would wait for each other's threads, for ten times as long
os.environ.setdefault("OMP_NUM_THREADS", "1")
pytest.register_assert_rewrite("jacobians")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Run a plain ``pytest`` in two processes if xdist is installed, with whole files."""
    if hasattr(config, "workerinput") or config.invocation_params.args:
        return  # a worker, or a run with arguments
    if config.pluginmanager.hasplugin("xdist"):
        config.option.numprocesses, config.option.dist = 2, "loadfile"


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason=simulated_gpu.absent))


def pytest_collection_finish():
    """Leave what was imported to no collection of garbage: fits that lack memory collect often."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Draw the same numbers in each test, and for the fixtures that it is first to use, whatever ran before."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def cuda_context():
    """Make the first calls of cuBLAS here, forward and backward: they warn of a missing context."""
    if torch.cuda.is_available():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            a = torch.ones(2, 2, device="cuda", requires_grad=True)
            (a @ a).sum().backward()
            torch.cuda.synchronize()


@pytest.fixture
def simulated():
    """The simulated GPU, for what only it counts: synchronisations, races, out of memory on demand."""
    if simulated_gpu.absent:
        pytest.skip("needs the simulated GPU")
    return simulated_gpu


@pytest.fixture(autouse=True)
def restored_logging():
    """Restore log levels, which scripts change."""
    loggers = [logging.getLogger(), logging.getLogger("torch_lla_em")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
