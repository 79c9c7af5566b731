import logging
import warnings

import pretended_card
import pytest
import torch

torch.set_num_threads(1)
pytest.register_assert_rewrite("jacobians")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Have a plain ``pytest`` run by two processes where xdist is installed; files stay whole."""
    if hasattr(config, "workerinput") or config.invocation_params.args:
        return  # one of the two, or somebody who has said what to do
    if config.pluginmanager.hasplugin("xdist"):
        config.option.numprocesses, config.option.dist = 2, "loadfile"


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason=pretended_card.absent))


@pytest.fixture(scope="session", autouse=True)
def cuda_context():
    """Make cuBLAS's first calls here, forward and backward: it warns of a missing context."""
    if torch.cuda.is_available():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            a = torch.ones(2, 2, device="cuda", requires_grad=True)
            (a @ a).sum().backward()
            torch.cuda.synchronize()


@pytest.fixture
def pretended():
    """The pretended card, for what only it tells: waits, races, memory that ends on demand."""
    if pretended_card.absent:
        pytest.skip("needs the pretended card")
    return pretended_card


@pytest.fixture(autouse=True)
def logging_as_it_was():
    """Scripts set what they want to hear of the library, in this process too."""
    loggers = [logging.getLogger(), logging.getLogger("torch_lla_em")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels):
        logger.setLevel(level)
