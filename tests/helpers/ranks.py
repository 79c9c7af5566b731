"""Runs functions in several processes of one gloo group."""

import importlib
import os
import time
import traceback
from datetime import timedelta

import torch
from fresh import CONTEXT
from torch import distributed as dist


def run(size, function, folder, *arguments, timeout=60.0):
    """Return the result or error of ``function(rank, *arguments)`` on each rank; None if killed."""
    folder.mkdir(parents=True, exist_ok=True)
    name = function.__module__, function.__name__
    ranks = [
        CONTEXT.Process(target=_work, args=(rank, size, name, folder, arguments, timeout))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    end = time.monotonic() + 600  # only for processes that hang
    for process in ranks:
        process.join(max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
    paths = [folder / f"rank-{rank}.pt" for rank in range(size)]
    return [torch.load(p, weights_only=False) if p.exists() else None for p in paths]


def _work(rank, size, name, folder, arguments, timeout):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    own = {"rank": rank, "world_size": size, "timeout": timedelta(seconds=timeout)}
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", **own)
    function = getattr(importlib.import_module(name[0]), name[1])
    try:
        result = function(rank, *arguments)
    except Exception as error:
        traceback.print_exc()
        result = error
    torch.save(result, folder / f"rank-{rank}.pt")


def facts(la):
    state = {name: tensor for name, tensor in la.state_dict().items() if name != "record"}
    records = [{k: v for k, v in record.items() if k != "seconds"} for record in la.history]
    return {"state": state, "history": records, "num_data": la.num_data}
