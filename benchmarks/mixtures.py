"""The log-likelihood of Gaussian mixtures, beside that of scikit-learn.

    python benchmarks/mixtures.py       # less than a minute of one core

Nine data sets: clusters of two to eight columns, strongly correlated columns, and iris, wine and the ten mean columns of
breast cancer from scikit-learn. Half of the examples are for training and half for the test, in two ways. Mixtures have
full covariances, defaults otherwise, and the number of components of the data; scikit-learn has the best of five starts
(``n_init=5``). A line has both log-likelihoods per example. Lines go to results/mixtures.jsonl.

Expected: the training log-likelihood is nowhere lower; that of the test differs in both directions.
"""

from collections.abc import Iterator

import torch
from methods import markdown
from methods.provenance import begin, provenance, script_parser
from sklearn import datasets
from sklearn.mixture import GaussianMixture as OfScikitLearn
from torch import Tensor

from torch_lla_em.mixtures import GaussianMixture


def clusters(columns: int, count: int, rows: int = 600) -> Tensor:
    """Return examples of Gaussian clusters with random covariances."""
    kinds = torch.randint(count, (rows,))
    roots = 0.5 * torch.randn(count, columns, columns)
    apart = 2.0 * torch.randn(count, columns)
    return apart[kinds] + torch.einsum("nij,nj->ni", roots[kinds], torch.randn(rows, columns))


def correlated(columns: int, rows: int = 400) -> Tensor:
    """Return columns that are one number each time, with noise of a hundredth, in two groups."""
    common = torch.randn(rows, 1) + 3 * torch.randint(2, (rows, 1))
    return common * torch.linspace(1, 2, columns) + 0.01 * torch.randn(rows, columns)


def measured() -> Iterator[dict]:
    """Yield both log-likelihoods of every data set and split."""
    torch.manual_seed(0)
    of = datasets.load_iris, datasets.load_wine, datasets.load_breast_cancer
    iris, wine, cancer = (torch.tensor(load().data) for load in of)
    made = {
        f"clusters, {d} columns": (clusters(d, k), k) for d, k in ((2, 3), (3, 5), (5, 4), (8, 3))
    }
    made |= {f"correlated, {d} columns": (correlated(d), 2) for d in (3, 6)}
    made |= {"iris": (iris, 3), "wine": (wine, 3), "breast cancer": (cancer[:, :10], 2)}
    for name, (x, count) in made.items():
        x = ((x - x.mean(0)) / x.std(0)).double()
        for split in range(2):
            train, test = x[torch.randperm(len(x))].chunk(2)
            ours = GaussianMixture(count, seed=split).fit(train)
            theirs = OfScikitLearn(count, n_init=5, random_state=split).fit(train.numpy())
            line = {"data": name, "split": split}
            for part, rows in (("training", train), ("test", test)):
                line[f"ours, {part}"] = ours.log_prob(rows).mean().item()
                line[f"scikit-learn, {part}"] = float(theirs.score(rows.numpy()))
                line[part] = line[f"ours, {part}"] - line[f"scikit-learn, {part}"]
            yield line


def report(lines: list[dict]) -> str:
    """Return mean, smallest and largest difference of the log-likelihoods per example."""
    rows = []
    for part in ("training", "test"):
        values = torch.tensor([line[part] for line in lines])
        found = {"mean": values.mean(), "smallest": values.min(), "largest": values.max()}
        rows.append({"examples": part} | {k: f"{v.item():.3f}" for k, v in found.items()})
    names = {"examples": "log-likelihood per example minus that of scikit-learn"}
    return markdown.table(
        rows, names, {"mean": "mean", "smallest": "smallest", "largest": "largest"}
    )


def main(argv: list[str] | None = None) -> None:
    args = begin(script_parser(__doc__, "mixtures"), argv)
    if not args.report:
        markdown.append(args.out, measured(), provenance(("torch", "scikit-learn")))
    print(report(markdown.read(args.out)))


if __name__ == "__main__":
    main()
