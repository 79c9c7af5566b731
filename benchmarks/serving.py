"""The time of a prediction of one and of eight images, and requests a second by threads of clients.

A posterior of all layers and of the last one, as it is and exported, against the network alone and
an ensemble of five. CPU milliseconds are the median of alternating calls. Requests are of one image
each. Alone: every client calls the predictor itself. Batched: a thread of the server joins what is
waiting, up to 16 requests.

    python benchmarks/serving.py            # a LeNet, two minutes on one core: exported with 8
                                            # samples, 1.2 to 1.5 times an ensemble of five
    python benchmarks/serving.py --tiny     # to see that it runs
"""

import argparse
import logging
import queue
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch
from methods import markdown
from methods.learning import descend
from methods.provenance import provenance
from torch import Tensor, nn

from torch_lla_em import LinearisedLaplace

ROWS = 16
Predictor = Callable[[Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument(
        "--requests", type=int, default=160, help="of each predictor, way and round"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of which the median counts")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("results/serving.jsonl"))
    given = parser.parse_args()
    logging.getLogger("torch_lla_em").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    size, requests, rounds = (16, 24, 1) if given.tiny else (28, given.requests, given.rounds)
    x = torch.randn(64, 1, size, size, generator=torch.Generator().manual_seed(0))
    makers = predictors(x)
    ways = {
        (name, way): made
        for name, answer in makers.items()
        for way, made in (("alone", answer), ("batched", batched(answer)))
    }
    found: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in ways}
    for _ in range(rounds):
        for key, answer in ways.items():
            found[key].append(measured(answer, x, given.clients, requests))
    times = {images: cpu_times(makers, x[:images], 3 * rounds) for images in (1, 8)}
    records: dict[str, dict] = {name: {"predictor": name} for name in makers}
    for (name, way), each in found.items():
        rate, slow = torch.tensor(each).median(0).values.tolist()
        records[name] |= {f"{way}, requests/s": rate, f"{way}, p99 ms": slow}
    for images, each in times.items():
        for name, taken in each.items():
            records[name][f"CPU ms of {images}"] = taken
            records[name][f"ensembles, {images}"] = taken / each["ensemble of five"]
    markdown.append(given.out, [*records.values()], provenance(("torch",)))
    columns = [key for key in records["network"] if key != "predictor"]
    print(markdown.table([*records.values()], ("predictor",), columns))


def cpu_times(makers: dict[str, Predictor], x: Tensor, rounds: int) -> dict[str, float]:
    """Return the median CPU milliseconds of a call, of predictors that take turns."""
    taken: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(rounds):
        for name, answer in makers.items():
            answer(x)
            start = time.process_time()
            for _ in range(5):
                answer(x)
            taken[name].append(1e3 * (time.process_time() - start) / 5)
    return {name: torch.tensor(each).median().item() for name, each in taken.items()}


def predictors(x: Tensor) -> dict[str, Predictor]:
    """Return what answers any number of rows, by name."""
    y = torch.arange(len(x)) % 10
    networks = [lenet(x.shape[-1], seed) for seed in range(5)]
    for network in networks:
        descend(network, (x, y), 30, torch.optim.Adam(network.parameters(), 1e-3))

    @torch.no_grad()
    def ensemble(x: Tensor) -> Tensor:
        return torch.stack([network(x).softmax(1) for network in networks]).mean(0)

    @torch.no_grad()
    def alone(x: Tensor) -> Tensor:
        return networks[0](x).softmax(1)

    fit = {"em_steps": 0, "prior_precision": 1e3, "progress_bar": False}
    la = LinearisedLaplace(networks[0], "classification").fit(x, y, **fit)
    last = LinearisedLaplace(networks[0], "classification", parameters="last_layer")
    last.fit(x, y, **fit)
    exported = {
        f"posterior, {number} samples, exported": without_grad(
            la.export(x[:8], None, number).module()
        )
        for number in (32, 8)
    }
    return {
        "network": alone,
        "ensemble of five": ensemble,
        "posterior, 32 samples": la,
        "posterior, 8 samples": lambda x: la.predict(x, num_samples=8).probs,
        **exported,
        "last-layer posterior, 32 samples": last,
        "last-layer posterior, 32 samples, exported": without_grad(last.export(x[:8]).module()),
    }


def lenet(size: int, seed: int) -> nn.Module:
    """LeNet-5 with ReLU."""
    torch.manual_seed(seed)
    side = ((size - 4) // 2 - 4) // 2
    trunk = nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU()
    head = nn.Linear(16 * side**2, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)
    return nn.Sequential(*trunk, nn.MaxPool2d(2), nn.Flatten(), *head)


def without_grad(program: nn.Module) -> Predictor:
    """Return the probabilities of an exported program, which records no graph."""
    return torch.no_grad()(lambda x: program(x)["probs"])


def batched(answer: Predictor) -> Predictor:
    """Return a predictor of one row, of which a thread answers many at once."""
    waiting: queue.Queue[tuple[Tensor, Future]] = queue.Queue()

    def serve() -> None:
        while True:
            jobs = [waiting.get()]
            while len(jobs) < ROWS and not waiting.empty():
                jobs.append(waiting.get())
            try:
                rows = answer(torch.cat([x for x, _ in jobs]))
            except Exception as error:  # the clients would wait forever
                for _, future in jobs:
                    future.set_exception(error)
                continue
            for row, (_, future) in zip(rows, jobs):
                future.set_result(row)

    threading.Thread(target=serve, daemon=True).start()

    def ask(x: Tensor) -> Tensor:
        future: Future = Future()
        waiting.put((x, future))
        return future.result()

    return ask


def measured(answer: Predictor, x: Tensor, clients: int, requests: int) -> tuple[float, float]:
    """Return requests a second, and the 99th percentile of their times in milliseconds."""
    times: list[float] = []

    def client(number: int) -> None:
        for i in range(requests // clients):
            row = (number + i * clients) % len(x)
            start = time.perf_counter()
            answer(x[row : row + 1])
            times.append(time.perf_counter() - start)

    answer(x[:1])
    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rate = len(times) / (time.perf_counter() - start)
    return rate, 1e3 * torch.tensor(times).quantile(0.99).item()


if __name__ == "__main__":
    main()
