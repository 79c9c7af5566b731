import logging
import warnings

import pytest
import torch

torch.set_num_threads(1)


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
