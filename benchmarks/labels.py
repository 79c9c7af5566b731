"""Which training labels are wrong? One posterior beside cleanlab with five folds, the network's loss and neighbours.

    python benchmarks/labels.py                     # tables and digits, two stages, three seeds: an hour of one core
    python benchmarks/labels.py --cases vehicle --seeds 0
    python benchmarks/labels.py --report            # the table of results/labels.jsonl

A tenth of the labels of 800 rows is replaced (``--rate``), on the ten tuning tables, ten of the twenty others and letter, on the digits of
scikit-learn (1,000, 5 % of the labels) and of MNIST (LeNet, 1,000). Networks are trained for 30 epochs, or 200; the CNNs for 20,
or 100. The seconds are those of a method once the network is trained: five more trainings, or a fit
and ``la.suspicious``. For cleanlab, ``find_label_issues`` and ``get_label_quality_scores`` are
applied to out-of-fold probabilities. F1 of networks and neighbours is that of flagging all labels
that are not the most probable ones. Expect an AUROC of .91 for posteriors and .89 for five folds on
the tuning tables.
"""

import time
from collections.abc import Callable, Iterator

import torch
from cleanlab.filter import find_label_issues
from cleanlab.rank import get_label_quality_scores
from methods import markdown
from methods.families import images
from methods.learning import descend
from methods.metrics import auroc
from methods.networks import convolutional, lenet
from methods.provenance import begin, provenance, script_parser
from methods.tasks import TUNING, UNSEEN, Rows, perceptron, task
from torch import Tensor, nn

from torch_lla_em import LinearisedLaplace

OTHERS = tuple(UNSEEN)[:10]
FOLDS, NEIGHBOURS = 5, 10
SHOWN = {
    "auroc": "AUROC",
    "precision": "precision",
    "f1": "F1 of the mask",
    "estimated": "labels in the mask",
    "seconds": "CPU s",
}


KINDS = dict.fromkeys(TUNING, "tuning tables") | dict.fromkeys(OTHERS, "other tables")
"""What a table counts among, where that is not its name."""


def problem(case: str, seed: int) -> tuple[Rows, Callable[[], nn.Module], tuple[int, int]]:
    """Return examples with the right labels, the network's maker, and the epochs of the two stages."""
    if case == "MNIST":
        x, y = images("mnist_lenet", seed).train
        return Rows(x[:1000], y[:1000]), lenet, (20, 100)
    if case == "digits":
        x, y = task("digits", seed, 1000).train
        return (
            Rows(x.view(-1, 1, 8, 8), y),
            lambda: convolutional([1, 16, 32], [128, 10]),
            (20, 100),
        )
    x, y = task(case, seed, 800).train
    return Rows(x, y), perceptron([x.shape[1], 50, 50, int(y.max()) + 1]), (30, 200)


def replaced(y: Tensor, rate: float, seed: int) -> Tensor:
    """Return labels of which a share is replaced by another class at random."""
    generator, C = torch.Generator().manual_seed(seed), int(y.max()) + 1
    wrong = torch.rand(len(y), generator=generator) < rate
    other = (y + torch.randint(1, C, y.shape, generator=generator)) % C
    return torch.where(wrong, other, y)


def trained(make: Callable[[], nn.Module], rows: Rows, epochs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    network = make()
    return descend(network, rows, epochs, torch.optim.Adam(network.parameters(), 2e-3), 100)


def at(log_p: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return -log p of the labels, and which are not the most probable ones."""
    return -log_p.gather(1, y[:, None])[:, 0], log_p.argmax(1) != y


def methods(rows: Rows, make: Callable[[], nn.Module], epochs: int, seed: int) -> Iterator[tuple]:
    """Yield the name of each method, its scores and its mask, and its CPU seconds after the training."""
    x, y = rows
    network = trained(make, rows, epochs, 100 * seed)
    with torch.no_grad():
        yield "network", *at(network(x).log_softmax(1), y), 0.0
    began = time.process_time()
    near = torch.cdist(x.flatten(1), x.flatten(1)).fill_diagonal_(torch.inf)
    votes = y[near.topk(NEIGHBOURS, largest=False).indices]
    shares = (votes[..., None] == torch.arange(int(y.max()) + 1)).double().mean(1)
    yield "ten neighbours", *at((shares + 1e-3).log(), y), time.process_time() - began
    for name, selection in {"ours": None, "ours, last layer": "last_layer"}.items():
        began = time.process_time()
        la = LinearisedLaplace(network, "classification", parameters=selection, seed=seed)
        found = la.fit(x, y, progress_bar=False).suspicious(x, y)
        yield name, found.score, found.mask, time.process_time() - began
    began, out = time.process_time(), torch.zeros(len(y), int(y.max()) + 1)
    folds = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed)) % FOLDS
    for k in range(FOLDS):
        kept = folds != k
        member = trained(make, Rows(x[kept], y[kept]), epochs, 100 * seed + k + 1)
        with torch.no_grad():
            out[~kept] = member(x[~kept]).log_softmax(1)
    seconds = time.process_time() - began
    yield "five folds", *at(out, y), seconds
    labels, p = y.numpy(), out.double().softmax(1).numpy()
    mask = torch.tensor(find_label_issues(labels, p, n_jobs=1))
    for name in ("self_confidence", "normalized_margin"):
        quality = torch.tensor(get_label_quality_scores(labels, p, method=name))
        yield f"cleanlab, {name}", -quality, mask, seconds


def measured(case: str, seed: int, rate: float) -> Iterator[dict]:
    """Yield the scores of every method at both stages."""
    (x, y), make, stages = problem(case, seed)
    share = rate / 2 if case == "digits" else rate
    given = replaced(y, share, seed)
    wrong = given != y
    for stage, epochs in zip(("early", "late"), stages, strict=True):
        for row, score, mask, seconds in methods(Rows(x, given), make, epochs, seed):
            record = {"kind": KINDS.get(case, case), "stage": stage}
            record |= {"row": row, "estimated": mask.double().mean().item(), "seconds": seconds}
            yield record | (judged(score, mask, wrong) if wrong.any() else {})


def judged(score: Tensor, mask: Tensor, wrong: Tensor) -> dict[str, float]:
    """Return how well scores and a mask find the labels that are wrong."""
    first, right = score.argsort(descending=True)[: int(wrong.sum())], (mask & wrong).sum().item()
    return {
        "auroc": auroc(score[~wrong], score[wrong]),
        "precision": wrong[first].double().mean().item(),
        "f1": 2 * right / (mask.sum() + wrong.sum()).item(),
    }


ROWS = {"kind": "data", "row": "method"}


def wrong(lines: list[dict]) -> str:
    """Return the table of data with wrong labels."""
    return of_means([line for line in lines if line["rate"]], ROWS, SHOWN)


def right(lines: list[dict]) -> str:
    """Return the table of data whose labels are right."""
    return of_means(
        [line for line in lines if not line["rate"]], ROWS, {"estimated": "labels in the mask"}
    )


def of_means(lines: list[dict], rows: dict[str, str], columns: dict[str, str]) -> str:
    """Return a table of means over cases, stages and seeds."""
    groups: dict[tuple, list[dict]] = {}
    for line in lines:
        groups.setdefault(tuple(line[key] for key in rows), []).append(line)
    means = [
        dict(zip(rows, at, strict=True)) | {k: sum(r[k] for r in of) / len(of) for k in columns}
        for at, of in groups.items()
    ]
    return markdown.table(means, rows, columns, decimals=3)


def main(argv: list[str] | None = None) -> None:
    parser = script_parser(__doc__, "labels")
    parser.add_argument("--cases", nargs="+", default=[*KINDS, "letter", "digits", "MNIST"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rate", type=float, default=0.1, help="share of labels that are replaced")
    args = begin(parser, argv)
    cases = [
        {"case": name, "seed": seed, "rate": args.rate}
        for seed in args.seeds
        for name in args.cases
    ]
    origin = provenance(("torch", "cleanlab", "scikit-learn"))
    lines = markdown.resume(args.out, [] if args.report else cases, measured, origin)
    print(wrong(lines), right(lines), sep="\n\n")


if __name__ == "__main__":
    main()
