import logging
import warnings

import pytest
import torch

torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Run the whole suite, and nothing less, by two processes; files stay whole."""
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    chosen = config.option.markexpr or config.option.keyword or config.option.usepdb
    if config.pluginmanager.hasplugin("xdist") and whole and not chosen:
        if config.option.numprocesses is None:
            config.option.numprocesses, config.option.dist = 2, "loadfile"


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def cuda_context():
    """Make cuBLAS's first calls here, forward and backward: it warns of a missing context."""
    if torch.cuda.is_available():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            a = torch.ones(2, 2, device="cuda", requires_grad=True)
            (a @ a).sum().backward()
            torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def logging_as_it_was():
    """Scripts set what they want to hear of the library, in this process too."""
    loggers = [logging.getLogger(), logging.getLogger("torch_lla_em")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels):
        logger.setLevel(level)
