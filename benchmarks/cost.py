"""What a fit and its predictions cost, beside the training of the network and an ensemble.

    python benchmarks/cost.py                              # every network: an hour and a half
    python benchmarks/cost.py --problems mlp regression cnn
    python benchmarks/cost.py --problems "last layer, 2000 x 64 x 50"
    python benchmarks/cost.py --predictions                # of small networks alone: a minute

One thread, processor seconds; with --device cuda, wall-clock seconds. There is a line for each network, which is trained by
Adam in batches of 100. Classifiers are fitted with the defaults, and a second time with ``curvature="network"``. K is 16, and
32 for tables and last layers. An epoch is one of the training; a forward pass (F) is one over the same examples in eval mode,
without gradients. "served 1" and "served 8" are the times of an exported program for 1 and 8
examples, with all samples, divided by that of five networks. The ensemble costs four further
trainings. laplace-torch has Kronecker factors of all layers, tuned by its marginal likelihood, for
the same network in the same run. For last layers of generated data, the NLLs are those of 2,000 further examples, and
laplace-torch also has Kronecker factors and the full matrix of the last layer. Predictions of small ReLU networks are
measured with 32 samples, 500 training examples and 250 for validation, without and with p-values, in forward passes.
Lines go to results/cost.jsonl.

Expected: trainings 1 to 5 for fits of a few thousand examples, 2 to 60 for last layers; predict F 1 to 60; served 8 0.3 to 15.
With 1,000 classes: trainings 630, predict F 245, served 8 27.
"""

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from methods import markdown, tasks
from methods.learning import descend
from methods.networks import lenet, resnet20
from methods.provenance import begin, provenance, script_parser
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from torch_lla_em import LinearisedLaplace

BATCH = 100


class Problem(NamedTuple):
    """A network and its data."""

    network: nn.Module
    x: Tensor
    y: Tensor
    epochs: int
    """Of training."""

    options: dict = {}
    """Of ``LinearisedLaplace``."""

    num_samples: int | None = None
    """K, where it is not that of the command."""

    unseen: tuple[Tensor, Tensor] | None = None
    """Further examples."""

    @property
    def regression(self) -> bool:
        return self.y.is_floating_point()

    def on(self, device: str) -> "Problem":
        x, y = self.x.to(device), self.y.to(device)
        unseen = self.unseen and tuple(part.to(device) for part in self.unseen)
        return self._replace(network=self.network.to(device), x=x, y=y, unseen=unseen)

    def loader(self, batch: int = BATCH) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.x.split(batch), self.y.split(batch), strict=True))


def mlp(rows: int = 3000, width: int = 200, classes: int = 5) -> Problem:
    """20 inputs, two hidden layers, labels of a random network with noise."""
    x = torch.randn(rows, 20)
    teacher = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, classes))
    with torch.no_grad():
        f = teacher(x)
        y = (6 * (f - f.mean(0)) + torch.randn(rows, classes)).argmax(1)
    layers = nn.Linear(20, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
    return Problem(nn.Sequential(*layers, nn.Linear(width, classes)), x, y, 30)


def regression(rows: int = 4000) -> Problem:
    """12 inputs, two hidden layers of 128 units."""
    x = torch.randn(rows, 12)
    y = (2 * x[:, :1]).sin() + x[:, 1:2] * x[:, 2:3] + 0.3 * torch.randn(rows, 1)
    layers = nn.Linear(12, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1)
    return Problem(nn.Sequential(*layers), x, y, 30)


def many(classes: int) -> Problem:
    """100,000 weights on 50,000 rows of 32 columns."""
    x, teacher = torch.randn(50_000, 32), torch.randn(32, max(classes, 2))
    f = (x @ teacher / 4).sin() + 0.3 * torch.randn(len(x), max(classes, 2))
    layers = [nn.Linear(32, 295), nn.ReLU(), nn.Linear(295, 295), nn.ReLU()]
    network = nn.Sequential(*layers, nn.Linear(295, classes))
    return Problem(network, x, f.argmax(1) if classes > 1 else f[:, :1], 5)


def images(rows: int, channels: int, size: int) -> tuple[Tensor, Tensor]:
    """Return noisy copies of one smooth picture a class, of ten."""
    y = torch.randint(10, (rows,))
    pictures = F.interpolate(torch.randn(10, channels, 4, 4), (size, size), mode="bilinear")
    return pictures[y] + torch.randn(rows, channels, size, size), y


def cnn() -> Problem:
    """Three convolutions with BatchNorm on 800 images of 16 × 16."""
    layers, width = [], 1
    for outputs in (16, 32, 32):
        layers += [nn.Conv2d(width, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers, width = [*layers, nn.MaxPool2d(2)], outputs
    return Problem(
        nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10)), *images(800, 1, 16), 20
    )


class Classifier(nn.Module):
    """A tiny BERT from its configuration, tokens to logits."""

    def __init__(self):
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = BertConfig(vocab_size=60, intermediate_size=96, num_labels=3, **sizes)
        self.body = BertForSequenceClassification(config)

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(input_ids=ids).logits


def transformer(**options: str) -> Problem:
    """A tiny BERT on 600 sequences of 16 tokens; the most frequent third decides the label."""
    ids = torch.randint(60, (600, 16))
    y = F.one_hot(ids // 20, 3).sum(1).argmax(1)
    return Problem(Classifier(), ids, y, 10, options)


def head(rows: int, width: int, classes: int) -> Problem:
    """The last layer of two hidden layers, with K = 32."""
    x = torch.randn(rows + 2_000, 64)
    teacher = nn.Sequential(nn.Linear(64, 30), nn.Tanh(), nn.Linear(30, classes))
    with torch.no_grad():
        f = teacher(x)
        y = (6 * (f - f.mean(0)) + torch.randn(len(x), classes)).argmax(1)
    (x, new), (y, of_new) = x.split([rows, 2_000]), y.split([rows, 2_000])
    layers = nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
    network = nn.Sequential(*layers, nn.Linear(width, classes))
    epochs = 30 if rows <= 5000 else 5
    return Problem(network, x, y, epochs, LAST, num_samples=32, unseen=(new, of_new))


def segment() -> Problem:
    """The last layer's 357 weights on 800 examples, which the directions span completely."""
    train = tasks.task("segment", 0, 800).train
    network = tasks.perceptron([train.x.shape[1], 50, 50, 7])()
    return Problem(network, train.x, train.y.long(), 30, LAST, num_samples=32)


def table(name: str, rows: int, epochs: int) -> Problem:
    """Two hidden layers of 100 units on so many examples of a large table, with K = 32."""
    train = tasks.task(name, 0, rows).train
    y = train.y if train.y.is_floating_point() else train.y.long()
    sizes = train.x.shape[1], 100, 100, y.shape[1] if y.dim() > 1 else 2
    return Problem(tasks.perceptron(sizes)(), train.x, y, epochs, num_samples=32)


LAST = {"parameters": "last_layer"}
HEADS_OF = (
    *((1_000, 50, 7), (2_000, 128, 10), (5_000, 512, 10), (30_000, 256, 10), (50_000, 512, 10)),
    *((2_000, 64, 50), (20_000, 256, 100), (10_000, 64, 1_000)),
)
"""Examples, features and classes of a last layer."""

PROBLEMS: dict[str, Callable[[], Problem]] = {
    "mlp": mlp,
    "regression": regression,
    "cnn": cnn,
    "lenet": lambda: Problem(lenet(pool=nn.AvgPool2d), *images(1000, 1, 28), 10),
    "resnet20": lambda: Problem(resnet20(), *images(200, 3, 32), 8),
    "many rows": partial(many, 10),
    "many rows, regression": partial(many, 1),
    "bert": transformer,
    "bert, last_layer": partial(transformer, parameters="last_layer"),
    "diamonds": partial(table, "diamonds", 20_000, 100),
    "flights, late or not": partial(table, "flights", 20_000, 100),
    "flights, delay": partial(table, "flights:delay", 60_000, 100),
    "segment, last_layer": segment,
} | {f"last layer, {N} x {D} x {C}": partial(head, N, D, C) for N, D, C in HEADS_OF}
FULL = 2_000
"""Parameters up to which laplace-torch's full matrix is run: with 5,130 it had not ended after two minutes of CPU time."""

JACOBIAN = 2e8
"""Bytes of laplace-torch's Jacobians of a last layer, with which it predicts, that are made at once."""

NETWORK = {"curvature": "network"}
SMALL = (
    *(([2, 16, 2], 512), ([8, 50, 50, 3], 512), ([26, 64, 64, 4], 512), ([26, 64, 64, 4], 1)),
    *(([20, 200, 200, 10], 512), ([8, 50, 50, 1], 512)),
)
"""Layers of a network, and the inputs that are predicted at once."""


def seconds(run: Callable[[], object], repeats: int = 1) -> float:
    """Return the smallest duration of a call: CPU seconds, or wall-clock seconds on a GPU."""
    on_gpu, taken = torch.cuda.is_initialized(), []
    clock = time.perf_counter if on_gpu else time.process_time
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    for _ in range(repeats):
        wait()
        began = clock()
        run()
        wait()
        taken.append(clock() - began)
    return min(taken)


def train(problem: Problem) -> float:
    """Train in place, and return the seconds of an epoch."""
    optimiser = torch.optim.Adam(problem.network.parameters(), 2e-3, weight_decay=1e-4)
    how = problem.epochs, optimiser, BATCH, F.mse_loss if problem.regression else F.cross_entropy
    return seconds(lambda: descend(problem.network, (problem.x, problem.y), *how)) / problem.epochs


@torch.no_grad()
def forward(problem: Problem, x: Tensor) -> None:
    for part in x.split(BATCH):
        problem.network(part)


def fitted(
    problem: Problem, num_samples: int, batch: int = BATCH
) -> tuple[LinearisedLaplace, float]:
    """Return the posterior, and the seconds that its fit took."""
    likelihood = "regression" if problem.regression else "classification"
    la = LinearisedLaplace(problem.network, likelihood, num_samples=num_samples, **problem.options)
    return la, seconds(lambda: la.fit(problem.loader(batch), progress_bar=False))


def line(
    problem: Problem, epoch: float, num_samples: int, batch: int = BATCH, serve: bool = False
) -> dict:
    """Return what a fit costs."""
    on_gpu = torch.cuda.is_initialized()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if on_gpu else 0
    la, taken = fitted(problem, num_samples, batch)
    peak = {"peak_gb": (torch.cuda.max_memory_allocated() - held) / 1e9} if on_gpu else {}
    few = problem.x[:500]
    ahead = seconds(lambda: la(few), 2) / seconds(lambda: forward(problem, few), 3)
    return {
        "weights": la.w_lin.numel(),
        "rows": len(problem.x),
        "K": num_samples,
        "training_seconds": epoch * problem.epochs,
        "trainings": taken / (epoch * problem.epochs),
        "epochs": taken / epoch,
        "seconds": taken,
        "predict F": ahead,
        "relative_certificate": la.accuracy.error,
        **(served(problem, la) if serve else {}),
        **(of_unseen(problem, la) if problem.unseen else {}),
    } | peak


@torch.no_grad()
def of_unseen(problem: Problem, la: LinearisedLaplace) -> dict[str, float]:
    """Return the NLLs of a posterior and of its network for further examples."""
    x, y = problem.unseen
    nll = -la.predict(x).log_prob(y).mean().item()
    return {"nll": nll, "network_nll": F.cross_entropy(problem.network(x), y).item()}


@torch.no_grad()
def served(problem: Problem, la: LinearisedLaplace) -> dict[str, float]:
    """Return the time of an exported program for 1 and 8 examples, over that of five networks."""
    program, found = la.export(problem.x[:8]).module(), {}
    for rows in (1, 8):
        x, taken = problem.x[:rows], ([], [])
        for _ in range(7):  # in turns, since others may use the machine
            for times, run in zip(taken, (program, problem.network), strict=True):
                times.append(seconds(lambda run=run: [run(x) for _ in range(10)], 2))
        found[f"served {rows}"] = min(taken[0]) / (5 * min(taken[1]))
    return found


def laplace_torch(
    problem: Problem, subset: str = "all", structure: str = "kron"
) -> tuple[float, float | None]:
    """Return the seconds of its posterior and of tuning it, and the NLL for further examples."""
    from laplace import Laplace

    likelihood = "regression" if problem.regression else "classification"
    rows = TensorDataset(problem.x, problem.y)

    la = Laplace(copy.deepcopy(problem.network), likelihood, subset, structure)

    def fit() -> None:
        la.fit(DataLoader(rows, BATCH))
        la.optimize_prior_precision(method="marglik")

    if not problem.unseen:
        return seconds(fit), None
    (x, y), last = problem.unseen, list(problem.network.parameters())[-2:]
    of_example = 4 * last[-1].numel() * sum(t.numel() for t in last)
    if of_example > JACOBIAN:
        raise MemoryError(f"a Jacobian of one example takes {of_example / 1e9:.2f} GB")
    taken, pieces = seconds(fit), x.split(int(JACOBIAN // of_example))
    return taken, F.nll_loss(torch.cat([la(piece) for piece in pieces]).log(), y).item()


def fits(args: argparse.Namespace) -> Iterator[dict]:
    """Yield a line of every network."""
    for name in args.problems or PROBLEMS:
        problem = made(PROBLEMS[name], args.device)
        epoch, K = train(problem), problem.num_samples or args.num_samples
        found = {"part": "fits", "problem": name}
        found |= line(problem, epoch, K, serve=args.device == "cpu")
        found["ensemble"] = 4 * problem.epochs * epoch
        if not problem.regression:
            by_network = problem._replace(options={**problem.options, **NETWORK})
            found["network_curvature"] = fitted(by_network, K)[1]
        peers = {"laplace_torch": ("all", "kron")} if not problem.options else {}
        if problem.unseen:
            peers = {"last_kron": ("last_layer", "kron")}
            if found["weights"] <= FULL:
                peers["last_full"] = "last_layer", "full"
        for peer, form in peers.items():
            try:
                found[peer], nll = laplace_torch(problem, *form)
                found |= {f"{peer}_nll": nll} if problem.unseen else {}
            except Exception as error:  # what a peer cannot do is no failure of this script
                found["peer_failed"] = f"{type(error).__name__}: {error}"[:200]
        yield found


def predictions() -> Iterator[dict]:
    """Yield a line of what predictions cost for every small network."""
    for sizes, rows in SMALL:
        torch.manual_seed(0)
        network, teacher = (tasks.perceptron(sizes)() for _ in range(2))
        x = torch.randn(500 + 250 + rows, sizes[0])
        with torch.no_grad():
            f = teacher(x)
        f = (f - f.mean(0)) / f.std() + 0.3 * torch.randn(f.shape)
        y = f if sizes[-1] == 1 else f.argmax(1)
        (x, held_out, some), (y, of_held_out, _) = (t.split([500, 250, rows]) for t in (x, y))
        problem = Problem(network, x, y, 30)
        train(problem)
        la = fitted(problem, 32)[0].calibrate(held_out, of_held_out)
        with torch.no_grad():
            once = seconds(lambda: [network(some) for _ in range(100)], 9) / 100
        yield {
            "part": "predictions",
            "problem": "-".join(map(str, sizes)) + (", regression" if problem.regression else ""),
            "rows": rows,
            "forward": 1000 * once,
            "predict F": seconds(lambda: la(some), 9) / once,
            "p_value F": seconds(lambda: la.predict(some).p_value, 9) / once,
        }


def made(make: Callable[[], Problem], device: str = "cpu") -> Problem:
    torch.manual_seed(0)
    return make().on(device)


SHOWN = "weights", "rows", "seconds", "trainings", "network_curvature", "predict F", "served 8"


def main(arguments: list[str] | None = None) -> None:
    parser = script_parser(__doc__, "cost")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, help="default: all")
    parser.add_argument("--predictions", action="store_true", help="of small networks alone")
    parser.add_argument("--num-samples", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    args = begin(parser, arguments)
    if args.predictions and (args.device != "cpu" or args.problems):
        parser.error("--predictions has networks of its own, on the CPU")
    origin = provenance(("torch",))
    origin |= {"machine": torch.cuda.get_device_name()} if args.device != "cpu" else {}
    fitted(Problem(nn.Linear(2, 2), torch.randn(9, 2), torch.arange(9) % 2, 1), 2)  # burn-in
    lines = predictions() if args.predictions else fits(args)
    for record in () if args.report else lines:
        markdown.append(args.out, [record], origin)
    print("\n" + markdown.table(markdown.read(args.out), ["problem"], SHOWN))


if __name__ == "__main__":
    main()
