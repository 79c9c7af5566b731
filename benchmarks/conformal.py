"""Conformal intervals of MAPIE, with and without our standard deviation, beside ours.

    python benchmarks/conformal.py --data DIR       # two tables, five splits: a minute of one core

DIR is that of uci.py. Networks have 50 units and are trained for 40 epochs; a tenth of the training
rows is held out. All intervals have a level of 90 % and use the same rows: intervals of MAPIE
around our means as fitted, with its default score and with ``StdConformityScore`` and our standard
deviations; and our intervals after ``calibrate``. Width and interval score (Winkler, 1972; lower is
better) are in standard deviations of the targets. Expect a coverage of .87 to .94, and lower
interval scores of MAPIE with our standard deviations than without.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from mapie.conformity_scores import StdConformityScore
from mapie.regression import SplitConformalRegressor
from methods import markdown
from methods.provenance import begin, provenance, script_parser
from sklearn.base import BaseEstimator, RegressorMixin
from uci import read, train

from torch_lla_em import LinearisedLaplace

LEVEL, SHOWN = 0.9, {"coverage": "coverage", "width": "width", "score": "interval score"}


class Estimator(RegressorMixin, BaseEstimator):
    """A fitted posterior as MAPIE takes it."""

    def __init__(self, la: LinearisedLaplace):
        self.la, self.is_fitted = la, True

    def fit(self, X: object, y: object) -> "Estimator":
        return self

    def predict(self, X: np.ndarray, return_std: bool = False):
        found = self.la.predict(torch.tensor(X).float())
        mean, variance = (
            f[:, 0].double().numpy() for f in (found.expectation, found.predictive_variance)
        )
        return (mean, np.sqrt(variance)) if return_std else mean


def intervals(data: Path, name: str, split: int) -> Iterator[dict]:
    """Yield the scores of every kind of interval."""
    parts = read(data, "standard", name, split)
    (x, y), (x_test, y_test), kept = parts.train, parts.test, max(20, len(parts.train[0]) // 10)
    network = train(parts._replace(train=(x[kept:], y[kept:])), 10 * split, 40)
    la = LinearisedLaplace(network, "regression").fit(x[kept:], y[kept:], progress_bar=False)
    found = {}
    for row, score in {"default": "absolute", "`StdConformityScore`": StdConformityScore()}.items():
        mapie = SplitConformalRegressor(Estimator(la), LEVEL, score)
        mapie.conformalize(x[:kept].double().numpy(), y[:kept, 0].double().numpy())
        found[f"MAPIE, {row}"] = mapie.predict_interval(x_test.double().numpy())[1][:, :, 0].T
    la.calibrate(x[:kept], y[:kept])
    found["ours, calibrated"] = [end[:, 0].numpy() for end in la.predict(x_test).interval(LEVEL)]
    target = y_test[:, 0].numpy()
    for row, (low, high) in found.items():
        missed = np.maximum(0, low - target) + np.maximum(0, target - high)
        scores = {"coverage": (missed == 0).mean(), "width": (high - low).mean()}
        scores["score"] = scores["width"] + 2 / (1 - LEVEL) * missed.mean()
        yield {"row": row} | {key: float(value) for key, value in scores.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = script_parser(__doc__, "conformal")
    parser.add_argument("--data", type=Path, help="tables of UCI, as in uci.py")
    parser.add_argument("--tables", nargs="+", default=["concrete", "yacht"])
    parser.add_argument("--splits", type=int, default=5)
    args = begin(parser, arguments)
    splits = () if args.report else range(args.splits)
    cases = [{"name": name, "split": split} for name in args.tables for split in splits]
    origin = provenance(("torch", "mapie"))
    found = markdown.resume(args.out, cases, lambda **case: intervals(args.data, **case), origin)
    print(markdown.table(found, {"name": "table", "row": "intervals"}, SHOWN, decimals=3))


if __name__ == "__main__":
    main()
