"""How often ``check`` reports that the noise of a regression depends on its inputs, if it does and
if it does not.

    python benchmarks/residuals.py              # 400 fits of each likelihood, ten minutes of one core
    python benchmarks/residuals.py --report     # the table of results/residuals.jsonl

Targets are a function of uniform inputs, with a variance of 1, plus Gaussian noise of a fifth or three fifths of that on average. Its
standard deviation is the same at all inputs ("same"), is e^0.7 times as large where the function is one standard deviation larger ("mean"),
or where the first input is ("column"). A ReLU layer of 50 units is trained on 100 or 400 examples for 40 or 400 epochs, as in uci.py,
calibrated on 100 and checked on 200 others, or on 50. The first columns are the share of checks
that recommend the heteroscedastic likelihood; the last two are the difference between the test NLL
of a heteroscedastic network and that of the regression, where the check of 200 examples recommends
that likelihood and where it does not (two seeds; four where the noise is the same).
"""

from collections.abc import Callable, Iterator
from itertools import product
from statistics import mean

import torch
from methods import markdown
from methods.provenance import begin, provenance, script_parser
from sklearn import datasets
from torch import Tensor
from uci import STAGES, Split, train

from torch_lla_em import LinearisedLaplace

GROWTH, COMPARED = 0.7, {"same": 4, "mean": 2, "column": 2}
FIRST = "noise", "examples", "training"
LIKELIHOODS = "regression", "heteroscedastic"
COLUMNS = {
    "fits": "fits",
    "50 checked": "alarms, 50 checked",
    "200 checked": "alarms, 200 checked",
    "after": "NLL of the heteroscedastic network − NLL, after an alarm",
    "without": "without one",
}


def friedman(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return inputs and the values of one of Friedman's functions, 700 of each."""
    seed = int(torch.randint(2**31, (), generator=generator))
    make = getattr(datasets, f"make_friedman{number}")
    x, f = make(700, noise=0.0, random_state=seed)
    return torch.tensor(x), torch.tensor(f)


def waves(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return three inputs, and a sum of products of sines."""
    x = torch.rand(700, 3, generator=generator, dtype=torch.double)
    return x, (6 * x[:, 0]).sin() + (4 * x[:, 1]).cos() * (2 * x[:, 2] - 1)


def plane(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return six inputs, and their sum."""
    x = torch.rand(700, 6, generator=generator, dtype=torch.double)
    return x, x.sum(1)


FUNCTIONS: dict[str, Callable[[torch.Generator], tuple[Tensor, Tensor]]] = {
    "friedman1": lambda generator: friedman(1, generator),
    "friedman2": lambda generator: friedman(2, generator),
    "friedman3": lambda generator: friedman(3, generator),
    "waves": waves,
    "plane": plane,
}


def standardised(values: Tensor) -> Tensor:
    return (values - values.mean(0)) / values.std(0)


def measure(noise: str, function: str, seed: int) -> Iterator[dict]:
    """Yield a record for each number of examples, size of the noise and time of training."""
    generator = torch.Generator().manual_seed(seed)
    x, f = map(standardised, FUNCTIONS[function](generator))
    by = {"same": torch.zeros_like(f), "mean": f, "column": x[:, 0]}[noise]
    draws = (GROWTH * by).exp() * torch.randn(len(f), generator=generator, dtype=torch.double)
    draws *= (0.2, 0.6)[seed % 2] / (2 * GROWTH * by).exp().mean().sqrt()
    y = (f + draws).float()[:, None]
    train_rows, held_out, test = (
        (x[rows].float(), y[rows]) for rows in torch.arange(700).split([400, 100, 200])
    )
    for count, (stage, epochs) in product((100, 400), STAGES.items()):
        rows = train_rows[0][:count], train_rows[1][:count]
        split, posteriors = Split(rows, test, 1.0, 50), []
        for outputs, likelihood in enumerate(LIKELIHOODS[: 1 + (seed < COMPARED[noise])], 1):
            network = train(split, seed, epochs, outputs)
            la = LinearisedLaplace(network, likelihood, seed=seed).fit(*rows, progress_bar=False)
            posteriors.append(la.calibrate(*held_out))
        nll = [-la.predict(test[0]).log_prob(test[1]).mean().item() for la in posteriors]
        record = {"examples": count, "stage": stage}
        record |= {"gain": nll[1] - nll[0]} if nll[1:] else {}
        for checked in (50, 200):
            found = posteriors[0].check(*(values[:checked] for values in test))
            named = any('"heteroscedastic"' in problem for problem in found.problems)
            of = found.residuals._asdict()
            yield record | of | {"checked": f"{checked} checked", "alarms": float(named)}


def report(records: list[dict]) -> str:
    """Return the share of alarms, and what following them gains, by noise and training."""
    lines: dict[tuple, dict] = {}
    for record in records:
        noise = {"same": "the same"}.get(record["noise"], f"by the {record['noise']}")
        for key in ((noise, record["examples"], record["stage"]), (noise, "all", "all")):
            line = lines.setdefault(key, {name: [] for name in COLUMNS if name != "fits"})
            line[record["checked"]].append(record["alarms"])
            if "gain" in record and record["checked"] == "200 checked":
                line["after" if record["alarms"] else "without"].append(record["gain"])
    shown = [
        dict(zip(FIRST, key, strict=True))
        | {"fits": str(len(line["50 checked"]))}
        | {name: mean(values) for name, values in line.items() if values}
        for key, line in lines.items()
    ]
    order = sorted(
        shown, key=lambda x: (x["noise"] != "the same", x["noise"], x["examples"] == "all")
    )
    return markdown.table(order, {name: name for name in FIRST}, COLUMNS, decimals=2)


def main(arguments: list[str] | None = None) -> None:
    parser = script_parser(__doc__, "residuals")
    parser.add_argument("--noises", nargs="+", default=["same", "mean", "column"])
    parser.add_argument("--functions", nargs="+", choices=FUNCTIONS, default=list(FUNCTIONS))
    parser.add_argument("--seeds", type=int, default=10, help="for noise of one size; else half")
    args = begin(parser, arguments)
    cases = [
        {"noise": noise, "function": function, "seed": seed}
        for noise in args.noises
        for function in args.functions
        for seed in range(args.seeds if noise == "same" else args.seeds // 2)
    ]
    origin = provenance(("torch", "scikit-learn"))
    print(report(markdown.resume(args.out, [] if args.report else cases, measure, origin)))


if __name__ == "__main__":
    main()
