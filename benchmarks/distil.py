"""How close a student of one forward pass is to its posterior, and what it costs.

    python benchmarks/distil.py                 # 20 minutes on one core
    python benchmarks/distil.py --tasks wdbc --quick

Networks are trained on tables that were not used to choose any option, on digits and for
regression, and evaluated at the lowest validation loss ("early") and at the end ("on"). The
network, temperature scaling, the posterior (calibrated on 500 validation examples) and its student,
distilled from the inputs of training and validation, are compared: the ratio of their NLL to the
posterior's (for regression the difference), ECE, AUROCs of shifted inputs by the epistemic
uncertainty and by 1 - p_value, coverage of conformal sets of 90 %, false alarms at 5 %,
milliseconds of CPU for 1 and 500 inputs, for a student in forward passes of the network too, and
the CPU time of distilling in trainings of the network and in their epochs. "ensemble of five"
averages the probabilities of five networks (not for regression). Expected: on tables the student's
NLL is within 3 % of the posterior's, on average.
"""

import time
from collections.abc import Callable, Iterator
from math import exp, log
from statistics import mean

import torch
from cost import seconds
from methods import families, markdown, tasks
from methods.learning import best_temperature, train
from methods.metrics import Classes, auroc
from methods.provenance import begin, provenance, script_parser
from torch import Tensor, nn

from torch_lla_em import LinearisedLaplace

TABLES = "australian banana chess letter mammographic satimage splice twonorm".split()
IMAGES = ["mnist8_cnn", "mnist8_transformer", "mnist_lenet"]
REGRESSION = ["diabetes", "friedman1", "friedman2"]
SHOWN = {
    "nll": "NLL, relative to the posterior",
    "worst": "worst",
    "ece": "ECE",
    "auroc, epistemic": "AUROC, epistemic",
    "auroc, 1 - p": "AUROC, 1 - p-value",
    "coverage": "coverage of 90 % sets",
    "false alarms": "false alarms at 5 %",
    "1, ms": "1 input, ms",
    "predict, ms": "1 input, all outputs, ms",
    "500, ms": "500 inputs, ms",
    "1, passes": "1 input, passes",
    "500, passes": "500 inputs, passes",
    "trainings": "distilling / training",
    "epochs": "distilling, epochs",
}
LEVEL, RATE = 0.9, 0.05


def main(arguments: list[str] | None = None) -> None:
    parser = script_parser(__doc__, "distil")
    parser.add_argument("--tasks", nargs="*", default=[*TABLES, *REGRESSION, *IMAGES])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it runs")
    given = begin(parser, arguments)
    for name in () if given.report else given.tasks:
        for record in run(name, given.seed, given.quick):
            markdown.append(given.out, [record], provenance(("torch",)))
    print(summary(markdown.read(given.out)))


def summary(records: list[dict]) -> str:
    """Return a table of means over tasks and networks."""
    groups: dict[tuple, list[dict]] = {}
    for record in records:
        groups.setdefault((record["kind"], record["method"]), []).append(record)
    found = []
    for (kind, method), group in groups.items():
        line = {"kind": kind, "method": method}
        for key in SHOWN:
            values = [record[key] for record in group if record.get(key) is not None]
            if values:
                line[key] = mean(values)
        nll = [record["nll"] for record in group]
        ratio = kind != "regression"
        line |= {"nll": exp(mean(map(log, nll))) if ratio else mean(nll), "worst": max(nll)}
        found.append(line)
    return markdown.table(found, {"kind": "", "method": ""}, SHOWN, decimals=3)


def run(name: str, seed: int, quick: bool) -> Iterator[dict]:
    """Yield a record of each method on both networks of a task."""
    kind = "images" if name in IMAGES else "tables"
    task = (families.images if kind == "images" else tasks.task)(name, seed)
    kind = kind if task.classes else "regression"
    epochs, others = 5 if quick else task.epochs, []
    clock = time.process_time()
    networks = train(task, 1000 * seed, epochs)
    training = time.process_time() - clock
    if task.classes:
        others = [train(task, 1000 * seed + number, epochs) for number in range(1, 5)]
    for at, (stage, network) in enumerate(zip(("early", "on"), networks, strict=True)):
        several = [network.eval(), *(pair[at].eval() for pair in others)]
        common = {"task": name, "kind": kind, "network": stage}
        for method, record in compared(task, several, quick):
            if taken := record.pop("distilling", None):
                record |= {"trainings": taken / training, "epochs": taken / training * epochs}
            yield common | {"method": method} | record


def compared(
    task: tasks.Task, networks: list[nn.Module], quick: bool
) -> Iterator[tuple[str, dict]]:
    """Yield the scores and the cost of each method; the first network is that of the posterior."""
    network = networks[0]
    likelihood = "classification" if task.classes else "regression"
    (x, y), shifted = task.test, next(iter(task.shifted.values()))
    la = LinearisedLaplace(network, likelihood).fit(*task.train, progress_bar=False)
    la.calibrate(*task.held_out)
    posterior = scored(la, x, y, shifted)
    base = posterior["nll"]

    def relative(record: dict) -> dict:
        nll = record["nll"]
        return record | {"nll": nll / base if task.classes else nll - base}

    def averaged(x: Tensor) -> Tensor:
        each = [member(x).log_softmax(-1) for member in networks]
        return torch.stack(each).logsumexp(0) - log(len(each))

    with torch.no_grad():
        if task.classes:
            T = best_temperature(network(task.held_out.x), task.held_out.y)
            for name, of in (
                ("network", lambda x: network(x).log_softmax(-1)),
                ("temperature scaling", lambda x: (network(x) / T).log_softmax(-1)),
                ("ensemble of five", averaged),
            ):
                yield name, relative(plain(of, x, y, shifted)) | milliseconds(of, x)
    yield "posterior", relative(posterior) | milliseconds(la, x)
    inputs = torch.cat([task.train.x, task.held_out.x])
    options = {"steps": 20, "num_inputs": 100} if quick else {}
    torch.manual_seed(0)
    clock = time.process_time()
    student = la.distil(inputs, progress_bar=False, **options)
    distilling = time.process_time() - clock
    student.calibrate(*task.held_out)
    taken, passes = milliseconds(student, x), milliseconds(network, x)
    found = relative(scored(student, x, y, shifted)) | taken
    found |= {key.replace("ms", "passes"): taken[key] / passes[key] for key in passes}
    found |= {"predict, ms": milliseconds(student.predict, x)["1, ms"]}
    yield "student", found | {"distilling": distilling}


def scored(la: nn.Module, x: Tensor, y: Tensor, shifted: Tensor) -> dict:
    """Return the scores of a posterior or a student."""
    with torch.no_grad():
        at, away = la.predict(x), la.predict(shifted)
        record = {"nll": -at.log_prob(y).mean().item()}
        kinds = {"epistemic": lambda p: p.epistemic, "1 - p": lambda p: -p.p_value}
        for name, of in kinds.items():
            record[f"auroc, {name}"] = auroc(of(at).flatten(), of(away).flatten())
        if at.likelihood.real_valued:
            lower, upper = at.interval(LEVEL)
            inside = (lower <= y) & (y <= upper)
        else:
            inside = at.prediction_set(LEVEL).gather(1, y[:, None])
            record["ece"] = Classes(at.log_probs, tuple).scores(y, {})["ece"]
        record["coverage"] = inside.double().mean().item()
        record["false alarms"] = at.is_ood(RATE).double().mean().item()
    return record


def plain(log_probs: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, shifted: Tensor) -> dict:
    """Return the scores of a network, whose uncertainty is the entropy."""
    at, away = (Classes.of(log_probs(rows)[None]) for rows in (x, shifted))
    scores = at.scores(y, {})
    found = {key: scores[key] for key in ("nll", "ece")}
    return found | {"auroc, epistemic": auroc(at.unfamiliarity, away.unfamiliarity)}


def milliseconds(predict: Callable[[Tensor], object], x: Tensor) -> dict:
    """Return the least CPU time of a prediction of 1 and of 500 inputs."""
    found = {}
    for count, repeats in ((1, 30), (500, 5)):
        some = x[torch.arange(count) % len(x)]
        with torch.no_grad():
            taken = seconds(lambda some=some, n=repeats: [predict(some) for _ in range(n)], 5)
        found[f"{count}, ms"] = 1e3 * taken / repeats
    return found


if __name__ == "__main__":
    main()
