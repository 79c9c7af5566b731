"""How a pass over the data scales with ranks: gloo processes on one machine, and a model of more.

    python benchmarks/scaling.py                 # 1, 2 and 4 processes

A pass of K columns ends with one sum of K P numbers over ranks. Expect the bytes that a rank
sends to be 2 K P 4 (R - 1) / R, and seconds of computation a rank to fall as 1 / R where the
data stay (strong) and to stay where they grow with R (weak). Wall-clock times mean something
only with one idle core a process; seconds of a rank's own processor time do on any machine.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import torch
from methods.markdown import append
from methods.provenance import provenance
from torch import distributed as dist
from torch import nn

from torch_lla_em import Compute
from torch_lla_em.data.loader import Data
from torch_lla_em.jacobian.linear_model import LinearModel
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.parameters import ParameterLayout, select_parameters
from torch_lla_em.likelihoods import Classification
from torch_lla_em.problem import Problem, prepare
from torch_lla_em.runtime.group import current_group


def network(width):
    """A small CNN for 32×32 images; nearly all of its weights are in one linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(2048, width), nn.ReLU(), nn.Linear(width, 10),
    )  # fmt: skip


def problem_of(args, rows, group):
    torch.manual_seed(0)
    model = network(args.width)
    x, y = torch.randn(rows, 3, 32, 32), torch.randint(10, (rows,))
    batches = list(zip(x.split(args.batch), y.split(args.batch)))
    linear = LinearModel(Network(model), ParameterLayout.of(model, select_parameters(model)))
    return Problem(linear, Classification(), Data(batches, torch.device("cpu"), group=group))


def loopback_bytes():
    """Return what this machine has sent to itself so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[8])
    return 0


def timed(action):
    """Return wall-clock seconds, this process's own seconds, and bytes over the loopback."""
    if dist.is_initialized():
        dist.barrier()
    sent, wall, own = loopback_bytes(), time.monotonic(), time.process_time()
    action()
    own = time.process_time() - own
    if dist.is_initialized():
        dist.barrier()
    return time.monotonic() - wall, own, loopback_bytes() - sent


def measured(rank, size, args, rows, folder):
    """Time passes of one rank; rank 0 writes the least of the repeats."""
    torch.set_num_threads(1)
    if size > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    group = current_group()
    problem = problem_of(args, rows, group)
    prepare(problem, args.num_samples, Compute(keep_data=False))
    w = torch.ones(args.num_samples, problem.size)
    problem.ggn_product(w)  # the first pass probes
    times = [timed(lambda: problem.ggn_product(w)) for _ in range(args.repeats)]
    seconds, own_seconds, sent = map(min, zip(*times))
    numbers = args.num_samples * problem.size
    sums = [timed(lambda: group.sum(torch.zeros(numbers)))[0] for _ in range(args.repeats)]
    meets = [timed(lambda: [group.meet(0, max) for _ in range(50)])[0] for _ in range(5)]
    line = {
        "ranks": size,
        "rows": rows,
        "seconds": seconds,
        "own_seconds": own_seconds,
        "bytes": sent / (4 * numbers),  # in units of the vectors that are summed
        "sum_seconds": min(sums),
        "meet_seconds": min(meets) / 50,
        "load": os.getloadavg()[0],
    }
    if rank == 0:
        Path(folder, "line.json").write_text(json.dumps(line))
    if size > 1:
        dist.destroy_process_group()


def run(size, args, rows):
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        work = [(rank, size, args, rows, folder) for rank in range(size)]
        ranks = [context.Process(target=measured, args=arguments) for arguments in work]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        return json.loads(Path(folder, "line.json").read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--num-samples", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    for size in args.ranks:
        for kind, rows in {"strong": args.rows, "weak": args.rows // 4 * size}.items():
            line = {"kind": kind} | run(size, args, rows)
            print(line, flush=True)
            append(args.out / "scaling.jsonl", [line], provenance(("torch",)))


if __name__ == "__main__":
    main()
