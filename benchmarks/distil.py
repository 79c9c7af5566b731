"""What a student of one forward pass keeps of its posterior, and what it costs.

Networks are trained on tables that no option was chosen by, on digits and for regression, and looked at
where their validation loss was least ("early") and at the end ("on"). The network, temperature scaling,
the posterior (calibrated on 500 validation examples) and its student, distilled from the inputs of
training and validation and from inputs made of these, are compared: the ratio of their NLL to the
posterior's (for regression the difference), ECE, AUROCs of shifted inputs by the epistemic uncertainty
and by 1 - p_value, coverage of conformal sets of 90 %, false alarms at 5 %, milliseconds of CPU for 1 and
500 inputs, and the CPU time of distilling in trainings of the network and in their epochs. "student, twice" has hidden layers of
128 units, for tables. "ensemble of five" averages the probabilities of five networks, without
temperature scaling (for regression it is left out, since the networks have no variance), and
"distilled ensemble" is a copy of the first network, trained on these averages at the inputs of training and
validation. Beside the tables there are digits with a CNN, a LeNet and a small transformer, and
generated sequences of tokens with another one.

    python benchmarks/distil.py                 # half an hour on one core
    python benchmarks/distil.py --tasks letter --methods "ensemble of five"
    python benchmarks/distil.py --tasks wdbc --quick
"""

import argparse
import copy
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from math import exp, log
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
from methods import families, markdown, tasks
from methods.learning import best_temperature, train
from methods.metrics import auroc
from methods.provenance import provenance
from torch import Tensor, nn
from torch.nn import functional as F

from torch_lla_em import LinearisedLaplace
from torch_lla_em.prediction import outcomes, scores

TABLES = "australian banana chess letter mammographic satimage splice twonorm".split()
IMAGES = ["mnist8_cnn", "mnist8_transformer", "mnist_lenet"]
SEQUENCES = ["sequences"]
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
    "trainings": "distilling / training",
    "epochs": "distilling, epochs",
}
METHODS = ["network", "temperature scaling", "ensemble of five", "distilled ensemble", "posterior"]
METHODS += ["student", "student, twice"]
LEVEL, RATE = 0.9, 0.05
# steps of the training of a distilled ensemble
_STEPS = 1000


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="*", default=[*TABLES, *REGRESSION, *IMAGES, *SEQUENCES])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it runs")
    parser.add_argument("--out", type=Path, default=Path("results/distil.jsonl"))
    given = parser.parse_args(arguments)
    logging.getLogger("torch_lla_em").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    records = []
    for name in given.tasks:
        for record in run(name, given.seed, given.methods, given.quick):
            markdown.append(given.out, [record], provenance(("torch",)))
            records.append(record)
            print(record, flush=True)
    print(summary(records))


def summary(records: list[dict]) -> str:
    """Return a table of means over tasks and networks."""
    groups: dict[tuple, list[dict]] = {}
    for record in records:
        groups.setdefault((record["kind"], record["method"]), []).append(record)
    found = []
    for (kind, method), group in sorted(groups.items(), key=_order):
        line = {"kind": kind, "method": method}
        for key in SHOWN:
            values = [record[key] for record in group if record.get(key) is not None]
            if values:
                line[key] = mean(values)
        nll = [record["nll"] for record in group]
        ratio = kind != "regression"
        line |= {"nll": exp(mean(map(log, nll))) if ratio else mean(nll), "worst": max(nll)}
        found.append(line)
    columns = {key: title for key, title in SHOWN.items() if any(key in line for line in found)}
    return markdown.table(found, {"kind": "", "method": ""}, columns, decimals=3)


def _order(entry: tuple[tuple, list]) -> tuple[int, int]:
    kind, method = entry[0]
    kinds = ["tables", "images", "sequences", "regression"]
    return kinds.index(kind), METHODS.index(method)


def run(name: str, seed: int, methods: list[str], quick: bool) -> Iterator[dict]:
    """Yield a record of each method on both networks of a task."""
    kind = "images" if name in IMAGES else "tables"
    if name in SEQUENCES:
        kind, task = name, sequences(seed)
    else:
        task = (families.images if kind == "images" else tasks.task)(name, seed)
    kind = kind if task.classes else "regression"
    epochs, others = 5 if quick else task.epochs, []
    clock = time.process_time()
    networks = train(task, 1000 * seed, epochs)
    training = time.process_time() - clock
    if task.classes and {"ensemble of five", "distilled ensemble"} & set(methods):
        others = [train(task, 1000 * seed + number, epochs) for number in range(1, 5)]
    for at, (stage, network) in enumerate(zip(("early", "on"), networks)):
        several = [network.eval(), *(pair[at].eval() for pair in others)]
        common = {"task": name, "kind": kind, "network": stage}
        of_training = Training(training, epochs)
        for method, record in compared(task, several, methods, of_training, quick):
            yield common | {"method": method} | record


class Training(NamedTuple):
    """CPU seconds of the training of a network, and its epochs."""

    seconds: float
    epochs: int

    def units(self, seconds: float) -> dict:
        """Return seconds in trainings and in epochs."""
        trainings = seconds / self.seconds
        return {"trainings": trainings, "epochs": trainings * self.epochs}


class Reader(nn.Module):
    """A small transformer that classifies sequences of tokens."""

    def __init__(self, tokens: int, length: int, classes: int, width: int = 32):
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x) + self.places).mean(1))


def sequences(seed: int, length: int = 12, tokens: int = 20, classes: int = 4) -> tasks.Task:
    """Return sequences of four Markov chains, to be told apart; the shifted ones are of a fifth."""
    generator = torch.Generator().manual_seed(seed)
    chains = (2 * torch.randn(classes + 1, tokens, tokens, generator=generator)).softmax(-1)

    def drawn(y: Tensor) -> Tensor:
        x = [torch.randint(tokens, (len(y),), generator=generator)]
        for _ in range(length - 1):
            x.append(torch.multinomial(chains[y, x[-1]], 1, generator=generator)[:, 0])
        return torch.stack(x, 1)

    labels = [torch.randint(classes, (n,), generator=generator) for n in (1000, 500, 1500)]
    parts = [tasks.Rows(drawn(y), y) for y in labels]
    shifted = {"another chain": drawn(torch.full((1500,), classes))}
    return tasks.Task(*parts, shifted, classes, lambda _: Reader(tokens, length, classes), 30)


def compared(
    task: tasks.Task, networks: list[nn.Module], methods: list[str], training: Training, quick: bool
) -> Iterator[tuple[str, dict]]:
    """Yield the scores of each method, and what it takes; the first network is that of the posterior."""
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
                if name in methods:
                    found = plain(of, x, y, shifted)
                    yield name, relative(found) | milliseconds(of, x)
    if task.classes and "distilled ensemble" in methods:
        clock = time.process_time()
        inputs = torch.cat([task.train.x, task.held_out.x])
        one = imitated(averaged, network, inputs, 20 if quick else _STEPS)
        seconds = time.process_time() - clock
        with torch.no_grad():
            found = plain(one, x, y, shifted)
        yield (
            "distilled ensemble",
            relative(found) | milliseconds(one, x) | training.units(seconds),
        )
    if "posterior" in methods:
        yield "posterior", relative(posterior) | milliseconds(la, x)
    inputs = torch.cat([task.train.x, task.held_out.x])
    options = {"steps": 20, "num_inputs": 100} if quick else {}
    for name, width in (("student", None), ("student, twice", 128)):
        if name not in methods or (width and (x.dim() > 2 or not x.is_floating_point())):
            continue
        torch.manual_seed(0)
        own = width and tasks.perceptron([x.shape[1], width, width, task.classes or 1])()
        clock = time.process_time()
        student = la.distil(inputs, student=own or None, progress_bar=False, **options)
        seconds = time.process_time() - clock
        student.calibrate(*task.held_out)
        found = relative(scored(student, x, y, shifted)) | milliseconds(student, x)
        found |= {"predict, ms": milliseconds(student.predict, x)["1, ms"]}
        yield (
            name,
            found | training.units(seconds) | {"held-out KL": student.error.held_out.kl},
        )


def imitated(
    teacher: Callable[[Tensor], Tensor], network: nn.Module, x: Tensor, steps: int
) -> Callable[[Tensor], Tensor]:
    """Return the log-probabilities of a copy of a network, trained on those of an ensemble."""
    with torch.no_grad():
        known = teacher(x).exp()
    own = copy.deepcopy(network)
    optimiser = torch.optim.Adam(own.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for _ in range(steps):
            rows = torch.randint(len(x), (256,))
            optimiser.zero_grad()
            F.cross_entropy(own(x[rows]), known[rows]).backward()
            optimiser.step()
            schedule.step()
    return lambda x: own(x).log_softmax(-1)


def scored(la: nn.Module, x: Tensor, y: Tensor, shifted: Tensor) -> dict:
    """Return the scores of a posterior or a student."""
    with torch.no_grad():
        at, away = la.predict(x), la.predict(shifted)
        found = scores(outcomes(at, y))
        record = {"nll": found["NLL"], "ece": found.get("ECE")}
        kinds = {"epistemic": lambda p: p.epistemic, "1 - p": lambda p: -p.p_value}
        for name, of in kinds.items():
            record[f"auroc, {name}"] = auroc(of(at).flatten(), of(away).flatten())
        if at.likelihood.real_valued:
            lower, upper = at.interval(LEVEL)
            inside = (lower <= y) & (y <= upper)
        else:
            inside = at.prediction_set(LEVEL).gather(1, y[:, None])
        record["coverage"] = inside.double().mean().item()
        record["false alarms"] = at.is_ood(RATE).double().mean().item()
    return record


def plain(log_probs: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, shifted: Tensor) -> dict:
    """Return the scores of a network, whose uncertainty is the entropy."""
    at, away = log_probs(x), log_probs(shifted)
    stated, right = at.exp().max(-1).values, at.argmax(-1) == y
    bins = (stated * 15).long().clamp(max=14)
    gaps = [(right[bins == b].double() - stated[bins == b]).sum().abs() for b in range(15)]
    entropy = [torch.special.entr(p.exp()).sum(-1) for p in (at, away)]
    return {
        "nll": -at.gather(1, y[:, None]).mean().item(),
        "ece": (torch.stack(gaps).sum() / len(y)).item(),
        "auroc, epistemic": auroc(*entropy),
    }


def milliseconds(predict: Callable[[Tensor], object], x: Tensor) -> dict:
    """Return the least CPU time of a prediction of 1 and of 500 inputs."""
    found = {}
    for count, repeats in ((1, 30), (500, 5)):
        some, times = x[torch.arange(count) % len(x)], []
        with torch.no_grad():
            for _ in range(5):
                clock = time.process_time()
                for _ in range(repeats):
                    predict(some)
                times.append(1e3 * (time.process_time() - clock) / repeats)
        found[f"{count}, ms"] = min(times)
    return found


if __name__ == "__main__":
    main()
