"""How often and how late a monitor raises an alarm, beside windows of a Kolmogorov-Smirnov test and detectors of river.

    python benchmarks/monitor.py                    # streams, three networks and four tables: half an hour of one core
    python benchmarks/monitor.py --report           # the tables of results/monitor.jsonl

"alarms" are the shares of 10,000 streams of 2,000 inputs, distributed as the validation set (of 200 or 2,000 examples), in which an
alarm is raised: by our monitor, and by the same bets against uniform p-values, as if those of one validation set were independent.

"delay" has streams of test inputs in 20 random orders, which change after 300 inputs: to the shifts of images.py, or to permuted
columns. Inputs are compared with half of the 500 validation examples. The other detectors are given
the entropy of the calibrated predictions: two-sample tests compare windows of 100 inputs with the
validation examples, and ADWIN and KSWIN of river are given the validation examples first. Expect a
share of alarms below the rate for ours alone, and delays of 5 to 50 inputs for strong shifts.
"""

from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import images
import numpy as np
import torch
from methods import markdown
from methods.families import images as digits
from methods.learning import descend
from methods.networks import lenet
from methods.provenance import begin, provenance, script_parser
from methods.tasks import Task, task
from river.drift import ADWIN, KSWIN
from scipy.stats import ks_2samp
from torch import Tensor

from torch_lla_em import LinearisedLaplace
from torch_lla_em.prediction import Monitor
from torch_lla_em.prediction.conformal import Compared

RATES, POWERS, WINDOW, BEFORE, ORDERS = (0.1, 0.01, 0.001), (0.25, 0.5, 0.75, 2.0), 100, 300, 20
NETWORKS = {"LeNet": lenet, "CNN with BatchNorm": images.batch_norm}
CELLS = "solar cells"
TABLES = "segment", "penbased", "phoneme", "spambase"


class Scored:
    """A calibrated object whose inputs are their scores, with their p-values."""

    def __init__(self, reference: Tensor):
        self.reference = SimpleNamespace(unusual=reference)

    def predict(self, x: Tensor) -> SimpleNamespace:
        found = Compared(x, torch.zeros_like(x), self.reference.unusual)
        return SimpleNamespace(compared=lambda: found, p_value=torch.ones(len(x)))


def alarms(examples: int, streams: int, length: int) -> Iterator[dict]:
    """Yield the share of streams without a change in which alarms are raised."""
    generator, peaks = torch.Generator().manual_seed(examples), []
    monitors = dict.fromkeys(RATES, 0)
    ends = [examples + 1]
    while ends[0] > 1:
        ends.insert(0, -(-ends[0] // 2))
    sizes = np.diff([0, *ends]) / (examples + 1)
    shares = (np.array(ends) / (examples + 1)) ** np.array(POWERS)[:, None]
    bets = np.log(np.diff(shares, prepend=0) / sizes)
    left = 1 / np.log(np.arange(length + 1) + np.e)
    begun = np.log((left[:-1] - left[1:]) / len(POWERS))
    for _ in range(streams):
        scores = torch.rand(examples + length, 1, generator=generator, dtype=torch.double)
        for rate in RATES:  # there is no alarm at a rate without one at all larger ones
            if not Monitor(Scored(scores[:examples]), rate).update(scores[examples:]):
                break
            monitors[rate] += 1
        known = scores[:examples, 0].sort().values
        ranks = examples + 1 - torch.searchsorted(known, scores[examples:, 0])
        own = bets[:, np.searchsorted(ends, ranks.numpy())]
        total = own.cumsum(1)
        grown = np.logaddexp.accumulate(begun - (total - own), axis=1)
        wealth = np.logaddexp.reduce(total + grown, axis=0)
        peaks.append(np.logaddexp(wealth, np.log(left[1:])).max())
    for rate in RATES:
        plain = float(np.mean(np.array(peaks) >= -np.log(rate)))
        record = {"rate": rate, "ours": monitors[rate] / streams, "uniform": plain}
        yield {"part": "alarms", "length": length, "streams": streams} | record


def problem(case: str, seed: int, features: Path) -> Task:
    """Return examples, the network and the shifts of test inputs; of solar cells by their features in a file."""
    if case == CELLS:
        return images.solar(features, seed, False)
    if case in NETWORKS:
        found = digits("mnist_lenet", seed)
        shifted = images.shifted(found.test.x)
        return found._replace(network=NETWORKS[case], shifted=shifted)
    return task(case, seed)


def detectors(rate: float, known: np.ndarray, seed: int) -> dict[str, Callable[[float], bool]]:
    """Return functions of an entropy that return whether an alarm is raised, by the names of the detectors."""
    each = {"river, ADWIN": ADWIN(delta=rate), "river, KSWIN": KSWIN(alpha=rate, seed=seed)}
    waiting: list[float] = []

    def in_windows(value: float) -> bool:
        waiting.append(value)
        if len(waiting) < WINDOW:
            return False
        p = ks_2samp(waiting, known).pvalue
        waiting.clear()
        return p <= rate

    def seen(detector: ADWIN | KSWIN, value: float) -> bool:
        detector.update(value)
        return detector.drift_detected

    for detector in each.values():
        for value in known:
            detector.update(float(value))
    return {"KS test in windows": in_windows} | {k: partial(seen, d) for k, d in each.items()}


def first(raised: Callable[[float], bool], values: np.ndarray) -> float:
    """Return the number of the first value at which an alarm is raised."""
    return next((i for i, value in enumerate(values, 1) if raised(float(value))), inf)


def delays(case: str, seed: int, features: Path) -> Iterator[dict]:
    """Yield the share of false alarms before a change, and the median delay after it, of all methods."""
    found = problem(case, seed, features)
    torch.manual_seed(seed)
    network = found.network()
    descend(network, found.train, 40, torch.optim.Adam(network.parameters(), 2e-3), 64)
    la = LinearisedLaplace(network, "classification", seed=seed)
    la.fit(*found.train, progress_bar=False).calibrate(*found.held_out)
    with torch.no_grad():
        known = la.predict(found.held_out.x).entropy.numpy()
        usual = la.predict(found.test.x)
    for shift, x in found.shifted.items():
        with torch.no_grad():
            changed = la.predict(x)
        for rate in RATES[1:]:
            times: dict[str, list[float]] = {}
            for order in range(ORDERS):
                rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(order))
                parts = usual, changed
                rows = rows[:BEFORE], rows[BEFORE:]
                scores = [p.compared().scores[own] for p, own in zip(parts, rows, strict=True)]
                entropy = [p.entropy[own].numpy() for p, own in zip(parts, rows, strict=True)]
                one = Monitor(Scored(usual.compared().reference), rate, seed=order)
                one.update(torch.cat(scores))
                at = {"ours": one.state["since"] or inf}
                values = np.concatenate(entropy)
                at |= {k: first(d, values) for k, d in detectors(rate, known, order).items()}
                for row, time in at.items():
                    times.setdefault(row, []).append(time - BEFORE)
            for row, each in times.items():
                after = [time for time in each if time > 0]
                delay = median(after) if after else inf
                record = {"row": row, "false": 1 - len(after) / ORDERS}
                record |= {
                    "delay": delay if delay < inf else None,
                    "missed": after.count(inf) / ORDERS,
                }
                yield {"part": "delay", "shift": shift, "rate": rate} | record


def of_alarms(lines: list[dict]) -> str:
    """Return the table of the share of alarms without a change."""
    columns = {"ours": "ours", "uniform": "bets against uniform p-values"}
    rows = {"examples": "validation examples", "rate": "rate"}
    return markdown.table([x for x in lines if x["part"] == "alarms"], rows, columns, decimals=4)


def of_delays(lines: list[dict]) -> str:
    """Return the table of median delays and the share of false alarms."""
    found: dict[tuple, dict] = {}
    lines = [line for line in lines if line["part"] == "delay"]
    for x in lines:
        line = found.setdefault((x["case"], x["shift"], x["rate"]), {})
        line |= {"case": x["case"], "shift": x["shift"], "rate": str(x["rate"])}
        words = "none" if x["delay"] is None else f"{x['delay']:.0f}"
        line[x["row"]] = f"{words} ({x['false']:.2f})"
    title = {"case": "median delay (false alarms)", "shift": "change", "rate": "rate"}
    return markdown.table(found.values(), title, [*dict.fromkeys(x["row"] for x in lines)])


def main(argv: list[str] | None = None) -> None:
    parser = script_parser(__doc__, "monitor")
    parser.add_argument("--cases", nargs="+", default=[*NETWORKS, CELLS, *TABLES])
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--features", type=Path, default=Path("results/cells.pt"))
    args = begin(parser, argv)
    origin = provenance(("torch", "river", "scipy"))
    for examples in () if args.report else (200, 2000):
        run = partial(alarms, streams=args.streams, length=2000)
        markdown.resume(args.out, [{"examples": examples}], run, origin)
    cases = [{"case": name, "seed": 0} for name in args.cases]
    run = partial(delays, features=args.features)
    measured = markdown.resume(args.out, [] if args.report else cases, run, origin)
    print(of_alarms(measured), of_delays(measured), sep="\n\n")


if __name__ == "__main__":
    main()
