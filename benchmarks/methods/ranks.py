"""One process of several, as torchrun starts them, or the only one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed, nn


@contextmanager
def ranks(device: str) -> Iterator[torch.device]:
    """Join the process group of torchrun, if it started this; yield the device of this rank."""
    if "RANK" not in os.environ:
        yield torch.device(device)
        return
    cuda = device.startswith("cuda")
    if cuda:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    # the others wait while the first trains
    distributed.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(days=2))
    try:
        yield torch.device(device)
    finally:
        distributed.destroy_process_group()


def is_first() -> bool:
    """Whether this process is the one that trains, prints and writes."""
    together = distributed.is_available() and distributed.is_initialized()
    return not together or distributed.get_rank() == 0


def as_first(network: nn.Module) -> nn.Module:
    """Give every rank the weights of the first."""
    if distributed.is_available() and distributed.is_initialized():
        for tensor in network.state_dict().values():
            distributed.broadcast(tensor, 0)
    return network
